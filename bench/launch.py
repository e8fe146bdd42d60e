"""A tiny process that starts a command, waits for it, and writes what the kernel says it used.

It stands between a bench and the command because `ru_maxrss` survives `exec`: a child that was forked from a
process with much memory would report that process's peak as its own. This launcher has a few MB, so
what it reports is the command's (or, for a very small command, the launcher's own few MB).

    python -I -S launch.py RESULT_FILE COMMAND...
"""

import json
import os
import signal
import sys
import time

__all__: list[str] = []


def main() -> int:
    """Exit with the command's code, or 128 + signal."""
    result_file, *command = sys.argv[1:]
    began = time.perf_counter()
    try:
        pid = os.posix_spawnp(command[0], command, os.environ, setsigdef=[signal.SIGINT, signal.SIGPIPE])
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    print(pid, flush=True)
    _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - began
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump(
            {
                "wall": wall,
                "user": usage.ru_utime,
                "system": usage.ru_stime,
                "peak": usage.ru_maxrss * 1024,
                "major_faults": usage.ru_majflt,
                "from_disk": usage.ru_inblock * 512,
            },
            file,
        )
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
