"""Restricted unpickling: plain data out, nothing imported, nothing run.

The C unpickler does the work; `find_class` never imports. Every global of the stream becomes a
*recorder class* that carries the dotted name; calling it (REDUCE, NEWOBJ, OBJ) only keeps the
arguments, BUILD only keeps the state. So an honest file of any trainer reads as plain data, with
its own classes absent, and a hostile one can at most build a strange tree of recorders.

    GLOBAL torch._utils _rebuild_tensor_v2     class R(Recorder), R.dotted = "torch._utils._rebuild_tensor_v2"
    REDUCE (storage, 0, (4, 2), (2, 1), ...)   R instance, .args = (storage, 0, (4, 2), (2, 1), ...)
    BUILD {"dim": 0}                           .state = {"dim": 0}
    BINPERSID ("storage", R, "7", "cuda:3", 8) StorageRecord(kind="FloatStorage", key="7", numel=8)

Exceptions that become plain values: `collections.OrderedDict` and `defaultdict` (a dict),
`torch.Size` (a tuple), `getattr` (the nested class, by name), `torch.<dtype>` stays a class and
is known by its name. Globals of modules that can run code are an UnsafePickleError, because no
checkpoint needs them; any other unknown name is inert and an error only where a tensor is needed.

Recorders hash by identity, their classes refuse new attributes (BUILD on a class object must not
change them), and none of them can reach back into this process.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn, Self

from merge_stream.containers.pickle_guard import check_pickle
from merge_stream.containers.pickle_source import PickleSource
from merge_stream.errors import CorruptCheckpointError, UnsafePickleError

__all__ = ["Recorder", "StorageRecord", "described", "dotted_name", "is_class", "is_instance", "read_pickle"]

_MOST_GLOBALS = 5000

# Only built-in names that describe data; all other names of these modules run code.
_BUILTINS = frozenset({
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "getattr", "int", "list", "object", "range",
    "set", "slice", "str", "tuple", "type",
})  # fmt: skip
_BUILTIN_MODULES = frozenset({"builtins", "__builtin__"})
_UNSAFE_MODULES = frozenset({
    "_io", "_pickle", "_posixsubprocess", "_socket", "_thread", "ast", "asyncio", "bdb", "cProfile", "cloudpickle",
    "cmd", "code", "codeop", "commands", "concurrent", "ctypes", "dill", "dis", "distutils", "ensurepip",
    "faulthandler", "fcntl", "ftplib", "gc", "http", "httplib", "imaplib", "imp", "importlib", "inspect", "io",
    "joblib", "linecache", "marshal", "mmap", "modulefinder", "multiprocessing", "nt", "ntpath", "operator",
    "_operator", "os", "pdb", "pickle", "pip", "pkgutil", "popen2", "posix", "posixpath", "profile", "pty", "pydoc",
    "resource", "runpy", "selectors", "setuptools", "shelve", "shutil", "signal", "site", "smtplib", "socket",
    "socketserver", "sqlite3", "ssl", "subprocess", "sys", "sysconfig", "telnetlib", "tempfile", "threading",
    "timeit", "trace", "types", "urllib", "urllib2", "venv", "webbrowser", "winreg", "xmlrpc", "zipimport",
})  # fmt: skip
_ERRORS = (pickle.UnpicklingError, EOFError, ArithmeticError, ValueError, LookupError, AttributeError, TypeError)
# data all the same: seen in Megatron's common.pt (args) and in TransformerEngine's _extra_state
_SAFE_NAMES = frozenset(
    {"signal.Signals", "signal.Handlers", "_io.BytesIO", "io.BytesIO", "types.SimpleNamespace", "types.NoneType"}
)
_UNSAFE_PREFIXES = ("torch.hub", "torch.utils.cpp_extension", "torch._inductor", "numpy.f2py", "numpy.testing")
_UNSAFE_NAMES = frozenset({"torch.load", "torch.serialization.load", "torch.jit.load"})


class _Frozen(type):
    """Metaclass whose classes cannot be changed from a pickle."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError(f"{cls.__name__}.{name} cannot be set")

    def __delattr__(cls, name: str) -> NoReturn:
        raise TypeError(f"{cls.__name__}.{name} cannot be deleted")


