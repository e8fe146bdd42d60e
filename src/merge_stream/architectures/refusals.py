"""Why names cannot be told: one function for each refusal, each with its ways out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.base_match import BaseMatch
from merge_stream.architectures.families import AUDIO_AND_VISION, FUSED_EXPERTS, HEADS
from merge_stream.architectures.structure import layer_of
from merge_stream.errors import CheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.units import counted

__all__ = [
    "notes_without_config",
    "other_model_error",
    "refuse_fused",
    "refuse_lora",
    "refuse_vision",
    "renamed_vlm_error",
    "strangers_error",
    "unknown_family_error",
    "unknown_layers_error",
]

Ints = tuple[int, ...]

_LORA = re.compile(r"(^|.*\.)(lora_[A-Za-z_]+|base_layer|modules_to_save|original_module)(\..*)?|base_model\.model\..*")
_TEXT_NAMES = re.compile(
    r"(model\.|transformer\.|gpt_neox\.|backbone\.|model\.decoder\.)?"
    r"(embed_tokens|wte|wpe|word_embeddings|word_embeddings_layernorm|embed_in|embed_positions|embeddings|norm"
    r"|final_layernorm|final_layer_norm|ln_f|norm_f|norm_out|project_in|project_out|rotary_emb)(\..+)?"
)
_ATTENTION = re.compile(r"(self_attn|self_attention|attn|attention|mixer|temporal_block)\..+")
_AS_IS = "`--layout as-is` writes the tensors under the trainer's names"
_BASE = "`--base-model DIR` with the model this was trained from (its safetensors headers decide)"


def refuse_lora(shapes: Mapping[str, Ints]) -> None:
    """Refuse PEFT's names: the count, an example."""
    lora = [name for name in shapes if _LORA.fullmatch(name)]
    factors = [name for name in lora if "lora_" in name]
    if lora:
        count = (
            counted(len(factors), "LoRA tensor") if factors else f"{counted(len(lora), 'tensor')} inside a PEFT wrapper"
        )
        msg = f"the checkpoint holds {count} (for example {(factors or lora)[0]})"
        raise UnsupportedError(msg, hint=f"this version does not fold LoRA into the weights; {_AS_IS}, unfolded")


def refuse_fused(shapes: Mapping[str, Ints], kind: str) -> None:
    """Refuse fused experts of a family whose split is not known."""
    fused = [name for name, shape in shapes.items() if len(shape) == 3 and FUSED_EXPERTS.fullmatch(name)]
    if fused:
        msg = (
            f"{len(fused)} fused expert tensors (for example {fused[0]} {list(shapes[fused[0]])}) need splitting "
            f"into the original repository's tensors{f' of {kind}' if kind else ''}, which this version does not do"
        )
        raise UnsupportedError(msg, hint=_AS_IS)


def renamed_vlm_error(shapes: Mapping[str, Ints], kind: str) -> UnsupportedError:
    """Refusal of a vision or audio family that has no table."""
    msg = (
        f"{kind} may have other names in memory ({next(iter(shapes), '')}) than in the original repository, "
        "and this version has no rules for it"
    )
    return UnsupportedError(msg, hint=f"pass {_BASE}; or {_AS_IS}")


def strangers_error(strangers: list[str], shapes: Mapping[str, Ints], kind: str) -> UnsupportedError:
    """Refusal of names that no repository of the family has, the first five with their shapes."""
    first = ", ".join(f"{name} {list(shapes[name])}" for name in strangers[:5])
    more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
    msg = f"{len(strangers)} of {len(shapes)} tensors have no place in a repository of {kind}: {first}{more}"
    fused = any(FUSED_EXPERTS.fullmatch(name) for name in strangers)
    hint = "experts of this shape cannot be split" if fused else "there may be a wrapper's prefix before the names"
    return UnsupportedError(msg, hint=f"{hint}; choose the sub-tree with `--root KEY`, pass {_BASE}, or {_AS_IS}")


def refuse_vision(shapes: Mapping[str, Ints], kind: str) -> None:
    """Refuse a text config beside vision or audio tensors."""
    vision = [name for name in shapes if AUDIO_AND_VISION.search(name)]
    if vision:
        msg = f"{kind} is a text model, but the checkpoint holds {counted(len(vision), 'tensor')} such as {vision[0]}"
        raise UnsupportedError(msg, hint=f"the config may belong to another model; {_AS_IS}")


def unknown_layers_error(shapes: Mapping[str, Ints], kind: str) -> UnsupportedError:
    """Refusal of names of which none is in a layer."""
    first = ", ".join(list(shapes)[:3])
    msg = f"no name of the checkpoint is one of a layer of {kind}: it has {first} ..."
    hint = f"there may be a wrapper's prefix before them; choose the sub-tree with `--root KEY`, or {_AS_IS}"
    return UnsupportedError(msg, hint=hint)


def unknown_family_error(model: ModelInfo, match: BaseMatch | None) -> UnsupportedError:
    """Refusal of a model_type without table, with what differs from the base model where one was given."""
    where, kind = model.config_path or "config.json", model.model_type
    if match is not None:
        msg = f"the names are not those of the base model, and model_type {kind!r} is not known: {match}"
        return UnsupportedError(msg, hint=_AS_IS)
    family = f"model_type {kind!r} ({where}) is not known" if kind else f"{where} has no model_type"
    msg = f"{family}, so the names of the original repository cannot be told"
    more = "; or install `merge-stream[transformers]`, whose own conversion is then asked"
    return UnsupportedError(msg, hint=f"pass {_BASE}, or {_AS_IS}{more}")


def other_model_error(match: BaseMatch) -> CheckpointError:
    """Refusal of a checkpoint that is not the base model trained further: what differs, both ways."""
    msg = f"the checkpoint is not the base model trained further: {match}"
    if match.missing and not match.extra and not match.reshaped:
        return IncompleteShardsError(msg, hint="pass the folder that holds all shards, or another --base-model")
    return CheckpointError(msg, hint="pass the --base-model that the training started from, or leave it out")


def notes_without_config(shapes: Mapping[str, Ints]) -> tuple[str, ...]:
    """A remark when all names are those of a plain text model, else a refusal."""
    others = [
        name
        for name in shapes
        if AUDIO_AND_VISION.search(name) or not (layer_of(name) or _TEXT_NAMES.fullmatch(name) or HEADS.fullmatch(name))
    ]
    attention = any(_ATTENTION.fullmatch(place[2]) for name in shapes if (place := layer_of(name)))
    if others or not attention:
        example = f" ({others[0]} is none of a plain text model)" if others else ""
        msg = f"without config.json the names of the original repository cannot be told{example}"
        raise UnsupportedError(msg, hint=f"pass {_BASE}, or {_AS_IS}")
    note = (
        "no config.json: the names are taken to be those of the original repository, since all are names of a plain "
        "text model; nothing was checked against a config"
    )
    return (note,)
