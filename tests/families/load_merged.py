"""Do merged models load? The nightly check: dump in one transformers, merge, load in both.

    .venv/bin/python -m tests.families.load_merged --tf5 /tmp/tf5 --tf4 /tmp/tf4 --more /tmp/tfs [NAME ...]

For each tiny model of models.py and each of the two versions as the trainer's: its state
dict is written under the names of its memory, merged by the tool, and loaded by both
versions. Loading must miss nothing and find nothing unexpected; every tensor must be the
trainer's (same version) and the logits equal (both). Prints one line for each family.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def ids() -> Any:
    import torch

    return torch.tensor([[1, 5, 9, 17, 23, 42, 3, 11]])


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=ids()).logits.float()


def dump(work: pathlib.Path, names: list[str]) -> None:
    """Stage 1, inside one transformers: the trainer's state dict, its config and its logits."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from tests.families.models import MODELS, build

    for name in names:
        folder = work / name / "ckpt"
        try:
            model = build(name)
        except Exception as error:  # noqa: BLE001 - a family that this version cannot build is reported, not fatal
            (work / name).mkdir(parents=True, exist_ok=True)
            here = hasattr(transformers, MODELS[name][0]) and hasattr(transformers, MODELS[name][1])
            text = f"BAD {type(error).__name__}: {error}"[:200] if here else "unknown to this version"
            (work / name / "failed").write_text(text)
            continue
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(1)
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
        save_file({n: t.contiguous().clone() for n, t in model.state_dict().items()}, folder / "model.safetensors")
        model.config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
        try:
            torch.save(logits(model), work / name / "logits.pt")
        except Exception as error:  # noqa: BLE001 - some tiny models cannot run; their tensors are compared all the same
            (work / name / "no_logits").write_text(f"{type(error).__name__}: {error}"[:200])


def load(work: pathlib.Path, names: list[str], *, same: bool) -> None:
    """Stage 3, inside one transformers: load the merged folder, compare; a word for each model on stdout."""
    import torch
    import transformers
    from safetensors.torch import load_file

    from tests.families.models import MODELS

    transformers.utils.logging.set_verbosity_error()
    for name in names:
        merged = work / name / "merged"
        if not merged.exists():
            continue
        model_class, config_class, settings = MODELS[name]
        kind = getattr(transformers, model_class, None)
        if kind is None or not hasattr(transformers, config_class):
            print(json.dumps([name, "unknown"]))
            continue
        try:
            config = getattr(transformers, config_class)(**settings)
            model, told = kind.from_pretrained(merged, config=config, output_loading_info=True, dtype=torch.float32)
            bad = {k: sorted(told[k])[:3] for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if told[k]}
            word = "ok" if not bad else f"BAD {bad}"
            if same and not bad:
                want = load_file(work / name / "ckpt/model.safetensors")
                differ = [n for n, t in model.state_dict().items() if n not in want or not torch.equal(t, want[n])]
                word = f"BAD tensors {differ[:3]}" if differ else "ok, tensors equal"
            reference = work / name / "logits.pt"
            if reference.exists() and not word.startswith("BAD"):
                word += _compared(model.eval(), torch.load(reference))
        except Exception as error:  # noqa: BLE001 - one line for each family, whatever happens in it
            word = f"BAD {type(error).__name__}: {str(error)[:160]}"
        print(json.dumps([name, word]))


def _compared(model: Any, reference: Any) -> str:
    try:
        got = logits(model)
    except Exception as error:  # noqa: BLE001 - Llama4's forward without an image fails in 5.24 itself
        return f", does not run here ({type(error).__name__})"
    off = float((got - reference).abs().max())
    if off >= 1e-4:
        return f" BAD logits {off}"
    return f", logits {'equal' if off == 0 else f'within {off:.0e}'}"


def run(path: list[str], *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": ":".join([*path, str(ROOT)]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.families.load_merged", *arguments]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(ended.stderr[-2000:], file=sys.stderr)
    return ended.stdout


def merge(work: pathlib.Path, names: list[str]) -> None:
    """Stage 2: the tool itself."""
    from merge_stream.__main__ import main as tool

    for name in names:
        if (work / name / "ckpt").exists():
            sys.argv = ["merge-stream", "merge", str(work / name / "ckpt"), str(work / name / "merged"), "--quiet"]
            try:
                tool()
            except SystemExit as ended:
                if ended.code:
                    (work / name / "failed").write_text(f"BAD merge ended with {ended.code}")


def main() -> None:
    """All stages for both versions."""
    from tests.families.models import MODELS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--tf5")
    parser.add_argument("--tf4")
    parser.add_argument("--more", default="")
    parser.add_argument("--work", help="a folder that may be emptied; default: a fresh one")
    parser.add_argument("--stage", choices=["all", "dump", "load", "load-same"], default="all")
    options = parser.parse_args()
    work, names = pathlib.Path(options.work or tempfile.mkdtemp()), options.names or list(MODELS)
    if options.stage == "dump":
        dump(work, names)
    elif options.stage != "all":
        load(work, names, same=options.stage == "load-same")
    else:
        shutil.rmtree(work, ignore_errors=True)
        table: dict[str, dict[str, str]] = {name: {} for name in names}
        paths = {"5": [options.tf5, options.more], "4": [options.tf4, options.more]}
        for trainer in ("4", "5"):
            at = work / trainer
            run(paths[trainer], "--stage", "dump", "--work", str(at), *names)
            merge(at, names)
            for loader in ("4", "5"):
                stage = "load-same" if loader == trainer else "load"
                for line in run(paths[loader], "--stage", stage, "--work", str(at), *names).splitlines():
                    if line.startswith("["):
                        name, word = json.loads(line)
                        table[name][f"{trainer} in {loader}"] = word
            for name in names:
                if (at / name / "failed").exists():
                    table[name][f"{trainer}"] = (at / name / "failed").read_text()
        for name, row in table.items():
            if len([word for word in row.values() if word.startswith("ok")]) == 0:
                row["loaded"] = "BAD by none"
            print(name, *(f"[{k}: {v}]" for k, v in row.items()), flush=True)
        sys.exit(any("BAD" in word for row in table.values() for word in row.values()))


if __name__ == "__main__":
    main()
