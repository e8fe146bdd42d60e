"""Local files: listing input folders, positioned reads and writes, a bounded set of open files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnknownFormatError
from merge_stream.storage.base import FileEntry

__all__ = ["LocalSink", "LocalSource", "LocalTree", "natural_key", "time_of_change"]

_DEPTH = 5
_MOST_FILES = 2_000_000
_SKIP_FOLDERS = {".git", "__pycache__", "wandb", ".cache", ".merge-stream"}


def natural_key(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key with numbers in numeric order: "layers.2" before "layers.10"."""
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in re.split(r"(\d+)", text) if p)


class LocalTree:
    """The regular files below one or several folders, overlaid, listed once.

    Several folders are node-local parts of one checkpoint: a file that stands in two of
    them must be the same in both, byte for byte. Symbolic links to regular files are
    followed (a Hub cache is made of them); links to folders are not, except the given
    folders themselves.
    """

    def __init__(self, label: str, files: Mapping[str, FileEntry], doubles: Mapping[str, tuple[str, ...]]) -> None:
        self.label = label
        self.files = files
        self._doubles = doubles
        self._compared: set[str] = set()

    @classmethod
    def of(cls, folders: Sequence[str | os.PathLike[str]]) -> LocalTree:
        """List `folders`; UnknownFormatError when one is missing, PermissionError text when unreadable."""
        files: dict[str, FileEntry] = {}
        doubles: dict[str, list[str]] = {}
        for folder in [os.fspath(f) for f in folders]:
            if not os.path.isdir(folder):
                kind = "a file, not a folder" if os.path.exists(folder) else "not there"
                msg = f"the input folder {folder} is {kind}"
                raise UnknownFormatError(msg, hint="pass the folder that holds the checkpoint's files")
            for name, entry in _listed(folder):
                if name in files:
                    doubles.setdefault(name, []).append(entry.path)
                else:
                    files[name] = entry
        ordered = {k: files[k] for k in sorted(files, key=natural_key)}
        return cls(os.fspath(folders[0]), ordered, {k: tuple(v) for k, v in doubles.items()})

    def subtree(self, folder: str) -> LocalTree:
        """The same files seen from `folder`."""
        if not folder:
            return self
        prefix = folder.rstrip("/") + "/"
        cut = len(prefix)
        return LocalTree(
            os.path.join(self.label, folder),
            {k[cut:]: v for k, v in self.files.items() if k.startswith(prefix)},
            {k[cut:]: v for k, v in self._doubles.items() if k.startswith(prefix)},
        )

    def only(self, name: str) -> LocalTree:
        """The tree of that one file and the JSON files beside it."""
        kept = {k: v for k, v in self.files.items() if k == name or ("/" not in k and k.endswith(".json"))}
        return LocalTree(self.label, kept, {k: v for k, v in self._doubles.items() if k in kept})

    def folders(self) -> Iterable[str]:
        """Names of the folders directly below."""
        return sorted({name.split("/", 1)[0] for name in self.files if "/" in name}, key=natural_key)

    def entry(self, name: str) -> FileEntry:
        """The file, after a check that its copies in other input folders are equal."""
        entry = self.files[name]
        if name in self._doubles and name not in self._compared:
            for other in self._doubles[name]:
                if not _equal_files(entry.path, other):
                    _refuse_double(name, entry.path, other)
            self._compared.add(name)
        return entry

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Exact bytes of a file."""
        entry = self.entry(name)
        wanted = entry.nbytes - offset if nbytes is None else nbytes
        if wanted < 0 or offset + wanted > entry.nbytes:
            msg = f"{entry.path} has {entry.nbytes} bytes, but {max(wanted, 0)} at offset {offset} are needed"
            raise TruncatedFileError(msg, hint="the file is cut or was not copied whole: copy it again")
        with _readable(entry.path) as fd:
            data = os.pread(fd, wanted, offset)
            while len(data) < wanted:
                more = os.pread(fd, wanted - len(data), offset + len(data))
                if not more:
                    msg = f"{entry.path} ended at byte {offset + len(data)}, wanted up to {offset + wanted}"
                    raise TruncatedFileError(msg, hint="the file shrank while it was read")
                data += more
        return data


def _listed(root: str) -> Iterator[tuple[str, FileEntry]]:
    count = 0
    stack = [("", root, 0)]
    while stack:
        prefix, folder, depth = stack.pop()
        try:
            entries = list(os.scandir(folder))
        except PermissionError:
            if depth == 0 or os.path.basename(folder) == "huggingface":
                raise
            continue
        for item in entries:
            count += 1
            if count > _MOST_FILES:
                msg = f"{root} holds more than {_MOST_FILES} files"
                raise UnknownFormatError(msg, hint="pass the checkpoint's own folder, not one far above it")
            if item.is_dir(follow_symlinks=False):
                ours = item.name.endswith(".partial") or item.name in _SKIP_FOLDERS
                if depth < _DEPTH and not ours:
                    stack.append((f"{prefix}{item.name}/", item.path, depth + 1))
                continue
            with contextlib.suppress(OSError):
                info = item.stat()
                if stat.S_ISREG(info.st_mode):
                    path = os.path.abspath(item.path)
                    yield prefix + item.name, FileEntry(path, info.st_size, time_of_change(info))


def time_of_change(info: os.stat_result) -> int:
    """Nanoseconds of the last change of content or inode: a copy that keeps its old mtime is told from the original."""
    return max(info.st_mtime_ns, info.st_ctime_ns)


def _refuse_double(name: str, first: str, second: str) -> None:
    msg = f"{name} stands in two input folders with different content: {first} and {second}"
    raise CorruptCheckpointError(msg, hint="the folders are not parts of one checkpoint; remove the stale one")


def _equal_files(a: str, b: str) -> bool:
    with _readable(a) as x, _readable(b) as y:
        offset = 0
        while True:
            p, q = os.pread(x, 1 << 20, offset), os.pread(y, 1 << 20, offset)
            if p != q:
                return False
            if not p:
                return True
            offset += len(p)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class _Files:
    """Open file descriptors by key: at most `most` idle ones are kept, those in use are never closed."""

    def __init__(self, flags: int, most: int) -> None:
        self._flags = flags
        self._most = most
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _InUse] = OrderedDict()

    def using(self, path: str) -> _InUse:
        """The open file, for a `with` block; its descriptor is what the block gets."""
        with self._lock:
            slot = self._open.get(path)
            if slot is None:
                slot = self._open[path] = _InUse(os.open(path, self._flags | os.O_CLOEXEC), self)
            slot.users += 1
            self._open.move_to_end(path)
        return slot

    def release(self, slot: _InUse) -> None:
        with self._lock:
            slot.users -= 1
            if len(self._open) > self._most:
                for key in [k for k, s in self._open.items() if s.users == 0][: len(self._open) - self._most]:
                    os.close(self._open.pop(key).fd)

    def close(self) -> None:
        with self._lock:
            for slot in self._open.values():
                os.close(slot.fd)
            self._open.clear()


class _InUse:
    """An open file and how many use it; leaving the `with` block is one user less.

    A class, since a generator would cost more than the read of a small shard.
    """

    __slots__ = ("_files", "fd", "users")

    def __init__(self, fd: int, files: _Files) -> None:
        self.fd = fd
        self.users = 0
        self._files = files

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self._files.release(self)


def _open_file_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(16, (4096 if soft == resource.RLIM_INFINITY else soft) // 2)


class _Uncached:
    """Flags for bulk writes that leave no pages in the page cache, where the kernel can.

    RWF_DONTCACHE (Linux 6.14, ext4, xfs, btrfs): pages are written back at once and dropped
    then; pages that were cached before stay. So a run piles up no dirty pages and pushes no
    other program's files out of the cache. Small transfers share pages with their
    neighbours and stay cached. Reads have `_Behind`: with this flag a read that ends inside
    a large folio drops what read-ahead had put there for the next one, and a checkpoint was
    read in 2.9 s instead of 1.7 s.
    """

    def __init__(self) -> None:
        self.works = True

    def flags(self, nbytes: int) -> int:
        return _RWF_DONTCACHE if self.works and nbytes >= _BULK else 0

    def refused(self, error: OSError, flags: int) -> bool:
        """True when the call failed only because of the flag; it is not used again."""
        if flags and error.errno in {errno.EOPNOTSUPP, errno.EINVAL}:
            self.works = False
            return True
        return False


_RWF_DONTCACHE = 0x80
_BULK = 256 << 10


class _Behind:
    """Drops the pages of one file behind its reader, unless somebody had them cached before.

    Pages go in whole folios (2 MiB at most) and some way behind the reading position, since
    neighbouring reads share folios and several workers read one file. A reader that turns
    back begins a new sweep. What is left goes when the file is done with.
    """

    __slots__ = ("_dropped", "_drops")

    _FOLIO = 2 << 20
    _LAG = 8 << 20
    _STEP = 4 << 20

    def __init__(self, fd: int) -> None:
        self._drops = not _is_cached(fd)
        self._dropped = 0

    def passed(self, fd: int, stop: int) -> None:
        """Bytes up to `stop` were read."""
        if not self._drops:
            return
        reached = max(stop - self._LAG, 0) // self._FOLIO * self._FOLIO
        before = self._dropped
        if reached - before >= self._STEP:
            self._dropped = reached
            os.posix_fadvise(fd, before, reached - before, os.POSIX_FADV_DONTNEED)
        elif stop < before:
            self._dropped = reached

    def done(self, path: str) -> None:
        """The file is not read any more."""
        if self._drops:
            with contextlib.suppress(OSError), _readable(path) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _is_cached(fd: int) -> bool:
    """True when most of a few bytes, spread over the file, come without waiting for the disk."""
    size = os.fstat(fd).st_size
    byte = bytearray(1)
    hits = 0
    for k in range(8):
        try:
            hits += os.preadv(fd, [byte], size * (2 * k + 1) // 16, os.RWF_NOWAIT)
        except OSError:  # not cached, or a file system that cannot tell
            continue
    return hits >= 6


class LocalSource:
    """Positioned reads with a bounded cache of open files."""

    def __init__(self) -> None:
        self._files = _Files(os.O_RDONLY, _open_file_limit())
        self._behind: dict[str, _Behind] = {}

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; TruncatedFileError names path, offset, wanted and got."""
        wanted, done = len(buffer), 0
        with self._files.using(path) as fd:
            behind = self._behind.get(path)
            if behind is None:
                behind = self._behind.setdefault(path, _Behind(fd))
            while done < wanted:
                more = os.preadv(fd, [buffer[done:] if done else buffer], offset + done)
                if more == 0:
                    msg = f"{path} ends at byte {offset + done}, wanted {wanted} bytes at offset {offset}"
                    raise TruncatedFileError(msg, hint="the file is cut, or shrank during the run")
                done += more
            behind.passed(fd, offset + done)

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        for path, behind in self._behind.items():
            behind.done(path)
        self._behind.clear()


