"""Layer files of a PipelineModule: the 16-bit weights of each layer, by `<layer>.<name>`.

    layer_03-model_states.pt            layer 3
    layer_03-model_01-model_states.pt   layer 3, tensor-parallel rank 1

Facts: DeepSpeed 0.14.4 to 0.19.8 (runtime/pipe/module.py): keys have no layer prefix; layers without
parameters have no file. A tied layer's master is `tied_modules.<key>.<name>`, in every stage that uses it; its
16-bit weight stands in the layer's file (the second layer of a TiedLayerSpec with a forward_fn writes none).
BF16_Optimizer without ZeRO lists no shapes: those of the layer files serve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from merge_stream.containers.torch_file import open_torch_file
from merge_stream.errors import CorruptCheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.formats._catalog import FileTable, listed
from merge_stream.formats._deepspeed_files import DeepSpeedFiles
from merge_stream.formats._deepspeed_local import LocalModel, plain_ref, widened
from merge_stream.formats._deepspeed_states import Shape, StatesFile, tensors_in
from merge_stream.formats._zero_masters import sliced_masters
from merge_stream.formats._zero_stage0 import moment_shapes
from merge_stream.tensors.ref import TensorRef

__all__ = ["add_sliced_masters", "lay_under", "read_layers", "require_layers"]

_TIED = "tied_modules."
_COPY = "copy all layer_* files here"


def read_layers(files: DeepSpeedFiles, table: FileTable) -> dict[int, LocalModel]:
    """The 16-bit weights of all layers, for each tensor-parallel rank."""
    layers: dict[int, LocalModel] = {}
    for (layer, rank), name in sorted(files.layers.items()):
        source = StatesFile(name, table.index(name), open_torch_file(files.tree, name))
        held = layers.setdefault(rank, LocalModel())
        held.metadata_nbytes += source.file.metadata_nbytes
        tensors, other = tensors_in(source.file.root, source)
        held.ignored["Python value"] += other
        for key, tensor in tensors.items():
            held.tensors[f"{layer}.{key}"] = plain_ref(f"{layer}.{key}", tensor, source)
    return layers


def require_layers(parts: Mapping[int, LocalModel], layers: Mapping[int, LocalModel], files: DeepSpeedFiles) -> None:
    """IncompleteShardsError for layers that the optimizers have and no file holds.

    Their names tell it (ZeRO), or the shapes of the moments (stage 0). What a tied layer's further uses have has no
    file: a matrix in each stage but one.
    """
    states = {rank: part.states for rank, part in parts.items() if part.states is not None}
    if not layers:
        if any(state.module is None for state in states.values()):
            msg = f"{files.tree.label} is of a pipeline and holds no layer files (layer_*-model_states.pt)"
            raise IncompleteShardsError(msg, hint=_COPY)
        return
    names = [name for state in states.values() for group in state.groups or () for name in group]
    names += [name for part in parts.values() for name in part.tensors]
    numbers = {int(name.partition(".")[0]) for name in names if name.partition(".")[0].isdecimal()}
    if missing := sorted(numbers - {layer for layer, _ in files.layers}):
        msg = f"{files.tree.label} has no layer_* files of layers {listed(map(str, missing))}, which were trained"
        raise IncompleteShardsError(msg, hint=_COPY)
    ranks = len(layers)
    for rank, held in layers.items():
        stages = [state for mp, state in sorted(states.items()) if mp % ranks == rank]
        moments = [Counter(moment_shapes(state)) for state in stages]
        left = sum(moments, Counter[Shape]())
        left -= Counter(ref.shape for ref in held.tensors.values())
        using = {shape: sum(shape in of_stage for of_stage in moments) for shape in left}
        if any(count >= using[shape] or len(shape) != 2 for shape, count in left.items()):
            msg = (
                f"{files.tree.label}: the optimizers have {left.total()} parameters more than the layer files, "
                f"for example of shape {list(min(left))}"
            )
            raise IncompleteShardsError(msg, hint=_COPY)


def add_sliced_masters(part: LocalModel, layers: LocalModel) -> None:
    """Masters of a stage whose model states list no shapes."""
    if part.tensors or not part.optim:
        return
    shapes = {name: ref.shape for name, ref in layers.tensors.items()}
    named = [name for rank in part.optim for group in rank.slices or () for name in group]
    shapes |= _tied_shapes(named, shapes)
    for group in range(max(len(rank.flats) for rank in part.optim)):
        part.tensors |= sliced_masters(group, shapes, part.optim)


def _tied_shapes(names: Iterable[str], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of tied modules: that of the layers' parameters of the same name, where they have but one."""
    found = {}
    for name in names:
        if name.startswith(_TIED):
            same = {shape for other, shape in shapes.items() if _leaf(other) == _leaf(name)}
            if len(same) == 1:
                found[name] = same.pop()
    return found


def _leaf(name: str) -> str:
    """The name within its layer."""
    return name.split(".", 2)[2] if name.startswith(_TIED) else name.split(".", 1)[1]


def lay_under(whole: LocalModel, layers: LocalModel, *, module: bool, trained: set[str] | None) -> None:
    """The layers' weights below the masters of all stages; without masters they are the model.

    What no optimizer has is frozen: by the masters, else by the names that were `trained` where a file lists them. A
    tied layer's weight is compared with its tied master.
    """
    masters = dict(whole.tensors)
    tied = [name for name in masters if name.startswith(_TIED)]
    for name, ref in layers.tensors.items():
        if name not in masters and (known := _tied_master(name, ref, tied, masters)):
            whole.twins.setdefault(known, ref)
        elif name not in masters:
            whole.tensors[name] = ref if module or not masters else widened(ref)
            if masters or (trained is not None and not _is_listed(name, trained)):
                whole.frozen.add(name)
        elif masters[name].shape != ref.shape:
            two = f"{list(ref.shape)} in its layer file, {list(masters[name].shape)} in the optimizer's list"
            raise CorruptCheckpointError(f"{name} is {two}", hint="files of two runs are mixed")
        else:
            whole.twins[name] = ref
    whole.frozen_known = whole.frozen_known and (bool(masters) or trained is not None)
    whole.ignored += layers.ignored


def _is_listed(name: str, trained: set[str]) -> bool:
    return name in trained or any(other.startswith(_TIED) and _leaf(other) == _leaf(name) for other in trained)


def _tied_master(name: str, ref: TensorRef, tied: list[str], masters: Mapping[str, TensorRef]) -> str | None:
    """The tied master whose weight stands in a layer's file under `name`; UnsupportedError when two could be."""
    fitting = [other for other in tied if _leaf(other) == _leaf(name) and masters[other].shape == ref.shape]
    if len(fitting) > 1:
        msg = f"{name} may be the weight of {' or '.join(fitting)}"
        raise UnsupportedError(msg, hint="--weights module writes the 16-bit weights")
    return fitting[0] if fitting else None
