"""Megatron-Bridge's run_config.yaml: how the adapter of a run was made.

    peft:                                            (`peft: null` without an adapter)
      _target_: megatron.bridge.peft.lora.LoRA
      alpha: 32
      dim: 16

Only these three keys of this block are read, line by line; the file is never run through a YAML library, whose tags
could ask for classes. Facts: Megatron-Bridge 0.6.2 (`training/config.py`, `peft/lora.py`: the scale is alpha / dim).
"""

from __future__ import annotations

import re

from merge_stream.errors import CorruptCheckpointError

__all__ = ["RUN_CONFIG", "run_config_settings"]

RUN_CONFIG = "run_config.yaml"
_LIMIT = 4 << 20
_BLOCK = re.compile(r"^peft:[ \t]*\n((?:[ \t-].*\n|\n)*)", re.MULTILINE)
_KEY = re.compile(r"^  (_target_|alpha|dim): *(\S+)[ \t]*$", re.MULTILINE)
_KIND = "megatron.bridge.peft."
_PLAIN = ("lora.LoRA", "lora.VLMLoRA")


def run_config_settings(path: str) -> dict[str, object]:
    """`r` and `lora_alpha` as peft calls them, `peft_type` for another kind of adapter; nothing where none is told.

    CorruptCheckpointError when a number is none.
    """
    with open(path, "rb") as file:
        data = file.read(_LIMIT + 1)
    block = _BLOCK.search(data.decode(errors="replace").replace("\r\n", "\n") + "\n") if len(data) <= _LIMIT else None
    if block is None:
        return {}
    told = dict(_KEY.findall(block[1]))
    kind = told.get("_target_", "").removeprefix(_KIND)
    if kind not in _PLAIN:
        return {"peft_type": kind or "of no known kind"}
    settings: dict[str, object] = {}
    for key, name in (("alpha", "lora_alpha"), ("dim", "r")):
        if key in told:
            try:
                settings[name] = float(told[key])
            except ValueError:
                msg = f"{path}: peft.{key} is {told[key][:40]!r}, wanted a number"
                raise CorruptCheckpointError(msg, hint="correct the file, or give --lora-alpha") from None
    return settings
