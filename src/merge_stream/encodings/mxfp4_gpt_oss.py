"""`mxfp4` in the layout of gpt-oss: the experts of a block in one stack of float4 e2m1 (`quant_method: mxfp4`).

`NAME` [experts, in, out], as transformers and trainers hold it, becomes `NAME_blocks` U8 [experts, out, in / 32, 16],
the earlier of two codes in the lower half, and `NAME_scales` U8 [experts, out, in / 32], the exponents of the scales
plus 127: each matrix transposed, then groups of 32 along its rows (rule: `_mx`). Biases, attention and router stay
plain, as in OpenAI's own files. Loads in transformers 5.24, vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merge_stream.encodings._mx import GROUP
from merge_stream.encodings.base import Ints, Part
from merge_stream.encodings.mxfp4 import Mxfp4
from merge_stream.tensors.dtype import U8

__all__ = ["MEMBER"]

_METHOD = "mxfp4"


class Mxfp4GptOss(Mxfp4):
    """A power of two for each group of 32 in a row of a transposed matrix."""

    name = "mxfp4-gpt-oss"
    transposed = True
    suffixes = ("_blocks", "_scales")

    def remark(self, *, experts: bool) -> str:  # noqa: ARG002 - part of the protocol
        """Every loader of gpt-oss reads it."""
        return ""

    def parts(self, name: str, shape: Ints) -> tuple[Part, ...]:
        """Groups of codes and the exponents of their scales."""
        groups = (*shape[:-1], -(-shape[-1] // GROUP))
        return Part(f"{name}_blocks", U8, (*groups, GROUP // 2)), Part(f"{name}_scales", U8, groups)

    def unpacked(self, shape: Ints) -> Ints:
        """Groups of sixteen bytes."""
        return (*shape[:2], shape[2] * GROUP) if len(shape) == 4 and shape[3] == GROUP // 2 else ()

    def settings(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` as in OpenAI's own files."""
        return {"quant_method": _METHOD, "modules_to_not_convert": list(ignored)}

    def wrote(self, settings: dict[str, Any]) -> bool:
        """True when `quantization_config` describes weights of this scheme."""
        return settings.get("quant_method") == _METHOD


MEMBER = Mxfp4GptOss()
