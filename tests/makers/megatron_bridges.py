r"""Small models as Megatron-Bridge and mbridge load them: their own code turns numbered tensors into Megatron's.

    pip install --target SITE --no-deps --ignore-requires-python megatron-bridge==0.6.2 mbridge==0.15.1 \
        transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2 regex filelock fsspec pyyaml packaging \
        requests tqdm
    PYTHONPATH=SITE:. .venv/bin/python -m tests.makers.megatron_bridges SITE [FAMILY ...]

SITE is a folder of yours. Megatron-Bridge asks for Python 3.12 from 0.4 on; what is used of it here runs on 3.11. Other
families' files stay as they are when FAMILY is given.

Names, shapes and configs of a model are those of transformers 4.57.6; what its classes lack (layers of multi-token
prediction, MiMo) is added here from the published repositories. Megatron itself is not installed: its modules are empty
stand-ins, and of tensor parallelism (one rank) nothing is left to do. So the tables of names and all merging of
rows are the projects' own, and nothing of merge-stream is imported.

The result, tests/data/megatron_bridges/FAMILY.BRIDGE.json: `hf` name -> [first number, shape], `megatron` name ->
[shape, numbers as base64 of zlib of int32 differences], `also` further Megatron names that the table accepts for the
same.
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import pathlib
import re
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

HERE = pathlib.Path(__file__).resolve().parents[1] / "data" / "megatron_bridges"
Tensors = dict[str, torch.Tensor]
VERSIONS = {
    "megatron-bridge": "Megatron-Bridge 0.6.2",
    "mbridge": "mbridge 0.15.1",
    "transformers": "transformers 4.57.6",
}

DENSE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPARSE = DENSE | {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LATENT = {
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 16,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "type": "default"}

# family: class of transformers, settings, module and class of Megatron-Bridge, module and class of mbridge
FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "llama": ("Llama", DENSE, "llama.llama_bridge:LlamaBridge", "llama:LLaMABridge"),
    "mistral": ("Mistral", DENSE, "mistral.mistral_bridge:MistralBridge", ""),
    "qwen2": ("Qwen2", DENSE, "qwen.qwen2_bridge:Qwen2Bridge", "qwen2:Qwen2Bridge"),
    "qwen3": ("Qwen3", DENSE, "qwen.qwen3_bridge:Qwen3Bridge", "qwen3:Qwen3Bridge"),
    "gemma": ("Gemma", DENSE | {"tie_word_embeddings": True}, "gemma.gemma_bridge:GemmaBridge", ""),
    "gemma2": ("Gemma2", DENSE | {"tie_word_embeddings": True}, "gemma.gemma2_bridge:Gemma2Bridge", ""),
    "gemma3_text": (
        "Gemma3",
        DENSE | {"tie_word_embeddings": True},
        "gemma.gemma3_bridge:Gemma3ModelBridge",
        "",
    ),
    "nemotron": ("Nemotron", DENSE, "nemotron.nemotron_bridge:NemotronBridge", ""),
    "mimo": ("Qwen2", DENSE | {"num_nextn_predict_layers": 1}, "mimo.mimo_bridge:MimoBridge", "mimo:MimoBridge"),
    "mixtral": ("Mixtral", SPARSE, "", "mixtral:MixtralBridge"),
    "qwen2_moe": ("Qwen2Moe", SPARSE, "", "qwen2moe:Qwen2MoEBridge"),
    "qwen3_moe": ("Qwen3Moe", SPARSE, "qwen.qwen3_moe_bridge:Qwen3MoEBridge", "qwen3moe:Qwen3MoEBridge"),
    "olmoe": (
        "Olmoe",
        SPARSE | {"intermediate_size": 8, "num_key_value_heads": 4},
        "olmoe.olmoe_bridge:OlMoEBridge",
        "",
    ),
    "qwen3_next": (
        "Qwen3Next",
        SPARSE
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 3,
            "linear_value_head_dim": 5,
            "num_nextn_predict_layers": 1,
        },
        "qwen.qwen3_next_bridge:Qwen3NextBridge",
        "",
    ),
    "gpt_oss": (
        "GptOss",
        SPARSE | {"intermediate_size": 6, "layer_types": ["sliding_attention", "full_attention"]},
        "gpt_oss.gpt_oss_bridge:GPTOSSBridge",
        "",
    ),
    "deepseek_v2": ("DeepseekV2", SPARSE | LATENT, "deepseek.deepseek_v2_bridge:DeepSeekV2Bridge", ""),
    "deepseek_v3": (
        "DeepseekV3",
        SPARSE | LATENT | {"num_nextn_predict_layers": 1},
        "deepseek.deepseek_v3_bridge:DeepSeekV3Bridge",
        "deepseek_v3:DeepseekV3Bridge",
    ),
    "kimi_k2": ("DeepseekV3", SPARSE | LATENT, "kimi.kimi_bridge:KimiK2Bridge", ""),
    "glm4_moe": (
        "Glm4Moe",
        SPARSE
        | {
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
        },
        "glm.glm45_bridge:GLM45Bridge",
        "glm4moe:GLM4MoEBridge",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "text_config": DENSE | {"rope_scaling": ROPE},
            "vision_config": VISION | {"fullatt_block_indexes": [1]},
            **DENSE,
            "rope_scaling": ROPE,
        },
        "qwen_vl.qwen25_vl_bridge:Qwen25VLBridge",
        "qwen2_5_vl:Qwen2_5VLBridge",
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": DENSE | {"rope_scaling": ROPE},
            "vision_config": VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
            "tie_word_embeddings": False,
        },
        "qwen_vl.qwen3_vl_bridge:Qwen3VLBridge",
        "",
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "text_config": SPARSE | {"rope_scaling": ROPE, "moe_intermediate_size": 6},
            "vision_config": VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            "tie_word_embeddings": False,
        },
        "qwen_vl.qwen3_vl_bridge:Qwen3VLMoEBridge",
        "",
    ),
    "minimax_m2": (
        "MiniMaxM2",
        SPARSE | {"intermediate_size": 8, "num_key_value_heads": 4},
        "minimax_m2.minimax_m2_bridge:MiniMaxM2Bridge",
        "",
    ),
}
# Families that neither project has: names and shapes alone, the Megatron side is written by hand in the test.
FAMILIES |= {
    "phi3": ("Phi3", DENSE, "", ""),
    "seed_oss": ("SeedOss", DENSE | {"attention_bias": True, "attention_out_bias": False}, "", ""),
    "glm4": ("Glm4", DENSE | {"attention_bias": True}, "", ""),
    "gpt_neox": ("GPTNeoX", DENSE | {"num_key_value_heads": 4}, "", ""),
    "starcoder2": ("Starcoder2", DENSE | {"tie_word_embeddings": True}, "", ""),
}


# ------------------------------------------------------------------------------------------ models by transformers


def model_of(family: str) -> tuple[dict[str, Any], Tensors]:
    """config.json and numbered tensors under the names of the published repository."""
    kind, settings, _, _ = FAMILIES[family]
    if family == "minimax_m2":  # not in 4.57: Mixtral with norms over all heads, sigmoid scores and their bias
        config, shapes = _built("Mixtral", settings)
        config |= {"model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "use_qk_norm": True}
        for layer in range(2):
            at = f"model.layers.{layer}"
            shapes |= {f"{at}.self_attn.q_norm.weight": (16,), f"{at}.self_attn.k_norm.weight": (16,)}
            shapes[f"{at}.block_sparse_moe.e_score_correction_bias"] = (4,)
    else:
        config, shapes = _built(kind, settings)
    shapes = {_published(family, name): shape for name, shape in shapes.items()}
    if family == "mimo":
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        shapes |= {_moved(n, "model.layers.1", "model.mtp_layers.0"): s for n, s in shapes.items() if ".layers.1." in n}
        shapes |= {f"model.mtp_layers.0.{x}_layernorm.weight": (16,) for x in ("token", "hidden", "final")}
        shapes["model.mtp_layers.0.input_proj.weight"] = (16, 32)
    if family == "kimi_k2":
        config |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    if family in {"deepseek_v3", "glm4_moe"}:
        shapes |= {_moved(n, "model.layers.1", "model.layers.2"): s for n, s in shapes.items() if ".layers.1." in n}
        shapes |= {f"model.layers.2.{x}.weight": (16,) for x in ("enorm", "hnorm", "shared_head.norm")}
        shapes["model.layers.2.eh_proj.weight"] = (16, 32)
    if family == "qwen3_next":
        shapes |= {_moved(n, "model.layers.1", "mtp.layers.0"): s for n, s in shapes.items() if ".layers.1." in n}
        shapes |= {f"mtp.{x}.weight": (16,) for x in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        shapes["mtp.fc.weight"] = (16, 32)
    tensors, at = {}, 0
    for name, shape in shapes.items():
        count = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(at, at + count, dtype=torch.float64).reshape(tuple(shape))
        at += count
    assert at < 1 << 24  # every number is exact in fp32
    return config, tensors


def _built(kind: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    import transformers

    texts = {"Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig")}
    vision = "VL" in kind
    tail = "ForConditionalGeneration" if vision else "ForCausalLM"
    model_class, config_class = texts.get(kind, (f"{kind}{tail}", f"{kind}Config"))
    config = getattr(transformers, config_class)(**settings)
    config.architectures = [model_class]
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    written = json.loads(json.dumps(config.to_dict(), default=str))
    return written | {"torch_dtype": "float32", "dtype": "float32"}, shapes


def _published(family: str, name: str) -> str:
    if family == "qwen2_5_vl":
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return name


def _moved(name: str, here: str, there: str) -> str:
    return name.replace(f"{here}.", f"{there}.")


# ------------------------------------------------------------------------------------------ modules that are not there


def _nothing(self: object, *args: object, **more: object) -> None:
    del self, args, more


class _Kind(type):
    """Of empty classes: every attribute of theirs is one more."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (), {"__init__": _nothing})


