"""Tensor names that an engine refuses, or skips without a word: trainer wrappers and names of transformers' memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.base_match import packed
from merge_stream.architectures.families import EMBEDDINGS, FUSED_EXPERTS, HEADS, RECOMPUTED
from merge_stream.architectures.lookup import family_of
from merge_stream.architectures.structure import text_value
from merge_stream.verification.finding import CheckedFolder, Finding, listed, some

__all__ = ["check_names"]

_WRAPPED = re.compile(
    r"module\..*|base_model\.model\..*|(.*\.)?(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\..*"
    r"|.*\.base_layer\..*|.*\.lora_[AB](\..*)?|.*_extra_state"
)
_BARE_TOWER = re.compile(r"(model\.)?vision_tower\.(embeddings|encoder|post_layernorm|pre_layrnorm)\..*")
_MERGE = "merge-stream writes the names of the original repository (--layout upstream)"


def check_names(folder: CheckedFolder) -> Iterator[Finding]:
    """Findings about names; only families whose repositories are known are judged."""
    wrapped = [name for name in folder.tensors if _WRAPPED.fullmatch(name)]
    if wrapped:
        text = f"{some(len(wrapped), 'name')} of a trainer's wrapper: {listed(wrapped)}"
        yield Finding("error", "names", "wrapper", "all", text, _MERGE)
    buffers = [name for name in folder.tensors if RECOMPUTED.fullmatch(name)]
    if buffers:
        text = f"{some(len(buffers), 'buffer')} that every loader computes again: {listed(buffers)}"
        yield Finding("note", "names", "buffers", "all", text)
    model = ModelInfo(folder.config, "config.json")
    if model.model_type == "qwen3_vl_moe":
        yield from _hidden_first(folder)
    family = family_of(model)
    if family is None:
        return
    seen = [n for n in folder.tensors if not (HEADS.fullmatch(n) or RECOMPUTED.fullmatch(n) or n in set(wrapped))]
    seen = [name for name in seen if not packed(name)]
    strange = family.strangers(seen)
    fused = [name for name in strange if FUSED_EXPERTS.fullmatch(name)]
    towers = [name for name in seen if _BARE_TOWER.fullmatch(name)] if _wants_vision_model(folder.config) else []
    if fused:
        text = f"{some(len(fused), 'tensor')} of fused experts, of which repositories of {family.name} have none"
        text += f": {listed(fused)}; SGLang skips them, transformers 4 starts with random experts, neither says so"
        yield Finding("error", "names", "fused-experts", "SGLang, transformers 4, older vLLM, llama.cpp", text, _MERGE)
    if towers:
        text = f"vision_tower without vision_model: {listed(towers)}"
        yield Finding("error", "names", "vision-tower", "vLLM, SGLang, transformers 4", text, _MERGE)
    rest = [name for name in strange if name not in set(fused) | set(towers)]
    if rest:
        text = f"{some(len(rest), 'name')} that no repository of {family.name} has: {listed(rest)}"
        yield Finding("error", "names", "family", "vLLM, SGLang, llama.cpp", text, _MERGE)


def _wants_vision_model(config: dict[str, Any]) -> bool:
    """CLIP and SigLIP towers have `vision_model.` in every repository."""
    vision = config.get("vision_config")
    return isinstance(vision, dict) and str(vision.get("model_type")) in {"clip_vision_model", "siglip_vision_model"}


def _hidden_first(folder: CheckedFolder) -> Iterator[Finding]:
    columns = (t.shape[-1] for n, t in folder.tensors.items() if n in EMBEDDINGS and t.shape)
    hidden = text_value(folder.config, "hidden_size") or next(columns, None)
    wrong = [
        name
        for name, t in folder.tensors.items()
        if name.endswith(".experts.gate_up_proj") and len(t.shape) == 3 and t.shape[1] != hidden == t.shape[2]
    ]
    if wrong:
        shape = list(folder.tensors[wrong[0]].shape)
        text = f"{wrong[0]} {shape} is stored as in the memory of transformers 5; hidden size must be its second dim"
        yield Finding("error", "names", "experts-transposed", "vLLM, SGLang, transformers 4", text, _MERGE)
