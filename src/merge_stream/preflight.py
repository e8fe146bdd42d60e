"""What is known to fail is refused before the first byte, with numbers.

    preflight(job, place)            everything below, for a model or a staging store
    check_target(place, writes)      may these files be made where OUT goes?
    check_together(targets)          do several fit on their disks at one time?

Checked: permissions (of the folder, of a partial folder that is continued, of an OUT that
is replaced, of side files that are read last), lengths of names and paths, limits of file
sizes (`ulimit -f`, FAT32), free bytes and free inodes, and the limit of open files. A disk
that another program fills meanwhile, a quota, or a limit that nobody tells in advance still
ends a run in the middle; that run is resumable (docs/resume.md).
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from merge_stream.errors import DiskSpaceError, MergeStreamError, ResourceError, UsageError
from merge_stream.job import Job
from merge_stream.output.index import INDEX_NAME
from merge_stream.output.model_card import CARD_NAME
from merge_stream.output.model_info import ModelFolder
from merge_stream.output.place import KEPT_STORE, STORE_OF_STAGE, OutputPlace
from merge_stream.output.store_files import store_files
from merge_stream.planning.plan import Plan
from merge_stream.planning.store_layout import is_store
from merge_stream.storage.mounts import largest_file_of, mount_of
from merge_stream.units import format_bytes

__all__ = [
    "Needs",
    "Target",
    "Writes",
    "check_target",
    "check_together",
    "free_inodes",
    "needs_of",
    "preflight",
    "writes_of",
]

_LONGEST_PATH = 4095
_OWN_FILES = 64 << 10
"""config.json, the model card, the lock, the mark of a commit."""
_JOURNAL_LINE = 80
_ENTRY = 16
_OWN_INODES = 10
_LEAST_OPEN_FILES = 48


@dataclass(frozen=True, slots=True)
class Writes:
    """`files` that a run makes below its model folder (or store), with their bytes; `more_nbytes` of bookkeeping.

    Folders follow from the names of the files. `largest_item` is the most bytes that cannot be split over
    two files; `can_shrink` tells that another element type would write fewer bytes; `sparse` that zeros take no
    room, so that nobody knows how much is needed.
    """

    files: Mapping[str, int]
    more_nbytes: int = 0
    largest_item: int = 0
    can_shrink: bool = False
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes, in whole blocks, and inodes that a run takes on a disk."""

    nbytes: int
    inodes: int


@dataclass(frozen=True, slots=True)
class Target:
    """What is written where."""

    place: OutputPlace
    writes: Writes


def preflight(job: Job, place: OutputPlace) -> None:
    """Raise what would end this merge later: see the module's words. Changes nothing on disk."""
    check_target(place, writes_of(job.plan, job.folder, job.memory.segment, sparse=job.options.sparse))
    for side_file in job.folder.side_files.files:
        if not os.access(side_file.path, os.R_OK):
            msg = f"{side_file.path}, which is copied to {place.kind.word}, cannot be read by this user (permission)"
            raise MergeStreamError(msg, hint="change its mode or owner, or move it away if the model needs none")
    _check_open_files(job.memory.workers)


def check_target(place: OutputPlace, writes: Writes) -> None:
    """MergeStreamError for a target that cannot be written, DiskSpaceError for one too small, UsageError for names."""
    folder = _nearest_folder(place)
    _check_permissions(place, folder)
    _check_names(place, folder, writes)
    _check_file_sizes(folder, writes)
    _check_room(place, folder, writes)


def check_together(targets: Sequence[Target]) -> None:
    """DiskSpaceError when targets that stand there at one time fit alone, but not together on the disk they share."""
    by_disk: dict[int, list[Target]] = {}
    for target in targets:
        check_target(target.place, target.writes)
        by_disk.setdefault(os.stat(_nearest_folder(target.place)).st_dev, []).append(target)
    for on_disk in by_disk.values():
        needs = [needs_of(target.place, target.writes) for target in on_disk]
        both = Needs(sum(n.nbytes for n in needs), sum(n.inodes for n in needs))
        folder = _nearest_folder(on_disk[0].place)
        what = " and ".join(f"the {target.place.kind.content}" for target in reversed(on_disk))
        free, inodes = shutil.disk_usage(folder).free, free_inodes(folder)
        if both.nbytes > free and not any(target.writes.sparse for target in on_disk):
            msg = f"{folder} has {format_bytes(free)} free, {what} need {format_bytes(both.nbytes)} at one time"
            raise DiskSpaceError(msg, hint=f"free some space, {_APART}")
        if inodes is not None and both.inodes > inodes:
            msg = f"{folder} has room for {inodes} more files (inodes), {what} need {both.inodes} at one time"
            raise DiskSpaceError(msg, hint=f"remove files there, {_APART}")


