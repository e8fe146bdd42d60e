"""Biases that a setting of the config gives or takes: there where it says so, and nowhere else.

`parts.json` cannot ask for them, since a setting takes them away, and layers that all lack one look alike. A loader
would make up those that are missing and leave out those that it does not expect.

Facts: models of transformers 4.57.6, each built with the setting on and off.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.structure import layer_of
from merge_stream.architectures.tables.base import words
from merge_stream.errors import CheckpointError, IncompleteShardsError

__all__ = ["check_biases"]


@dataclass(frozen=True, slots=True)
class _Setting:
    """A key of config.json, the modules of a layer that it is about, and what it means where it is not there."""

    key: str
    modules: frozenset[str]
    default: bool = False


def _modules(at: str, names: str) -> frozenset[str]:
    return frozenset(f"{at}.{name}" for name in names.split())


_QKV = _modules("self_attn", "q_proj k_proj v_proj")
_OUT = _modules("self_attn", "o_proj")
_ATTENTION = _Setting("attention_bias", _QKV | _OUT)
_GATED_MLP = _Setting("mlp_bias", _modules("mlp", "gate_proj up_proj down_proj"))
_BY_TYPE: dict[str, tuple[_Setting, ...]] = {
    **dict.fromkeys(words("gemma gemma2 gemma3_text olmo olmo2 olmo3 olmoe qwen3 qwen3_moe"), (_ATTENTION,)),
    **dict.fromkeys(words("llama granite smollm3"), (_ATTENTION, _GATED_MLP)),
    "glm4": (_Setting("attention_bias", _QKV, default=True),),
    "glm4_moe": (_Setting("attention_bias", _QKV),),
    "gpt_neox": (_Setting("attention_bias", _modules("attention", "query_key_value dense"), default=True),),
    "gpt_oss": (_Setting("attention_bias", _QKV | _OUT, default=True),),
    "nemotron": (_ATTENTION, _Setting("mlp_bias", _modules("mlp", "up_proj down_proj"))),
    "qwen2_moe": (_Setting("qkv_bias", _QKV, default=True),),
    "seed_oss": (
        _Setting("attention_bias", _QKV, default=True),
        _Setting("attention_out_bias", _OUT),
        _GATED_MLP,
    ),
    "starcoder2": (_Setting("use_bias", _QKV | _OUT | _modules("mlp", "c_fc c_proj"), default=True),),
}


def check_biases(names: Collection[str], model: ModelInfo) -> None:
    """Compare the biases beside the weights of every layer with the config.

    `names` are those of the repository. IncompleteShardsError for biases that are missing, CheckpointError for those
    that the config denies. A model with code of its own (`auto_map`) may have others and is not asked.
    """
    config = model.config or {}
    if "auto_map" in config:
        return
    for setting in _BY_TYPE.get(model.model_type, ()):
        told = bool(config.get(setting.key, setting.default))
        beside = [_bias_of(name) for name in sorted(names) if _is_weight_of(name, setting)]
        wrong = [bias for bias in beside if (bias in names) != told]
        if not wrong:
            continue
        first = wrong[0] + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        says = "says" if setting.key in config else "has by default"
        where = f"{model.config_path or 'config.json'} {says} {setting.key} {str(told).lower()}"
        other = (
            f"set {setting.key} to {str(not told).lower()} in config.json if the model was trained so, or write the "
        )
        other += "weights alone with `--no-config`"
        if told:
            msg = f"{first} {'are' if len(wrong) > 1 else 'is'} missing: {where}"
            raise IncompleteShardsError(msg, hint=f"pass the folder that holds all shards; {other}")
        msg = f"the checkpoint holds {first}, but {where}: loaders would leave out what was trained"
        raise CheckpointError(msg, hint=other)


def _is_weight_of(name: str, setting: _Setting) -> bool:
    parts = layer_of(name)
    return parts is not None and parts[2].endswith(".weight") and parts[2].removesuffix(".weight") in setting.modules


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
