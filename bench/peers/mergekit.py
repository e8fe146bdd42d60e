"""mergekit's copy of one model (merge method `passthrough`), with `--lazy-unpickle`, from pytorch_model-*.bin.

Where it fits: mergekit reads Hugging Face models, not ranks, so both tools turn the same `torch.save` files into
safetensors.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Generator, Mapping

from bench.peers.race import OUT, Peer, Race, Size
from merge_stream.benchmark.shapes import Model, model_of
from merge_stream.benchmark.values import Values

__all__ = ["PEER"]

_FILES = 4


def _races(folder: pathlib.Path, size: Size) -> Generator[Race]:
    ckpt, recipe = folder / "model", folder / "recipe.yaml"
    _write_bins(ckpt, model_of("tiny" if size == "small" else "llama-3.6gb", scale=1.0, itemsize=4))
    recipe.write_text(f"merge_method: passthrough\nmodels:\n  - model: {ckpt}\n")
    words = (str(recipe), OUT, "--lazy-unpickle", "--no-copy-tokenizer")
    yield Race(
        f"pytorch_model.bin in {_FILES} files, fp32 kept",
        ckpt,
        ("--max-mem", "2G"),
        {"mergekit, lazy": ("mergekit-yaml", *words)},
    )


def _write_bins(folder: pathlib.Path, model: Model) -> None:
    """One file of about a quarter after the other, and their index."""
    import torch

    folder.mkdir()
    values = Values("float32")
    names = list(model.parameters)
    place: dict[str, str] = {}
    for k in range(_FILES):
        file = f"pytorch_model-{k + 1:05d}-of-{_FILES:05d}.bin"
        mine = names[k * len(names) // _FILES : (k + 1) * len(names) // _FILES]
        shapes: Mapping[str, tuple[int, ...]] = {name: model.parameters[name] for name in mine}
        state = {
            name: torch.from_numpy(values.whole(name, shape).view("f4")).view(shape) for name, shape in shapes.items()
        }
        torch.save(state, folder / file)
        place |= dict.fromkeys(mine, file)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {"total_size": model.elements * 4}, "weight_map": place})
    )
    (folder / "config.json").write_text(json.dumps({**model.config, "torch_dtype": "float32"}, indent=2) + "\n")


PEER = Peer("mergekit", (("mergekit==0.1.5",),), "import mergekit.scripts.run_yaml", _races)
