"""Do names and shapes fit the config: what can be said about a model before its first byte is read.

Nothing here demands a key that a config lacks: a check whose number is not there is left
out. Configs of vision models keep the text model's numbers in a nest (`text_config`,
`llm_config`, `thinker_config`); those are asked first.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from merge_stream.architectures.base import ModelInfo, class_names
from merge_stream.architectures.families import (
    EMBEDDINGS,
    EXPERTS_OF_INTERMEDIATE_SIZE,
    FUSED_EXPERTS,
    HEADS,
    LLAMA_LIKE,
    ODD_VOCABULARY,
    PART_SHAPES,
    RECOMPUTED,
    UNIFORM,
)
from merge_stream.errors import CheckpointError, IncompleteShardsError
from merge_stream.units import counted

__all__ = ["TEXT_NESTS", "check_structure", "layer_of", "text_configs", "text_value"]

Ints = tuple[int, ...]

TEXT_NESTS = ("text_config", "llm_config", "language_config", "thinker_config")
_SHOWN = 5
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model", "n_embed")
_LAYER = re.compile(
    r"(?P<stem>(?:model\.|transformer\.|gpt_neox\.|backbone\.|model\.decoder\.|model\.language_model\."
    r"|language_model\.model\.|text_model\.model\.|model\.text_model\.|thinker\.model\.|biogpt\.|rwkv\.)?(?:layers|h|blocks)\.)(?P<number>\d+)\.(?P<rest>.+)"
)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
_EXPERT = re.compile(r"(?P<stem>(?:.*\.)?experts\.)(?P<number>\d+)\.(?P<rest>.+)")
_WIDTHS = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
_ALL_SHARDS = "pass the folder that holds all shards (all ranks, all pipeline stages)"
_NO_CONFIG = "correct config.json, or write the weights alone with `--no-config`"
_OTHER_MODEL = f"the config belongs to another model: {_NO_CONFIG}"
_MEANING = {
    "hidden": "hidden size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads * head_dim",
    "key_value_heads": "num_key_value_heads * head_dim",
}


def text_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of a config that describe the text model: nests first, the innermost first, then the top."""
    for key in TEXT_NESTS:
        nest = config.get(key)
        if isinstance(nest, Mapping):
            yield from text_configs(nest)
    yield config


def text_value(config: Mapping[str, Any] | None, *keys: str) -> int | None:
    """The first of `keys` that stands in the config as a number, or None."""
    for part in text_configs(config or {}):
        for key in keys:
            value = part.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def layer_of(name: str) -> tuple[str, int, str] | None:
    """(stem, number, rest) of a name inside a text layer: ("model.layers.", 3, "mlp.up_proj.weight"), or None."""
    match = _LAYER.fullmatch(name)
    return (match["stem"], int(match["number"]), match["rest"]) if match else None


def check_structure(shapes: Mapping[str, Ints], model: ModelInfo) -> tuple[str, ...]:
    """Refuse what is incomplete or contradicts the config; return remarks for the user.

    IncompleteShardsError: a layer, a part of a layer, an expert, the last norm, the embedding or the output head is
    not there.
    CheckpointError: the config and the shapes cannot both be right.
    """
    _check_layers(shapes, model)
    _check_embedding(shapes, model)
    _check_output_head(shapes, model)
    if not any("lora_" in name for name in shapes):  # an adapter holds parts only
        _check_experts(shapes, model)
        _check_expert_width(shapes, model)
        if model.model_type in LLAMA_LIKE:
            _check_ends(shapes)
            _check_parts(shapes, model)
    return tuple(_notes_on_labels(shapes, model))


def _where(model: ModelInfo) -> str:
    return model.config_path or "config.json"


def _check_layers(shapes: Mapping[str, Ints], model: ModelInfo) -> None:
    config = model.config or {}
    if config.get("is_encoder_decoder") or "decoder_layers" in config:
        return  # num_hidden_layers counts the encoder there
    layers: dict[str, dict[int, set[str]]] = {}
    for name in shapes:
        parts = layer_of(name)
        if parts is not None:
            stem, number, rest = parts
            layers.setdefault(stem, {}).setdefault(number, set()).add(rest)
    if not layers:
        return
    stem = max(layers, key=lambda k: len(layers[k]))
    there = layers[stem]
    keys = ("num_layers", *_LAYERS) if model.model_type == "longcat_flash" else _LAYERS  # two attentions in a layer
    wanted = text_value(config, *keys)
    count = max(there) + 1 if wanted is None else wanted
    lost = max(count - sum(n < count for n in there), 0)
    if lost:
        missing = list(islice((n for n in itertools.count() if n not in there), min(lost, _SHOWN)))
        says = f"{_where(model)} says {wanted} layers" if wanted is not None else f"the highest layer is {max(there)}"
        msg = f"{_listed([stem + str(n) for n in missing], lost)} missing: {says}, the checkpoint holds {len(there)}"
        raise IncompleteShardsError(msg, hint=_ALL_SHARDS + (f"; or {_NO_CONFIG}" if wanted is not None else ""))
    spare = text_value(config, "num_nextn_predict_layers", "num_mtp_layers") or 0
    if wanted is not None and max(there) >= wanted + spare:
        held = f"{stem}{max(there)} ({counted(len(there), 'layer')})"
        msg = f"{_where(model)} says {counted(wanted, 'layer')}, but the checkpoint holds {held}"
        raise CheckpointError(msg, hint=_OTHER_MODEL)
    if model.model_type in UNIFORM:
        _check_uniform(stem, there)


