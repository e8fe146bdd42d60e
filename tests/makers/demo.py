"""`make demo`: a real FSDP2 checkpoint, merged and verified, in front of your eyes.

Trains a small llama-shaped model for one step with torch FSDP2 on two CPU ranks (gloo), with sizes that two
does not divide, then runs the installed `merge-stream` on the shards and compares the result with the
trainer's own gather. Every command is printed before it runs. Exits with 1 as soon as one fails.
"""

from __future__ import annotations

import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

MAX_MEM = "512M"
TIMEOUT_SECONDS = 120


def main() -> int:
    """Make, merge, verify; 0 when all three hold."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="merge-stream-demo-") as folder_name:
        folder = pathlib.Path(folder_name)
        made, model = folder / "trained", folder / "model"
        python = [sys.executable, "-m"]
        steps = [
            (
                "A real training run: FSDP2 on two ranks, one step, sizes that do not divide by two",
                [*python, "tests.makers.fsdp2", str(made), "--world", "2", "--odd"],
            ),
            (
                f"Merge its shards into one Hugging Face model, in at most {MAX_MEM} of memory",
                [*python, "merge_stream", "merge", str(made / "ckpt"), str(model), "--max-mem", MAX_MEM],
            ),
            (
                "Verify the model against the trainer's own gather",
                [*python, "merge_stream", "verify", str(model), "--against", str(made / "expected")],
            ),
        ]
        for title, command in steps:
            print(f"\n# {title}\n$ {_as_typed(command)}", flush=True)
            try:
                ended = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS, check=False)
            except subprocess.TimeoutExpired:
                print(f"demo failed: no end within {TIMEOUT_SECONDS} s", file=sys.stderr)
                return 1
            if ended.returncode:
                print(f"demo failed: exit code {ended.returncode}", file=sys.stderr)
                return 1
        print("\nThe model:")
        for path in sorted(model.iterdir()):
            print(f"  {path.stat().st_size:>9,}  {path.name}")
    print(f"\ndemo ok in {time.monotonic() - started:.1f} s")
    return 0


def _as_typed(command: list[str]) -> str:
    """The command as a user would type it."""
    text = shlex.join(command)
    python = shlex.quote(sys.executable)
    return text.replace(f"{python} -m merge_stream", "merge-stream").replace(python, "python")


if __name__ == "__main__":
    sys.exit(main())
