"""Numbers of a run: what was merged, how much was moved, what was verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from merge_stream.units import counted, format_bytes, format_duration

__all__ = ["Report", "names_told"]

_SHOWN = 8


def names_told(architecture: str) -> str:
    """In words by which rules the names became those of the output."""
    told = {"identity": "without renaming", "base-index": "names matched with the base model's"}
    return told.get(architecture, f"renamed by the rules of {architecture}")


@dataclass(slots=True)
class Report:
    """The result of a merge; `as_json` for machines, `lines` for people.

    `read_nbytes` is what was asked of the sources: what `plan` tells, and up to 4 KiB between small parameters that are
    read together. `io` splits it by the way: "pread", "mmap".
    `verified` lists in words what was checked; `memory` holds bytes: allowed, projected, reserved and peak of the whole
    process; `memory_bound` says whose limit "allowed" is, `memory_pressure` what the governor did (empty: nothing);
    `timeline` samples: seconds from the start, resident bytes, slabs in use, bytes written by then. `checksums` maps
    each weight file to its "crc32c" and, where asked for, "sha256", in hex; `source_checksums` counts what
    `--check-crc` compared (None without it).
    """

    out: str
    format: str
    architecture: str
    fingerprint: str
    dtype: str
    layout: str
    tensors: int
    files: Sequence[str]
    read_nbytes: int = 0
    io: Mapping[str, int] = field(default_factory=dict)
    written_nbytes: int = 0
    resumed_nbytes: int = 0
    output_nbytes: int = 0
    seconds: float = 0.0
    workers: int = 0
    segment_nbytes: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    memory_bound: str = "--max-mem"
    memory_pressure: str = ""
    timeline: Sequence[tuple[float, int, int, int]] = ()
    verified: Sequence[str] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)
    overflows: Mapping[str, int] = field(default_factory=dict)
    side_files: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    source_checksums: Mapping[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """A JSON object; sizes in bytes, times in seconds."""
        return {"ok": True, **asdict(self), "ignored": dict(self.ignored)}

    def lines(self) -> list[str]:
        """The result for a person."""
        rate = (self.read_nbytes + self.written_nbytes) / self.seconds if self.seconds else 0.0
        files = counted(len(self.files), "file")
        before = f", {format_bytes(self.resumed_nbytes)} done before" if self.resumed_nbytes else ""
        ways = f" by {' and '.join(self.io)}" if self.io else ""
        peak, projected, allowed = (format_bytes(self.memory.get(k, 0)) for k in ("peak", "projected", "allowed"))
        text = [
            f"wrote {self.out}",
            f"  {counted(self.tensors, 'tensor')} in {files}, {format_bytes(self.output_nbytes)}, dtype {self.dtype}",
            f"  from {self.format}, {names_told(self.architecture)}",
            (
                f"  read {format_bytes(self.read_nbytes)}{ways}, wrote {format_bytes(self.written_nbytes)}{before} "
                f"in {format_duration(self.seconds)} ({format_bytes(rate)}/s)"
            ),
            f"  peak memory {peak}, projected {projected}, allowed {allowed} ({self.memory_bound})",
            "  verified: " + "; ".join(self.verified),
        ]
        if self.memory_pressure:
            text.append(f"  {self.memory_pressure}")
        text += self._checksum_lines()
        if self.dropped:
            text += [f"  left out {name}: {why}" for name, why in self.dropped.items()]
        if self.ignored:
            text.append("  ignored: " + ", ".join(f"{count} {kind}" for kind, count in self.ignored.items()))
        if self.overflows:
            worst = sorted(self.overflows.items(), key=lambda item: -item[1])[:3]
            count = counted(sum(self.overflows.values()), "finite value")
            text.append(
                f"  OVERFLOW: {count} in {counted(len(self.overflows), 'tensor')} became infinite "
                f"in {self.dtype}: " + ", ".join(f"{name} ({n})" for name, n in worst)
            )
        return text

    def _checksum_lines(self) -> list[str]:
        """The strongest checksum of each file, as `sha256sum` prints it; many files are shortened."""
        kinds = {kind for checksums in self.checksums.values() for kind in checksums}
        if not kinds:
            return []
        kind = "sha256" if "sha256" in kinds else "crc32c"
        names = sorted(self.checksums)
        more = f"    and {len(names) - _SHOWN} more (--json tells all)"
        return [
            f"  {kind}:",
            *(f"    {self.checksums[name][kind]}  {name}" for name in names[:_SHOWN]),
            *([more] if len(names) > _SHOWN else []),
        ]
