"""The probe: facts that metadata cannot tell, found by a bounded, streamed look at bytes.

Between catalog and plan. Do the bytes still have the checksums that the containers hold? Are
the two ends of a tie equal? Do stored replicas agree? Its answers are part of the plan, its
bytes part of the plan's figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from merge_stream.encodings.base import Encoding
from merge_stream.engine.assembler import Assembler
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.compare import Difference, Pair, compare_pairs
from merge_stream.engine.events import Observer, Phase
from merge_stream.engine.executor import StopFlag
from merge_stream.engine.stored_checksums import ChecksumFindings, check_stored, ranges_read, refuse_broken
from merge_stream.engine.twins import twin_samples
from merge_stream.errors import CorruptCheckpointError
from merge_stream.planning.plan import Assembly, ParameterPlan, ResolvedTake
from merge_stream.storage.base import ByteSource
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

__all__ = ["Prober"]


@dataclass(slots=True)
class Prober:
    """Answers questions about the bytes of a catalog; `read_nbytes` counts what it compared."""

    catalog: Catalog
    source: ByteSource
    encoding: Encoding
    budget: MemoryBudget
    segment_bytes: int
    observer: Observer
    stop: StopFlag
    read_nbytes: int = 0

    def stored_checksums(self, sources: Iterable[Assembly], *, replicas: bool) -> ChecksumFindings:
        """Check what the containers say of the bytes that `sources` read (and of the replicas, if those are read too).

        CorruptCheckpointError names the file, the record and the tensors of each that does not fit.
        """
        tensors = self.catalog.tensors.values() if replicas else ()
        copies = [_replicas(tensor) for tensor in tensors if tensor.replicas is not None]
        findings = check_stored(
            self.catalog,
            ranges_read([*sources, *copies]),
            source=self.source,
            budget=self.budget,
            segment_bytes=self.segment_bytes,
            observer=self.observer,
            stop=self.stop,
        )
        self.read_nbytes += findings.nbytes
        refuse_broken(findings)
        return findings

    def same(self, name: str, a: Assembly, b: Assembly) -> bool:
        """True when both assemblies hold the same bits; reading stops at the first difference.

        Assemblies over the very same file ranges are equal without reading: two names of
        one storage are how a tie looks in a torch file.
        """
        if a.view != b.view or a.dtype != b.dtype:
            return False
        if _same_ranges(a, b):
            return True
        wanted, got = _plain(name, a), _plain(name, b)
        self.observer(Phase(f"comparing {name} with its twin", wanted.nbytes))
        return not self._differences([Pair(name, wanted, got)], first_only=True)

    def replica_differences(self, tensors: Mapping[str, TensorRef]) -> list[Difference]:
        """Tensors with a stored replica that is not bit-equal to the shards that are used."""
        pairs = [
            pair for tensor in tensors.values() if tensor.replicas is not None for pair in self._replica_pairs(tensor)
        ]
        self.observer(Phase("comparing replicas", sum(p.wanted.nbytes for p in pairs)))
        return self._differences(pairs, first_only=False)

    def check_twins(self) -> None:
        """Raise unless masters round to their twins, as far as samples tell.

        CorruptCheckpointError names the first that does not.
        """
        pairs = list(twin_samples(self.catalog))
        if not pairs:
            return
        self.observer(Phase("comparing masters with their copies", sum(p.wanted.nbytes for p in pairs)))
        different = self._differences(pairs, first_only=True)
        if different:
            names = list(dict.fromkeys(d.name for d in different))
            msg = (
                f"{len(names)} of {len(self.catalog.twins)} fp32 masters do not round to the weights that the trainer "
                f"saved with them; the first is {different[0]}"
            )
            hint = (
                "files of two saves may be mixed, or a converter made them wrong; --weights module writes those "
                "weights as they are"
            )
            raise CorruptCheckpointError(msg, hint=hint)

    def _differences(self, pairs: Sequence[Pair], *, first_only: bool) -> list[Difference]:
        made: list[Assembler] = []

        def assembler() -> Assembler:
            made.append(Assembler(self.source, self.catalog.files, self.encoding))
            return made[-1]

        result = compare_pairs(
            pairs,
            assembler,
            assembler,
            budget=self.budget,
            segment_bytes=self.segment_bytes,
            observer=self.observer,
            stop=self.stop,
            first_only=first_only,
        )
        self.read_nbytes += sum(a.read_nbytes for a in made)
        return result

    def _replica_pairs(self, tensor: TensorRef) -> list[Pair]:
        replicas = tensor.replicas
        if replicas is None:
            return []
        pairs = []
        for k in range(len(replicas)):
            box, file, offset = replicas.row(k)
            whole = Box.whole(box.shape)
            copy = ShardTable.of([(whole, file, offset)], len(box.shape))
            wanted = Assembly(box.shape, tensor.dtype, (ResolvedTake(tensor.shards, box, whole, stored=tensor.stored),))
            got = Assembly(box.shape, tensor.dtype, (ResolvedTake(copy, whole, whole, stored=tensor.stored),))
            name = f"{tensor.name} (copy in {self.catalog.files[file].name})"
            pairs.append(Pair(name, _plain(name, wanted), _plain(name, got)))
        return pairs


def _replicas(tensor: TensorRef) -> Assembly:
    """All stored copies of a tensor as one source; it is for its ranges alone."""
    whole = Box.whole(tensor.shape)
    table = tensor.replicas or tensor.shards
    return Assembly(tensor.shape, tensor.dtype, (ResolvedTake(table, whole, whole, stored=tensor.stored),))


def _plain(name: str, source: Assembly) -> ParameterPlan:
    return ParameterPlan(name, source.view, source, source.dtype, 0, 0)


def _same_ranges(a: Assembly, b: Assembly) -> bool:
    return len(a.takes) == len(b.takes) and all(
        x.source_box == y.source_box
        and x.dest_box == y.dest_box
        and x.permute == y.permute
        and x.fold is y.fold is None
        and x.stored == y.stored
        and x.table.same_bytes(y.table)
        for x, y in zip(a.takes, b.takes, strict=True)
    )
