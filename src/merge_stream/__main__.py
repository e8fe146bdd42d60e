"""`python -m merge_stream` and the console script."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    # before numpy is imported: its BLAS would start a thread for each core, and only LoRA folds multiply, in workers
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from merge_stream.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
