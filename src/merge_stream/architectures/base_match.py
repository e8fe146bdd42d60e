"""Comparison with the base model's own files: the first authority for names and shapes.

The names of the trainer are right when they are the base model's, whatever the family.
Differences that training makes on purpose are understood and told; any other stays in
`missing`, `extra` and `reshaped`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from merge_stream.architectures.base import BaseTensor, ModelInfo
from merge_stream.architectures.families import EMBEDDINGS, HEADS, RECOMPUTED
from merge_stream.architectures.structure import layer_of, text_value
from merge_stream.architectures.ties import tied_by_config
from merge_stream.units import counted

__all__ = ["BaseMatch", "compare_with_base", "form_is_known", "packed", "plain_name", "plain_weights"]

Ints = tuple[int, ...]

# Companions of quantized weights: fp8-block and compressed-tensors scales, MXFP4 blocks, AWQ/GPTQ tables.
_SCALES = re.compile(
    r".*(_scale_inv|_scale|_scales|_scale_2|\.input_scale|_zero_point|\.weight_shape|\.weight_global_scale"
    r"|\.qzeros|\.scales|\.g_idx|\.absmax|\.quant_map|\.quant_state\..+)"
)
_PACKED = re.compile(r"(?P<plain>.*)(?P<packed>_blocks|_packed|\.qweight)")
_KNOWN_FORMS = frozenset({"awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4"})
_PREDICTION = re.compile(r"(^|.*\.)(mtp|nextn|mtp_block)(\.|_|s\.).*")
_HEAD_NAMES = ("lm_head.weight", "lm_head.bias", "embed_out.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class BaseMatch:
    """What differs between the checkpoint and the base model; nothing left means that the names are upstream.

    `missing` are names of the base that the checkpoint lacks, `extra` the opposite,
    `reshaped` names with both shapes in words. `notes` tell the differences that were
    understood.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True when nothing is left unexplained."""
        return not (self.missing or self.extra or self.reshaped)

    def __str__(self) -> str:
        parts = (
            _listed("missing", self.missing),
            _listed("not in the base model", self.extra),
            _listed("another shape", self.reshaped),
        )
        return "; ".join(part for part in parts if part)


def compare_with_base(shapes: Mapping[str, Ints], model: ModelInfo) -> BaseMatch:
    """Compare the trainer's names and shapes with those of the base model."""
    base = plain_weights(model.base_tensors or {})
    notes: list[str] = []
    missing = set(base) - set(shapes)
    extra = set(shapes) - set(base)

    missing -= {name for name in missing if RECOMPUTED.fullmatch(name)}
    extra -= {name for name in extra if RECOMPUTED.fullmatch(name)}
    heads = {name for name in extra if HEADS.fullmatch(name)}
    extra -= heads
    absent_heads = missing & set(_HEAD_NAMES)
    other_heads = {name for name in heads if name not in _HEAD_NAMES}
    if absent_heads and (other_heads or tied_by_config(model)):
        missing -= absent_heads
    if other_heads:
        notes.append(f"the base model has no {', '.join(sorted(other_heads))}: the trainer's own head")

    prediction = {name for name in missing if _predicts(name, model)}
    if prediction:
        missing -= prediction
        notes.append(
            f"the checkpoint lacks {counted(len(prediction), 'tensor')} of the base model's multi-token-prediction "
            f"layers (for example {min(prediction)}); the model is written without them"
        )
    reshaped = []
    for name in sorted(set(base) & set(shapes)):
        want, got = base[name], shapes[name]
        if want is None or want == got:
            continue
        is_vocabulary = name in EMBEDDINGS or name in _HEAD_NAMES
        if is_vocabulary and want[1:] == got[1:]:
            notes.append(f"{name} has {got[0]} rows, the base model has {want[0]}: the vocabulary was resized")
        elif not HEADS.fullmatch(name):
            reshaped.append(f"{name} {list(got)} (base model: {list(want)})")
    return BaseMatch(tuple(sorted(missing)), tuple(sorted(extra)), tuple(reshaped), tuple(notes))


def packed(name: str) -> bool:
    """True for a tensor that only a quantized model has."""
    return plain_name(name) != name


def plain_name(name: str) -> str | None:
    """What the tensor is called in the same model unquantized; None when it has none there (scales)."""
    if _SCALES.fullmatch(name):
        return None
    found = _PACKED.fullmatch(name)
    return name if found is None else found["plain"] + ".weight" * (found["packed"] == ".qweight")


def form_is_known(config: Mapping[str, Any]) -> bool:
    """Whether `plain_name` knows the names of a quantized model with this config; true of a plain one."""
    settings = config.get("quantization_config")
    return not isinstance(settings, Mapping) or str(settings.get("quant_method")) in _KNOWN_FORMS


def plain_weights(base: Mapping[str, BaseTensor]) -> dict[str, Ints | None]:
    """Names of the base as an unquantized model has them; shape None where it was packed."""
    named = ((plain_name(name), name, tensor.shape) for name, tensor in base.items())
    return {plain: shape if plain == name else None for plain, name, shape in named if plain is not None}


def _predicts(name: str, model: ModelInfo) -> bool:
    layers = text_value(model.config, "num_hidden_layers")
    place = layer_of(name)
    return bool(_PREDICTION.fullmatch(name)) or (layers is not None and place is not None and place[1] >= layers)


def _listed(what: str, names: tuple[str, ...]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what}: {', '.join(names[:5])}{more}"
