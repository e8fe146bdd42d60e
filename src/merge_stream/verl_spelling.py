"""verl's own command line, so that a script calling `python -m verl.model_merger` needs one word changed.

    python -m merge_stream merge --backend fsdp --local_dir CKPT --target_dir OUT
    python -m merge_stream test  --backend fsdp --local_dir CKPT --test_hf_dir REF

Facts: verl 0.9.1 `verl/model_merger/base_model_merger.py` (options and defaults; the output is
bf16, the target folder defaults to `tmp`).
"""

from __future__ import annotations

from dataclasses import dataclass

from merge_stream.errors import UsageError

__all__ = ["VerlOptions", "explain_and_check"]


@dataclass(frozen=True, slots=True)
class VerlOptions:
    """verl's options as given; None or False when absent."""

    backend: str | None = None
    local_dir: str | None = None
    target_dir: str | None = None
    test_hf_dir: str | None = None
    hf_upload_path: str | None = None
    hf_model_path: str | None = None
    private: bool = False
    use_cpu_initialization: bool = False
    tie_word_embedding: bool = False
    is_value_model: bool = False
    trust_remote_code: bool = False

    @property
    def used(self) -> bool:
        """True when the command is written in verl's way."""
        return self.local_dir is not None or self.backend is not None


_MEANINGLESS = {
    "hf_model_path": "config and tokenizer are those beside the shards; --base-model DIR gives what they lack",
    "use_cpu_initialization": "no model is ever built here, so there is nothing to initialise",
    "tie_word_embedding": "ties are found from config.json and proved from the bytes",
    "is_value_model": "value heads are recognised by their tensors",
    "trust_remote_code": "no code of the model is ever run; its *.py files are copied",
}


def explain_and_check(given: VerlOptions) -> list[str]:
    """Lines that explain options without a meaning here; UsageError for a backend that verl does not have."""
    if given.backend not in {None, "fsdp", "megatron"}:
        msg = f"--backend {given.backend} is neither fsdp nor megatron"
        raise UsageError(msg)
    return [f"--{name} has no effect: {why}" for name, why in _MEANINGLESS.items() if getattr(given, name)]
