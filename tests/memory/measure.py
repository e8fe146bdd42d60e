"""Peak memory of a command and its children, measured from outside.

    python -S -E measure.py RESULT.json COMMAND ...

A small process of its own starts the command, so that the peak which the kernel hands back (ru_maxrss, inherited
at exec) is the command's own. While it runs, the resident memory of the whole tree is summed every few
milliseconds. The result is the larger of both: {"code", "peak", "tree_peak", "children", "seconds", "cpu"}.
"""

import json
import os
import sys
import time

_EVERY_SECONDS = 0.004
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:
        pass
    return found + [grandchild for child in found for grandchild in _children(child)]


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def main(result: str, command: list[str]) -> int:
    """Run and measure; ends with the command's own code."""
    began = time.monotonic()
    pid = os.posix_spawn(command[0], command, os.environ)
    tree_peak = seen = 0
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        below = _children(pid)
        seen = max(seen, len(below))
        tree_peak = max(tree_peak, _resident(pid) + sum(map(_resident, below)))
        time.sleep(_EVERY_SECONDS)
    code = os.waitstatus_to_exitcode(status)
    numbers = {
        "code": code,
        "peak": max(usage.ru_maxrss * 1024, tree_peak),
        "tree_peak": tree_peak,
        "children": seen,
        "seconds": time.monotonic() - began,
        "cpu": usage.ru_utime + usage.ru_stime,
    }
    with open(result, "w", encoding="utf-8") as file:
        json.dump(numbers, file)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
