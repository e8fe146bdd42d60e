"""What an engine does with these weights under this config: parts it never builds, tensors it never reads, and
models it has no class for.

The rules need a config and headers only, so that `check` asks them about a folder and a merge about what it is going to
write. What holds for the original repository too is a warning (or a note, where an engine simply does not have
the family); what is wrong with this model alone is an error.

Read in vLLM 0.32 (`deepseek_v2.py`, `qwen3_moe.py`, `phimoe.py`, `commandr.py`, `gemma2.py`), SGLang 0.5.23
(`srt/models/`), TGI of January 2026 (`models/custom_modeling/`) and llama.cpp's converter (`conversion/`, 2026, with
gguf 0.19).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from merge_stream.architectures.base import ModelInfo, class_names
from merge_stream.architectures.base_match import plain_name
from merge_stream.architectures.families import HEADS
from merge_stream.architectures.parts import strange_names
from merge_stream.architectures.ties import tied_by_config
from merge_stream.tensors.dtype import DType
from merge_stream.verification.engine_classes import classes_of, spelled_otherwise
from merge_stream.verification.finding import Finding, Severity, listed, some

__all__ = ["Headers", "check_engines", "engine_warnings"]

_BIAS = ".mlp.gate.e_score_correction_bias"
_LIKE_DEEPSEEK = frozenset({"deepseek_v3", "deepseek_v32"})

# Loaders that never read the output head, whatever the config says: they take the embedding (SGLang's Gemma3: nothing).
_NEVER_READ_A_HEAD: dict[str, frozenset[str]] = {
    "SGLang": frozenset(
        {"cohere", "cohere2", "cohere2_moe", "cohere2_vision", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"}
        | {"gpt2", "gpt_bigcode"}
    ),
    "vLLM": frozenset({"cohere", "cohere2", "cohere2_moe"}),
    "TGI": frozenset({"gpt2"}),
    "llama.cpp": frozenset({"gemma", "gemma2"}),
}
_NO_PLACE_FOR_A_HEAD = {
    "vLLM": frozenset({"cohere2_vision", "gemma2"}),
    "llama.cpp": frozenset({"cohere", "cohere2", "lfm2_moe"}),
}
_LLAMA_CPP_DTYPES = frozenset(
    {"F64", "F32", "BF16", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"}
)

# A quantized model may hold tensors of forms that are not known here.
_QUANTIZED = ("quantization_config", "compression_config", "quantization")

# What vLLM 0.32 reads from a config without asking whether it is there, and transformers' own classes (5.24) do not
# write unless a config that they read had it (`vllm/model_executor/models/`; below GLM-4.5V it is `glm4_moe.py`).
_GLM = ("head_dim", "use_qk_norm")
_READ_BY_VLLM = {
    "afmoe": ("n_group", "route_norm", "score_func", "topk_group"),
    "glm4_moe": ("head_dim",),
    "glm4_moe_lite": ("first_k_dense_replace",),
    "glm4v_moe_text": _GLM,
    "Glm4vMoe_text": _GLM,
    "lfm2": ("block_dim", "conv_dim"),
    "longcat_flash": ("mla_scale_kv_lora", "mla_scale_q_lora", "zero_expert_type"),
    "minimax_m2": ("rotary_dim", "scoring_func"),
}

# Families whose names in the repository are not those of transformers' memory, and which SGLang leaves to transformers.
_NOT_THROUGH_TRANSFORMERS = frozenset(
    ["aria", "minimax", "phimoe", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "video_llava"]
)
_TGI_CAUSAL = frozenset({"emu3", "fuyu", "got_ocr2"})
_TGI_WITH_A_TEXT_MODEL = frozenset({"idefics2", "idefics3", "llava_next"})
_TGI_TEXT_MODELS = frozenset({"llama", "mistral", "gemma", "gemma2", "gemma3", "gemma3_text"})
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


class Header(Protocol):
    """A tensor without its data."""

    @property
    def dtype(self) -> DType:
        """Element type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        ...


