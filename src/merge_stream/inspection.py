"""What `inspect` and `plan` tell: a checkpoint described, a merge forecast; and what a killed run had finished."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from merge_stream.api import Job, check_disk, make_plan
from merge_stream.engine.events import Observer
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.staging import belongs_to
from merge_stream.opening import open_checkpoint
from merge_stream.options import MergeOptions, OpenOptions
from merge_stream.output.place import choose_place
from merge_stream.storage.local import LocalSource
from merge_stream.tensors.ref import Catalog
from merge_stream.units import format_bytes, format_duration

__all__ = ["Description", "Forecast", "describe", "forecast"]

_SAMPLE_BYTES = 32 << 20
_SAMPLE_SECONDS = 0.5


@dataclass(slots=True)
class Description:
    """A checkpoint in numbers; `tensors` maps names to [type, shape, shards] when asked for."""

    format: str
    root: str
    facts: Mapping[str, str | int]
    tensor_count: int
    nbytes: int
    parameters: int
    dtypes: Mapping[str, int]
    files: int
    shards: int
    replicas: int
    ignored: Mapping[str, int]
    notes: Sequence[str]
    config_dirs: Sequence[str]
    tensors: Mapping[str, tuple[str, Sequence[int], int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"ok": True, **asdict(self)}

    def lines(self) -> list[str]:
        """For a person."""
        types = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        text = [
            f"{self.root}",
            f"  format      {self.format}",
            *(f"  {key:<11} {value}" for key, value in self.facts.items()),
            f"  tensors     {self.tensor_count} ({types}), {self.parameters:,} elements, {format_bytes(self.nbytes)}",
            f"  stored in   {_count(self.files, 'file')}, {_count(self.shards, 'shard')}"
            + (f", {_count(self.replicas, 'further copy', 'further copies')}" if self.replicas else ""),
        ]
        if self.ignored:
            text.append("  ignored     " + ", ".join(f"{count} {kind}" for kind, count in self.ignored.items()))
        text.append(
            "  config      "
            + (", ".join(self.config_dirs) or "none beside it: a merge needs --base-model DIR or --no-config")
        )
        text += [f"  note: {note}" for note in self.notes]
        text += [
            f"    {name}  {dtype} {list(shape)}  {_count(shards, 'shard')}"
            for name, (dtype, shape, shards) in self.tensors.items()
        ]
        return text


def describe(catalog: Catalog, *, every_tensor: bool) -> Description:
    """Count what a catalog holds."""
    tensors = catalog.tensors.values()
    return Description(
        format=catalog.format,
        root=catalog.root,
        facts={**catalog.facts, **_lora_facts(catalog)},
        tensor_count=len(catalog.tensors),
        nbytes=catalog.nbytes,
        parameters=sum(t.size for t in tensors),
        dtypes=dict(Counter(t.dtype.name for t in tensors)),
        files=len(catalog.files),
        shards=sum(len(t.shards) for t in tensors),
        replicas=sum(len(t.replicas) for t in tensors if t.replicas is not None),
        ignored=dict(catalog.ignored),
        notes=catalog.notes,
        config_dirs=catalog.config_dirs,
        tensors={t.name: (t.dtype.name, t.shape, len(t.shards)) for t in tensors} if every_tensor else {},
    )


def _lora_facts(catalog: Catalog) -> dict[str, str | int]:
    count = sum(".lora_" in name for name in catalog.tensors)
    return {"LoRA": f"{count} tensors of adapters; a merge folds them (--lora)"} if count else {}


@dataclass(slots=True)
class Forecast:
    """What a merge would do: sizes in bytes; `seconds` is a rough estimate from a short read of the source."""

    root: str
    format: str
    architecture: str
    tensors: int
    output_files: Mapping[str, int]
    side_files: Sequence[str]
    read_nbytes: int
    write_nbytes: int
    disk_free: int
    peak_memory: int
    allowed_memory: int
    workers: int
    segment_nbytes: int
    seconds: float
    fingerprint: str
    coverage: str
    dropped: Mapping[str, str]
    ignored: Mapping[str, int]
    warnings: Sequence[str]
    notes: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"ok": True, **asdict(self)}

    def lines(self) -> list[str]:
        """For a person."""
        files = _count(len(self.output_files), "file")
        text = [
            f"{self.root} ({self.format}), names: {self.architecture}",
            f"  writes      {format_bytes(self.write_nbytes)}, {self.tensors} tensors, {files}",
            f"  disk        {format_bytes(self.disk_free)} free where OUT goes",
            *(f"              {name}  {format_bytes(size)}" for name, size in list(self.output_files.items())[:10]),
            *([f"              and {len(self.output_files) - 10} more"] if len(self.output_files) > 10 else []),
            f"  side files  {', '.join(self.side_files) or 'none'}",
            f"  reads       {format_bytes(self.read_nbytes)}",
            f"  peak memory {format_bytes(self.peak_memory)} of {format_bytes(self.allowed_memory)} allowed",
            f"  workers     {self.workers}, with segments of {format_bytes(self.segment_nbytes)}",
            f"  time        about {format_duration(self.seconds)} (from a short read of the source; rough)",
            f"  coverage    {self.coverage}",
        ]
        text += [f"  leaves out  {name}: {why}" for name, why in self.dropped.items()]
        if self.ignored:
            text.append("  ignored     " + ", ".join(f"{count} {kind}" for kind, count in self.ignored.items()))
        text += [f"  warning: {w}" for w in self.warnings] + [f"  note: {n}" for n in self.notes]
        return text


def forecast(
    paths: Sequence[str],
    out: str | None,
    options: MergeOptions,
    *,
    opening: OpenOptions,
    observer: Observer,
    stop: StopFlag,
) -> Forecast:
    """Everything a merge does before its first byte; raises where the merge would."""
    place = choose_place(out, overwrite=options.overwrite, inputs=tuple(paths)) if out is not None else None
    catalog = open_checkpoint(paths, opening)
    job = make_plan(catalog, options, observer=observer, stop=stop)
    target = os.getcwd()
    if place is not None:
        if not options.restart:
            belongs_to(place.work, job.plan)
        check_disk(job, place)
        target = place.out
    while not os.path.exists(target):
        target = os.path.dirname(target)
    plan = job.plan
    moved = plan.read_nbytes * (2 if options.verify else 1) + plan.write_nbytes + plan.probe_nbytes
    return Forecast(
        root=catalog.root,
        format=catalog.format,
        architecture=job.named.mapping.architecture,
        tensors=len(plan.parameters),
        output_files={o.name: o.nbytes for o in plan.outputs},
        side_files=[f.name for f in job.folder.side_files.files],
        read_nbytes=plan.read_nbytes + plan.probe_nbytes,
        write_nbytes=plan.write_nbytes + job.folder.side_files.nbytes,
        disk_free=shutil.disk_usage(target).free,
        peak_memory=job.memory.projected,
        allowed_memory=job.memory.allowed,
        workers=job.memory.workers,
        segment_nbytes=job.memory.segment,
        seconds=moved / _read_rate(job),
        fingerprint=plan.fingerprint,
        coverage=f"all {len(catalog.tensors)} source tensors are tiled by their shards; all outputs by their sources",
        dropped=plan.dropped,
        ignored=dict(catalog.ignored),
        warnings=job.warnings,
        notes=plan.notes,
    )


def _count(number: int, word: str, words: str = "") -> str:
    return f"{number} {word if number == 1 else words or word + 's'}"


def _read_rate(job: Job) -> float:
    """Bytes a second of a short read of the largest source file."""
    largest = max(job.plan.files, key=lambda f: f.nbytes, default=None)
    if largest is None:
        return float(1 << 30)
    source = LocalSource()
    buffer = memoryview(bytearray(1 << 20))
    began, done = time.perf_counter(), 0
    try:
        while (
            done + len(buffer) <= min(largest.nbytes, _SAMPLE_BYTES) and time.perf_counter() - began < _SAMPLE_SECONDS
        ):
            source.read_into(largest.path, done, buffer)
            done += len(buffer)
    finally:
        source.close()
    seconds = time.perf_counter() - began
    return done / seconds if done and seconds else float(1 << 30)
