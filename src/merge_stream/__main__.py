"""`python -m merge_stream` and the console script."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    from merge_stream.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
