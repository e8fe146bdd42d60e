"""Names of a DeepSpeed PipelineModule: layers have numbers, and the config tells what they are.

    0.weight [V, H]                        model.embed_tokens.weight
    1.self_attn.q_proj.weight ...          model.layers.0.self_attn.q_proj.weight ...
    2. ...                                 model.layers.1. ...
    3.weight [H]                           model.norm.weight
    4.weight [V, H]                        lm_head.weight
    tied_modules.KEY.weight [V, H]         model.embed_tokens.weight, where the config ties the head

That is how a transformers decoder is put into a pipeline: embedding, the decoder layers themselves, norm, head.
Layers without parameters have numbers too. Whatever does not fit is refused, and `--rules` decides. The names
within the layers are those of transformers, so the rest is that member's work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as MappingABC
from dataclasses import replace

from merge_stream.architectures.base import ModelInfo, Named
from merge_stream.architectures.hugging_face import HuggingFace
from merge_stream.architectures.structure import text_value
from merge_stream.errors import UnsupportedError
from merge_stream.options import LayoutName
from merge_stream.tensors.parameter import Mapping, Parameter
from merge_stream.tensors.ref import Catalog
from merge_stream.units import counted

__all__ = ["MEMBER", "DeepSpeedPipeline"]

_NUMBERED = re.compile(r"(\d+)\.(.+)")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
_HINT = "--rules FILE.toml says what the layers are; --layout as-is writes the tensors under the trainer's names"
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens", "model.norm", "lm_head"
Ints = tuple[int, ...]


class DeepSpeedPipeline:
    """Numbered layers of a transformers decoder."""

    name = "deepspeed_pipeline"

    def claims(self, catalog: Catalog, model: ModelInfo) -> bool:
        """Responsible when the format found a pipeline's names."""
        del model
        return catalog.naming == self.name

    def parameters(self, catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Mapping:
        """What transformers calls the layers; UnsupportedError when their order does not tell."""
        member = HuggingFace()
        if layout == "as-is":
            return member.parameters(catalog, model, layout)
        names = _names({name: tensor.shape for name, tensor in catalog.tensors.items()}, model)
        source = {new: old for old, new in names.items()}
        tensors = {new: catalog.tensors[old] for new, old in source.items()}
        named = member.parameters(replace(catalog, tensors=tensors, naming="hf"), model, layout)
        note = f"{counted(len(names), 'name')} of pipeline layers mapped by their order and config.json"
        return Named(
            f"{self.name}, {named.architecture}",
            tuple(_from(parameter, source) for parameter in named.parameters),
            named.ties,
            (note, *named.notes),
            {source[name]: reason for name, reason in named.dropped.items()},
        )


MEMBER = DeepSpeedPipeline()


def _from(parameter: Parameter, source: MappingABC[str, str]) -> Parameter:
    return replace(parameter, takes=tuple(replace(take, source=source[take.source]) for take in parameter.takes))


def _names(shapes: MappingABC[str, Ints], model: ModelInfo) -> dict[str, str]:
    """Pipeline name -> name of the transformers module."""
    count = text_value(model.config, "num_hidden_layers")
    if count is None:
        msg = "the layers of a pipeline have numbers, and no config.json tells how many of them are decoder layers"
        raise UnsupportedError(msg, hint=f"pass --base-model DIR; {_HINT}")
    layers: dict[int, dict[str, Ints]] = {}
    tied: dict[str, dict[str, Ints]] = {}
    for name, shape in shapes.items():
        if match := _NUMBERED.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = shape
        elif match := _TIED.fullmatch(name):
            tied.setdefault(match[1], {})[match[2]] = shape
        else:
            raise UnsupportedError(f"{name} is no name of a pipeline layer", hint=_HINT)
    blocks = sorted(number for number, parts in layers.items() if len(parts) > 2)
    if len(blocks) != count:
        msg = f"{len(blocks)} layers of the pipeline have more than two tensors, config.json has {count} decoder layers"
        raise UnsupportedError(msg, hint=_HINT)
    names = {
        f"{number}.{part}": f"model.layers.{k}.{part}" for k, number in enumerate(blocks) for part in layers[number]
    }
    for number in sorted(set(layers) - set(blocks)):
        target = _role(layers[number], before=number < blocks[0])
        if target is None or any(name.startswith(f"{target}.") for name in names.values()):
            what = ", ".join(f"{number}.{part} {list(shape)}" for part, shape in layers[number].items())
            raise UnsupportedError(f"what {what} is cannot be told", hint=_HINT)
        names |= {f"{number}.{part}": f"{target}.{part}" for part in layers[number]}
    for key, parts in tied.items():
        ties = (model.config or {}).get("tie_word_embeddings") is True
        taken = any(name.startswith(f"{_EMBEDDING}.") for name in names.values())
        if set(parts) != {"weight"} or len(parts["weight"]) != 2 or not ties or taken:
            msg = f"what tied_modules.{key} ({', '.join(parts)}) is cannot be told"
            raise UnsupportedError(msg, hint=f"config.json says tie_word_embeddings {ties}; {_HINT}")
        names[f"tied_modules.{key}.weight"] = f"{_EMBEDDING}.weight"
    return names


def _role(parts: MappingABC[str, Ints], *, before: bool) -> str | None:
    """The module of a small layer: a matrix is the embedding or the head, a vector the norm."""
    dims = {len(shape) for shape in parts.values()}
    if "weight" not in parts or not set(parts) <= {"weight", "bias"}:
        return None
    if len(parts["weight"]) == 2:
        return _EMBEDDING if before and len(parts) == 1 else _HEAD if not before else None
    return _NORM if dims == {1} and not before else None
