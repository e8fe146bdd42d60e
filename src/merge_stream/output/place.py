"""Where the output stands until it is whole, and how it becomes visible at once.

    OUT is not there      work in OUT.partial/; commit renames OUT.partial/model to OUT
    OUT is an empty       work in OUT/.merge-stream/; commit moves the files, config and
    folder or a mount     index last (a folder that is a mount point cannot be renamed)
    --overwrite           work in OUT.partial/; commit: OUT -> OUT.old, model -> OUT, OUT.old removed

An existing OUT is never touched before the new model is whole. A file beside the work
folder (`OUT.partial.committing`) marks that everything is checked and only renames are
left; a start that finds it finishes them. The mark goes last, in one step, so a run that
was killed while it committed leaves either the mark or nothing but the finished model.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from merge_stream.engine.staging import STORE_ENTRIES
from merge_stream.errors import MergeStreamError, OutputBusyError, OutputExistsError, UsageError
from merge_stream.storage.unfinished import INNER_FOLDER
from merge_stream.units import counted

__all__ = [
    "INNER_STORE",
    "KEPT_STORE",
    "MODEL",
    "STORE_OF_STAGE",
    "OutputKind",
    "OutputPlace",
    "choose_place",
    "commit",
    "confirm_place",
    "finish_interrupted_commit",
    "interrupted_commit",
    "interrupted_identity",
]

_MARK = ".committing"
_INNER = INNER_FOLDER
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp", ".ckpt")
_LONGEST_NAME = 255 - len(".partial.committing.new")
_DIRECT = {"lock", "plan.json", "plan.json.new", "journal", "model"}
_WORK_FILES = {*_DIRECT, *STORE_ENTRIES}
# what stands beside weights in a finished model: anything else is somebody's work
_MODEL_FILE = re.compile(
    r".*\.(safetensors|index\.json|jinja|tiktoken|model|spm)"
    r"|(config|generation_config|adapter_config|.*tokenizer.*|special_tokens_map|added_tokens|vocab|chat_template"
    r"|.*processor.*|.*preprocessor.*|quantize_config|quant_config|hf_quant_config|quantization_config|modules"
    r"|sentence_bert_config|merge_report)\.json"
    r"|(vocab|merges)\.txt|(configuration|modeling|tokenization|processing|image_processing|video_processing)_.*\.py"
    r"|(README|LICEN[CS]E|NOTICE|USE_POLICY|COPYING)(\..*)?|\.gitattributes",
    re.IGNORECASE,
)
_LAST = ("config.json", "model.safetensors.index.json", "zarr.json")


@dataclass(frozen=True, slots=True)
class OutputKind:
    """What a folder is to become, in the words of messages.

    `word` is the argument that names the folder, `content` what is written; `replaceable` tells
    that --overwrite is an option of the command.
    """

    word: str
    content: Literal["model", "store"]
    replaceable: bool = False

    @property
    def some(self) -> str:
        """The word with its article."""
        return f"{'an' if self.word.startswith('O') else 'a'} {self.word}"


MODEL = OutputKind("OUT", "model", replaceable=True)
STORE_OF_STAGE = OutputKind("STORE", "store")
KEPT_STORE = OutputKind("--keep-store", "store")
INNER_STORE = OutputKind("OUT", "store")
"""The store in the partial folder of OUT, which goes with success."""


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """`out` is the folder to be, `work` the partial folder; `inside` when work lies in out."""

    out: str
    work: str
    inside: bool
    replaces: bool
    kind: OutputKind = MODEL

    @property
    def model_dir(self) -> str:
        """Folder that the files are staged in."""
        return os.path.join(self.work, "model")


def choose_place(
    out: str | os.PathLike[str], *, overwrite: bool, inputs: tuple[str, ...] = (), kind: OutputKind = MODEL
) -> OutputPlace:
    """Decide where to work; OutputExistsError when OUT may not be touched, UsageError when it cannot be meant."""
    text, word = os.fspath(out), kind.word
    if not text:
        msg = f"{word} is an empty name"
        raise UsageError(msg, hint=f"name the folder that the {kind.content} goes to")
    path = _absolute(out)
    if text.endswith(_WEIGHT_ENDINGS):
        msg = f"{word} is a folder, and {text} is named like a file"
        files = "model*.safetensors" if kind.content == "model" else "NAME/c.0.0"
        raise UsageError(msg, hint=f"name a folder; the weights become {word}/{files}")
    for given in inputs:
        inner, outer = os.path.realpath(given), os.path.realpath(path)
        if inner.startswith(os.path.join(outer, _INNER, "")):
            continue  # the store that this merge goes through
        if inner == outer or inner.startswith(outer.rstrip("/") + "/"):
            msg = f"{word} is the input folder {given}" if inner == outer else f"{word} holds the input {given}"
            raise UsageError(msg, hint="choose another folder: the checkpoint is never changed")
        if os.path.realpath(os.path.join(given, "huggingface")) == os.path.realpath(path) and os.path.isdir(path):
            msg = f"{word} is the folder of config and tokenizer inside the checkpoint {given}"
            raise UsageError(msg, hint="choose another folder: the checkpoint is never changed")
    for place in _places(path):
        if not os.path.isdir(place.model_dir):  # a mark without a model says nothing about the one to come
            with contextlib.suppress(OSError):
                os.unlink(place.work + _MARK)
    if len(os.fsencode(os.path.basename(path))) > _LONGEST_NAME:
        msg = f"the name of {word} has more than {_LONGEST_NAME} bytes"
        raise UsageError(msg, hint="the partial folder beside it needs a longer name still: choose a shorter one")
    if not os.path.lexists(path):
        return _own(OutputPlace(path, path + ".partial", inside=False, replaces=False, kind=kind))
    if not os.path.isdir(path):
        msg = f"{text} is there and is not a folder"
        raise OutputExistsError(msg, hint=f"choose another {word}")
    entries = _foreign(path)
    mount = os.path.ismount(path)
    if not entries:
        return _own(OutputPlace(path, os.path.join(path, _INNER), inside=True, replaces=False, kind=kind))
    if not overwrite:
        shown = ", ".join(sorted(entries)[:3]) + (", ..." if len(entries) > 3 else "")
        msg = f"{text} is there and holds {counted(len(entries), 'entry', 'entries')} ({shown})"
        other = "or give --overwrite to replace it once the new model is whole"
        other = other if kind.replaceable else "or remove that one yourself"
        raise OutputExistsError(msg, hint=f"choose another {word}, {other}")
    _check_replaceable(path, entries)
    if mount:
        msg = f"{text} is a mount point and not empty, so it cannot be swapped for the new model at once"
        raise OutputExistsError(msg, hint="empty it, or choose a folder below it")
    return _own(OutputPlace(path, path + ".partial", inside=False, replaces=True, kind=kind))


def confirm_place(place: OutputPlace, *, begun: bool) -> None:
    """Once the lock is held: OutputExistsError when another run has made OUT since the place was chosen.

    A work folder that no run had `begun` before this one is removed again, unless a store was staged in it.
    """
    try:
        choose_place(place.out, overwrite=place.replaces, kind=place.kind)
    except OutputExistsError:
        if not begun and set(os.listdir(place.work)) <= _DIRECT:
            shutil.rmtree(place.work, ignore_errors=True)
        raise


def _own(place: OutputPlace) -> OutputPlace:
    """The place, if its work folder is ours or not there: what is in it may be thrown away."""
    work = place.work
    if os.path.islink(work) or (os.path.lexists(work) and not os.path.isdir(work)):
        msg = f"{work} is there and is not a folder of an interrupted run"
        raise OutputExistsError(msg, hint=f"the run needs that name: move it away, or choose another {place.kind.word}")
    strange = set(os.listdir(work)) - _WORK_FILES if os.path.isdir(work) else set()
    if strange:
        msg = f"{work} is there and holds {min(strange)}, which no run of merge-stream has written"
        raise OutputExistsError(msg, hint=f"the run needs that name: move it away, or choose another {place.kind.word}")
    return place


def _foreign(path: str) -> set[str]:
    """What a folder holds that is neither ours nor the file system's."""
    return {name for name in os.listdir(path) if not name.startswith(_INNER) and name != "lost+found"}