class _Empty(types.ModuleType):
    """A module whose every attribute is an empty class."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Kind(name, (), {"__init__": _nothing})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for all of Megatron but the conversion of weights, and for whatever else is not installed."""

    real = re.compile(
        r"megatron\.bridge\.models\.(conversion(\.(?!auto_bridge|peft_bridge|quant_bridge).*)?|\w+\.\w+_bridge"
        r"|gemma\.gemma\d?_bridge|deepseek\.common|glm\.\w+|decorators.*)|megatron\.bridge\.utils\.(common_utils|fusions"
        r"|activation_map)|mbridge\.(core.*|models\.\w+|utils.*)"
    )
    packages = re.compile(r"megatron(\.bridge(\.(models(\.[a-z_0-9]+)?|utils))?)?|mbridge(\.models)?")

    def __init__(self, site: pathlib.Path) -> None:
        self._site = site

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        del path, target
        place = self._site / name.replace(".", "/")
        if self.packages.fullmatch(name) and place.is_dir() and name != "megatron.bridge.models.conversion":
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        if self.real.fullmatch(name) and (place.is_dir() or place.with_suffix(".py").exists()):
            return None
        if name.split(".", 1)[0] in {"megatron", "mbridge", "modelopt", "transformer_engine", "nvidia", "triton"}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Empty(spec.name)
        if spec.submodule_search_locations:
            module.__path__ = list(spec.submodule_search_locations)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


