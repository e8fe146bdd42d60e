"""Families with fused experts or nested parts that the repository has exactly so: nothing to do, names are checked."""

from __future__ import annotations

from merge_stream.architectures.tables.base import FUSED_TEXT_NAMES, Family, Table, words

__all__ = ["MEMBER"]

MEMBER = Table(
    "in-place",
    (
        Family("gpt-oss", words("gpt_oss"), (), FUSED_TEXT_NAMES),
        Family(
            "llama4",
            words("llama4 llama4_text"),
            (),
            (*FUSED_TEXT_NAMES, "language_model.model.{rest}", "{m:vision_model|multi_modal_projector}.{rest}"),
        ),
        Family("glm4v", words("glm4v"), (), ("model.{m:language_model|visual}.{rest}",)),
    ),
)
