"""LoRA inside a state dict: which tensors are the model, which the adapter.

    base_model.model.<module>.base_layer.weight         the model's weight   -> <module>.weight
    base_model.model.<module>.lora_A.<adapter>.weight   A [r, in]   of the
    base_model.model.<module>.lora_B.<adapter>.weight   B [out, r]  adapter (and .bias: lora_bias)
    base_model.model.<module>.lora_magnitude_vector.<adapter>.weight    DoRA, [out]
    base_model.model.<module>.lora_embedding_A.<adapter>                A [r, vocabulary], B [hidden, r]
    base_model.model.<module>.modules_to_save.<adapter>.weight   trained copy, used instead of
    base_model.model.<module>.original_module.weight             the original one
    base_model.model.<anything else>                             -> <anything else>

In an adapter's own file `.<adapter>` is left out. Parameters (`target_parameters`, experts)
have no module of their own: their factors stand on the module that holds them, the second
one's on `<module>.base_layer` and so on.

Facts: peft 0.21 (`LoraLayer`, `ParamWrapper`, `ModulesToSaveWrapper`, save names), verl 0.9.1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from merge_stream.errors import CheckpointError, CorruptCheckpointError, UnsupportedError
from merge_stream.tensors.ref import Catalog, TensorRef

__all__ = ["PREFIX", "LoraModule", "Unwrapped", "holds_lora", "is_adapter_alone", "plain_name", "unwrap"]

PREFIX = "base_model.model."
_ADAPTER = r"(?:\.(?P<adapter>[^.]+))?"
_FACTOR = re.compile(rf"(?P<module>.+)\.lora_(?P<side>[AB]){_ADAPTER}\.(?P<what>weight|bias)")
_EMBEDDING = re.compile(rf"(?P<module>.+)\.lora_embedding_(?P<side>[AB]){_ADAPTER}")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(?:\.weight|\.(?P<adapter>[^.]+?)(?:\.weight)?)?")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_ORIGINAL = re.compile(r"(?P<module>.+)\.original_module\.(?P<rest>.+)")
_BESIDE = re.compile(r"(.*\.)?(lm_head|embed_out|score|classifier|embed_tokens|wte|word_embeddings|embed_in|embedding)")
_OTHER = re.compile(r"(.*\.)?(lora_[A-Za-z_]+|hada_\w+|lokr_\w+|ia3_l|oft_\w+|vera_\w+|trainable_tokens_\w+)(\..*)?")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapted module: its name in the model, its factors.

    `path` is the name with peft's nesting (`<module>.base_layer` for the second parameter of
    one module); `embedding` says that A is [r, vocabulary].
    """

    module: str
    path: str
    a: TensorRef
    b: TensorRef
    bias: TensorRef | None = None
    magnitude: TensorRef | None = None
    embedding: bool = False

    @property
    def weight(self) -> str:
        """The model's tensor that is adapted, when the module is a layer."""
        return f"{self.module}.weight"


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A state dict taken apart.

    trained  the model with trained copies of `modules_to_save`; original the model without
    adapter  name in a peft adapter file -> tensor
    saved    modules that were trained whole
    """

    trained: Catalog
    original: Catalog
    modules: tuple[LoraModule, ...]
    adapter: Mapping[str, TensorRef]
    saved: tuple[str, ...] = ()


def holds_lora(catalog: Catalog) -> bool:
    """True when a tensor is a LoRA factor or stands in a peft wrapper; False for a store, where all is decided."""
    if catalog.staged is not None:
        return False
    return any(".lora_" in name or ".base_layer." in name or name.startswith(PREFIX) for name in catalog.tensors)


def is_adapter_alone(catalog: Catalog) -> bool:
    """True when LoRA factors are there and hardly a weight that they belong to.

    An adapter's own file may hold what was trained whole, and the embeddings. False for a store.
    """
    if catalog.staged is not None:
        return False
    adapted, saved, holders = set(), set(), set()
    for name in map(_short, catalog.tensors):
        if match := _FACTOR.fullmatch(name) or _EMBEDDING.fullmatch(name):
            adapted.add(_plain(match["module"]))
        elif match := _SAVED.fullmatch(name) or _ORIGINAL.fullmatch(name):
            saved.add(match["module"])
        elif ".lora_" not in name:
            holders.add(_plain(name).rpartition(".")[0])
    beside = {module for module in adapted if _BESIDE.fullmatch(module)}
    if adapted - beside:
        return not any(module in holders for module in adapted - beside)
    return bool(adapted) and not (holders - beside - saved)


def unwrap(catalog: Catalog) -> Unwrapped:
    """Sort the tensors.

    UnsupportedError for adapters of another kind or several of them, CheckpointError for a lone factor, or for a module
    of which a trained copy or an original is missing.
    """
    plain: dict[str, TensorRef] = {}
    trained: dict[str, TensorRef] = {}
    original: dict[str, TensorRef] = {}
    adapter: dict[str, TensorRef] = {}
    parts: dict[str, dict[str, TensorRef]] = {}
    adapters: set[str] = set()
    saved: dict[str, None] = {}
    for name, tensor in catalog.tensors.items():
        short = _short(name)
        if match := _FACTOR.fullmatch(short):
            adapters.add(match["adapter"] or "default")
            parts.setdefault(match["module"], {})[f"{match['side']}.{match['what']}"] = tensor
            adapter[f"{PREFIX}{match['module']}.lora_{match['side']}.{match['what']}"] = tensor
        elif match := _EMBEDDING.fullmatch(short):
            adapters.add(match["adapter"] or "default")
            parts.setdefault(match["module"], {})[f"embedding {match['side']}"] = tensor
            adapter[f"{PREFIX}{match['module']}.lora_embedding_{match['side']}"] = tensor
        elif match := _MAGNITUDE.fullmatch(short):
            adapters.add(match["adapter"] or "default")
            parts.setdefault(match["module"], {})["magnitude"] = tensor
            adapter[f"{PREFIX}{match['module']}.lora_magnitude_vector"] = tensor
        elif match := _SAVED.fullmatch(short):
            adapters.add(match["adapter"])
            target = f"{match['module']}.{match['rest']}"
            saved[match["module"]] = None
            trained[target] = _named(tensor, target)
            adapter[f"{PREFIX}{target}"] = tensor
        elif match := _ORIGINAL.fullmatch(short):
            target = f"{match['module']}.{match['rest']}"
            original[target] = _named(tensor, target)
        elif _OTHER.fullmatch(short):
            msg = f"the checkpoint holds adapter tensors that are not LoRA (for example {name})"
            raise UnsupportedError(msg, hint="fold them with peft; --layout as-is writes them as they are")
        else:
            target = _plain(short)
            if target in plain:
                msg = f"two tensors are {target} without peft's wrapper"
                raise CorruptCheckpointError(msg, hint="the checkpoint mixes two models")
            plain[target] = _named(tensor, target)
    if len(adapters) > 1:
        msg = f"the checkpoint holds {len(adapters)} adapters: {', '.join(sorted(adapters))}"
        raise UnsupportedError(msg, hint="only one adapter can be folded; save the model with one active adapter")
    _check_copies(original, trained)
    return Unwrapped(
        dataclasses.replace(catalog, tensors={**plain, **original, **trained}),
        dataclasses.replace(catalog, tensors={**plain, **trained, **original}),
        tuple(_modules(parts)),
        adapter,
        tuple(saved),
    )


def _check_copies(original: Mapping[str, TensorRef], trained: Mapping[str, TensorRef]) -> None:
    """A module that was trained whole has each of its tensors twice; an adapter alone has the trained ones only."""
    wrapped = {name.rpartition(".")[0] for name in original}
    lost = [f"the trained copy (modules_to_save) of {name}" for name in original if name not in trained]
    lost += [
        f"the original (original_module) of {name}"
        for name in trained
        if name not in original and name.rpartition(".")[0] in wrapped
    ]
    if lost:
        msg = f"{lost[0]} is missing" + (f", and {len(lost) - 1} more" if len(lost) > 1 else "")
        raise CheckpointError(msg, hint="the checkpoint is incomplete: pass all of its files")


def _modules(parts: Mapping[str, Mapping[str, TensorRef]]) -> Iterable[LoraModule]:
    for path, tensors in parts.items():
        embedding = any(what.startswith("embedding") for what in tensors)
        sides = ("embedding A", "embedding B") if embedding else ("A.weight", "B.weight")
        have = next(iter(tensors.values()))
        if any(side not in tensors for side in sides):
            msg = f"{path} has not both of its LoRA factors, but {have.name}"
            raise CheckpointError(msg, hint="the checkpoint is incomplete: pass all of its files")
        a, b = (tensors[side] for side in sides)
        fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] and a.shape[0] > 0
        if not fits or a.dtype != b.dtype or a.dtype.name not in {"F32", "BF16", "F16"}:
            msg = f"{path}: LoRA factors A {list(a.shape)} {a.dtype} and B {list(b.shape)} {b.dtype} are not known here"
            raise UnsupportedError(
                msg, hint="factors of linear layers, embeddings and experts are, in fp32, bf16 or fp16; fold with peft"
            )
        extra = set(tensors) - {*sides, "B.bias", "magnitude"}
        if extra or (embedding and "B.bias" in tensors):
            msg = f"{path} has adapter tensors that are not known here: {', '.join(sorted(set(tensors) - set(sides)))}"
            raise UnsupportedError(msg, hint="fold with peft")
        yield LoraModule(_plain(path), path, a, b, tensors.get("B.bias"), tensors.get("magnitude"), embedding)


def plain_name(name: str) -> str:
    """The model's own name for a tensor in a peft wrapper."""
    short = _short(name)
    match = _SAVED.fullmatch(short) or _ORIGINAL.fullmatch(short)
    return f"{match['module']}.{match['rest']}" if match else _plain(short)


def _short(name: str) -> str:
    return name.removeprefix(PREFIX)


def _plain(name: str) -> str:
    """The name without peft's wrappers around a layer."""
    return ".".join(segment for segment in name.split(".") if segment != "base_layer")


def _named(tensor: TensorRef, name: str) -> TensorRef:
    return dataclasses.replace(tensor, name=name)