class Recorder(metaclass=_Frozen):
    """What a call of a global would have been: `dotted` name, `args`, and the `state` BUILD gave.

    Keyword arguments count as state; what is added to list or dict subclasses is in `items`.
    """

    __slots__ = ("args", "items", "state")
    dotted = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any] | None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Keep the arguments."""
        self = object.__new__(cls)
        self.args = args
        self.state = kwargs or None
        self.items = None
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        """Keep an item of a list subclass."""
        if self.items is None:
            self.items = []
        self.items.append(item)

    def extend(self, items: list[Any]) -> None:
        """Keep items of a list subclass."""
        for item in items:
            self.append(item)

    def __setitem__(self, key: object, value: object) -> None:
        self.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.dotted}>"


class _Dict(dict[Any, Any], metaclass=_Frozen):
    """Stand-in of OrderedDict and defaultdict: a dict that keeps the attributes BUILD gives."""

    __slots__ = ("state",)

    def __init__(self, *args: object) -> None:
        # a default factory is dropped; items come by SETITEMS (hashing them here would pass by the guard)
        if len(args) > 1 or any(isinstance(arg, (list, tuple, dict)) for arg in args):
            raise TypeError("an OrderedDict with items as arguments")

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Size(metaclass=_Frozen):
    """Stand-in of torch.Size: hands its one argument back, which must be a tuple."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> Any:  # noqa: ANN401 - a plain tuple, not a _Size
        if len(args) != 1 or type(args[0]) is not tuple:
            raise TypeError("torch.Size of something that is no tuple")
        return args[0]


class StorageRecord(metaclass=_Frozen):
    """A persistent id of torch.save: storage class name ("FloatStorage"), key, elements (bytes if untyped)."""

    __slots__ = ("key", "kind", "numel")

    def __init__(self, kind: str, key: str, numel: int) -> None:
        self.kind = kind
        self.key = key
        self.numel = numel

    def __setstate__(self, state: object) -> NoReturn:
        raise TypeError("BUILD on a storage")


def is_class(value: object) -> bool:
    """True for a global itself (a class, function or dtype that was only named)."""
    return type(value) is _Frozen and issubclass(value, Recorder)


def is_instance(value: object) -> bool:
    """True for the record of a call of a global."""
    return isinstance(value, Recorder)


def dotted_name(value: object) -> str:
    """Dotted name of a recorder or of its class; the Python type's name of anything else."""
    if is_class(value) or isinstance(value, Recorder):
        return value.dotted  # type: ignore[attr-defined, no-any-return]
    return "storage" if isinstance(value, StorageRecord) else type(value).__name__


def described(value: object) -> str:
    """The value for a message, never longer than a line: what a checkpoint holds may not be printed as it is."""
    if value is None or type(value) in (int, float, bool):
        return str(value)[:40]
    if type(value) is str:
        return repr(value[:60])
    if type(value) in (tuple, list) and len(value) <= 16 and all(type(n) is int for n in value):  # type: ignore[arg-type, attr-defined]
        return str(value)[:120]
    return dotted_name(value)[:120]


def _recorder_class(dotted: str) -> type[Recorder]:
    return _Frozen(dotted.rpartition(".")[2] or "_", (Recorder,), {"__slots__": (), "dotted": dotted})  # type: ignore[return-value]


_PLAIN = {"collections.OrderedDict": _Dict, "collections.defaultdict": _Dict, "torch.Size": _Size}
_SHARED: dict[tuple[str, str], type] = {}  # recorder classes that honest files repeat; at most _MOST_GLOBALS
_SHARED_PACKAGES = frozenset({"torch", "collections", "pathlib", "argparse"})


