"""What every format needs to fill a catalog: source files by index, clean unique names, config folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from merge_stream.errors import CorruptCheckpointError
from merge_stream.formats._names import clean_name
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import SourceFile

__all__ = ["FileTable", "clean_names", "config_dirs", "listed"]


_LONGEST_NAME = 4096
_RESERVED = {"", "__metadata__"}


class FileTable:
    """The source files of a catalog, numbered in the order they are first asked for."""

    def __init__(self, tree: ByteTree) -> None:
        self._tree = tree
        self._index: dict[str, int] = {}
        self._files: list[SourceFile] = []

    def index(self, name: str) -> int:
        """Number of the tree's file `name` (for `ShardTable.file`)."""
        if name not in self._index:
            entry = self._tree.entry(name)
            self._index[name] = len(self._files)
            self._files.append(SourceFile(entry.path, name, entry.nbytes, entry.mtime_ns))
        return self._index[name]

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files asked for so far."""
        return tuple(self._files)


def clean_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Stored name -> name without wrapper segments; CorruptCheckpointError when two become one."""
    cleaned: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        clean = cleaned[name] = clean_name(name)
        if not clean.isprintable() or len(clean) > _LONGEST_NAME:
            raise CorruptCheckpointError(
                f"{where}: a tensor is called {clean[:80]!a} ({len(clean)} characters): invisible ones, or too many",
                hint="no model has such a name: the file is damaged, or was made to mislead",
            )
        if clean in _RESERVED:
            raise CorruptCheckpointError(
                f"{where}: a tensor is called {clean[:80]!a}, which no safetensors file can hold",
                hint="rename it in the model, or leave it out of the state dict",
            )
        if owner.setdefault(clean, name) != name:
            raise CorruptCheckpointError(
                f"{where}: {owner[clean]!r} and {name!r} are both {clean!r} without wrapper prefixes",
                hint="the checkpoint holds one parameter under two names; save it from one wrapped model",
            )
    return cleaned


def config_dirs(tree: ByteTree) -> tuple[str, ...]:
    """Absolute folders that may hold config.json and tokenizer: `huggingface/` first, then the folder itself."""
    beside = [name for name in tree.files if name.startswith("huggingface/") and name.count("/") == 1]
    itself = [name for name in ("config.json",) if name in tree.files]
    return tuple(dict.fromkeys(str(Path(tree.files[name].path).parent) for name in (*beside, *itself)))


def listed(names: Iterable[str], *, most: int = 8) -> str:
    """The names for a message: the first `most`, then how many more."""
    every = list(names)
    text = ", ".join(every[:most])
    return f"{text} and {len(every) - most} more" if len(every) > most else text
