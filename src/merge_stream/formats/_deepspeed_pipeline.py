"""Layer files of a PipelineModule: the 16-bit weights of each layer, by `<layer>.<name>`.

    layer_03-model_states.pt            layer 3
    layer_03-model_01-model_states.pt   layer 3, tensor-parallel rank 1

Facts: DeepSpeed 0.14.4 to 0.19.8 (runtime/pipe/module.py): keys have no layer prefix; layers without
parameters have no file; the second layer of a TiedLayerSpec with a forward_fn writes none. Which stage a layer
belongs to is told by the names of that stage's masters, or not at all: then all layers count for stage 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import CorruptCheckpointError
from merge_stream.formats._catalog import FileTable
from merge_stream.formats._deepspeed_files import DeepSpeedFiles
from merge_stream.formats._deepspeed_local import LocalModel, plain_ref, widened
from merge_stream.formats._deepspeed_states import StatesFile, tensors_in
from merge_stream.formats._zero_masters import sliced_masters
from merge_stream.options import OpenOptions
from merge_stream.tensors.dtype import F32
from merge_stream.tensors.ref import TensorRef

__all__ = ["add_layers"]


def add_layers(  # noqa: PLR0917 - one stage of one checkpoint
    parts: Sequence[LocalModel],
    stage: int,
    stages: int,
    files: DeepSpeedFiles,
    table: FileTable,
    options: OpenOptions,
) -> int:
    """Add the layers of a stage to its tensor-parallel parts; returns the bytes of metadata read."""
    read = 0
    for rank, part in enumerate(parts):
        weights: dict[str, TensorRef] = {}
        for (layer, model), name in sorted(files.layers.items()):
            if model != rank:
                continue
            source = StatesFile(name, table.index(name), open_torch_file(files.tree, name))
            read += source.file.metadata_nbytes
            tensors, _ = tensors_in(source.file.root, source)
            for key, tensor in tensors.items():
                weights[f"{layer}.{key}"] = plain_ref(f"{layer}.{key}", tensor, source)
        if part.optim and not part.tensors:  # BF16_Optimizer without ZeRO lists no shapes
            _add_sliced(part, weights)
        _lay_under(part, weights, first=stage == 0, only=stages == 1, options=options)
    return read


def _add_sliced(part: LocalModel, weights: dict[str, TensorRef]) -> None:
    shapes = {name: ref.shape for name, ref in weights.items()}
    for group in range(max(len(rank.flats) for rank in part.optim)):
        for name, (shape, rows) in sliced_masters(group, _with_tied(shapes, part), part.optim).items():
            part.tensors[name] = TensorRef(name, F32, shape, rows)


def _with_tied(shapes: dict[str, tuple[int, ...]], part: LocalModel) -> dict[str, tuple[int, ...]]:
    """Shapes of tied modules: those of the one layer that has a parameter of that name and size."""
    wanted = {
        name: numel
        for rank in part.optim
        for group in rank.slices or ()
        for name, (_, numel) in group.items()
        if name.startswith("tied_modules.")
    }
    known = dict(shapes)
    for name in wanted:
        leaf = name.split(".", 2)[2]
        found = {shape for other, shape in shapes.items() if other.split(".", 1)[1] == leaf}
        if len(found) == 1:
            known[name] = found.pop()
    return known


def _lay_under(
    part: LocalModel, weights: dict[str, TensorRef], *, first: bool, only: bool, options: OpenOptions
) -> None:
    """The layers' weights below the masters that are there; without masters they are the model."""
    masters = bool(part.tensors)
    for name, ref in weights.items():
        if name in part.tensors:
            listed = part.tensors[name].shape
            if listed != ref.shape:
                msg = f"{name} is {list(ref.shape)} in its layer file, {list(listed)} in the optimizer's list"
                raise CorruptCheckpointError(msg, hint="files of two runs are mixed")
            if ref.dtype != F32:
                part.twins[name] = ref
        elif (first or only) and not masters:
            part.tensors[name] = ref if options.weights == "module" else widened(ref)
