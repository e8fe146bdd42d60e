"""Which weights are written quantized, and which modules must be named as plain.

Quantized are the linear layers of the language model's blocks, by an allow-list of names: whatever else there is
(embeddings, head, norms, routers, convolutions, state-space layers, vision and audio towers) stays plain, and each
module of it is named in full, since loaders match such lists in different ways (transformers 5.24, vLLM 0.33, SGLang
0.5.23, compressed-tensors 0.20). Layers that engines fuse, and all experts of a block, are quantized together or
not at all; a weight whose shape a scheme cannot take leaves those that belong with it plain too.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from merge_stream.architectures.families import AUDIO_AND_VISION
from merge_stream.encodings.base import Scheme, as_rows, scheme_named
from merge_stream.errors import UnsupportedError, UsageError
from merge_stream.options import QuantizeName
from merge_stream.tensors.dtype import DType
from merge_stream.units import counted

__all__ = ["FUSED", "QuantizedWeights", "choose_weights", "is_linear", "shares_scale_with"]

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Layers of one module that vLLM and SGLang make one layer of."""
_LINEAR = frozenset(
    {*(name for group in FUSED for name in group), "o_proj", "down_proj", "w2", "q_b_proj", "kv_b_proj"}
    | {"qkv_proj", "gate_up_proj"}
)
_BLOCK = re.compile(r"(^|\.)layers\.\d+\.")
_EXPERT = re.compile(r"(?P<all>.+\.experts)\.\d+\.")
_EMBEDDING = re.compile(r"(?P<model>.*?)(model\.)?embed_tokens\.weight")
_HEAD = "lm_head"
_STACK = re.compile(r"(^|\.)layers\.\d+\.mlp\.experts\.(gate_up_proj|down_proj)$")
_GPT_OSS, _OWN_FORM = "gpt_oss", "mxfp4-gpt-oss"
_SUFFIX = ".weight"
_SHOWN = 3