def _check_uniform(stem: str, there: Mapping[int, set[str]], what: str = "layers") -> None:
    counts = Counter(rest for names in there.values() for rest in names if not RECOMPUTED.fullmatch(rest))
    lost = [
        f"{stem}{number}.{rest}"
        for rest, count in sorted(counts.items())
        if count * 2 > len(there)
        for number in sorted(there)
        if rest not in there[number]
    ]
    if lost:
        msg = f"{_listed(lost)} missing, though the other {what} have it ({len(there)} {what})"
        raise IncompleteShardsError(msg, hint=_ALL_SHARDS)


def _check_embedding(shapes: Mapping[str, Ints], model: ModelInfo) -> None:
    if model.model_type in ODD_VOCABULARY:
        return
    vocab, hidden = text_value(model.config, "vocab_size"), _hidden(model)
    for name, shape in shapes.items():
        is_embedding = name in EMBEDDINGS
        if len(shape) != 2 or not (is_embedding or name in {"lm_head.weight", "language_model.lm_head.weight"}):
            continue
        rows, columns = shape
        if vocab is not None and rows != vocab:
            more = (
                f"; {rows - vocab} rows more look like padding to a multiple of {_power_of_two(rows)}"
                if rows > vocab and _power_of_two(rows) >= 8
                else ""
            )
            msg = f"{name} has {rows} rows, but {_where(model)} says vocab_size {vocab}{more}"
            raise CheckpointError(
                msg, hint=f"set vocab_size to {rows} if the vocabulary was resized in training; otherwise {_NO_CONFIG}"
            )
        if is_embedding and hidden is not None and columns != hidden:
            msg = f"{name} has {columns} columns, but {_where(model)} says hidden size {hidden}"
            raise CheckpointError(msg, hint=_OTHER_MODEL)


def _expert_counts(model: ModelInfo) -> list[int]:
    """The numbers of experts that the config says; several if its keys or nests disagree."""
    values = [part.get(key) for part in text_configs(model.config or {}) for key in _EXPERTS]
    return sorted({v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0})


def _check_experts(shapes: Mapping[str, Ints], model: ModelInfo) -> None:
    counts = _expert_counts(model)
    layers: dict[str, dict[int, set[str]]] = {}
    for name, shape in shapes.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            layers.setdefault(expert["stem"], {}).setdefault(int(expert["number"]), set()).add(expert["rest"])
        elif counts and len(shape) == 3 and shape[0] not in counts and FUSED_EXPERTS.fullmatch(name) and layer_of(name):
            msg = f"{name} holds {shape[0]} experts, but {_where(model)} says {counts[0]}"
            raise CheckpointError(msg, hint=f"expert-parallel parts, or the config of another model: {_NO_CONFIG}")
    for stem, there in layers.items():
        _check_numbered_experts(stem, there, counts if layer_of(stem + "0") else [], model)


def _check_numbered_experts(stem: str, there: Mapping[int, set[str]], counts: list[int], model: ModelInfo) -> None:
    highest = max(there)
    wanted = next((count for count in counts if count > highest), None)
    if counts and wanted is None:
        msg = f"{stem}{highest} is there, but {_where(model)} says {counts[-1]} experts"
        raise CheckpointError(msg, hint=_OTHER_MODEL)
    lost = (wanted or highest + 1) - len(there)
    if lost:
        missing = list(islice((n for n in itertools.count() if n not in there), min(lost, _SHOWN)))
        says = f"{_where(model)} says {wanted} experts" if wanted else f"the highest expert is {highest}"
        msg = f"{_listed([stem + str(n) for n in missing], lost)} missing: {says}, the checkpoint holds {len(there)}"
        raise IncompleteShardsError(msg, hint=_ALL_SHARDS + (f"; or {_NO_CONFIG}" if wanted else ""))
    _check_uniform(stem, there, "experts")