# ------------------------------------------------------------------------------------------ the two bridges


def sizes_of(config: Mapping[str, Any], *, vision: bool = False) -> types.SimpleNamespace:
    """What Megatron's config says of a decoder, or of a vision tower."""
    text = config.get("text_config") or config
    if vision:
        tower = config["vision_config"]
        heads = tower["num_heads"]
        width = tower["hidden_size"] // heads
        return types.SimpleNamespace(
            num_attention_heads=heads, num_query_groups=heads, kv_channels=width, hidden_size=tower["hidden_size"]
        )
    made = {key: value for key, value in text.items() if key.startswith("linear_")}
    return types.SimpleNamespace(
        num_attention_heads=text["num_attention_heads"],
        num_query_groups=text["num_key_value_heads"],
        kv_channels=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        hidden_size=text["hidden_size"],
        attention_output_gate=text["model_type"] == "qwen3_next",
        **made,
    )


def by_megatron_bridge(
    module: str, config: Mapping[str, Any], tensors: Tensors
) -> tuple[Tensors, dict[str, list[str]]]:
    """Megatron's tensors, and further names for the same repository names."""
    mappings: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    _single_rank(mappings)
    file, _, name = module.partition(":")
    loaded: Any = importlib.import_module(f"megatron.bridge.models.{file}")
    bridge_class = getattr(loaded, name)
    text = config.get("text_config") or config
    fused = (2 * (text.get("moe_intermediate_size") or text["intermediate_size"]), text["hidden_size"])
    if name == "GPTOSSBridge":
        fused = (2 * text["intermediate_size"], text["hidden_size"])
    loaded.get_module_and_param_from_name = mappings.get_module_and_param_from_name = lambda module, name: (
        module,
        torch.empty(fused if ".weight" in name else fused[:1]),
    )
    bridge = object.__new__(bridge_class)
    namespace = _attributes(config)
    bridge.hf_config = namespace
    source = types.SimpleNamespace(
        has_glob=lambda glob: bool(fnmatch.filter(tensors, glob)), get_all_keys=lambda: list(tensors)
    )
    bridge.hf_pretrained = types.SimpleNamespace(config=namespace, state=types.SimpleNamespace(source=source))
    made: Tensors = {}
    also: dict[str, list[str]] = {}
    for mapping in bridge.mapping_registry().mappings:
        for one, found in _matches(mapping, tensors, config):
            target = str(one.megatron_param)
            layer = re.search(r"decoder\.layers\.(\d+)", target)
            if layer and ".visual." not in next(iter(found.values())) and int(layer[1]) >= text["num_hidden_layers"]:
                continue  # layers of multi-token prediction, which the repository numbers on
            known = also.setdefault(" ".join(found.values()), [])
            if target in known or target in made or target.startswith("mtp.final_layernorm"):  # a name of no module
                continue
            known.append(target)
            if isinstance(one.hf_param, str):
                given = bridge.maybe_modify_loaded_hf_weight(one.hf_param, tensors)
                if getattr(one, "transpose_on_export", False):  # what it writes; it reads transformers' own way round
                    given = given.transpose(-1, -2)
            else:
                given = {key: tensors[value] for key, value in found.items()}
            vision = target.startswith("vision_model")
            holder = torch.nn.Module()
            holder.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.float64))
            holder.config = sizes_of(config, vision=vision)  # type: ignore[assignment]
            result = one.hf_to_megatron(given, holder)
            if re.sub(r"\d+$", "", target) == re.sub(
                r"\d+$", "", known[0]
            ):  # the same, or another expert of one tensor
                made[target] = result
    lost = tensors.keys() - {name for key in also for name in key.split()}
    if lost:
        print(f"  Megatron-Bridge has no {sorted(lost)}")
    return made, {key: names for key, names in also.items() if len(names) > 1}


