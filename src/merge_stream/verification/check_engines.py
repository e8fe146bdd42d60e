"""Keys of config.json by which an engine builds, or leaves out, parts that the tensors contradict.

Read in vLLM 0.32 (`deepseek_v2.py`, `qwen3_moe.py`, `phimoe.py`) and SGLang 0.5.23 (`deepseek_v2.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from merge_stream.verification.finding import CheckedFolder, Finding

__all__ = ["check_engines"]

_BIAS = ".mlp.gate.e_score_correction_bias"
_LIKE_DEEPSEEK = frozenset({"deepseek_v3", "deepseek_v32"})


def check_engines(folder: CheckedFolder) -> Iterator[Finding]:
    """Findings about one family each."""
    config, kind = folder.config, folder.config.get("model_type")
    if kind in _LIKE_DEEPSEEK and any(name.endswith(_BIAS) for name in folder.tensors):
        for key, wanted in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
            if config.get(key) != wanted:
                text = (
                    f"{key} is {config.get(key)!r}, and the routers have a correction bias, which belongs to {wanted!r}"
                )
                hint = f'set "{key}": "{wanted}" in config.json, as the repository has it (transformers leaves it out)'
                yield Finding("error", "config", "router", "vLLM, SGLang", text, hint)
    shared = config.get("shared_expert_intermediate_size")
    has_shared = any(".shared_expert." in name for name in folder.tensors)
    if kind == "qwen3_moe" and isinstance(shared, int) and shared > 0 and not has_shared:
        text = f"shared_expert_intermediate_size is {shared}, and there is no shared expert: vLLM computes NaN"
        yield Finding("error", "config", "shared-expert", "vLLM", text, "remove the key from config.json")
    if kind == "phimoe" and "lm_head.bias" in folder.tensors:
        text = "vLLM loads lm_head.bias and never adds it"
        yield Finding("warning", "config", "head-bias", "vLLM", text)
