"""Is every whole model accepted? The nightly check of the rules that refuse incomplete ones.

    PYTHONPATH=/tmp/tf5:/tmp/tfs:. .venv/bin/python -m tests.nightly.accepted

Inside a transformers: each model of make_parts.py (those of models.py, and plain text models by their own defaults) is
built without data; its names and shapes, as the repository has them, with the config as `save_pretrained` writes it,
must pass what a merge asks of them: layers, sizes, experts, biases, parts, no other names. Prints those that do not.
"""

from __future__ import annotations

import json
import sys

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.biases import check_biases
from merge_stream.architectures.parts import check_parts, strange_names
from merge_stream.architectures.structure import check_structure
from merge_stream.errors import MergeStreamError
from tests.families.make_parts import models, repository_shapes

EXPECTED = {"longcat_flash": "are not the two halves of the same experts"}
"""5.24 cannot load one of this size itself (docs/architectures.md)."""


def main() -> None:
    """Exit code 1 when a whole model is refused, or its family is not known."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    wrong = built = 0
    for model_type, model_class, config in models():
        written = json.loads(config.to_json_string()) | {"architectures": [model_class.__name__]}
        model = ModelInfo(written, "config.json")
        try:
            shapes = repository_shapes(model_type, model_class, config)
            if shapes is None:
                print(f"{model_type}: cannot be built")
                continue
            check_biases(shapes, model)
            strange = [f"{name} is strange" for name in strange_names(shapes, model)]
            told = [*check_structure(shapes, model), *check_parts(shapes, model), *strange]
        except MergeStreamError as error:
            told = [] if EXPECTED.get(model_type, "no") in error.message else [error.message]
        built += 1
        for text in told:
            wrong += 1
            print(f"BAD {model_type}: {text}")
    print(f"{wrong} wrong words about {built} whole models, transformers {transformers.__version__}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
