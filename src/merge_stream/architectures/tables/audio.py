"""Audio models built like LLaVA: Qwen2-Audio, Voxtral, AudioFlamingo3 and kin.

transformers 5 puts everything below `model.`; 4.57 has the names of the repository.
"""

from __future__ import annotations

from merge_stream.architectures.rules import Rename
from merge_stream.architectures.tables.base import Family, Table, words

__all__ = ["MEMBER"]

_PARTS = "audio_tower|multi_modal_projector|encoder|projector"

MEMBER = Table(
    "audio",
    (
        Family(
            "audio",
            words("audioflamingo3 glmasr granite_speech musicflamingo qwen2_audio voxtral voxtral_realtime"),
            (
                Rename(f"model.{{m:{_PARTS}}}.{{rest}}", "{m}.{rest}"),
                Rename("model.language_model.{rest}", "language_model.model.{rest}"),
                Rename("lm_head.{rest}", "language_model.lm_head.{rest}"),
            ),
            ("language_model.{k:model|lm_head}.{rest}", f"{{m:{_PARTS}}}.{{rest}}"),
        ),
    ),
)
