"""Files that are memory: an OUT on tmpfs or ramfs takes from the same memory as the run."""

from __future__ import annotations

import os

from merge_stream.engine.limits import free_memory
from merge_stream.engine.memory import MemoryPlan, resident
from merge_stream.errors import DiskSpaceError
from merge_stream.output.place import OutputPlace
from merge_stream.planning.plan import Plan
from merge_stream.storage.mounts import mount_of
from merge_stream.units import format_bytes

__all__ = ["remarks_on_memory_files"]

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def remarks_on_memory_files(place: OutputPlace, plan: Plan, memory: MemoryPlan) -> tuple[str, ...]:
    """A remark when OUT lies in memory; DiskSpaceError when what is written and the run need more than is free.

    What an interrupted run has written is there already and does not count again.
    """
    mount = mount_of(place.model_dir)
    if mount.type not in _IN_MEMORY:
        return ()
    there = sum(_blocks(os.path.join(place.model_dir, output.name)) for output in plan.outputs)
    output = max(plan.write_nbytes - there, 0)
    run = max(memory.projected - resident(), 0)
    free = free_memory()
    where = f"{place.out} lies in memory ({mount.type} on {mount.folder})"
    if output + run > free.nbytes:
        msg = (
            f"{where}: the {place.kind.content}'s {format_bytes(output)} and this run's {format_bytes(run)} do not fit "
            f"in the {format_bytes(free.nbytes)} that {free.words} has free"
        )
        raise DiskSpaceError(msg, hint=f"choose {place.kind.some} on a disk")
    return (f"{where}: its {format_bytes(output)} are memory too, beside --max-mem, until they are moved or removed",)


def _blocks(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0
