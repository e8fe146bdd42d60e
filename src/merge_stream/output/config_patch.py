"""config.json of the output: the source's bytes, with as few keys changed as the weights demand.

Untouched when nothing has to change. What may change: the dtype keys (the spelling the
source uses, in every nest), `tie_word_embeddings` when the tie is broken, `architectures`
when it is empty or names a language model although the head is that of a value or reward
model (with its labels, without which that class does not load), `quantization_config` when
plain weights are written, or weights that this very merge quantizes. Key order, indent and the
final newline stay. Never re-serialised through transformers: configs written by 5.24 lose their rope settings in 4.57.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merge_stream.architectures.families import AUDIO_AND_VISION
from merge_stream.architectures.structure import TEXT_NESTS
from merge_stream.output.class_names import class_for
from merge_stream.planning.plan import ParameterPlan
from merge_stream.tensors.dtype import DType

__all__ = [
    "OutputTensor",
    "PatchedConfig",
    "dominant_dtype",
    "holds_quantized",
    "patch_config",
    "with_vocabulary",
    "without_prediction",
]

_PREDICTION_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers", "mtp_num_hidden_layers")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_NOT_A_MODEL = re.compile(r"quantization_config|compression_config|generation_config|rope_.*|.*_token_config")
_PACKED_ENDS = (
    ".qweight", ".qzeros", ".weight_packed", "_blocks", ".weight_scale", ".weight_scale_inv", ".absmax", ".quant_map",
    ".SCB",
)  # fmt: skip
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_TOWER_NEST = re.compile(r"vision|audio|visual")
_INDENT = re.compile(r"\{\r?\n([ \t]+)\"")


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the output: name, dtype as written, number of elements, shape (empty where it does not matter)."""

    name: str
    dtype: DType
    size: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PatchedConfig:
    """The bytes of config.json and remarks about what was changed and why."""

    data: bytes
    notes: tuple[str, ...] = ()


def dominant_dtype(tensors: Iterable[OutputTensor]) -> DType | None:
    """The floating type of most elements, or None when there is no floating tensor."""
    sizes: Counter[DType] = Counter()
    for tensor in tensors:
        if tensor.dtype.kind == "float" and not tensor.name.endswith(_PACKED_ENDS):
            sizes[tensor.dtype] += tensor.size
    return max(sizes, key=lambda dtype: (sizes[dtype], dtype.itemsize, dtype.name)) if sizes else None


def holds_quantized(tensors: Iterable[OutputTensor | ParameterPlan]) -> bool:
    """True when a tensor is quantized: an 8-bit float, or a name that only packed weights have."""
    return any(tensor.dtype.kind == "quantized" or tensor.name.endswith(_PACKED_ENDS) for tensor in tensors)


def patch_config(
    original: bytes,
    tensors: Sequence[OutputTensor],
    *,
    untied: bool,
    quantization: Mapping[str, Any] | None = None,
) -> PatchedConfig:
    """config.json for these tensors; `quantization` are the settings of weights that were quantized now.

    `original` is a JSON object (checked where it was read). `untied` says that head and
    embedding differ although the config, or the family's default, ties them.
    """
    text = original.decode("utf-8-sig")
    config: dict[str, Any] = json.loads(text)
    notes: list[str] = []
    _set_dtypes(config, tensors, notes)
    if untied:
        _break_tie(config, notes)
    _set_architectures(config, tensors, notes)
    if quantization is not None or not holds_quantized(tensors):
        _drop_quantization(config, notes)
    if quantization is not None:
        config[_QUANTIZATION_KEYS[0]] = dict(quantization)
        notes.append(f"config.json: {_QUANTIZATION_KEYS[0]} set ({quantization['quant_method']})")
    if config == json.loads(text):
        return PatchedConfig(original, tuple(notes))
    return PatchedConfig(_written_like(text, config), tuple(notes))


def with_vocabulary(original: bytes, rows: int) -> bytes:
    """config.json with `vocab_size` `rows`, wherever it stands; the bytes as they are when it says so already."""
    text = original.decode("utf-8-sig")
    config: dict[str, Any] = json.loads(text)
    for _, nest in _nests(config):
        if isinstance(nest.get("vocab_size"), int):
            nest["vocab_size"] = rows
    return original if config == json.loads(text) else _written_like(text, config)


def without_prediction(original: bytes) -> tuple[bytes, tuple[str, ...]]:
    """config.json without layers of multi-token prediction, and the keys that counted them; else as it is."""
    text = original.decode("utf-8-sig")
    config: dict[str, Any] = json.loads(text)
    changed = []
    for path, nest in _nests(config):
        for key in _PREDICTION_KEYS:
            if type(nest.get(key)) is int and nest[key] > 0:
                nest[key] = 0
                changed.append(path + key)
    return (_written_like(text, config), tuple(changed)) if changed else (original, ())


