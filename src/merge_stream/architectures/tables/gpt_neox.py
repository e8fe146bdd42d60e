"""GPT-NeoX and Pythia: transformers 5 calls the head `lm_head`."""

from __future__ import annotations

from merge_stream.architectures.rules import Rename
from merge_stream.architectures.tables.base import Family, Table, words

__all__ = ["MEMBER"]

MEMBER = Table(
    "gpt-neox",
    (
        Family(
            "gpt-neox",
            words("gpt_neox"),
            (Rename("lm_head.{rest}", "embed_out.{rest}"),),
            ("gpt_neox.{rest}", "embed_in.{rest}", "layers.{i}.{rest}", "final_layer_norm.{rest}"),
        ),
    ),
)
