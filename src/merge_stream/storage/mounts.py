"""Which file system a path lies on, and what that kind of file system cannot hold.

Read from /proc/self/mountinfo (proc_pid_mountinfo(5)), since Python tells no type. Where it
cannot be read, the type is "" and nothing is claimed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

__all__ = ["Mount", "largest_file_of", "mount_of"]

_MOUNTINFO = "/proc/self/mountinfo"
_ESCAPE = re.compile(r"\\([0-7]{3})")
_FAT_LARGEST = (1 << 32) - 1
_LARGEST_FILE = {"vfat": _FAT_LARGEST, "msdos": _FAT_LARGEST}


@dataclass(frozen=True, slots=True)
class Mount:
    """`type` as the kernel calls it ("ext4", "nfs4", "fuse.sshfs"; "" when unknown), and where it is mounted."""

    type: str
    folder: str


def mount_of(path: str) -> Mount:
    """The mount that holds `path`, or would hold it once it is made."""
    path = os.path.realpath(path)
    best = Mount("", "/")
    try:
        with open(_MOUNTINFO, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return best
    for line in lines:
        fields, _, rest = line.partition(" - ")
        words = fields.split(" ")
        if len(words) < 5 or not rest:
            continue
        folder = _ESCAPE.sub(lambda m: chr(int(m[1], 8)), words[4])
        inside = path == folder or path.startswith(folder.rstrip("/") + "/")
        if inside and len(folder) >= len(best.folder):  # the later of two on one folder hides the earlier
            best = Mount(rest.split(" ")[0], folder)
    return best


def largest_file_of(kind: str) -> int | None:
    """Most bytes of a file on file systems of this type, where that is a limit that people meet (FAT32: 4 GB)."""
    return _LARGEST_FILE.get(kind)
