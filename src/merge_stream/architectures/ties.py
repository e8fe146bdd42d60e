"""Tied embeddings: which two parameters may be one, and what the config says about them."""

from __future__ import annotations

from collections.abc import Collection

from merge_stream.architectures.base import ModelInfo, class_names
from merge_stream.architectures.families import HEADS, TIE_NAMES, TIED_BY_DEFAULT
from merge_stream.architectures.structure import text_configs
from merge_stream.errors import IncompleteShardsError
from merge_stream.tensors.parameter import Tie

__all__ = ["absent_head", "find_ties", "tied_by_config"]

_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def tied_by_config(model: ModelInfo) -> bool:
    """Whether head and embedding are one by the config, or by the family's default where it does not say.

    4.57 reads the flag of the text nest, 5.x the one at the top: where both stand and
    differ they are not tied, so that both tensors are written and every loader finds its own.
    """
    config = model.config or {}
    flags = [
        part["tie_word_embeddings"] for part in text_configs(config) if part.get("tie_word_embeddings") is not None
    ]
    if flags:
        return all(flag is True for flag in flags)
    types = {str(part.get("model_type") or "") for part in text_configs(config)}
    return bool(types & TIED_BY_DEFAULT)


def find_ties(names: Collection[str], model: ModelInfo) -> tuple[Tie, ...]:
    """The tied pairs of which both ends are there.

    IncompleteShardsError when the config ties them and only the head is there: the
    embedding, which is the one that is kept, is lost.
    """
    tied = tied_by_config(model)
    pairs = [(head, twin) for head, twin in TIE_NAMES if head in names and twin in names]
    if not pairs and tied and "lm_head.weight" in names and not _has_embedding(names):
        msg = (
            f"model.embed_tokens.weight is missing: {model.config_path or 'config.json'} ties lm_head.weight to it, "
            "and only lm_head.weight is in the checkpoint"
        )
        raise IncompleteShardsError(msg, hint="pass the folder that holds all shards (all pipeline stages, all ranks)")
    return tuple(Tie(head, twin, tied) for head, twin in pairs)


def absent_head(names: Collection[str], model: ModelInfo) -> tuple[str, str] | None:
    """(head, embedding) of a tied language model that lacks its head; None when there is no such head.

    None too for classification and value models, which have another head instead.
    """
    if not tied_by_config(model) or any(HEADS.fullmatch(name) for name in names):
        return None
    classes = class_names(model.config)
    if classes and not any(name.endswith(_WITH_HEAD) for name in classes):
        return None
    known = model.base_tensors or {}
    pairs = [(head, twin) for head, twin in TIE_NAMES if twin in names]
    if model.model_type == "gpt_neox":
        pairs.sort(key=lambda pair: pair[0] != "embed_out.weight")
    pairs.sort(key=lambda pair: pair[0] not in known)
    return pairs[0] if pairs else None


def _has_embedding(names: Collection[str]) -> bool:
    return any("embed" in name or name.endswith("wte.weight") for name in names if not HEADS.fullmatch(name))
