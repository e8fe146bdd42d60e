"""Local files: listing input folders, reads and writes at an offset."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence

from merge_stream.errors import CorruptCheckpointError, TruncatedFileError, UnknownFormatError
from merge_stream.options import IoName
from merge_stream.storage.allowance import MetadataAllowance
from merge_stream.storage.base import FileEntry
from merge_stream.storage.mapped import Mapped
from merge_stream.storage.open_files import OpenFiles, open_file_limit
from merge_stream.storage.page_cache import Behind, Uncached

__all__ = ["LocalSink", "LocalSource", "LocalTree", "natural_key", "time_of_change"]

_DEPTH = 5
_MOST_FILES = 2_000_000
_WINDOW = 4 << 20
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

    def __init__(
        self,
        label: str,
        files: Mapping[str, FileEntry],
        doubles: Mapping[str, tuple[str, ...]],
        allowance: MetadataAllowance | None = None,
    ) -> None:
        self.allowance = allowance or MetadataAllowance()
        self.label = label
        self.files = files
        self._doubles = doubles
        self._compared: set[str] = set()

    @classmethod
    def of(cls, folders: Sequence[str | os.PathLike[str]], allowance: MetadataAllowance | None = None) -> LocalTree:
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
        return cls(os.fspath(folders[0]), ordered, {k: tuple(v) for k, v in doubles.items()}, allowance)

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
            self.allowance,
        )

    def only(self, name: str) -> LocalTree:
        """The tree of that one file and the JSON files beside it."""
        kept = {k: v for k, v in self.files.items() if k == name or ("/" not in k and k.endswith(".json"))}
        return LocalTree(self.label, kept, {k: v for k, v in self._doubles.items() if k in kept}, self.allowance)

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


class LocalSource:
    """Exact positioned reads of any number of files, with a bounded number of them open.

    `io` is how bytes get here: "pread" reads them, "mmap" maps windows of at most
    `window_bytes` and reads what a window could not or should not give (`storage.mapped`), so both give the
    same bytes and the same errors. "auto" is pread: it won on every file system that was
    measured (docs/performance.md). UnsupportedError when the system does not let us map safely.
    """

    def __init__(self, io: IoName = "auto", *, window_bytes: int = _WINDOW) -> None:
        self._files = OpenFiles(os.O_RDONLY, open_file_limit())
        self._behind: dict[str, Behind] = {}
        self._mapped = Mapped(window_bytes) if io == "mmap" else None

    @property
    def mapped_nbytes(self) -> int:
        """Bytes that came through a mapped window."""
        return self._mapped.nbytes if self._mapped is not None else 0

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; TruncatedFileError names path, offset, wanted and got, an OSError names the path."""
        with self._files.using(path) as fd:
            behind = self._behind.get(path)
            if behind is None:
                behind = self._behind.setdefault(path, Behind(fd))
            done = self._mapped.copy(fd, offset, buffer) if self._mapped is not None else 0
            if done < len(buffer):
                _read(path, fd, offset, buffer, done)
            behind.passed(fd, offset + len(buffer))

    def close(self) -> None:
        """Close all files."""
        self._files.close()
        for path, behind in self._behind.items():
            behind.done(path)
        self._behind.clear()


def _read(path: str, fd: int, offset: int, buffer: memoryview, done: int) -> None:
    """Fill `buffer`, whose first `done` bytes are there."""
    wanted = len(buffer)
    try:
        while done < wanted:
            more = os.preadv(fd, [buffer[done:] if done else buffer], offset + done)
            if more == 0:
                msg = f"{path} ends at byte {offset + done}, wanted {wanted} bytes at offset {offset}"
                raise TruncatedFileError(msg, hint="the file is cut, or shrank during the run")
            done += more
    except OSError as error:
        error.filename = error.filename or path
        raise


class LocalSink:
    """Positioned writes below one folder; creates files with the modes the umask asks for."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._paths: dict[str, str] = {}
        self._files = OpenFiles(os.O_RDWR, open_file_limit())
        self._uncached = Uncached()

    def path(self, name: str) -> str:
        """Absolute path of an output file."""
        path = self._paths.get(name)
        if path is None:
            path = self._paths[name] = os.path.join(self.folder, name)
        return path

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
        """Write all of `buffer`; an OSError names the path."""
        done, path = 0, self.path(name)
        with self._files.using(path) as fd:
            try:
                while done < len(buffer):
                    done += self._write(fd, offset + done, buffer[done:] if done else buffer)
            except OSError as error:
                error.filename = error.filename or path
                raise

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
        path = self.path(name)
        with self._files.using(path) as fd:
            _read(path, fd, offset, buffer, 0)

    def sync(self, name: str) -> None:
        """Fdatasync of one file."""
        with self._files.using(self.path(name)) as fd:
            os.fdatasync(fd)

    def close(self) -> None:
        """Close all files."""
        self._files.close()
