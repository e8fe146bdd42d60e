"""What each layout of Megatron gives: tensors under the keys of the files, and what was learned on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from merge_stream.containers.pickle_reader import Recorder
from merge_stream.tensors.ref import TensorRef, Vocabulary
from merge_stream.tensors.stored_checksum import ChecksumReader

__all__ = [
    "DELTA",
    "GATES",
    "HEADS",
    "ITERATION",
    "NORMS",
    "ROTARY",
    "Raw",
    "arguments_of",
    "delta_in_words",
    "facts_of",
    "heads_in_words",
    "settings_of",
    "vocabulary_of",
]

NORMS = "weights of norms"
ROTARY = "rotary pairs"
ITERATION = "iteration"
HEADS = "attention heads"
DELTA = "delta net heads"
GATES = "gates in linear_fc1"
"""Of files of several tensor-parallel ranks, which were joined by it: "yes", "no", or "assumed"."""
_NO_ROTARY = frozenset({"learned_absolute", "none", "relative"})

_ARGUMENTS = {
    "tensor_model_parallel_size": "tensor-parallel ranks",
    "pipeline_model_parallel_size": "pipeline stages",
    "virtual_pipeline_model_parallel_size": "virtual stages",
    "expert_model_parallel_size": "expert-parallel ranks",
    "expert_tensor_parallel_size": "tensor-parallel ranks of experts",
    "context_parallel_size": "context-parallel ranks",
    "world_size": "world size",
}


@dataclass(slots=True)
class Raw:
    """What was read.

    `twins` are the weights beside fp32 masters; `module_dtype` is "config" when masters stand for the weights of a
    16-bit model.
    """

    tensors: dict[str, TensorRef] = field(default_factory=dict)
    twins: dict[str, TensorRef] = field(default_factory=dict)
    facts: dict[str, str | int] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    metadata_nbytes: int = 0
    checksums: tuple[ChecksumReader, ...] = ()
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    module_dtype: Literal["", "config"] = ""

    def learn(self, state: Mapping[str, Any]) -> None:
        """Take in what a common state tells."""
        arguments = arguments_of(state.get("args"))
        self.facts |= facts_of(arguments, state.get("iteration"))
        self.vocabulary = vocabulary_of(arguments)


def arguments_of(value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - unpickled
    """The attributes of a pickled argparse.Namespace, or nothing."""
    state = value.state if isinstance(value, Recorder) else None
    return state if isinstance(state, dict) else {}


def settings_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the model that no shape shows; only those that are told.

    NORMS    "zero-centred": a norm of weight w scales by 1 + w (`--apply-layernorm-1p`); else "plain"
    ROTARY   "neighbours": rows 2k and 2k + 1 of a head turn together (`--rotary-interleaved`); else "halves"
    HEADS    of an attention with query-key-value in one tensor: as many rows may be fewer and wider heads
    DELTA    of gated delta nets, likewise
    """
    facts: dict[str, str] = {}
    for key in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"):
        if isinstance(arguments.get(key), bool):
            facts[NORMS] = "zero-centred" if arguments[key] else "plain"
    turns = arguments.get("rotary_interleaved")
    if isinstance(turns, bool) and str(arguments.get("position_embedding_type", "rope")) not in _NO_ROTARY:
        facts[ROTARY] = "neighbours" if turns else "halves"
        part = arguments.get("rotary_percent", 1.0)
        if turns and part != 1.0:
            facts[ROTARY] = f"neighbours in {part} of each head"
    return facts | _heads_of(arguments)


def _heads_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    def told(*keys: str) -> tuple[int, ...]:
        values = [arguments.get(key) for key in keys]
        return tuple(value for value in values if type(value) is int and value > 0)

    facts: dict[str, str] = {}
    grouped = arguments.get("group_query_attention", True)  # without it Megatron-LM's num_query_groups is 1 by default
    attention = told("num_attention_heads", "num_query_groups" if grouped else "num_attention_heads", "kv_channels")
    if len(attention) == 3 and not arguments.get("multi_latent_attention"):
        facts[HEADS] = heads_in_words(*attention)
    delta = told("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    if len(delta) == 4:
        facts[DELTA] = delta_in_words(*delta)
    return facts


def heads_in_words(queries: int, groups: int, width: int) -> str:
    """The same for arguments and config."""
    return f"{queries} queries and {groups} groups of {width}"


def delta_in_words(keys: int, key_width: int, values: int, value_width: int) -> str:
    """The same for arguments and config."""
    return f"{keys} keys of {key_width} and {values} values of {value_width}"


def vocabulary_of(arguments: Mapping[str, Any]) -> Vocabulary:
    """Tokens (`--vocab-size`), and `--make-vocab-size-divisible-by` x tensor-parallel ranks."""

    def told(key: str) -> int:
        value = arguments.get(key)
        return value if type(value) is int and value > 0 else 0

    multiple = told("make_vocab_size_divisible_by") * told("tensor_model_parallel_size")
    return Vocabulary(told("vocab_size"), multiple)


def facts_of(arguments: Mapping[str, Any], iteration: object) -> dict[str, str | int]:
    """The iteration, parallel sizes that the trainer's arguments tell, and what decides values: see `settings_of`."""
    facts: dict[str, str | int] = dict(settings_of(arguments))
    if type(iteration) is int and iteration > 0:
        facts[ITERATION] = iteration
    for key, name in _ARGUMENTS.items():
        value = arguments.get(key)
        if type(value) is int and value > (0 if key == "world_size" else 1):
            facts[name] = value
    return facts
