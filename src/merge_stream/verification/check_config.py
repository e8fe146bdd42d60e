"""config.json against the tensors: readable, shapes, dtype keys, tie flags, architectures, version traps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from merge_stream.architectures.base import ModelInfo, class_names
from merge_stream.architectures.base_match import form_is_known, plain_name
from merge_stream.architectures.biases import check_biases
from merge_stream.architectures.families import HEADS
from merge_stream.architectures.lookup import family_of
from merge_stream.architectures.parts import check_parts
from merge_stream.architectures.structure import TEXT_NESTS, check_structure
from merge_stream.architectures.ties import find_ties, tied_by_config
from merge_stream.errors import MergeStreamError
from merge_stream.output.config_patch import OutputTensor, PatchedConfig, patch_config
from merge_stream.verification.check_engines import Headers, check_engines
from merge_stream.verification.finding import CheckedFolder, Finding, Severity, listed

__all__ = ["check_config"]

_ALL = "all"
_ENGINES = "vLLM, SGLang, TGI, llama.cpp"
_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def check_config(folder: CheckedFolder) -> Iterator[Finding]:
    """Findings about config.json; fills `config` of the folder."""
    config = folder.json("config.json")
    if not isinstance(config, dict):
        text = config or "config.json is not there"
        yield Finding("error", "config", "config-readable", _ALL, text, "copy it from the base model")
        return
    folder.config = config
    model = ModelInfo(config, "config.json")
    if not config.get("model_type"):
        text = "config.json has no model_type"
        yield Finding("error", "config", "model-type", "transformers, vLLM, SGLang, TGI", text)
    yield from _architectures(folder, config)
    if folder.tensors:
        yield from check_engines(Headers(config, folder.tensors))
        yield from _shapes(folder, model)
        yield from _ties(folder, config, model)
        yield from _dtypes(folder, config)
    yield from _version_traps(config)


def _architectures(folder: CheckedFolder, config: dict[str, Any]) -> Iterator[Finding]:
    given = config.get("architectures")
    if not given or not isinstance(given, list):
        text = "config.json has no architectures, by which the engines choose their model class"
        yield Finding("error", "config", "architectures", _ENGINES, text, "merge-stream derives it when it merges")
        return
    if len(given) > 1:
        yield Finding("warning", "config", "architectures", _ENGINES, f"config.json names {len(given)} architectures")
    heads = {found[1] for name in folder.tensors if (found := HEADS.fullmatch(name))}
    if "score" in heads and "lm_head" not in heads and str(given[0]).endswith(_LANGUAGE):
        text = f"config.json says {given[0]}, but the head is `score`: the model would get a new random lm_head"
        yield Finding("error", "config", "architectures", "transformers, vLLM", text, "a value or reward model's class")
    if (
        heads
        and str(given[0]).endswith(("ForSequenceClassification", "ForTokenClassification"))
        and not heads
        & {
            "score",
            "classifier",
        }
    ):
        text = f"config.json says {given[0]}, and there is no score: the head would be random"
        yield Finding("error", "config", "architectures", "transformers, vLLM", text)
    if {"score", "lm_head"} <= heads:
        text = f"score stands beside lm_head, and {given[0]} has one head: the other is left out, or refused"
        yield Finding("warning", "config", "two-heads", "transformers, vLLM, SGLang, llama.cpp", text)
    wrapped = heads & {"v_head", "value_head", "reward_head"}
    if wrapped:
        text = f"{min(wrapped)} belongs to a wrapper of the trainer: engines refuse the tensors or leave them out"
        yield Finding("warning", "config", "wrapped-head", "vLLM, SGLang, llama.cpp", text, "load it with the wrapper")


def _shapes(folder: CheckedFolder, model: ModelInfo) -> Iterator[Finding]:
    shapes = {name: tensor.shape for name, tensor in folder.tensors.items()}
    try:
        notes = check_structure(shapes, model)
    except MergeStreamError as error:
        yield Finding("error", "config", "shapes", _ALL, error.message, error.hint)
        return
    for note in notes:  # labels that differ from the rows of the head
        yield Finding("error", "config", "labels", "transformers", note, "set id2label and label2id")
    yield from _complete(folder, model)


def _complete(folder: CheckedFolder, model: ModelInfo) -> Iterator[Finding]:
    """Biases that a flag gives or takes, parts that every layer lacks; not asked about names of no repository."""
    names = {plain_name(name) or name for name in folder.tensors}
    family = family_of(model)
    strange = family is not None and family.strangers(name for name in names if not HEADS.fullmatch(name))
    known = model.model_type and form_is_known(folder.config)
    if strange or not known or any("lora_" in name for name in names):
        return
    again = "correct config.json, or merge again from all shards"
    try:
        check_biases(names, model)
        parts = check_parts(names, model)
    except MergeStreamError as error:
        yield Finding("error", "config", "parts", "all", error.message, again)
        return
    for note in parts:
        yield Finding("note", "config", "parts", "all", note)


def _ties(folder: CheckedFolder, config: dict[str, Any], model: ModelInfo) -> Iterator[Finding]:
    try:
        ties = find_ties(folder.tensors, model)
    except MergeStreamError as error:
        yield Finding("error", "config", "tied", _ALL, error.message, error.hint)
        return
    tied = tied_by_config(model)
    top = config.get("tie_word_embeddings")
    for nest in TEXT_NESTS:
        inner = (config.get(nest) or {}).get("tie_word_embeddings") if isinstance(config.get(nest), dict) else None
        if top is not None and inner is not None and top != inner:
            text = f"tie_word_embeddings is {top} at the top and {inner} in {nest}: the versions read different ones"
            severity: Severity = "warning" if ties else "error"
            yield Finding(severity, "config", "tie-flags", "transformers 4.57 and 5", text)
    for tie in ties:
        if tie.by_config:
            text = f"{tie.name} is stored although config.json ties it to {tie.twin}: engines ignore it"
            yield Finding(
                "note", "config", "tied", "vLLM, SGLang, transformers 4", text, "`merge-stream verify` compares values"
            )
    classes = class_names(config)
    has_head = any(HEADS.fullmatch(name) for name in folder.tensors)
    if not ties and not tied and not has_head and any(name.endswith(_LANGUAGE) for name in classes):
        text = "there is no lm_head, and config.json does not say that it is tied to the embedding"
        yield Finding(
            "error", "config", "head", "transformers (random head), vLLM", text, "set tie_word_embeddings, or find it"
        )


def _dtypes(folder: CheckedFolder, config: dict[str, Any]) -> Iterator[Finding]:
    tensors = [OutputTensor(n, t.dtype, _size(t.shape), t.shape) for n, t in folder.tensors.items()]
    keys = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    if len({str(value) for value in keys.values()}) > 1:
        yield Finding("warning", "config", "dtype", "transformers, vLLM", f"config.json says {keys}")
    patched: PatchedConfig = patch_config(json.dumps(config).encode(), tensors, untied=False)
    for note in patched.notes:
        if "dtype was" in note:
            text = f"{note}: the weights are cast at load"
            yield Finding("warning", "config", "dtype", "transformers, vLLM, SGLang, TGI", text)
    if str(config.get("dtype", config.get("torch_dtype"))).endswith("float32"):
        text = "the model is float32: engines cast it to 16 bits by default"
        yield Finding("note", "config", "dtype", "vLLM, SGLang", text, "--dtype bf16 halves it")
    wide = [n for n, t in folder.tensors.items() if t.dtype.name in {"F64", "C64"}]
    if wide:
        yield Finding("warning", "config", "dtype", "engines", f"64-bit tensors: {listed(wide)}")


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _version_traps(config: dict[str, Any]) -> Iterator[Finding]:
    """Configs that transformers 5 wrote and 4.57 misreads in silence."""
    for nest in (config, *(config[k] for k in TEXT_NESTS if isinstance(config.get(k), dict))):
        rope = nest.get("rope_parameters")
        if isinstance(rope, dict) and rope.get("rope_theta", 10000) != 10000 and "rope_theta" not in nest:
            text = (
                f"rope_parameters without rope_theta: transformers 4 takes theta 10000 instead of {rope['rope_theta']}"
            )
            hint = "use the config of the original repository"
            yield Finding("warning", "config", "rope", "transformers 4, engines of before 2026", text, hint)
            break
    if config.get("model_type") == "qwen3_moe" and "num_local_experts" in config and "num_experts" not in config:
        text = "num_local_experts without num_experts: transformers 4 takes 128 experts"
        yield Finding("warning", "config", "experts", "transformers 4", text, "use the original config")
