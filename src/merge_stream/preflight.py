"""What is known to fail is refused before the first byte, with numbers.

    preflight(job, place)            everything below, for a merge
    check_target(place, writes)      may these files be made where OUT goes?

Checked: permissions (of the folder, of a partial folder that is continued, of an OUT that
is replaced, of side files that are read last), lengths of names and paths, limits of file
sizes (`ulimit -f`, FAT32), free bytes and free inodes, and the limit of open files. A disk
that another program fills meanwhile, a quota, or a limit that nobody tells in advance still
ends a run in the middle; that run is resumable (docs/resume.md).
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from merge_stream.errors import DiskSpaceError, MergeStreamError, ResourceError, UsageError
from merge_stream.job import Job
from merge_stream.output.index import INDEX_NAME
from merge_stream.output.model_card import CARD_NAME
from merge_stream.output.place import OutputPlace
from merge_stream.storage.mounts import largest_file_of, mount_of
from merge_stream.units import format_bytes

__all__ = ["Writes", "check_target", "preflight"]

_LONGEST_PATH = 4095
_OWN_FILES = 64 << 10
"""config.json, the model card, the lock, the mark of a commit."""
_JOURNAL_LINE = 80
_ENTRY = 16
_OWN_INODES = 10
_LEAST_OPEN_FILES = 48


@dataclass(frozen=True, slots=True)
class Writes:
    """`files` that a run makes below its model folder, with their bytes; `more_nbytes` of bookkeeping.

    `largest_item` is the most bytes that cannot be split over two files; `can_shrink` tells
    that another element type would write fewer bytes; `sparse` that zeros take no room, so that nobody knows how much
    is needed.
    """

    files: Mapping[str, int]
    more_nbytes: int = 0
    largest_item: int = 0
    can_shrink: bool = False
    sparse: bool = False


def preflight(job: Job, place: OutputPlace) -> None:
    """Raise what would end this merge later: see the module's words. Changes nothing on disk."""
    check_target(place, _writes(job))
    for side_file in job.folder.side_files.files:
        if not os.access(side_file.path, os.R_OK):
            msg = f"{side_file.path}, which is copied to OUT, cannot be read by this user (permission)"
            raise MergeStreamError(msg, hint="change its mode or owner, or move it away if the model needs none")
    _check_open_files(job.memory.workers)


def check_target(place: OutputPlace, writes: Writes) -> None:
    """MergeStreamError for a target that cannot be written, DiskSpaceError for one too small, UsageError for names."""
    folder = _nearest_folder(place)
    _check_permissions(place, folder)
    _check_names(place, folder, writes)
    _check_file_sizes(folder, writes)
    _check_room(place, folder, writes)