def _single_rank(mappings: Any) -> None:
    """One rank: what is distributed over tensor-parallel ranks is the tensor itself."""
    for name in ("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping", "DirectMapping"):
        getattr(mappings, name).hf_to_megatron = lambda self, weights, module: (  # noqa: ARG005
            weights.permute(self.permute_dims) if getattr(self, "permute_dims", None) else weights
        )
    base = mappings.MegatronParamMapping
    for name, value in {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "ep_rank": 0, "ep_size": 1}.items():
        setattr(base, name, property(functools.partial(_given, value=value)))
    base.__init__.__globals__["parallel_state"] = None
    mappings.mpu = types.SimpleNamespace(is_initialized=lambda: False)


def _given(mapping: object, *, value: int) -> int:
    del mapping
    return value


def _matches(mapping: Any, tensors: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, str]]]:
    """The mapping for each layer (and expert) that the model has, with the repository names it reads."""
    patterns = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
    first = next(iter(patterns.values()))
    holes = mapping.megatron_param.count("**") or mapping.megatron_param.count("*")
    regex = re.escape(first).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d+)")
    for name in tensors:
        match = re.fullmatch(regex, name)
        if match is None:
            continue
        rows = [match.groups()]
        if holes == len(match.groups()) + 1:  # experts that the repository keeps in one tensor
            rows = [(*match.groups(), str(e)) for e in range(len(tensors[name]))]
        for captures in rows:
            one = mapping.resolve(captures)
            found = one.hf_param if isinstance(one.hf_param, dict) else {"": one.hf_param}
            if all(value in tensors for value in found.values()):
                yield one, dict(found)


