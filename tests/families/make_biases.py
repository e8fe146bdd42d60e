"""Remake `architectures/biases.json`: which biases a setting of the config gives or takes.

    PYTHONPATH=/tmp/tf5:/tmp/tfs:. .venv/bin/python -m tests.families.make_biases /tmp/biases5.json
    PYTHONPATH=/tmp/tf4:/tmp/tfs:. .venv/bin/python -m tests.families.make_biases /tmp/biases4.json
    .venv/bin/python -m tests.families.make_biases /tmp/biases4.json /tmp/biases5.json

Inside a transformers (the first two): every model of make_parts.py is built without data, then once more for each
flag of its config and of the configs inside it. A flag that adds or takes the biases of all modules of a name, beside
weights that stay, is written down under the model_type of the config that has it, with what its class says where a
file does not. The third joins the two versions, and leaves out (and prints) what only one of those that know the
model does, or what they say by default if they differ.
"""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from merge_stream.architectures.biases import module_of
from merge_stream.errors import MergeStreamError
from tests.families.make_parts import NESTS, models, repository_shapes, run, write_table

TARGET = pathlib.Path(__file__).resolve().parents[2] / "src/merge_stream/architectures/biases.json"

Settings = dict[str, dict[str, dict[str, Any]]]
"""model_type -> key -> {"default": what the class says, "modules": those that have a bias where the key is true}."""


# ------------------------------------------------------------------------------ inside a transformers
def repository_names(model_type: str, model_class: Any, config: Any) -> frozenset[str] | None:
    try:
        shapes = repository_shapes(model_type, model_class, config)
    except MergeStreamError:  # experts without a second half, by an odd setting
        return None
    return None if shapes is None else frozenset(shapes)


def configs(config: Any) -> Iterator[tuple[str, Any]]:
    """(key, config): the whole, under "", and those inside it."""
    yield "", config
    for key in NESTS:
        inside = getattr(config, key, None)
        if hasattr(inside, "to_dict") and inside is not config:
            yield key, inside


def observe(to: pathlib.Path) -> None:
    """Write down what each flag does."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    found: Settings = {}
    for model_type, model_class, config in models():
        there = repository_names(model_type, model_class, config)
        if there is None:
            print(f"{model_type}: cannot be built")
            continue
        for nest, part in configs(config):
            if not part.model_type:
                continue
            try:
                defaults = type(part)().to_dict()
            except Exception:  # noqa: BLE001 - a config that cannot be made without settings has no defaults
                defaults = {}
            settings = found.setdefault(part.to_dict()["model_type"], {})  # as it is written: 4.57 has a Glm4vMoe_text
            for key, value in part.to_dict().items():
                if not isinstance(value, bool) or key.startswith("_"):
                    continue
                changed = copy.deepcopy(config)
                try:
                    setattr(getattr(changed, nest) if nest else changed, key, not value)
                except ValueError:  # `output_attentions` beside an attention that has none to show
                    continue
                other = repository_names(model_type, model_class, changed)
                modules = _flipped(there, other or there, more=not value)
                aliases = key in type(part).attribute_map.values()  # a file may say it by another name
                if modules and not aliases:
                    seen = settings.setdefault(key, {"default": defaults.get(key), "modules": []})
                    seen["modules"] = sorted({*seen["modules"], *modules})
                    print(f"{model_type}: {nest} {key} {sorted(modules)}", flush=True)
    to.write_text(json.dumps(found))


def _flipped(before: frozenset[str], after: frozenset[str], *, more: bool) -> set[str]:
    """Modules that have a bias only where the flag is true, beside a weight that stays."""
    true, false = (after, before) if more else (before, after)
    beside = {name.removesuffix("weight") + "bias" for name in true & false if name.endswith(".weight")}
    flipped = {bias for bias in beside if bias in true and bias not in false}
    return set(map(module_of, flipped)) - set(map(module_of, beside - flipped))


# ----------------------------------------------------------------------------------------- the file
def finish(parts: list[str]) -> None:
    """Join the versions and write the file."""
    versions: list[Settings] = [json.loads(pathlib.Path(part).read_text()) for part in parts]
    made: Settings = {}
    for model_type in sorted({kind for version in versions for kind in version}):
        known = [version[model_type] for version in versions if model_type in version]
        for key in sorted({key for settings in known for key in settings}):
            told = [settings.get(key) or {"default": None, "modules": []} for settings in known]
            modules = sorted(set.intersection(*(set(t["modules"]) for t in told)))
            if any(t["modules"] != modules for t in told):
                print(f"{model_type}: {key} is about {[t['modules'] for t in told]}: {modules} is written")
            if modules:
                default = told[0]["default"] if len({t["default"] for t in told}) == 1 else None
                made.setdefault(model_type, {})[key] = {"default": default, "modules": modules}
    write_table(TARGET, made)


if __name__ == "__main__":
    run(observe, finish)
