"""Families whose trainer names are the upstream names already: every tensor keeps its name.

    LoRA names?                  refused (folding is another step)
    the base model's own names?  accepted, whatever the family
    family known as identity?    accepted, unless experts are fused or the head was renamed
    vision or audio family?      accepted only with upstream names
    no config at all?            accepted when every name is that of a plain text model
    otherwise                    refused, with the ways out

Names are never guessed from the version of a library: the same model has per-expert names
under transformers 4.57 and fused ones under 5.x, so the names and shapes decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingABC

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.base_match import BaseMatch, compare_with_base
from merge_stream.architectures.families import (
    AUDIO_AND_VISION,
    DENSE,
    FUSED_EXPERTS,
    HEADS,
    MEMORY_IS_UPSTREAM,
    PER_EXPERT,
    RECOMPUTED,
    RENAMED_HEAD,
    RENAMED_VLM,
    UPSTREAM_VLM_PREFIXES,
)
from merge_stream.architectures.structure import layer_of
from merge_stream.errors import CheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.options import LayoutName
from merge_stream.tensors.parameter import Mapping, identity
from merge_stream.tensors.ref import Catalog

__all__ = ["MEMBER", "Identity"]

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


class Identity:
    """Every parameter is the source tensor of the same name."""

    name = "identity"

    def claims(self, catalog: Catalog, model: ModelInfo) -> bool:
        """Responsible for all transformers names that no other family claims."""
        del model
        return catalog.naming == "hf"

    def parameters(self, catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Mapping:
        """One parameter for each tensor, or a refusal that says why the names are not the upstream ones."""
        shapes = {name: tensor.shape for name, tensor in catalog.tensors.items()}
        notes = () if layout == "as-is" else _notes_or_refusal(shapes, model)
        kept = dict(shapes)
        if layout != "as-is":
            base = model.base_tensors or {}
            dropped = [name for name in shapes if RECOMPUTED.fullmatch(name) and name not in base]
            for name in dropped:
                del kept[name]
            if dropped:
                notes += (f"{len(dropped)} buffers that every loader computes again are left out ({dropped[0]})",)
        return Mapping(self.name, tuple(identity(name, shape) for name, shape in kept.items()), (), notes)


MEMBER = Identity()


def _notes_or_refusal(shapes: MappingABC[str, Ints], model: ModelInfo) -> tuple[str, ...]:
    _refuse_lora(shapes)
    match = compare_with_base(shapes, model) if model.base_tensors else None
    if match is not None and match.fits:
        return (f"all names are those of the base model ({len(shapes)} tensors)", *match.notes)
    kind = model.model_type
    if kind not in MEMORY_IS_UPSTREAM:
        _refuse_fused(shapes, kind)
    if kind in RENAMED_VLM:
        _refuse_renamed_vlm(shapes, kind)
    elif kind in RENAMED_HEAD and RENAMED_HEAD[kind] in shapes:
        msg = f"{kind}: {RENAMED_HEAD[kind]} has another name in the original repository (embed_out.weight)"
        raise UnsupportedError(msg, hint=f"this version does not rename it; {_AS_IS}")
    elif kind in DENSE | PER_EXPERT:
        _refuse_vision(shapes, kind)
        _refuse_unknown_layers(shapes, kind)
    elif kind not in MEMORY_IS_UPSTREAM and model.config is not None:
        _refuse_unknown_family(kind, model, match)
    if match is not None:
        _refuse_other_model(match)
    if model.config is None:
        return _notes_without_config(shapes)
    return ()


def _refuse_lora(shapes: MappingABC[str, Ints]) -> None:
    lora = [name for name in shapes if _LORA.fullmatch(name)]
    factors = [name for name in lora if "lora_" in name]
    if lora:
        count = f"{len(factors)} LoRA tensors" if factors else f"{len(lora)} tensors inside a PEFT wrapper"
        msg = f"the checkpoint holds {count} (for example {(factors or lora)[0]})"
        raise UnsupportedError(msg, hint=f"this version does not fold LoRA into the weights; {_AS_IS}, unfolded")


def _refuse_fused(shapes: MappingABC[str, Ints], kind: str) -> None:
    fused = [name for name, shape in shapes.items() if len(shape) == 3 and FUSED_EXPERTS.fullmatch(name)]
    if fused:
        msg = (
            f"{len(fused)} fused expert tensors (for example {fused[0]} {list(shapes[fused[0]])}) need splitting "
            f"into the original repository's tensors{f' of {kind}' if kind else ''}, which this version does not do"
        )
        raise UnsupportedError(msg, hint=_AS_IS)


def _refuse_renamed_vlm(shapes: MappingABC[str, Ints], kind: str) -> None:
    prefixes = UPSTREAM_VLM_PREFIXES.get(kind, ())
    other = [name for name in shapes if not name.startswith(prefixes) and not HEADS.fullmatch(name)]
    if other or not prefixes:
        example = other[0] if other else next(iter(shapes), "")
        msg = (
            f"{kind} has other names in memory ({example}) than in the original repository, "
            "and this version does not rename vision and audio models"
        )
        raise UnsupportedError(msg, hint=f"{_AS_IS}; or pass {_BASE} where the names are already the same")


def _refuse_vision(shapes: MappingABC[str, Ints], kind: str) -> None:
    vision = [name for name in shapes if AUDIO_AND_VISION.search(name)]
    if vision:
        msg = f"{kind} is a text model, but the checkpoint holds {len(vision)} tensors such as {vision[0]}"
        raise UnsupportedError(msg, hint=f"the config may belong to another model; {_AS_IS}")


def _refuse_unknown_layers(shapes: MappingABC[str, Ints], kind: str) -> None:
    if shapes and not any(layer_of(name) for name in shapes):
        first = ", ".join(list(shapes)[:3])
        msg = f"no name of the checkpoint is one of a layer of {kind}: it has {first} ..."
        doubled = all(name.startswith("model.model.") or HEADS.fullmatch(name) for name in shapes)
        hint = "every name has one `model.` too many; " if doubled else "there may be a wrapper's prefix before them; "
        raise UnsupportedError(msg, hint=f"{hint}choose the sub-tree with `--root KEY`, or {_AS_IS}")


def _refuse_unknown_family(kind: str, model: ModelInfo, match: BaseMatch | None) -> None:
    where = model.config_path or "config.json"
    if match is not None:
        msg = f"the names are not those of the base model, and model_type {kind!r} is not known: {match}"
        raise UnsupportedError(msg, hint=_AS_IS)
    family = f"model_type {kind!r} ({where}) is not known" if kind else f"{where} has no model_type"
    msg = f"{family}, so the names of the original repository cannot be told"
    raise UnsupportedError(msg, hint=f"pass {_BASE}, or {_AS_IS}")


def _refuse_other_model(match: BaseMatch) -> None:
    msg = f"the checkpoint is not the base model trained further: {match}"
    if match.missing and not match.extra and not match.reshaped:
        raise IncompleteShardsError(msg, hint="pass the folder that holds all shards, or another --base-model")
    raise CheckpointError(msg, hint="pass the --base-model that the training started from, or leave it out")


def _notes_without_config(shapes: MappingABC[str, Ints]) -> tuple[str, ...]:
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