class LocalSink:
    """Positioned writes below one folder; creates files with the modes the umask asks for."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._files = _Files(os.O_RDWR, _open_file_limit())
        self._uncached = _Uncached()

    def path(self, name: str) -> str:
        """Absolute path of an output file."""
        return os.path.join(self.folder, name)

    def allocate(self, name: str, nbytes: int) -> None:
        """Create the file at its full size, without blocks: free space is checked before, from the plan."""
        if "/" in name:
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        fd = os.open(self.path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.fstat(fd).st_size != nbytes:
                os.ftruncate(fd, nbytes)
        finally:
            os.close(fd)

    def write_at(self, name: str, offset: int, buffer: memoryview) -> None:
        """Write all of `buffer`."""
        done = 0
        with self._files.using(self.path(name)) as fd:
            while done < len(buffer):
                done += self._write(fd, offset + done, buffer[done:] if done else buffer)

    def _write(self, fd: int, offset: int, buffer: memoryview) -> int:
        flags = self._uncached.flags(len(buffer))
        try:
            return os.pwritev(fd, [buffer], offset, flags)
        except OSError as error:
            if not self._uncached.refused(error, flags):
                raise
            return os.pwritev(fd, [buffer], offset)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the output file."""
        with self._files.using(self.path(name)) as fd:
            done = 0
            while done < len(buffer):
                more = os.preadv(fd, [buffer[done:]], offset + done)
                if more == 0:
                    msg = f"{self.path(name)} ends at byte {offset + done}, wanted {len(buffer)} bytes at {offset}"
                    raise TruncatedFileError(msg)
                done += more

    def sync(self, name: str) -> None:
        """Fdatasync of one file."""
        with self._files.using(self.path(name)) as fd:
            os.fdatasync(fd)

    def close(self) -> None:
        """Close all files."""
        self._files.close()