def _attributes(config: Mapping[str, Any]) -> Any:
    class Attributes(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None

    return Attributes({key: _attributes(value) if isinstance(value, dict) else value for key, value in config.items()})


def mbridge_of(module: str, config: Mapping[str, Any]) -> Any:
    """A bridge of mbridge without a model behind it."""
    file, _, name = module.partition(":")
    package: Any = importlib.import_module("mbridge.models")
    for other, kind in (("qwen2", "Qwen2Bridge"), ("qwen2moe", "Qwen2MoEBridge")):
        setattr(package, kind, getattr(importlib.import_module(f"mbridge.models.{other}"), kind))
    bridge_class = getattr(importlib.import_module(f"mbridge.models.{file}"), name)
    bridge = object.__new__(bridge_class)
    namespace = _attributes(config)
    bridge.hf_config = namespace
    text = namespace.get("text_config") or namespace
    bridge.config = types.SimpleNamespace(
        num_layers=61 if "deepseek" in module else text["num_hidden_layers"],  # the only size with MTP that it takes
        mtp_num_layers=1,
        num_attention_heads=text["num_attention_heads"],
        num_moe_experts=4,
        layernorm_zero_centered_gamma=False,
    )
    bridge.make_vocab_size_divisible_by = None
    return bridge


def by_mbridge(module: str, config: Mapping[str, Any], tensors: Tensors, names: list[str]) -> Tensors:
    """It asks by Megatron's name: for which of the repository it stands, and what becomes of them."""
    bridge = mbridge_of(module, config)
    made: Tensors = {}
    used: set[str] = set()
    for name in names:
        target = name.replace("mtp_model_layer", "transformer_layer")
        try:
            wanted = bridge._weight_name_mapping_mcore_to_hf(target)
        except (NotImplementedError, AssertionError, KeyError):
            continue
        wanted = [one.replace("model.layers.61.", "model.layers.2.") for one in wanted]
        if used.isdisjoint(wanted) and all(one in tensors for one in wanted):
            used |= set(wanted)
            made[target] = bridge._weight_to_mcore_format(target, [tensors[one] for one in wanted])
    if lost := tensors.keys() - used:
        print(f"  mbridge has no {sorted(lost)}")
    return made


def names_for_mbridge(config: Mapping[str, Any]) -> list[str]:
    """Megatron's names of a dense or sparse decoder with grouped experts, with Transformer Engine."""
    made = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    for layer in range(2):
        at = f"decoder.layers.{layer}"
        made += [f"{at}.self_attention.{x}" for x in ("linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight")]
        made += [f"{at}.self_attention.linear_qkv.layer_norm_weight", f"{at}.pre_mlp_layernorm.weight"]
        made += [f"{at}.mlp.router.weight"]
        made += [f"{at}.mlp.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(4)]
        if config["model_type"] == "qwen2_moe":
            made += [f"{at}.mlp.shared_experts.{x}" for x in ("linear_fc1.weight", "linear_fc2.weight", "gate_weight")]
    return [name for name in made if config["model_type"] == "qwen2_moe" or not name.endswith("qkv.bias")]


def names_of_mbridge(module: str) -> list[str]:
    """The names that its tables have, for two layers."""
    file, _, name = module.partition(":")
    kind = getattr(importlib.import_module(f"mbridge.models.{file}"), name)
    tables = [*kind._DIRECT_MAPPING, *kind._ATTENTION_MAPPING, *kind._MLP_MAPPING]
    return [key.replace("{layer_number}", str(layer)) for key in tables for layer in (0, 1)]


def packed(tensor: torch.Tensor) -> list[Any]:
    numbers = tensor.to(torch.int64).flatten().numpy()
    assert (numbers == tensor.flatten().numpy()).all()
    differences = np.diff(numbers, prepend=0).astype("<i4")
    return [list(tensor.shape), base64.b64encode(zlib.compress(differences.tobytes(), 9)).decode()]


def write(  # noqa: PLR0917 - a document
    family: str, bridge: str, config: Mapping[str, Any], tensors: Tensors, made: Tensors, also: Any
) -> None:
    HERE.mkdir(parents=True, exist_ok=True)
    document = {
        "made by": VERSIONS[bridge],
        "config": config,
        "hf": {name: [int(tensor.flatten()[0]), list(tensor.shape)] for name, tensor in tensors.items()},
        "megatron": {name: packed(tensor) for name, tensor in made.items()},
        "also": also,
    }
    (HERE / f"{family}.{bridge}.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")


def main() -> None:
    site, *wanted = sys.argv[1:]
    models = {family: model_of(family) for family in wanted or FAMILIES}  # before the empty modules are there
    sys.meta_path.insert(0, _Finder(pathlib.Path(site)))
    for family, (config, tensors) in models.items():
        _, _, theirs, mbridge = FAMILIES[family]
        made: Tensors = {}
        also: dict[str, list[str]] = {}
        if theirs:
            made, also = by_megatron_bridge(theirs, config, tensors)
            used = {name for key in also for name in key.split()}
            write(family, "megatron-bridge", config, tensors, made, also)
            print(family, len(tensors), "->", len(made), len(used))
        if mbridge:
            every = [name for names in also.values() for name in names] if theirs else []
            if family == "qwen2_5_vl":  # its vision tower is one of Megatron's own, Megatron-Bridge's is transformers'
                every = names_of_mbridge(mbridge)
            names = [*made, *every] if made else names_for_mbridge(config)
            made_too = by_mbridge(mbridge, config, tensors, names)
            write(family, "mbridge", config, tensors, made_too, {})
            print(family, "mbridge", len(made_too))
        if not theirs and not mbridge:
            write(family, "transformers", config, tensors, {}, {})


if __name__ == "__main__":
    main()