def _nests(config: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The config and the configs of its sub-models, with their path ("text_config.")."""
    yield path, config
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config") and not _NOT_A_MODEL.fullmatch(key):
            yield from _nests(value, f"{path}{key}.")


def _set_dtypes(config: dict[str, Any], tensors: Sequence[OutputTensor], notes: list[str]) -> None:
    overall = dominant_dtype(tensors)
    if overall is None:
        return
    nests = [(path, nest, bool(_TOWER_NEST.search(path))) for path, nest in _nests(config)]
    tower = overall
    if any(of_tower for _, _, of_tower in nests):
        tower = dominant_dtype(t for t in tensors if _is_tower(t.name)) or overall
    for path, nest, of_tower in nests:
        wanted = tower if of_tower else overall
        for key in _DTYPE_KEYS:
            if key not in nest or str(nest[key]).removeprefix("torch.") == wanted.torch_name:
                continue
            if nest[key] is None or isinstance(nest[key], str):
                was = "null" if nest[key] is None else nest[key]
                nest[key] = wanted.torch_name
                notes.append(f"config.json: {path}{key} was {was}, the weights are {wanted.torch_name}")


def _is_tower(name: str) -> bool:
    found = AUDIO_AND_VISION.search(name)
    return found is not None and found[2] != "language_model"


def _break_tie(config: dict[str, Any], notes: list[str]) -> None:
    where = [(path, nest) for path, nest in _nests(config) if "tie_word_embeddings" in nest]
    if not where:  # tied by the family's default: say it where 5.x (top) and 4.57 (text nest) look
        where = [("", config)] + [(f"{k}.", config[k]) for k in TEXT_NESTS if isinstance(config.get(k), dict)]
    for path, nest in where:
        if nest.get("tie_word_embeddings") is not False:
            nest["tie_word_embeddings"] = False
            notes.append(f"config.json: {path}tie_word_embeddings set to false, since lm_head and the embedding differ")


def _set_architectures(config: dict[str, Any], tensors: Sequence[OutputTensor], notes: list[str]) -> None:
    model_type = str(config.get("model_type") or "")
    names = {tensor.name for tensor in tensors}
    name = class_for(model_type, names)
    given = config.get("architectures")
    if isinstance(given, list) and given:
        if _is_value_model(names) and all(str(was).endswith(_LANGUAGE_MODELS) for was in given):
            _set_value_class(config, tensors, name, notes)
        return
    if name is not None and _is_value_model(names):
        _set_value_class(config, tensors, name, notes)
        return
    if name is None:
        notes.append(f"config.json: architectures is empty and not known for model_type {model_type!r}; left as it is")
        return
    config["architectures"] = [name]
    notes.append(f"config.json: architectures was empty, set to {name} by the model_type and the weights")


def _is_value_model(names: Collection[str]) -> bool:
    """True when a scoring head stands where a language model has its output head."""
    return "score.weight" in names and not {"lm_head.weight", "embed_out.weight"} & set(names)


def _set_value_class(
    config: dict[str, Any], tensors: Sequence[OutputTensor], name: str | None, notes: list[str]
) -> None:
    was = config.get("architectures")
    if name is None:
        notes.append(
            f"config.json: architectures {was} is that of a language model, but the head is `score`, and no class of "
            f"transformers is known for it with model_type {config.get('model_type')!r}; left as it is"
        )
        return
    config["architectures"] = [name]
    notes.append(f"config.json: architectures was {was or 'empty'}, set to {name}, since the head is `score`")
    rows = next((t.shape[0] for t in tensors if t.name == "score.weight" and len(t.shape) == 2), None)
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if rows is not None and count != rows:
        config.pop("num_labels", None)
        config["id2label"] = {str(k): f"LABEL_{k}" for k in range(rows)}
        config["label2id"] = {f"LABEL_{k}": k for k in range(rows)}
        notes.append(f"config.json: id2label and label2id set to the {rows} rows of score.weight (was {count})")


def _drop_quantization(config: dict[str, Any], notes: list[str]) -> None:
    for path, nest in list(_nests(config)):
        for key in _QUANTIZATION_KEYS:
            if key in nest:
                settings = nest.pop(key)
                method = settings.get("quant_method") if isinstance(settings, dict) else None
                notes.append(
                    f"config.json: {path}{key} ({method or 'no method'}) left out, since the weights are plain"
                )


def _written_like(text: str, config: dict[str, Any]) -> bytes:
    indent = _INDENT.search(text)
    newline = "\n" if text.endswith("\n") else ""
    step = indent[1] if indent else (None if "\n" not in text.strip() else "  ")
    text = json.dumps(config, indent=step, ensure_ascii=False)
    # a lone surrogate came in as an escape, and goes out as one
    return (text + newline).encode(errors="backslashreplace")