@dataclass(frozen=True, slots=True)
class Headers:
    """A model as the rules see it: config.json (parsed) and its tensors by name."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Header]

    @property
    def kind(self) -> str:
        """`model_type`."""
        return str(self.config.get("model_type") or "")

    def nest(self, key: str) -> Mapping[str, Any]:
        """A nested config, or an empty one."""
        value = self.config.get(key)
        return value if isinstance(value, Mapping) else {}


def check_engines(model: Headers) -> Iterator[Finding]:
    """Findings about one engine and one family each."""
    if not model.tensors:
        return
    yield from _strange(model)
    yield from _keys(model)
    yield from _routers(model)
    yield from _experts(model)
    yield from _heads(model)
    yield from _classes(model)
    yield from _nested(model)
    yield from _llama_cpp(model)


def engine_warnings(model: Headers) -> list[str]:
    """The findings that are more than a note, as a merge tells them before its first byte."""
    told = (finding for finding in check_engines(model) if finding.severity != "note")
    return [f"{f.text} [{f.loaders}]" + (f"; {f.hint}" if f.hint else "") for f in told]


def _strange(model: Headers) -> Iterator[Finding]:
    """What no model of the family has; a trainer's wrapper is told by the rules on names."""
    names = [plain for plain in map(plain_name, model.tensors) if plain is not None]
    if any(key in model.config for key in _QUANTIZED) or any(
        "lora_" in name or name.startswith(("module.", "base_model.")) for name in names
    ):
        return
    strange = strange_names(names, ModelInfo(model.config))
    if strange:
        text = f"{some(len(strange), 'name')} that no {model.kind} has: {listed(strange)}; others leave them out"
        yield Finding("error", "names", "family", "vLLM, llama.cpp", text)


def _keys(model: Headers) -> Iterator[Finding]:
    for config, where in ((model.config, "config.json"), (model.nest("text_config"), "text_config")):
        lacking = [key for key in _READ_BY_VLLM.get(str(config.get("model_type")), ()) if key not in config]
        if lacking:
            text = f"{where} lacks {', '.join(lacking)}, without which vLLM cannot build the model"
            hint = "take config.json from the original repository (transformers leaves them out)"
            yield Finding("error", "config", "keys", "vLLM", text, hint)


def _routers(model: Headers) -> Iterator[Finding]:
    if model.kind not in _LIKE_DEEPSEEK or not any(name.endswith(_BIAS) for name in model.tensors):
        return
    for key, wanted in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if model.config.get(key) != wanted:
            told = model.config.get(key)
            text = f"{key} is {told!r}, and the routers have a correction bias, which belongs to {wanted!r}"
            hint = f'set "{key}": "{wanted}" in config.json, as the repository has it (transformers leaves it out)'
            yield Finding("error", "config", "router", "vLLM, SGLang", text, hint)
    if model.kind == "deepseek_v3":
        text = "TGI takes zeros for the correction bias of the routers, and never reads the stored one"
        yield Finding("warning", "config", "router-bias", "TGI", text)


def _experts(model: Headers) -> Iterator[Finding]:
    shared = model.config.get("shared_expert_intermediate_size")
    has_shared = any(".shared_expert." in name for name in model.tensors)
    if model.kind == "qwen3_moe" and isinstance(shared, int) and shared > 0 and not has_shared:
        text = f"shared_expert_intermediate_size is {shared}, and there is no shared expert: vLLM computes NaN"
        yield Finding("error", "config", "shared-expert", "vLLM", text, "remove the key from config.json")
    fused = any(name.endswith(".feed_forward.experts.gate_up_proj") for name in model.tensors)
    if "Llama4ForCausalLM" in class_names(model.config)[:1] and fused:
        text = "under Llama4ForCausalLM SGLang skips the experts of Llama4 and starts with random ones"
        yield Finding("warning", "config", "llama4-experts", "SGLang", text)


def _heads(model: Headers) -> Iterator[Finding]:
    if model.kind == "phimoe" and "lm_head.bias" in model.tensors:
        text = "vLLM and SGLang load lm_head.bias and never add it, TGI never reads it"
        yield Finding("warning", "config", "head-bias", "vLLM, SGLang, TGI", text)
    heads = [name for name in model.tensors if name.endswith("lm_head.weight")]
    tied = tied_by_config(ModelInfo(model.config, "config.json"))
    for engine in (e for e, families in _NO_PLACE_FOR_A_HEAD.items() if heads and model.kind in families):
        hint = "merge without --materialize-tied" if tied else "serve it with transformers"
        text = f"{engine} has no place for {heads[0]} in {model.kind}, and refuses it"
        yield Finding("error", "config", "head-refused", engine, text, hint)
    if not heads or tied:
        return
    lost = [engine for engine, families in _NEVER_READ_A_HEAD.items() if model.kind in families]
    if lost:
        reads = "reads" if len(lost) == 1 else "read"
        text = f"{' and '.join(lost)} never {reads} {heads[0]} of {model.kind}: the logits are wrong there"
        hint = "the head of this model is not tied to the embedding: serve it with another engine"
        yield Finding("error", "config", "head-lost", ", ".join(lost), text, hint)


