"""A model that was just written against its plan: everything is read back and compared with the source."""

from __future__ import annotations

from merge_stream.containers.safetensors_file import read_header
from merge_stream.encodings.base import Encoding
from merge_stream.engine.assembler import Assembler
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.checked_source import CheckedSource
from merge_stream.engine.compare import Difference, Pair, compare_pairs
from merge_stream.engine.compare_quantized import QuantizationError, compare_quantized
from merge_stream.engine.events import Observer, Phase
from merge_stream.engine.executor import StopFlag
from merge_stream.errors import VerificationError
from merge_stream.options import IoName
from merge_stream.planning.plan import Plan
from merge_stream.storage.local import LocalSource, LocalTree
from merge_stream.tensors.box import Box
from merge_stream.tensors.ref import ShardTable, SourceFile, TensorRef
from merge_stream.units import counted
from merge_stream.verification.verdict import pair_of

__all__ = ["compare_with_plan"]

_SHOWN = 5


def compare_with_plan(  # noqa: PLR0917 - the means of a comparison
    plan: Plan,
    model_dir: str,
    encoding: Encoding,
    budget: MemoryBudget,
    segment_bytes: int,
    observer: Observer,
    stop: StopFlag,
    io: IoName = "auto",
) -> list[QuantizationError]:
    """Read the whole staged output and the source again; VerificationError when a value differs.

    Returns how far quantized weights are from the source, worst first.
    """
    tree = LocalTree.of([model_dir])
    files: list[SourceFile] = []
    pairs: list[Pair] = []
    for number, output in enumerate(plan.outputs):
        entry = tree.entry(output.name)
        files.append(SourceFile(entry.path, output.name, entry.nbytes, entry.mtime_ns))
        header = read_header(tree, output.name)
        for p in (plan.parameters[k] for k in output.parameters):
            if p.quantized is not None or p.part_of is not None:
                continue
            stored = header.tensors[p.name]
            rows = ShardTable.of([(Box.whole(stored.shape), number, stored.offset)], len(stored.shape))
            pairs.append(pair_of(p, TensorRef(p.name, stored.dtype, stored.shape, rows)))
    files_below = LocalSource(io, window_bytes=segment_bytes)
    source = CheckedSource(files_below, plan.chunk_sums)
    observer(Phase("verifying", sum(p.nbytes for p in plan.parameters)))
    try:
        differences = compare_pairs(
            pairs,
            lambda: Assembler(source, plan.files, encoding),
            lambda: Assembler(source, files, encoding),
            budget=budget,
            segment_bytes=segment_bytes,
            observer=observer,
            stop=stop,
        )
        errors = compare_quantized(
            plan,
            {k: f.path for k, f in enumerate(files)},
            lambda: Assembler(source, plan.files, encoding),
            files_below,
            budget=budget,
            segment_bytes=segment_bytes,
            observer=observer,
            stop=stop,
        )
    finally:
        source.close()
    differences += [Difference(e.name, e.size, e.different, e.max_abs, e.max_rel) for e in errors if e.different]
    if differences:
        text = "; ".join(str(d) for d in differences[:_SHOWN])
        msg = f"values of {counted(len(differences), 'tensor')} of the written model differ from the source: {text}"
        raise VerificationError(
            msg, hint="run again with --restart; if it stays, memory or disk is faulty, or it is a bug"
        )
    return errors
