"""Which model classes an engine has: names of `architectures`, and for TGI of `model_type`.

`engine_classes.json` was read in vLLM 0.32 (`models/registry.py`, those of its own), SGLang 0.5.23
(`EntryClass` of `srt/models/*.py`), llama.cpp's converter (`conversion/__init__.py`, classes of text models,
snapshot of 2026) and TGI of January 2026 (`models/__init__.py`). What an engine does with a class that is not its own:

    vLLM        tries the model of transformers inside; of a classifier it first looks for the causal model
    SGLang      takes the model of transformers 5.19 inside (`models/transformers.py`), or refuses
    llama.cpp   refuses
    TGI         takes AutoModelForCausalLM, or refuses when transformers has none for the model type
"""

from __future__ import annotations

import importlib.resources
import json
from functools import cache

__all__ = ["classes_of", "spelled_otherwise"]


@cache
def classes_of(engine: str) -> frozenset[str]:
    """The names that `engine` ("vLLM", "SGLang", "llama.cpp" or "TGI") knows."""
    text = importlib.resources.files(__package__ or "").joinpath("engine_classes.json").read_text("utf-8")
    lines: dict[str, list[str]] = json.loads(text)
    return frozenset(name for line in lines[engine] for name in line.split())


def spelled_otherwise(name: str, engine: str) -> str:
    """How `engine` spells this class, when the case differs (PhiMoE for Phimoe); "" when it knows it, or not at all."""
    if name in classes_of(engine):
        return ""
    return next((known for known in sorted(classes_of(engine)) if _folded(known) == _folded(name)), "")


def _folded(name: str) -> str:
    return name.replace("_", "").casefold()