def _check_ends(shapes: Mapping[str, Ints]) -> None:
    for stem in ("model.", ""):
        if any(name.startswith(f"{stem}layers.") for name in shapes):
            lost = [] if f"{stem}norm.weight" in shapes else [f"{stem}norm.weight"]
            if f"{stem}embed_tokens.weight" not in shapes and not EMBEDDINGS & shapes.keys():
                lost.append(f"{stem}embed_tokens.weight")
            if lost:
                msg = f"{_listed(lost)} missing, though the layers are there"
                raise IncompleteShardsError(msg, hint=_ALL_SHARDS)


def _check_parts(shapes: Mapping[str, Ints], model: ModelInfo) -> None:
    config = model.config or {}
    if "quantization_config" in config:
        return  # packed weights have shapes of their own
    head_dim = text_value(config, "head_dim")
    sizes = {"hidden": _hidden(model), "intermediate": text_value(config, "intermediate_size")}
    for key in ("heads", "key_value_heads"):
        count = text_value(config, "num_attention_heads" if key == "heads" else "num_key_value_heads")
        sizes[key] = count * head_dim if count and head_dim else None
    for name, shape in shapes.items():
        layer = layer_of(name)
        wanted = PART_SHAPES.get(layer[2], ()) if layer else ("hidden",) if name == "model.norm.weight" else ()
        if len(wanted) != len(shape):
            continue
        for dim, key in enumerate(wanted):
            if sizes[key] not in {None, shape[dim]}:
                what = "length" if len(shape) == 1 else ("rows", "columns")[dim]
                msg = f"{name} is {list(shape)}, but {_where(model)} says {sizes[key]} {what} ({_MEANING[key]})"
                raise CheckpointError(msg, hint=f"a tensor-parallel part saved as a whole, or {_OTHER_MODEL}")


def _check_expert_width(shapes: Mapping[str, Ints], model: ModelInfo) -> None:
    """Routed experts are as wide as the config says; half of it is a tensor-parallel part."""
    config = model.config or {}
    kinds = {str(part.get("model_type")) for part in text_configs(config)}
    key = "intermediate_size" if kinds & EXPERTS_OF_INTERMEDIATE_SIZE else "moe_intermediate_size"
    wanted = text_value(config, key)
    if wanted is None or "quantization_config" in config:
        return
    for name, shape in shapes.items():
        match = _EXPERT.fullmatch(name)
        dim = _WIDTHS.get(match["rest"]) if match else None
        if dim is not None and len(shape) == 2 and shape[dim] != wanted:
            what = ("rows", "columns")[dim]
            msg = f"{name} is {list(shape)}, but {_where(model)} says {wanted} {what} ({key})"
            raise CheckpointError(msg, hint=f"a tensor-parallel part saved as a whole, or {_OTHER_MODEL}")


def _hidden(model: ModelInfo) -> int | None:
    return text_value(model.config, *_HIDDEN)


def _power_of_two(number: int) -> int:
    return min(number & -number, 1024)


def _check_output_head(shapes: Mapping[str, Ints], model: ModelInfo) -> None:
    config = model.config or {}
    flags = [part["tie_word_embeddings"] for part in text_configs(config) if "tie_word_embeddings" in part]
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in class_names(config))
    if not causal or not flags or any(flag is not False for flag in flags):
        return
    if "model.embed_tokens.weight" in shapes and all(name.startswith("model.") for name in shapes):
        msg = f"lm_head.weight is missing: {_where(model)} says {config['architectures'][0]}, not tied to the embedding"
        raise IncompleteShardsError(msg, hint=f"{_ALL_SHARDS}; or set tie_word_embeddings to true if they are tied")


def _notes_on_labels(shapes: Mapping[str, Ints], model: ModelInfo) -> Iterator[str]:
    config = model.config or {}
    labels = config.get("num_labels")
    if labels is None and isinstance(config.get("id2label"), Mapping):
        labels = len(config["id2label"])
    for name, shape in shapes.items():
        head = HEADS.fullmatch(name)
        is_labels = head is not None and head[1] in {"score", "classifier"} and name.endswith(".weight")
        if is_labels and len(shape) == 2 and isinstance(labels, int) and labels != shape[0]:
            yield f"{name} has {shape[0]} rows, but {_where(model)} says {labels} labels"


def _listed(names: list[str], count: int = 0) -> str:
    """The first names of `count` (all of them unless told), and a verb. A config may claim any number of layers."""
    count = count or len(names)
    first = ", ".join(names[:_SHOWN])
    return f"{first} and {count - _SHOWN} more are" if count > _SHOWN else first + (" is" if count == 1 else " are")