class _Unpickler(pickle.Unpickler):
    """C unpickler that resolves every global to a recorder class."""

    def __init__(self, stream: io.BufferedReader, where: str) -> None:
        super().__init__(stream)
        self.where = where
        self.storages: dict[str, StorageRecord] = {}
        self._own: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - the base class says so
        """The recorder class of this name."""
        key = (module, name)
        return _SHARED.get(key) or self._own.get(key) or self._made(key)

    def _made(self, key: tuple[str, str]) -> type:
        module, name = key
        dotted = f"{module}.{name}"
        top = module.partition(".")[0]
        if module in _BUILTIN_MODULES:
            unsafe = name.partition(".")[0] not in _BUILTINS
        elif dotted in _SAFE_NAMES:
            unsafe = False
        else:
            unsafe = top in _UNSAFE_MODULES or dotted in _UNSAFE_NAMES or module.startswith(_UNSAFE_PREFIXES)
        if unsafe:
            msg = f"{self.where}: the pickle asks for {dotted}, which can run code; nothing of it was run"
            raise UnsafePickleError(msg, hint="no checkpoint needs this: do not load this file with torch.load")
        is_getattr = module in _BUILTIN_MODULES and name == "getattr"
        made = self._getattr_class() if is_getattr else _PLAIN.get(dotted) or _recorder_class(dotted)
        if top in _SHARED_PACKAGES and len(_SHARED) < _MOST_GLOBALS:
            _SHARED[key] = made
            return made
        if len(self._own) >= _MOST_GLOBALS:
            msg = f"{self.where}: the pickle names more than {_MOST_GLOBALS} different classes"
            raise UnsafePickleError(msg, hint="do not use this file; it was not written by a trainer")
        self._own[key] = made
        return made

    def _getattr_class(self) -> type:
        """Stand-in of getattr(class, name): the class of the longer name (nested classes, enum members)."""

        def longer_name(_: type, *args: Any) -> Any:  # noqa: ANN401 - a recorder class
            if len(args) != 2 or not is_class(args[0]) or type(args[1]) is not str or len(args[0].dotted) > 500:
                raise TypeError("getattr of something that is no class")
            return self.find_class(args[0].dotted, args[1])

        return _Frozen("getattr", (object,), {"__slots__": (), "__new__": longer_name})

    def persistent_load(self, pid: Any) -> StorageRecord:  # noqa: ANN401 - whatever the stream holds
        """The storage a persistent id ("storage", class, key, location, numel[, view]) means."""
        if type(pid) is tuple and len(pid) in (5, 6) and pid[0] == "storage" and (len(pid) == 5 or pid[5] is None):
            kind, key, numel = pid[1], pid[2], pid[4]
            if is_class(kind) and type(key) is str and type(numel) is int and numel >= 0:
                record = StorageRecord(kind.dotted.rpartition(".")[2], key, numel)
                known = self.storages.setdefault(key, record)
                if known.numel == numel and known.kind == record.kind:
                    return known
                msg = f"{self.where}: storage {key} is named with {known.numel} and with {numel} elements"
                raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
        msg = f"{self.where}: a persistent id is not that of a torch storage"
        raise CorruptCheckpointError(msg, hint="this is not a plain torch.save file (a view of a legacy storage?)")


def read_pickle(data: bytes | PickleSource, where: str, *, start: int = 0) -> tuple[Any, int, dict[str, StorageRecord]]:
    """Read the pickle at `start`: (plain object, position after it, storages by key).

    `where` names the file in messages. UnsafePickleError when it asks for code or is built to do
    harm, TruncatedFileError or another CorruptCheckpointError when it is broken,
    MemoryLimitTooSmallError when it builds more than the allowance of its source.
    """
    source = data if isinstance(data, PickleSource) else PickleSource.of(data, where)
    end = check_pickle(source, start, where)
    stream = source.stream(start, end)
    unpickler = _Unpickler(stream, where)
    try:
        return unpickler.load(), end, unpickler.storages
    except _ERRORS as error:
        text = f"{type(error).__name__}: {error}"
    except RecursionError:
        text = "its values are nested too deeply"
    except MemoryError:
        text = "it needs more memory than there is"
    finally:
        stream.close()
    msg = f"{where}: the pickle cannot be read: {text[:300]}"
    raise CorruptCheckpointError(msg, hint="the file is damaged, or was not written by torch.save")
