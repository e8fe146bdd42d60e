"""Tensors that stay fp32 when the rest is cast to 16 bits.

The base model's own files decide where they are given: what a 16-bit base keeps in fp32
stays fp32. Without them a short list does: router biases lose their meaning in bf16
(transformers 5.24 `_keep_in_fp32_modules_strict`, DeepSeek-V3, GLM4-MoE ...), and so do the
decay terms of state-space layers (`A_log`, `dt_bias`, `D`; Mamba, Jamba, Qwen3-Next).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from merge_stream.architectures.base import ModelInfo

__all__ = ["names_kept_wide"]

_WIDE = re.compile(r"(.*\.)?(e_score_correction_bias|A_log|dt_bias|(mixer|mamba|ssm)\.D)")


def names_kept_wide(names: Iterable[str], model: ModelInfo) -> frozenset[str]:
    """Those of `names` that a cast to bf16 or fp16 must leave in their source type."""
    if model.kept_wide is not None:
        return frozenset(n for n in names if n in model.kept_wide)
    base = model.base_tensors
    if base:
        sizes: Counter[str] = Counter()
        for tensor in base.values():
            if tensor.dtype.kind == "float":
                size = 1
                for extent in tensor.shape:
                    size *= extent
                sizes[tensor.dtype.name] += size
        if sizes and sizes.most_common(1)[0][0] in {"BF16", "F16"}:
            return frozenset(n for n in names if n in base and base[n].dtype.name == "F32")
    return frozenset(n for n in names if _WIDE.fullmatch(n))