def _classes(model: Headers) -> Iterator[Finding]:
    names = class_names(model.config)
    if not names:
        return
    inner = class_names(model.nest("text_config"))
    asked = {"SGLang": names[0], "llama.cpp": (inner or names)[0]}  # the converter asks the text model first
    unknown = {engine: name for engine, name in asked.items() if name not in classes_of(engine)}
    for engine, name in list(unknown.items()):
        other = spelled_otherwise(name, engine)
        if other:
            del unknown[engine]
            text = f"config.json says {name}, and the class is {other} in {engine}, which does not find it"
            # a name that vLLM has is that of the repository, and another one would be lost there
            severity: Severity = "warning" if name in classes_of("vLLM") or engine != "SGLang" else "error"
            everywhere = name not in classes_of("vLLM") or other in classes_of("vLLM")
            hint = f'set "architectures": ["{other}"] in config.json' if everywhere else ""
            yield Finding(severity, "config", "class-spelled", engine, text, hint)
    told = []
    if not any(name in classes_of("vLLM") for name in (names[0], *_causal(names[0]))):
        told.append("vLLM tries transformers' own model inside")
    if "SGLang" in unknown:
        told.append(f"SGLang {_in_sglang(model, names[0])}")
    if "llama.cpp" in unknown:
        told.append(f"llama.cpp's converter refuses {unknown['llama.cpp']}")
    if names[0].endswith(_CLASSIFIERS) and not any(HEADS.fullmatch(n) and "lm_head" in n for n in model.tensors):
        told.append("TGI asks for an lm_head")
    elif model.kind not in classes_of("TGI") | _TGI_CAUSAL and (
        model.nest("vision_config") or model.nest("audio_config")
    ):
        told.append(f"TGI refuses model_type {model.kind}")
    if told:
        engines = ", ".join(
            engine for engine in ("vLLM", "SGLang", "TGI", "llama.cpp") if any(engine in t for t in told)
        )
        yield Finding("note", "config", "class", engines, f"no class for this model: {'; '.join(told)}")


def _causal(name: str) -> list[str]:
    """The language models that vLLM makes a classifier of."""
    return [
        name.removesuffix(ending) + other
        for ending in _CLASSIFIERS
        if name.endswith(ending)
        for other in ("ForCausalLM", "ForConditionalGeneration")
    ]


def _in_sglang(model: Headers, name: str) -> str:
    """What SGLang does with a class that it does not have."""
    if name.endswith("ForTokenClassification"):
        return f"refuses {name}: it has no token classifier"
    if model.kind in _NOT_THROUGH_TRANSFORMERS:
        return f"refuses the names of {model.kind}: transformers' own model inside has others"
    if model.kind == "jamba":
        return "refuses it: transformers' own model cannot run inside"
    return "runs transformers' own model inside" + (" (--is-embedding)" if name.endswith(_CLASSIFIERS) else "")


def _nested(model: Headers) -> Iterator[Finding]:
    """Text models and towers inside a model that sees or hears, for which an engine has no class or other names."""
    if model.kind == "voxtral" and any(name.startswith("audio_tower.") for name in model.tensors):
        text = "vLLM reads Voxtral in Mistral's own form alone (params.json, consolidated.safetensors), not in this one"
        yield Finding("warning", "config", "voxtral", "vLLM", text)
    tower, text_model = (str(model.nest(f"{n}_config").get("model_type") or "") for n in ("vision", "text"))
    if "LlavaForConditionalGeneration" in class_names(model.config)[:1] and tower in {
        "clip_vision_model",
        "siglip_vision_model",
    }:
        text = f"SGLang has a class for the Pixtral tower of a LLaVA, and none for {tower}"
        yield Finding("warning", "config", "tower", "SGLang", text)
    if model.kind in _TGI_WITH_A_TEXT_MODEL and text_model and text_model not in _TGI_TEXT_MODELS:
        text = f"TGI's {model.kind} has no text model {text_model} (it has {', '.join(sorted(_TGI_TEXT_MODELS))})"
        yield Finding("warning", "config", "text-model", "TGI", text)


def _llama_cpp(model: Headers) -> Iterator[Finding]:
    odd = sorted({t.dtype.name for t in model.tensors.values()} - _LLAMA_CPP_DTYPES)
    if odd:
        name = next(n for n, t in model.tensors.items() if t.dtype.name == odd[0])
        text = f"llama.cpp's converter knows no tensors of type {', '.join(odd)}: {name}"
        yield Finding("warning", "config", "dtype", "llama.cpp", text)
    dense = [n for n in model.tensors if n.endswith(".mlp.up_proj.weight")]
    if model.kind == "qwen3_moe" and dense:
        text = f"llama.cpp's converter knows no layers without experts in qwen3_moe: {listed(dense)}"
        yield Finding("warning", "config", "dense-layers", "llama.cpp", text)
    biases = [name for name in model.tensors if name.endswith(".bias")]
    if model.kind in {"cohere2", "cohere2_moe"} and biases:
        text = f"llama.cpp's converter refuses the biases of {model.kind} unless they are all zero"
        text += f": {some(len(biases), 'bias')}, {listed(biases)}"
        yield Finding("warning", "config", "bias", "llama.cpp", text)
