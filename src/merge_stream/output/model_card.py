"""README.md of the output: where the weights come from, for people and for the Hub's search.

Written only where the folder brings no README of its own; the base model's describes another
model, so only its licence and its task are taken over. The text depends on the plan alone,
never on the clock, the machine or the name of a folder, so a resumed run writes the same
bytes; no path and no token can get into it.

    ---  metadata block: library_name, base_model, license, pipeline_tag, tags
    mark (`MARK`): a later upload may replace a card that carries it, and no other
    table: format, trainer, step, mesh, fingerprint, version, types, names, LoRA, counts
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge_stream.units import format_bytes

__all__ = ["CARD_NAME", "MARK", "CardFacts", "build_card", "config_names", "hub_id_of", "is_own_card", "step_of"]

CARD_NAME = "README.md"
MARK = "<!-- This card was written by merge-stream. Remove this line to keep your own version. -->"

_README_LIMIT = 1 << 20
_COPIED_KEYS = ("license", "license_name", "license_link", "pipeline_tag")
_SCALAR = re.compile(r"[A-Za-z0-9][\w.+/:@ -]*")
_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}
# Facts of a catalog that say something about the training and nothing about the machine.
_TOLD_FACTS = ("trainer", "world size", "device mesh", "mesh dims", "FSDP", "torch", "stored as")
_STEP = re.compile(r"(?:global_?step|checkpoint|ckpt|step|iter)[-_]?(\d+)", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_CACHED = re.compile(r"models--([A-Za-z0-9][\w.-]*?)--([A-Za-z0-9][\w.-]*)")
# First segments of relative folders that look like an owner on the Hub.
_FOLDERS = """
    model models ckpt ckpts checkpoint checkpoints data dataset datasets exp exps experiments home hf huggingface local
    mnt opt out output outputs pretrained results root runs save saved scratch tmp user users var weights workspace
"""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """All that a card may tell.

    `facts` are a catalog's (an allow list decides which are told); `base_readme` is the
    path of the base model's card, from which licence and task are taken. `quantized` says
    in which scheme how many weights were written.
    """

    format: str
    facts: Mapping[str, str | int]
    step: int | None
    fingerprint: str
    version: str
    dtype: str
    dtypes: Mapping[str, int]
    layout: str
    lora: str
    tensors: int
    parameters: int
    nbytes: int
    files: int
    quantized: str = ""
    architectures: tuple[str, ...] = ()
    base_id: str = ""
    base_readme: str = ""
    adapter_only: bool = False


def build_card(card: CardFacts) -> bytes:
    """The bytes of README.md."""
    head = ["---", f"library_name: {'peft' if card.adapter_only else 'transformers'}"]
    if card.base_id:
        relation = "adapter" if card.adapter_only else "finetune"
        head += [f"base_model: {card.base_id}", f"base_model_relation: {relation}"]
    copied = _front_matter(card.base_readme)
    copied.setdefault("pipeline_tag", _task(card.architectures))
    other_task = _task(card.architectures)
    if other_task and "classification" in other_task:
        copied["pipeline_tag"] = other_task  # a value model is no chat model, whatever its base was
    head += [f"{key}: {copied[key]}" for key in _COPIED_KEYS if copied.get(key)]
    head += ["tags:", "- merge-stream"]
    trainer = str(card.facts.get("trainer", ""))
    if re.fullmatch(r"[a-z][a-z0-9-]{1,30}", trainer):
        head.append(f"- {trainer}")
    head += ["---", "", MARK, ""]
    rows = [f"| {key} | {_cell(value)} |" for key, value in _rows(card)]
    body = [
        "# Merged model",
        "",
        f"The sharded checkpoint of a training run, put together by merge-stream {card.version}.",
        "",
        "| | |",
        "|---|---|",
        *rows,
    ]
    return ("\n".join([*head, *body]) + "\n").encode()


def is_own_card(text: str) -> bool:
    """True for a card that merge-stream wrote and nobody claimed."""
    return MARK in text


def step_of(root: str) -> int | None:
    """The training step that the last folders of a checkpoint's path name (global_step_100, checkpoint-500)."""
    for part in reversed(Path(root).parts[-4:]):
        match = _STEP.fullmatch(part)
        if match:
            return int(match[1])
    return None


def hub_id_of(*candidates: str | None) -> str:
    """The first candidate that is a name on the Hub, or the path of a cached snapshot of one; else ""."""
    for text in candidates:
        if not text:
            continue
        cached = _CACHED.search(text)
        if cached:
            return f"{cached[1]}/{cached[2]}"
        name = text.partition("@")[0]
        if _HUB_ID.fullmatch(name) and name.partition("/")[0].lower() not in _FOLDERS.split():
            return name
    return ""


def _rows(card: CardFacts) -> list[tuple[str, str | int]]:
    rows: list[tuple[str, str | int]] = [("checkpoint format", card.format)]
    rows += [(key, card.facts[key]) for key in _TOLD_FACTS if key in card.facts]
    if card.step is not None:
        rows.append(("training step", card.step))
    if card.base_id:
        rows.append(("base model", card.base_id))
    types = ", ".join(f"{count} {name}" for name, count in card.dtypes.items())
    rows += [
        ("tensors", f"{card.tensors} ({types})" if types else card.tensors),
        ("parameters", f"{card.parameters:,}"),
        ("size", f"{format_bytes(card.nbytes)} in {card.files} file{'s' if card.files != 1 else ''}"),
        ("element types", "as in the checkpoint" if card.dtype == "keep" else f"cast to {card.dtype}"),
        ("names", "those of the original repository" if card.layout == "upstream" else "the trainer's own"),
    ]
    if card.quantized:
        rows.append(("quantized", card.quantized))
    if card.lora:
        rows.append(("LoRA", card.lora))
    rows.append(("plan fingerprint", f"`{card.fingerprint}`"))
    return rows


def _cell(value: str | int) -> str:
    return " ".join(str(value).replace("|", "/").split())


def _task(architectures: tuple[str, ...]) -> str:
    return next((task for name in architectures for ending, task in _TASKS.items() if name.endswith(ending)), "")


def _front_matter(path: str) -> dict[str, str]:
    """Licence and task of a card's metadata block; plain one-line values only."""
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_README_LIMIT)
    except OSError:
        return {}
    if not text.startswith("---"):
        return {}
    found: dict[str, str] = {}
    for line in text.split("\n---", 1)[0].splitlines()[1:]:
        key, _, value = line.partition(":")
        value = value.strip().strip("'\"")
        if key in _COPIED_KEYS and _SCALAR.fullmatch(value):
            found[key] = value
    return found


def config_names(config: Mapping[str, Any] | None, adapter_files: Mapping[str, str]) -> tuple[str | None, ...]:
    """What config.json and the adapter's config call the base model, for `hub_id_of`."""
    names: list[str | None] = []
    for name, path in adapter_files.items():
        if name.endswith("adapter_config.json"):
            try:
                with open(path, encoding="utf-8") as file:
                    value = json.loads(file.read(_README_LIMIT)).get("base_model_name_or_path")
            except (OSError, ValueError, AttributeError):
                continue
            names.append(value if isinstance(value, str) else None)
    given = (config or {}).get("_name_or_path")
    names.append(given if isinstance(given, str) else None)
    return tuple(names)
