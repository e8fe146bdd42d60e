"""Mixtral and its kin: `block_sparse_moe` on disk, `mlp` in the memory of transformers 5.

w1 is the gate (first half of gate_up_proj), w3 the up projection, w2 the down projection.
"""

from __future__ import annotations

from merge_stream.architectures.rules import Rename, SplitExperts
from merge_stream.architectures.tables.base import TEXT_NAMES, Family, Table, words

__all__ = ["MEMBER"]

_EXPERT = "{at}.block_sparse_moe.experts.{e}."
_SPLIT = SplitExperts("{at}.mlp.experts", _EXPERT + "w1.weight", _EXPERT + "w3.weight", _EXPERT + "w2.weight")
_BLOCK = Rename("{at:.*layers\\.\\d+}.mlp.{rest}", "{at}.block_sparse_moe.{rest}")

MEMBER = Table(
    "mixtral",
    (
        Family("mixtral", words("mixtral minimax minimax_m2"), (_SPLIT, _BLOCK), TEXT_NAMES),
        Family(
            "phimoe",
            words("phimoe"),
            (_SPLIT, _BLOCK, Rename("{at}.block_sparse_moe.router.{rest}", "{at}.block_sparse_moe.gate.{rest}")),
            TEXT_NAMES,
        ),
    ),
)
