"""State dicts of Megatron-LM's own GPTModel, before megatron-core's models: nested, with other names.

    language_model.embedding.word_embeddings.weight           embedding.word_embeddings.weight
    language_model.encoder|transformer."layers.0.input_norm..."  decoder.layers.0.input_layernorm ...
    language_model.output_layer.weight                        output_layer.weight
    word_embeddings_for_head.weight                           output_layer.weight (a tied copy on the last stage)

Rows of query_key_value by checkpoint_version, on each rank: 0 has all queries, all keys, all values [3, n, d]; 1.0 has
[n, d, 3]; 2.0 and newer [n, 3, d], or with groups [g, n/g + 2, d]. Only the last is what core has, so the others
are reordered row by row.

Facts: Megatron-LM until 2026-05 (documented nesting; no files of that code were at hand).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from merge_stream.containers.torch_tensor import plain_tensor
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.formats._deepspeed_local import plain_ref
from merge_stream.formats._deepspeed_states import StatesFile
from merge_stream.tensors.ref import ShardTable, TensorRef

__all__ = ["classic_tensors"]

_RENAMES = (
    (re.compile(r"layers\.(\d+)\.(?:input_norm|input_layernorm)\.(.+)"), r"decoder.layers.\1.input_layernorm.\2"),
    (
        re.compile(r"layers\.(\d+)\.(?:post_attention_norm|post_attention_layernorm)\.(.+)"),
        r"decoder.layers.\1.pre_mlp_layernorm.\2",
    ),
    (
        re.compile(r"layers\.(\d+)\.(?:self_attention|attention)\.query_key_value\.(.+)"),
        r"decoder.layers.\1.self_attention.linear_qkv.\2",
    ),
    (
        re.compile(r"layers\.(\d+)\.(?:self_attention|attention)\.dense\.(.+)"),
        r"decoder.layers.\1.self_attention.linear_proj.\2",
    ),
    (re.compile(r"layers\.(\d+)\.mlp\.dense_h_to_4h\.(.+)"), r"decoder.layers.\1.mlp.linear_fc1.\2"),
    (re.compile(r"layers\.(\d+)\.mlp\.dense_4h_to_h\.(.+)"), r"decoder.layers.\1.mlp.linear_fc2.\2"),
    (re.compile(r"(?:final_norm|final_layernorm)\.(.+)"), r"decoder.final_layernorm.\1"),
)
_NOISE = re.compile(r".*(inv_freq|_extra_state)")
_DEEPEST = 6


def classic_tensors(
    state: Mapping[Any, Any], arguments: Mapping[str, Any], version: float, source: StatesFile, ignored: Counter[str]
) -> dict[str, TensorRef]:
    """The tensors of one state dict under core's names; UnsupportedError for a name that is not known."""
    found: dict[str, TensorRef] = {}
    for path, value in _leaves(state, (), _DEEPEST):
        text = ".".join(path)
        view = plain_tensor(value, repr(text), source.where)
        if view is None or _NOISE.fullmatch(text):
            ignored["buffer computed again" if view is not None else "Python value"] += 1
            continue
        name = _name(path, source)
        ref = plain_ref(name, view, source)
        if ".linear_qkv." in name and version < 2:
            ref = _reordered(ref, arguments, version, source)
        if name in found:
            raise CorruptCheckpointError(f"{source.where} holds {name} twice", hint="it is of a form not known here")
        found[name] = ref
    return found


def _leaves(state: Mapping[Any, Any], path: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            if not depth:
                raise CorruptCheckpointError(
                    "a state dict of Megatron is nested without end", hint="the file is damaged"
                )
            yield from _leaves(value, (*path, str(key)), depth - 1)
        else:
            yield (*path, str(key)), value


def _name(path: tuple[str, ...], source: StatesFile) -> str:
    parts = path[1:] if path[0] == "language_model" else path
    text = ".".join(parts)
    if parts[0] in {"embedding", "output_layer"}:
        return text
    if parts[0] == "word_embeddings_for_head":
        return "output_layer.weight"
    if parts[0] in {"encoder", "transformer"}:
        inner = ".".join(parts[1:])
        for pattern, to in _RENAMES:
            if pattern.fullmatch(inner):
                return pattern.sub(to, inner)
    msg = f"{source.where}: {'.'.join(path)} is no name of a language model that is known here"
    raise UnsupportedError(msg, hint="only GPT and Llama of Megatron-LM's own classes are known")


def _reordered(ref: TensorRef, arguments: Mapping[str, Any], version: float, source: StatesFile) -> TensorRef:
    """The rows of query_key_value in core's order [heads, 3, head_dim]."""
    heads, ranks = arguments.get("num_attention_heads"), arguments.get("tensor_model_parallel_size", 1)
    if type(heads) is not int or type(ranks) is not int or ranks < 1 or heads % ranks:
        msg = f"{source.where}: checkpoint_version {version:g}, and the arguments do not tell the number of heads"
        raise UnsupportedError(msg, hint="convert it with Megatron's own tools first")
    local = heads // ranks
    rows = ref.shape[0]
    if rows % (3 * local):
        msg = f"{source.where}: {ref.name} has {rows} rows, wanted a multiple of 3 x {local} heads"
        raise CorruptCheckpointError(msg, hint="files of two saves are mixed")
    width = rows // (3 * local)
    n, j, d = np.meshgrid(np.arange(local), np.arange(3), np.arange(width), indexing="ij")
    stored = (j * local + n) * width + d if version < 1 else (n * width + d) * 3 + j
    order = stored.reshape(-1)  # row `order[k]` of the file is row k
    starts = np.flatnonzero(np.diff(order, prepend=order[0] - 2) != 1)
    stops = np.append(starts[1:], rows)
    _, file, offset = ref.shards.row(0)
    inner = ref.nbytes // rows
    rest = len(ref.shape) - 1
    low = np.hstack([starts[:, None], np.zeros((len(starts), rest), dtype=np.int64)])
    high = np.hstack([stops[:, None], np.broadcast_to(np.array(ref.shape[1:], dtype=np.int64), (len(starts), rest))])
    table = ShardTable(
        low.astype(np.int64),
        high.astype(np.int64),
        np.full(len(starts), file, dtype=np.int32),
        offset + order[starts].astype(np.int64) * inner,
    )
    return TensorRef(ref.name, ref.dtype, ref.shape, table)
