"""What a Megatron family is, and the parts that most of them share.

    decoder.layers.{i}.self_attention.linear_qkv     query, key, value groups
    decoder.layers.{i}.self_attention.linear_proj    output projection
    decoder.layers.{i}.mlp.linear_fc1, linear_fc2    gate and up, down
    decoder.layers.{i}.mlp.router, experts, shared_experts
    decoder.layers.{i}.input_layernorm, pre_mlp_layernorm

Names of megatron-core 0.9 to 0.19 after `formats/_megatron_names`. A rule list is made for one config, since head
counts, the number of layers and the like stand there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.megatron_qkv import HeadNorm, QkvGroups, heads_of
from merge_stream.architectures.megatron_rules import ExpertHalves, Halves
from merge_stream.architectures.rules import Rename, Rule, SplitExperts, Unstack

__all__ = [
    "LAYER",
    "MegatronFamily",
    "MegatronTable",
    "Place",
    "Rules",
    "attention",
    "ends",
    "experts",
    "gated_mlp",
    "norms",
    "plain_mlp",
]

Rules = tuple[Rule | Rename, ...]


@dataclass(frozen=True, slots=True)
class MegatronFamily:
    """One layout: the model types that have it, and the rules for a config.

    centred      canonical names of the norms whose weight w the repository means as 1 + w
    proof        the tests have merged what other programs made of the family (real saves, Megatron-Bridge, mbridge)
    gated        its MLP has a gate: `linear_fc1` is two matrices
    neighbours   the repository turns rows 2k and 2k + 1 of a head together (rotary), not rows k and k + width / 2
    """

    name: str
    model_types: frozenset[str]
    rules: Callable[[ModelInfo], Rules]
    centred: str = ""
    neighbours: bool = False
    gated: bool = True
    proof: bool = True


@dataclass(frozen=True, slots=True)
class MegatronTable:
    """The families of one file."""

    name: str
    families: tuple[MegatronFamily, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer stands in Megatron, and where in the repository."""

    here: str
    there: str


LAYER = Place("decoder.layers.{i}", "model.layers.{i}")


def ends(here: str = "", there: str = "model.") -> Rules:
    """Embedding, last norm, output head; `here` stands before Megatron's names, `there` before the repository's."""
    return (
        Rename(f"{here}embedding.word_embeddings.weight", f"{there}embed_tokens.weight"),
        Rename(f"{here}decoder.final_layernorm.{{leaf}}", f"{there}norm.{{leaf}}"),
        Rename(f"{here}output_layer.{{leaf}}", "lm_head.{leaf}"),
    )


def norms(place: Place = LAYER) -> Rules:
    """The two norms of a layer."""
    return (
        Rename(f"{place.here}.input_layernorm.{{leaf}}", f"{place.there}.input_layernorm.{{leaf}}"),
        Rename(f"{place.here}.pre_mlp_layernorm.{{leaf}}", f"{place.there}.post_attention_layernorm.{{leaf}}"),
    )


def attention(model: ModelInfo, place: Place = LAYER, *, gated: bool = False, norms_over_all: bool = False) -> Rules:
    """Fused query, key, value with or without bias, norms of heads where there are any, output projection.

    `norms_over_all`: the norm of queries is over all heads at once, that of keys too.
    """
    heads = heads_of(model)
    there = f"{place.there}.self_attn"
    here = f"{place.here}.self_attention"
    return (
        QkvGroups(
            f"{here}.linear_qkv.{{leaf}}",
            f"{there}.q_proj.{{leaf}}",
            f"{there}.k_proj.{{leaf}}",
            f"{there}.v_proj.{{leaf}}",
            heads,
            gated,
        ),
        Rename(f"{here}.linear_proj.{{leaf:weight|bias}}", f"{there}.o_proj.{{leaf}}"),
        *(
            HeadNorm(
                f"{here}.{x}_layernorm.{{leaf}}",
                f"{there}.{x}_norm.{{leaf}}",
                (heads.queries if x == "q" else heads.groups) if norms_over_all else 1,
                heads.width,
            )
            for x in ("q", "k")
        ),
    )


def gated_mlp(place: Place = LAYER, *, here: str = "mlp", there: str = "mlp") -> Rules:
    """Gate and up in one tensor, down."""
    return (
        Halves(
            f"{place.here}.{here}.linear_fc1.{{leaf:weight|bias}}",
            f"{place.there}.{there}.gate_proj.{{leaf}}",
            f"{place.there}.{there}.up_proj.{{leaf}}",
        ),
        Rename(f"{place.here}.{here}.linear_fc2.{{leaf:weight|bias}}", f"{place.there}.{there}.down_proj.{{leaf}}"),
    )


def plain_mlp(up: str, down: str, place: Place = LAYER) -> Rules:
    """An MLP without gate: two matrices, `up` and `down` in the repository, with or without bias."""
    return (
        Rename(f"{place.here}.mlp.linear_fc1.{{leaf:weight|bias}}", f"{place.there}.mlp.{up}.{{leaf}}"),
        Rename(f"{place.here}.mlp.linear_fc2.{{leaf:weight|bias}}", f"{place.there}.mlp.{down}.{{leaf}}"),
    )


def experts(
    place: Place = LAYER,
    *,
    block: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    bias: str = "gate.e_score_correction_bias",
) -> Rules:
    """Router and stacks of experts; `names` are those of gate, up and down."""
    gate, up, down = (f"{place.there}.{block}.experts.{{e}}.{name}.weight" for name in names)
    return (
        Rename(f"{place.here}.mlp.router.weight", f"{place.there}.{block}.gate.weight"),
        Rename(f"{place.here}.mlp.router.expert_bias", f"{place.there}.{block}.{bias}"),
        SplitExperts(f"{place.here}.mlp.experts", gate, up, down),  # the old GroupedMLP's stacks, [E, in, out]
        ExpertHalves(f"{place.here}.mlp.experts.linear_fc1.weight", gate, up),
        Unstack(f"{place.here}.mlp.experts.linear_fc2.weight", down),
    )
