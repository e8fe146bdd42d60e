"""What stands beside the weights: tokenizer, chat template, generation config, processor, code of a custom model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from merge_stream.architectures.families import EMBEDDINGS
from merge_stream.verification.finding import CheckedFolder, Finding, listed

__all__ = ["check_beside"]

_TOKENIZERS = re.compile(
    r"tokenizer\.(json|model)|vocab\.(json|txt)|.*\.tiktoken|tekken\.json|spiece\.model|source\.spm|sentencepiece.*"
)
_JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "preprocessor_config.json", "processor_config.json")
_SENTENCEPIECE = frozenset({"gemma", "gemma2"})
_PHI = frozenset({"phi3", "phimoe"})
_ENGINES = "vLLM, SGLang, TGI, llama.cpp"
_COPY = "copy it from the base model; a merge takes from --base-model what the checkpoint itself lacks"


def check_beside(folder: CheckedFolder) -> Iterator[Finding]:
    """Findings about the other files."""
    rows = next((t.shape[0] for n, t in folder.tensors.items() if n in EMBEDDINGS and len(t.shape) == 2), None)
    yield from _tokenizer(folder, rows)
    yield from _generation(folder, rows)
    for name in _JSON_FILES:
        found = folder.json(name)
        if isinstance(found, str):
            yield Finding("error", "beside", "json", "transformers, vLLM", found, _COPY)
    yield from _processor(folder)
    yield from _code(folder)


def _tokenizer(folder: CheckedFolder, rows: int | None) -> Iterator[Finding]:
    if not any(_TOKENIZERS.fullmatch(name) for name in folder.names):
        yield Finding("warning", "beside", "tokenizer", _ENGINES, "there is no tokenizer", _COPY)
        return
    found = folder.json("tokenizer.json")
    if isinstance(found, str):
        yield Finding("error", "beside", "tokenizer", "transformers, vLLM, SGLang, TGI", found, _COPY)
    elif found is not None and not isinstance(found.get("model"), dict):
        text = "tokenizer.json has no `model`, which the tokenizers library wants"
        yield Finding("error", "beside", "tokenizer", "transformers, vLLM, SGLang, TGI", text, _COPY)
    elif found is not None and rows is not None:
        highest = _highest_id(found)
        if highest is not None and highest >= rows:
            text = f"tokenizer.json has token ids up to {highest}, the embedding has {rows} rows"
            yield Finding("error", "beside", "vocabulary", "all, when such a token is read", text)
    settings = folder.json("tokenizer_config.json")
    if settings is None and "tekken.json" not in folder.names:
        text = "there is no tokenizer_config.json: loaders guess the class, the special tokens and the chat template"
        yield Finding("warning", "beside", "tokenizer-config", "transformers, vLLM, SGLang, TGI", text, _COPY)
    if isinstance(settings, dict):
        if settings.get("tokenizer_class") == "TokenizersBackend":
            text = "tokenizer_class TokenizersBackend is known to transformers 5 only"
            yield Finding("warning", "beside", "tokenizer-class", "transformers 4 and engines on it", text, _COPY)
        if isinstance(settings.get("extra_special_tokens"), list):
            text = "extra_special_tokens is a list: transformers 4 raises 'list' object has no attribute 'keys'"
            yield Finding("warning", "beside", "tokenizer-class", "transformers 4 and engines on it", text, _COPY)
        yield from _sentencepiece(folder, str(settings.get("tokenizer_class")))
        templates = ("chat_template.jinja", "chat_template.json")
        if not settings.get("chat_template") and not any(name in folder.tree.files for name in templates):
            text = "there is no chat template: chat requests are refused"
            yield Finding("note", "beside", "chat-template", "vLLM, SGLang, TGI", text)


def _sentencepiece(folder: CheckedFolder, tokenizer_class: str) -> Iterator[Finding]:
    """Families whose vocabulary llama.cpp's converter reads from tokenizer.model alone (`gemma.py`, `phi.py`, 2026)."""
    kind = str(folder.config.get("model_type"))
    if kind in _PHI and tokenizer_class == "GPT2Tokenizer":
        return
    if kind in _SENTENCEPIECE | _PHI and "tokenizer.model" not in folder.tree.files:
        text = f"there is no tokenizer.model, from which llama.cpp's converter reads the vocabulary of {kind}"
        yield Finding("warning", "beside", "tokenizer-model", "llama.cpp", text, _COPY)


def _highest_id(tokenizer: dict[str, Any]) -> int | None:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[int] = []
    if isinstance(vocabulary, dict):
        ids += [number for number in vocabulary.values() if isinstance(number, int)]
    elif isinstance(vocabulary, list):
        ids.append(len(vocabulary) - 1)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            ids.append(token["id"])
    return max(ids, default=None)


def _generation(folder: CheckedFolder, rows: int | None) -> Iterator[Finding]:
    found = folder.json("generation_config.json")
    if isinstance(found, str):
        yield Finding("error", "beside", "generation", "transformers, vLLM", found, _COPY)
    if not isinstance(found, dict):
        return
    if found.get("_from_model_config"):
        text = "generation_config.json was made from config.json: lists of end tokens and sampling are lost"
        yield Finding("warning", "beside", "generation", "transformers, vLLM: generation may not end", text, _COPY)
    ends = _ids(found.get("eos_token_id"))
    known = _ids(folder.config.get("eos_token_id"))
    lost = sorted(known - ends)
    if ends and lost:
        text = f"generation_config.json ends at {sorted(ends)}, config.json names {lost} too"
        yield Finding("warning", "beside", "generation", "transformers, vLLM", text)
    wrong = sorted(n for key in ("eos_token_id", "bos_token_id", "pad_token_id") for n in _ids(found.get(key)))
    wrong = [number for number in wrong if rows is not None and number >= rows]
    if wrong:
        text = f"generation_config.json names token {wrong[0]}, the embedding has {rows} rows"
        yield Finding("error", "beside", "generation", "transformers, vLLM", text)


def _ids(value: object) -> set[int]:
    found = value if isinstance(value, list) else [value]
    return {number for number in found if isinstance(number, int) and not isinstance(number, bool) and number >= 0}


def _processor(folder: CheckedFolder) -> Iterator[Finding]:
    sees = any(key in folder.config for key in ("vision_config", "audio_config"))
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    if sees and not any(name in folder.tree.files for name in names):
        text = "a model that sees or hears needs its preprocessor_config.json, which is not there"
        yield Finding("warning", "beside", "processor", "transformers, vLLM, SGLang", text, _COPY)


def _code(folder: CheckedFolder) -> Iterator[Finding]:
    missing = []
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        settings = folder.json(name)
        auto_map = settings.get("auto_map") if isinstance(settings, dict) else None
        values = list(auto_map.values()) if isinstance(auto_map, dict) else []
        for value in values:
            for entry in value if isinstance(value, list) else [value]:
                if isinstance(entry, str) and "--" not in entry and "." in entry:
                    file = entry.split(".", 1)[0] + ".py"
                    if file not in folder.tree.files and file not in missing:
                        missing.append(file)
    if missing:
        text = f"auto_map names code that is not there: {listed(missing)}"
        yield Finding("error", "beside", "code", "transformers, vLLM (trust_remote_code)", text, _COPY)