def _check_replaceable(path: str, entries: set[str]) -> None:
    """Refuse to replace a folder that is not a model: --overwrite must not delete somebody's home."""
    is_model = "config.json" in entries or any(e.endswith((".safetensors", ".index.json")) for e in entries)
    folders = {e for e in entries if os.path.isdir(os.path.join(path, e))}
    strange = sorted({e for e in folders if e not in {"lora_adapter", ".cache"}})
    strange += sorted(e for e in entries - folders if not _MODEL_FILE.fullmatch(e))
    if not is_model or strange:
        found = strange[0] if strange else f"{min(entries)} and no model"
        msg = f"--overwrite would delete {path}, which holds {found}"
        raise OutputExistsError(msg, hint="only a folder with a model and nothing else is replaced; remove it yourself")
    if os.path.lexists(path + ".old"):
        msg = f"{path}.old is there; --overwrite needs that name while it swaps the folders"
        raise OutputExistsError(msg, hint="move or remove it")


def interrupted_commit(out: str | os.PathLike[str]) -> str | None:
    """Fingerprint of the model that a killed run had finished and was moving to OUT; None when there is none."""
    for place in _places(_absolute(out)):
        mark = _read_mark(place)
        if mark is not None:
            return mark.fingerprint
    return None


def interrupted_identity(out: str | os.PathLike[str]) -> Mapping[str, str] | None:
    """Identity of the plan of the model that a killed run was moving to OUT; None when there is none."""
    marks = (_read_mark(place) for place in _places(_absolute(out)))
    return next((mark.identity for mark in marks if mark is not None), None)


