"""Remake `architectures/parts.json`: which parts a model of each family must have.

    PYTHONPATH=/tmp/tf5:/tmp/tfs:. .venv/bin/python -m tests.families.make_parts /tmp/seen5.json
    PYTHONPATH=/tmp/tf4:/tmp/tfs:. .venv/bin/python -m tests.families.make_parts /tmp/seen4.json
    .venv/bin/python -m tests.families.make_parts /tmp/seen4.json /tmp/seen5.json

Inside a transformers (the first two): every model of models.py and every plain text model is built
without data, then once more for each setting that could add or take parts (flags turned, what is
null given a number, numbers set to 0), and the sets of parts seen under each module are written down,
under the names of the repository. The third makes the file: parts that some setting takes away are
no duty, the smallest of the remaining sets are. The names of the goldens are added as they are. Under "*" stand all
names that were seen in a plain text model whose layers are alike.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pathlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.families import DENSE, HEADS, RECOMPUTED, UNIFORM
from merge_stream.architectures.lookup import family_of
from merge_stream.architectures.rules import convert
from merge_stream.errors import MergeStreamError

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "src/merge_stream/architectures/parts.json"
NESTS = ("text_config", "vision_config", "audio_config", "encoder_config", "decoder_config")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
COUNTS = re.compile(r"shared|lora|rank|every|interval|step|freq|dense|nextn|mtp|group|deepstack|fullatt|projection")
SMALL = {"num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4}
UNSAID = {"head_dim": 64, "num_key_value_heads": 4}
"""For classes that cannot be built from their own defaults, which leave these out."""

MASKS = ("bias", "masked_bias")
UNSEEN = {
    "opt": ["model.decoder.project_in.weight", "model.decoder.project_out.weight"],
    "gpt2": [f"transformer.h.#.attn.{name}" for name in MASKS],
    "gptj": [f"transformer.h.#.attn.{name}" for name in MASKS],
    "gpt_neox": [f"gpt_neox.layers.#.attention.{name}" for name in MASKS],
}
"""Parts that no flag adds: OPT-350m has a `word_embed_proj_dim` of its own; old repositories hold attention masks."""

Seen = dict[str, set[frozenset[str]]]


# ------------------------------------------------------------------------------ inside a transformers
def variants(config: Any) -> Iterator[Any]:
    """The config itself, and copies with one setting changed, in its nests too."""
    yield config
    for path in ((), *((nest,) for nest in NESTS)):
        part = config
        for nest in path:
            part = getattr(part, nest, None)
        if part is None or not hasattr(part, "to_dict"):
            continue
        for key, value in part.to_dict().items():
            for other in _others(key, value):
                changed = copy.deepcopy(config)
                at = changed
                for nest in path:
                    at = getattr(at, nest)
                try:
                    setattr(at, key, other)
                except Exception:  # noqa: BLE001, S112 - a setting that cannot be set is none
                    continue
                yield changed


def _others(key: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value] if key != "return_dict" else []
    if value is None:
        return [True, 8]
    if isinstance(value, int) and COUNTS.search(key):
        return [0, None, 1]
    if key == "layer_types" and isinstance(value, list):
        return [[kind] * len(value) for kind in sorted(set(value))]
    if isinstance(value, list) and COUNTS.search(key):
        return [[], None]
    return []


def names_of(model_class: Any, config: Any) -> dict[str, tuple[int, ...]] | None:
    import torch

    try:
        with torch.device("meta"):
            model = model_class(config)
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    except Exception:  # noqa: BLE001 - not every change of a config can be built
        return None


def repository_shapes(model_type: str, model_class: Any, config: Any) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of a model as the repository of its family has them; None when it cannot be built."""
    shapes = names_of(model_class, config)
    info: dict[str, Any] = {"model_type": model_type}
    nest = getattr(config, "text_config", None)
    if nest is not None and nest is not config:
        info["text_config"] = {"model_type": nest.model_type}
    family = family_of(ModelInfo(info))
    if shapes is None or family is None:
        return shapes
    found = convert(family.rules, shapes).shapes
    if "thinker" in model_type:  # saved alone it has no prefix, its repository has one
        return {name if name.startswith("thinker.") else f"thinker.{name}": shape for name, shape in found.items()}
    return dict(found)


def models() -> Iterator[tuple[str, Any, Any]]:
    """(model_type, class, config) of all that this transformers knows."""
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from tests.families.models import MODELS

    for model_class, config_class, settings in MODELS.values():
        kind, sort = getattr(transformers, model_class, None), getattr(transformers, config_class, None)
        if kind is not None and sort is not None:
            config = sort(**settings)
            yield config.model_type, kind, config
    for model_type in sorted(DENSE | {"gpt_neox"}):
        if model_type in CONFIG_MAPPING:
            sort = CONFIG_MAPPING[model_type]
            config = sort()
            with contextlib.suppress(Exception):  # some want lists of that length
                config = sort(**{k: v for k, v in SMALL.items() if k in config.to_dict() or k in sort.attribute_map})
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[sort]
            if names_of(kind, config) is None:
                for key in [key for key in UNSAID if config.to_dict().get(key, 0) is None]:
                    setattr(config, key, UNSAID[key])
            yield model_type, kind, config