_APART = "put the store on another disk (--keep-store DIR), or use --staging direct"


def writes_of(plan: Plan, folder: ModelFolder, segment: int, *, sparse: bool = False) -> Writes:
    """What a run of `plan` writes, in segments of `segment` bytes, or holes for zeros where it is `sparse`."""
    lines = sum(-(-o.nbytes // segment) for o in plan.outputs)
    sources = sum(len(f.name) + 4 * _ENTRY for f in plan.files)
    more = _OWN_FILES + lines * _JOURNAL_LINE + sources
    if is_store(plan):
        files = store_files(plan, folder)
        return Writes(files, more_nbytes=more, largest_item=max(files.values()))
    index = sum(len(p.name) + len(plan.outputs[p.output].name) + _ENTRY for p in plan.parameters)
    files = {o.name: o.nbytes for o in plan.outputs}
    files |= {f.name: f.nbytes for f in folder.side_files.files}
    files |= {"config.json": 0, CARD_NAME: files.get(CARD_NAME, 0)}
    if len(plan.outputs) > 1:
        files[INDEX_NAME] = index
    return Writes(
        files,
        more_nbytes=more,
        largest_item=max((p.nbytes for p in plan.parameters), default=0),
        can_shrink=any(p.dtype.itemsize > 2 for p in plan.parameters),
        sparse=sparse,
    )


def _nearest_folder(place: OutputPlace) -> str:
    """The folder that is there and that everything else is made in."""
    folder = place.out if place.inside else os.path.dirname(place.out)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        msg = f"{folder} is a file, so {place.out} cannot be made below it"
        raise MergeStreamError(msg, hint=f"choose another {place.kind.word}")
    return folder


def _check_permissions(place: OutputPlace, folder: str) -> None:
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        msg = f"{folder} lies on a file system that is mounted read-only"
        raise MergeStreamError(msg, hint=f"choose {place.kind.some} on a disk that can be written")
    if not os.access(folder, os.W_OK | os.X_OK):
        msg = f"{folder} is not writable for this user"
        raise MergeStreamError(msg, hint=f"choose {place.kind.some} on a disk you may write to")
    begun = (place.model_dir, *(os.path.join(place.work, name) for name in ("lock", "journal", "plan.json")))
    for path in (place.work, *begun):
        if os.path.lexists(path) and not os.access(path, os.W_OK):
            msg = f"{path}, of an interrupted run, is not writable for this user"
            raise MergeStreamError(
                msg, hint=f"continue it as the user who began it, or choose another {place.kind.word}"
            )
    if place.replaces and not (_may_rename(place.out, folder) and os.access(place.out, os.W_OK | os.X_OK)):
        msg = f"{place.out} cannot be replaced by this user: it belongs to another, or is write-protected"
        raise MergeStreamError(msg, hint="choose another OUT, or remove the old one yourself")


def _may_rename(path: str, folder: str) -> bool:
    """False for the entry of another user in a folder such as /tmp (sticky bit)."""
    parent, me = os.stat(folder), os.geteuid()
    return not parent.st_mode & stat.S_ISVTX or me in {0, parent.st_uid, os.lstat(path).st_uid}


def _check_names(place: OutputPlace, folder: str, writes: Writes) -> None:
    longest_name, word = os.pathconf(folder, "PC_NAME_MAX"), place.kind.word
    for path in (f"{place.work}.committing.new", *(os.path.join(place.model_dir, name) for name in writes.files)):
        for part in os.path.relpath(path, folder).split("/"):
            if len(os.fsencode(part)) > longest_name:
                msg = f"the name {part} has {len(os.fsencode(part))} bytes, {folder} allows {longest_name}"
                raise UsageError(msg, hint=f"choose another {word}: a shorter name, or another file system")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            msg = f"the path {path} has {len(os.fsencode(path))} bytes, the system allows {_LONGEST_PATH}"
            hint = f"choose {place.kind.some} with a shorter path, or go to its folder and name it from there"
            raise UsageError(msg, hint=hint)


def _check_file_sizes(folder: str, writes: Writes) -> None:
    """Limits that a file meets which is still far from filling the disk."""
    name = max(writes.files, key=lambda key: writes.files[key], default="")
    if not name:
        return
    nbytes, mount = writes.files[name], mount_of(folder)
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [
        (soft, "this process may not write", "raise the limit (`ulimit -f unlimited`)"),
        (largest_file_of(mount.type), f"{mount.folder} ({mount.type}) holds no", "choose another disk"),
    ]
    for limit, words, way in limits:
        if limit is not None and limit != resource.RLIM_INFINITY and nbytes > limit:
            msg = f"{name} would have {format_bytes(nbytes)}, and {words} files above {format_bytes(limit)}"
            smaller = f", or give --max-shard-size {limit * 9 // 10}" if writes.largest_item < limit * 8 // 10 else ""
            raise DiskSpaceError(msg, hint=way + smaller)


def needs_of(place: OutputPlace, writes: Writes) -> Needs:
    """What the run takes of its disk, less what an interrupted run has written."""
    block = os.statvfs(_nearest_folder(place)).f_frsize or 4096
    nbytes, inodes = writes.more_nbytes, _OWN_INODES
    folders: set[str] = set()
    for name, size in writes.files.items():
        try:
            found = os.stat(os.path.join(place.model_dir, name))
        except OSError:
            inodes += 1
            nbytes += -(-size // block) * block
            folders.update(_above(name))
        else:
            nbytes += max(-(-size // block) * block - found.st_blocks * 512, 0)
    new = sum(not os.path.isdir(os.path.join(place.model_dir, name)) for name in folders)
    return Needs(nbytes + new * block, inodes + new)


def free_inodes(folder: str) -> int | None:
    """How many more files and folders the disk takes; None where it has no such limit."""
    told = os.statvfs(folder)
    return told.f_favail if told.f_files else None


def _above(name: str) -> Iterator[str]:
    """The folders of a file's name."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _check_room(place: OutputPlace, folder: str, writes: Writes) -> None:
    """Free bytes and inodes; an OUT that is replaced stays until the end."""
    needs, kind = needs_of(place, writes), place.kind
    what = "output" if kind.content == "model" else "store"
    free, inodes = shutil.disk_usage(folder).free, free_inodes(folder)
    if needs.nbytes > free and not writes.sparse:
        msg = f"{folder} has {format_bytes(free)} free, the {what} needs {format_bytes(needs.nbytes)}"
        old = f", or remove {place.out}, which stays until the new model is whole" if place.replaces else ""
        fewer = ", or write fewer bytes (--dtype bf16)" if writes.can_shrink else ""
        raise DiskSpaceError(msg, hint=f"free some space, or {_other_disk(place)}{old}{fewer}")
    if inodes is not None and needs.inodes > inodes:
        msg = f"{folder} has room for {inodes} more files (inodes), the {what} needs {needs.inodes}"
        if kind.content == "model":
            raise DiskSpaceError(msg, hint="remove files there, choose another disk, or give a larger --max-shard-size")
        why = "a store has a file and a folder for each tensor"
        raise DiskSpaceError(msg, hint=f"{why}: remove files there, or {_other_disk(place)}")


def _other_disk(place: OutputPlace) -> str:
    """How the user puts it elsewhere."""
    if place.kind.content == "model":
        return "choose another disk"
    if place.kind in {STORE_OF_STAGE, KEPT_STORE}:
        return f"choose another {place.kind.word}, on another disk"
    return _APART


def _check_open_files(workers: int) -> None:
    """Each worker holds a source or an output file; a few more stay open to be used again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, hard) if resource.RLIM_INFINITY not in {soft, hard} else resource.RLIM_INFINITY
    if most != resource.RLIM_INFINITY and most < _LEAST_OPEN_FILES + workers:
        msg = f"this process may open {most} files at once, {workers} workers need {_LEAST_OPEN_FILES + workers}"
        raise ResourceError(msg, hint="raise the limit (`ulimit -n`), or give fewer --workers")
