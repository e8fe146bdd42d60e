"""Does the real vLLM run what is quantized? The schemes that its CPU build has kernels for, of a tiny Llama.

    .venv/bin/python -m tests.nightly.vllm_quantized --python VLLM/bin/python --trainer FOLDER[:FOLDER] [SCHEME ...]

Log-probabilities of a prompt from the quantized folder, beside those of a plain folder that holds codes x scales,
both in vLLM. Engines round activations too in most schemes, so they are near, not equal: much nearer than what
exchanging two projections of one layer changes. Prints a line for each scheme; the exit code is 1 when any is far.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile

from tests.nightly.vllm_cpu import PROMPT, SETTINGS, generate, last_line, stage

SCHEMES = ("fp8-dynamic", "int8", "int4")
IN_BF16 = frozenset({"int4", "fp8-block"})
"""Their kernels do not compute in float32."""
NEAR = 0.25
"""Of the difference that the exchange makes."""
MODULE = "tests.nightly.vllm_quantized"


def judge(work: pathlib.Path, scheme: str) -> None:
    """Inside vLLM: the largest differences of a log-probability, as json on the last line."""
    import torch

    if scheme in IN_BF16:
        SETTINGS["dtype"] = "bfloat16"
    reference = torch.load(work / "reference.pt")
    until = len(PROMPT) - 1
    scores = [generate(work / folder)["scores"][:until] for folder in ("quantized", "plain")]
    found = {
        "off": float((scores[0] - scores[1]).abs().max()),
        "exchanged": float((reference["exchanged"] - reference["right"])[:until].abs().max()),
    }
    print("\n" + json.dumps(found), flush=True)


def check(work: pathlib.Path, scheme: str, python: str, trainer: list[str]) -> tuple[bool, str]:
    """(holds, what to print) of one scheme."""
    from merge_stream import cli
    from tests.nightly.quantized import write_plain

    dumped, _, error = stage(sys.executable, trainer, "--stage", "dump", "--work", str(work), "llama")
    if dumped:
        return False, f"not dumped: {last_line(error)[:160]}"
    if cli.run([str(work / "ckpt"), str(work / "quantized"), "--quantize", scheme, "--quiet"]):
        return False, "not merged"
    write_plain(work / "ckpt", work / "quantized", work / "plain")
    ended, out, error = stage(python, [], "--work", str(work), scheme, module=MODULE)
    if ended:
        return False, f"vLLM ended with {ended}: {last_line(error)[:300]}"
    found = json.loads(last_line(out))
    return found["off"] <= NEAR * found["exchanged"], f"off by {found['off']:.2g}, exchanged {found['exchanged']:.2g}"


def main() -> None:
    """All schemes, one vLLM at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", default=[])
    parser.add_argument("--python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--trainer", default="", help="folders with transformers, for the dump")
    parser.add_argument("--work", help="(inside vLLM)")
    options = parser.parse_args()
    if options.work:
        judge(pathlib.Path(options.work), options.schemes[0])
        return
    if not options.python:
        parser.error("--python or VLLM_PYTHON: a Python with vllm-cpu (tests.nightly.environments makes one)")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="vllm-nightly-") as folder:
        for scheme in options.schemes or SCHEMES:
            work = pathlib.Path(folder, scheme)
            holds, words = check(work, scheme, options.python, [p for p in options.trainer.split(":") if p])
            failed += not holds
            print(f"{'ok ' if holds else 'BAD'} {scheme:14} {words}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