def observe(to: pathlib.Path) -> None:
    """Write down what each model type shows."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    found: dict[str, Seen] = {}
    for model_type, model_class, config in models():
        seen = found.setdefault(model_type, {})
        for key in NESTS:
            part = getattr(config, key, None)
            if hasattr(part, "to_dict") and part is not config:
                for inside in filter(None, {part.model_type, part.to_dict()["model_type"]}):  # 4.57: Glm4vMoe_text
                    seen.setdefault(f"@{key}", set()).add(frozenset({inside}))
        for variant in variants(config):
            try:
                shapes = repository_shapes(model_type, model_class, variant)
            except MergeStreamError as error:  # experts without a second half, by an odd setting
                print(f"{model_type}: {error}")
                continue
            note(shapes or {}, seen)
        print(f"{model_type}: {len(seen)} modules", flush=True)
    write(to, found)


def write(to: pathlib.Path, found: dict[str, Seen]) -> None:
    plain = {kind: {path: sorted(map(sorted, sets)) for path, sets in seen.items()} for kind, seen in found.items()}
    to.write_text(json.dumps(plain))


# ----------------------------------------------------------------------------------------- the file
def note(names: Iterable[str], seen: Seen) -> None:
    """Add the children of every module of one state dict: `weight` a tensor, `mlp.` a module."""
    children: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if HEADS.fullmatch(name) or RECOMPUTED.fullmatch(name):
            continue
        *modules, last = name.split(".")
        at = ""
        for module in modules:
            children[at].add(module + ".")
            at += module + "."
        children[at].add(last)
    for module, there in children.items():
        path = NUMBER.sub("#", "." + module)[1:]
        seen.setdefault(path, set()).add(frozenset(c for c in there if not c.rstrip(".").isdigit()))


def duties(seen: Seen) -> dict[str, list[list[str]]]:
    """Give each module the smallest sets of parts, one of which it must have."""
    kinds: dict[str, list[frozenset[str]]] = {}
    for path, sets in seen.items():
        if path.startswith("@"):
            kinds[path] = sorted(sets, key=sorted)
            continue
        optional = {part for small in sets for large in sets if small < large for part in large - small}
        bare = {there - optional for there in sets}
        kinds[path] = sorted((k for k in bare if not any(other < k for other in bare)), key=sorted)

    def spelled(path: str, part: str) -> str:
        own = kinds.get(path + part)
        return part + "weight" if part.endswith(".") and own == [frozenset({"weight"})] else part

    made = {}
    for path, sets in sorted(kinds.items()):
        plain = sets == [frozenset({"weight"})] and path and not path.endswith("#.")
        if any(sets) and not plain:
            made[path] = [sorted(spelled(path, part) for part in there) for there in sets]
    return made


def all_names(seen: Seen, at: str = "") -> Iterator[str]:
    """Every name that can be put together of the parts."""
    for part in set().union(*seen.get(at, ())):
        yield from all_names(seen, at + part) if part.endswith(".") else [at + part]
    if at and at + "#." in seen:
        yield from all_names(seen, at + "#.")


def finish(parts: list[str]) -> None:
    """Join what was seen, and the goldens, and write the file."""
    found: dict[str, Seen] = {}
    for part in parts:
        for kind, modules in json.loads(pathlib.Path(part).read_text()).items():
            seen = found.setdefault(kind, {})
            for path, sets in modules.items():
                seen.setdefault(path, set()).update(map(frozenset, sets))
    for golden in sorted((HERE / "goldens").glob("*.json")):
        told = json.loads(golden.read_text())
        note(told["outputs"], found.setdefault(told["config"]["model_type"], {}))
    made = {kind: duties(seen) for kind, seen in sorted(found.items()) if seen}
    for kind in UNIFORM & made.keys():
        made[kind]["*"] = [sorted({*all_names(found[kind]), *UNSEEN.get(kind, ())})]
    write_table(TARGET, made)


def write_table(target: pathlib.Path, made: Mapping[str, Any]) -> None:
    """One line for each model type."""
    lines = [f" {json.dumps(kind)}: {json.dumps(told, separators=(',', ':'))}" for kind, told in made.items()]
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(made)} model types, {target.stat().st_size} bytes")


def run(observe: Callable[[pathlib.Path], None], finish: Callable[[list[str]], None]) -> None:
    """One file: observe, inside a transformers; several: join them."""
    if len(sys.argv) == 2:
        observe(pathlib.Path(sys.argv[1]))
    else:
        finish(sys.argv[1:])


if __name__ == "__main__":
    run(observe, finish)