def finish_interrupted_commit(out: str | os.PathLike[str]) -> tuple[str, ...] | None:
    """Finish the renames of a run that was killed while it committed; None when there was none.

    Else what `commit` returns.
    """
    for place in _places(_absolute(out)):
        mark = _read_mark(place)
        if mark is not None:
            with _no_other_run(place):
                return _rename(OutputPlace(place.out, place.work, place.inside, mark.replaces), mark.old)
    return None


def commit(place: OutputPlace) -> tuple[str, ...]:
    """Make the staged model visible as OUT; everything in it must be checked and synced.

    Returns in words what could not be removed afterwards: OUT is whole all the same.
    """
    strange = _foreign(place.out) if place.inside else set[str]()
    if strange:
        msg = f"{place.out} was empty when the run began, and holds {min(strange)} now"
        raise OutputExistsError(msg, hint=f"move that away and run again; the finished model is in {place.model_dir}")
    if place.replaces:  # a run takes long: what was put there meanwhile is not ours to delete
        _check_replaceable(place.out, _foreign(place.out))
    old = os.stat(place.out).st_ino if place.replaces else 0
    sync_folder(place.model_dir)
    fingerprint, identity = "", dict[str, str]()
    plan = os.path.join(place.work, "plan.json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(plan, encoding="utf-8") as file:
        document = json.load(file)
        fingerprint, identity = str(document["fingerprint"]), dict(document["identity"])
    mark = place.work + _MARK
    with open(mark + ".new", "w", encoding="utf-8") as file:
        note = "all checks passed, only renames are left"
        told = {"fingerprint": fingerprint, "identity": identity, "replaces": place.replaces, "old": old}
        json.dump({"note": note, **told}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(mark + ".new", mark)
    sync_folder(os.path.dirname(mark))
    return _rename(place, old)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the mark says; `old` is the inode of the folder that becomes OUT.old and is ours to remove."""

    fingerprint: str
    replaces: bool
    old: int = 0
    identity: Mapping[str, str] = field(default_factory=dict)


def _read_mark(place: OutputPlace) -> _Mark | None:
    """The mark of `place`; one that has neither a staged nor a finished model beside it is stale, and removed."""
    path = place.work + _MARK
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        mark = _Mark(str(content["fingerprint"]), content["replaces"] is True, int(content["old"]))
        mark = replace(mark, identity=dict(content.get("identity", {})))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        mark = _Mark("", replaces=False)
    if not os.path.isdir(place.model_dir) and not os.path.isdir(place.out):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    return mark


def _places(path: str) -> tuple[OutputPlace, ...]:
    """Where an earlier run for the folder `path` can have worked."""
    return (
        OutputPlace(path, path + ".partial", inside=False, replaces=False),
        OutputPlace(path, os.path.join(path, _INNER), inside=True, replaces=False),
    )


def _absolute(out: str | os.PathLike[str]) -> str:
    """The folder meant: a link to a folder stands for that folder."""
    path = os.path.abspath(os.fspath(out))
    return os.path.realpath(path) if os.path.islink(path) and os.path.isdir(path) else path


@contextlib.contextmanager
def _no_other_run(place: OutputPlace) -> Iterator[None]:
    """Hold the lock of the work folder, where it still has one."""
    try:
        fd = os.open(os.path.join(place.work, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        msg = f"another merge-stream is just moving the finished model to {place.out}"
        raise OutputBusyError(msg, hint="wait for it to end") from error
    finally:
        os.close(fd)


def _rename(place: OutputPlace, old_inode: int) -> tuple[str, ...]:
    model, out, old = place.model_dir, place.out, place.out + ".old"
    if place.replaces and os.path.isdir(model) and os.path.lexists(out) and os.path.lexists(old):
        msg = f"{old} has appeared during the run, and the old {out} needs that name while it is replaced"
        raise OutputExistsError(msg, hint=f"move {old} away; the same command then ends the replacement")
    try:
        if place.inside:
            names = sorted(os.listdir(model), key=lambda n: (n in _LAST, n)) if os.path.isdir(model) else []
            for name in names:
                os.rename(os.path.join(model, name), os.path.join(out, name))
            sync_folder(out)
        elif os.path.isdir(model):
            if place.replaces and os.path.lexists(out):
                os.rename(out, old)
            os.rename(model, out)
            sync_folder(os.path.dirname(out))
    except OSError as error:
        msg = f"the finished model could not be moved to {out}: {error.strerror}"
        raise MergeStreamError(msg, hint=f"it is whole in {model}; the same command tries the move again") from error
    left: list[str] = []
    if place.replaces and os.path.isdir(old) and os.stat(old).st_ino == old_inode:
        left += _remove(old, "the replaced model")
    left += _remove(place.work, "the partial folder")
    with contextlib.suppress(OSError):
        os.unlink(place.work + _MARK)
    return tuple(left)


def _remove(folder: str, what: str) -> Iterator[str]:
    """Remove a folder of ours; when that fails, a remark instead of an error, since OUT is whole."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{what} {folder} could not be removed ({error.strerror}): remove it yourself"


def sync_folder(path: str) -> None:
    """Fsync of a folder's entries; file systems that cannot are left as they are."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