Tensors = Mapping[str, tuple[tuple[int, ...], DType]]


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The `names` that are written in `scheme` ("" for none), the modules that stay plain, and remarks about them."""

    scheme: str = ""
    names: frozenset[str] = frozenset()
    left_plain: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def is_linear(name: str) -> bool:
    """True for the weight of a linear layer in a block of a language model, by its name."""
    parts = name.split(".")
    known = len(parts) > 1 and parts[-1] == "weight" and parts[-2] in _LINEAR
    return known and not _in_tower(name) and "encoder" not in parts and _BLOCK.search(name) is not None


def choose_weights(
    asked: QuantizeName,
    tensors: Tensors,
    *,
    model_type: str = "",
    ignore: Sequence[str] = (),
    force: bool = False,
) -> QuantizedWeights:
    """Choose among the tensors of the model (name -> shape, source type); `ignore` are globs of what stays plain.

    UnsupportedError when the model is quantized already, has stacked experts, no known linear layer or none that the
    scheme can take, or (without `force`) when a loader is known to read it wrongly; UsageError when a glob fits
    nothing.
    """
    _refuse_quantized(tensors)
    name, why = _scheme_for(asked, tensors, model_type, ignore)
    scheme = scheme_named(name)
    if not scheme.transposed:
        _refuse_stacked(asked, tensors, model_type)
    able = _able_weights(scheme, tensors)
    if not able:
        msg = f"--quantize {asked}: none of {counted(len(tensors), 'tensor')} is a linear layer of a known name"
        hint = (
            "known are q_proj, k_proj, gate_proj and their like in `layers.N`; without --quantize the model is merged"
        )
        raise UnsupportedError(msg, hint=hint)
    plain = _ignored(able, ignore)
    unfit = _unfit(scheme, able - plain, tensors)
    with_others = _with_others(able, plain | unfit.keys())
    names = frozenset(able - plain - unfit.keys() - with_others)
    if not names:
        _refuse_nothing_left(asked, able, unfit)
    experts = any(_EXPERT.match(weight) for weight in names)
    objection = scheme.objection(experts=experts)
    if objection and not force:
        raise UnsupportedError(f"--quantize {asked}: {objection}", hint="choose another scheme, or add --force")
    left = sorted({*_modules(tensors, names), *_heads(list(tensors))})
    size = sum(math.prod(tensors[weight][0]) for weight in names)
    share = size / max(sum(math.prod(shape) for shape, _ in tensors.values()), 1)
    count = counted(len(names), "weight is", "weights are")
    notes = [why] if why else []
    notes.append(f"{count} written as {name} ({share:.0%} of all elements); the others stay plain")
    if unfit:
        count, first = counted(len(unfit), "weight stays", "weights stay"), min(unfit)
        notes.append(f"{count} plain, since {name} cannot take the shape: {_shown(unfit)} ({first}: {unfit[first]})")
    if with_others:
        count = counted(len(with_others), "more weight stays", "more weights stay")
        cause = " and ".join(
            words for words, of in (("what --quantize-ignore names", plain), ("what has no such shape", unfit)) if of
        )
        notes.append(f"{count} plain, since engines make one layer of them and {cause}: {_shown(with_others)}")
    notes += [text for text in (objection, scheme.remark(experts=experts)) if text]
    return QuantizedWeights(name, names, tuple(left), tuple(notes))


def _scheme_for(asked: QuantizeName, tensors: Tensors, model_type: str, ignore: Sequence[str]) -> tuple[str, str]:
    """The scheme that is meant, and why it was chosen ("" where it was asked for).

    `auto` takes what most loaders read for that model: gpt-oss's own form for gpt-oss, fp8-block where the shape of
    every linear layer allows it, else fp8-dynamic.
    """
    stacked = model_type == _GPT_OSS and bool(_able_weights(scheme_named(_OWN_FORM), tensors))
    if asked == "mxfp4":
        return (_OWN_FORM if stacked else asked), ""
    if asked not in {"auto", "auto-fp8"}:
        return asked, ""
    if asked == "auto" and stacked:
        return _OWN_FORM, f"--quantize auto: {_OWN_FORM}, the form that gpt-oss has in its own repositories"
    block = scheme_named("fp8-block")
    able = _able_weights(block, tensors)
    unfit = _unfit(block, able - _ignored(able, ignore), tensors) if able else {}
    if unfit:
        first = min(unfit)
        why = f"--quantize {asked}: fp8-dynamic and not fp8-block, since {counted(len(unfit), 'weight')} of {len(able)}"
        return "fp8-dynamic", f"{why} cannot take it ({first}: {unfit[first]})"
    return block.name, f"--quantize {asked}: fp8-block, since all linear layers are made of whole blocks of 128 x 128"


def _able_weights(scheme: Scheme, tensors: Tensors) -> set[str]:
    """The weights that are quantized if their shapes and the user allow it."""
    filled = {n: shape for n, (shape, dtype) in tensors.items() if math.prod(shape) > 0 and dtype.kind == "float"}
    if scheme.transposed:
        return {name for name, shape in filled.items() if _STACK.search(name) and len(shape) == 3}
    return {name for name, shape in filled.items() if is_linear(name) and len(shape) == 2}


def _unfit(scheme: Scheme, names: Collection[str], tensors: Tensors) -> dict[str, str]:
    """Those of `names` whose shape the scheme cannot take, and why."""
    reasons = {name: scheme.fits(as_rows(scheme, tensors[name][0])) for name in names}
    return {name: why for name, why in reasons.items() if why}


def shares_scale_with(name: str, names: Collection[str]) -> str:
    """The first of `names` that engines make one layer of with `name`: their scales must be made of one magnitude."""
    module, last, suffix = name.rsplit(".", 2)
    group = next((group for group in FUSED if last in group), (last,))
    return next(other for part in group if (other := f"{module}.{part}.{suffix}") in names)


def _with_others(able: set[str], plain: set[str]) -> set[str]:
    """Weights that stay plain because those do which engines make one layer of them with."""
    together: dict[str, set[str]] = defaultdict(set)
    for name in able:
        together[_group(name)].add(name)
    return {name for group in together.values() if group & plain for name in group - plain}


def _refuse_nothing_left(scheme: str, able: set[str], unfit: Mapping[str, str]) -> None:
    msg = f"--quantize {scheme}: nothing is left to quantize"
    if unfit:
        first = min(unfit)
        msg += f": {counted(len(unfit), 'weight')} of {len(able)} cannot be written so ({first}: {unfit[first]})"
        raise UnsupportedError(msg, hint="choose another scheme; fp8-dynamic takes any shape")
    raise UsageError(msg, hint="--quantize-ignore names everything; leave it out, or leave --quantize out")


def _shown(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_SHOWN]) + " ..." * (len(names) > _SHOWN)


def _refuse_quantized(tensors: Tensors) -> None:
    for name, (_, dtype) in tensors.items():
        if dtype.kind == "quantized" or name.endswith(("_scale", "_scale_inv", "_packed", ".qweight", "_blocks")):
            msg = f"the model is quantized already: {name} is {dtype}"
            raise UnsupportedError(msg, hint="quantize the model that it was made from")


def _refuse_stacked(scheme: str, tensors: Tensors, model_type: str) -> None:
    for name, (shape, _) in tensors.items():
        if (
            len(shape) == 3
            and min(shape[1:]) > 1
            and _BLOCK.search(name)
            and "conv" not in name
            and not _in_tower(name)
        ):
            msg = f"--quantize {scheme}: {name} {list(shape)} holds the experts of a block in one tensor"
            hint = "loaders look for scales of each expert and would misread it; merge it without --quantize"
            if model_type == _GPT_OSS:
                hint = "gpt-oss has a form of its own: --quantize mxfp4"
            raise UnsupportedError(msg, hint=hint)


def _in_tower(name: str) -> bool:
    return any(
        AUDIO_AND_VISION.fullmatch(part) and part not in {"language_model", "thinker"} for part in name.split(".")
    )


def _ignored(able: set[str], patterns: Sequence[str]) -> set[str]:
    plain: set[str] = set()
    for pattern in patterns:
        met = {n for n in able if fnmatchcase(n, pattern) or fnmatchcase(n.removesuffix(_SUFFIX), pattern)}
        if not met:
            msg = f"--quantize-ignore {pattern} fits none of {counted(len(able), 'weight')} that would be quantized"
            raise UsageError(msg, hint=f"give the name of a module, or a glob for several; one of them is {min(able)}")
        plain |= met
    return plain


def _group(name: str) -> str:
    """What is quantized together with `name`: all experts of a block, or the layers that engines fuse."""
    expert = _EXPERT.match(name)
    if expert:
        return expert["all"]
    module, last, _ = name.rsplit(".", 2)
    return next((f"{module}.{group[0]}" for group in FUSED if last in group), name)


def _modules(tensors: Tensors, quantized: frozenset[str]) -> list[str]:
    """Modules with a weight of two dims or more that stays plain."""
    return [
        name.removesuffix(_SUFFIX)
        for name, (shape, _) in tensors.items()
        if name.endswith(_SUFFIX) and len(shape) > 1 and name not in quantized
    ]


def _heads(names: Sequence[str]) -> list[str]:
    """The output head, which is a linear layer for a loader even where it is tied and not stored."""
    heads = [name.removesuffix(_SUFFIX) for name in names if name.endswith(f"{_HEAD}{_SUFFIX}")]
    found = (_EMBEDDING.fullmatch(name) for name in names)
    return [*heads, _HEAD, *(f"{m['model']}{_HEAD}" for m in found if m)]