def _writes(job: Job) -> Writes:
    plan = job.plan
    index = sum(len(p.name) + len(plan.outputs[p.output].name) + _ENTRY for p in plan.parameters)
    files = {o.name: o.nbytes for o in plan.outputs}
    files |= {f.name: f.nbytes for f in job.folder.side_files.files}
    files |= {"config.json": 0, CARD_NAME: files.get(CARD_NAME, 0)}
    if len(plan.outputs) > 1:
        files[INDEX_NAME] = index
    lines = sum(-(-o.nbytes // job.memory.segment) for o in plan.outputs)
    sources = sum(len(f.name) + 4 * _ENTRY for f in plan.files)
    return Writes(
        files,
        more_nbytes=_OWN_FILES + lines * _JOURNAL_LINE + sources,
        largest_item=max((p.nbytes for p in plan.parameters), default=0),
        can_shrink=any(p.dtype.itemsize > 2 for p in plan.parameters),
        sparse=job.options.sparse,
    )


def _nearest_folder(place: OutputPlace) -> str:
    """The folder that is there and that everything else is made in."""
    folder = place.out if place.inside else os.path.dirname(place.out)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        msg = f"{folder} is a file, so {place.out} cannot be made below it"
        raise MergeStreamError(msg, hint="choose another OUT")
    return folder


def _check_permissions(place: OutputPlace, folder: str) -> None:
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        msg = f"{folder} lies on a file system that is mounted read-only"
        raise MergeStreamError(msg, hint="choose an OUT on a disk that can be written")
    if not os.access(folder, os.W_OK | os.X_OK):
        msg = f"{folder} is not writable for this user"
        raise MergeStreamError(msg, hint="choose an OUT on a disk you may write to")
    begun = (place.model_dir, *(os.path.join(place.work, name) for name in ("lock", "journal", "plan.json")))
    for path in (place.work, *begun):
        if os.path.lexists(path) and not os.access(path, os.W_OK):
            msg = f"{path}, of an interrupted run, is not writable for this user"
            raise MergeStreamError(msg, hint="continue it as the user who began it, or choose another OUT")
    if place.replaces and not (_may_rename(place.out, folder) and os.access(place.out, os.W_OK | os.X_OK)):
        msg = f"{place.out} cannot be replaced by this user: it belongs to another, or is write-protected"
        raise MergeStreamError(msg, hint="choose another OUT, or remove the old one yourself")


def _may_rename(path: str, folder: str) -> bool:
    """False for the entry of another user in a folder such as /tmp (sticky bit)."""
    parent, me = os.stat(folder), os.geteuid()
    return not parent.st_mode & stat.S_ISVTX or me in {0, parent.st_uid, os.lstat(path).st_uid}


def _check_names(place: OutputPlace, folder: str, writes: Writes) -> None:
    longest_name = os.pathconf(folder, "PC_NAME_MAX")
    for path in (f"{place.work}.committing.new", *(os.path.join(place.model_dir, name) for name in writes.files)):
        for part in os.path.relpath(path, folder).split("/"):
            if len(os.fsencode(part)) > longest_name:
                msg = f"the name {part} has {len(os.fsencode(part))} bytes, {folder} allows {longest_name}"
                raise UsageError(msg, hint="choose another OUT: a shorter name, or another file system")
        if len(os.fsencode(path)) > _LONGEST_PATH:
            msg = f"the path {path} has {len(os.fsencode(path))} bytes, the system allows {_LONGEST_PATH}"
            raise UsageError(msg, hint="choose an OUT with a shorter path, or go to its folder and name it from there")


def _check_file_sizes(folder: str, writes: Writes) -> None:
    """Limits that a file meets which is still far from filling the disk."""
    name = max(writes.files, key=lambda key: writes.files[key], default="")
    if not name:
        return
    nbytes, mount = writes.files[name], mount_of(folder)
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [
        (soft, "this process may not write", "raise the limit (`ulimit -f unlimited`)"),
        (largest_file_of(mount.type), f"{mount.folder} ({mount.type}) holds no", "choose another disk"),
    ]
    for limit, words, way in limits:
        if limit is not None and limit != resource.RLIM_INFINITY and nbytes > limit:
            msg = f"{name} would have {format_bytes(nbytes)}, and {words} files above {format_bytes(limit)}"
            smaller = f", or give --max-shard-size {limit * 9 // 10}" if writes.largest_item < limit * 8 // 10 else ""
            raise DiskSpaceError(msg, hint=way + smaller)


def _check_room(place: OutputPlace, folder: str, writes: Writes) -> None:
    """Free bytes and inodes, less what an interrupted run has written; an OUT that is replaced stays until the end."""
    told = os.statvfs(folder)
    block = told.f_frsize or 4096
    nbytes, inodes = writes.more_nbytes, _OWN_INODES
    for name, size in writes.files.items():
        try:
            found = os.stat(os.path.join(place.model_dir, name))
        except OSError:
            inodes += 1
            nbytes += -(-size // block) * block
        else:
            nbytes += max(-(-size // block) * block - found.st_blocks * 512, 0)
    free = shutil.disk_usage(folder).free
    if nbytes > free and not writes.sparse:
        msg = f"{folder} has {format_bytes(free)} free, the output needs {format_bytes(nbytes)}"
        old = f", or remove {place.out}, which stays until the new model is whole" if place.replaces else ""
        fewer = ", or write fewer bytes (--dtype bf16)" if writes.can_shrink else ""
        raise DiskSpaceError(msg, hint=f"free some space, or choose another disk{old}{fewer}")
    if told.f_files and inodes > told.f_favail:
        msg = f"{folder} has room for {told.f_favail} more files (inodes), the output needs {inodes}"
        raise DiskSpaceError(msg, hint="remove files there, choose another disk, or give a larger --max-shard-size")


def _check_open_files(workers: int) -> None:
    """Each worker holds a source or an output file; a few more stay open to be used again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, hard) if resource.RLIM_INFINITY not in {soft, hard} else resource.RLIM_INFINITY
    if most != resource.RLIM_INFINITY and most < _LEAST_OPEN_FILES + workers:
        msg = f"this process may open {most} files at once, {workers} workers need {_LEAST_OPEN_FILES + workers}"
        raise ResourceError(msg, hint="raise the limit (`ulimit -n`), or give fewer --workers")
