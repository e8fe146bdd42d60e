"""Where the output stands until it is whole, and how it becomes visible at once.

    OUT is not there      work in OUT.partial/; commit renames OUT.partial/model to OUT
    OUT is an empty       work in OUT/.merge-stream/; commit moves the files, config and
    folder or a mount     index last (a folder that is a mount point cannot be renamed)
    --overwrite           work in OUT.partial/; commit: OUT -> OUT.old, model -> OUT, OUT.old removed

An existing OUT is never touched before the new model is whole. A file `committing` in the
work folder marks that everything is checked and only renames are left; a start that finds
it finishes them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass

from merge_stream.errors import MergeStreamError, OutputExistsError, UsageError

__all__ = ["OutputPlace", "choose_place", "commit", "finish_interrupted_commit"]

_MARK = "committing"
_INNER = ".merge-stream"
_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".distcp", ".ckpt")
_LAST = ("config.json", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """`out` is the model folder to be, `work` the partial folder; `inside` when work lies in out."""

    out: str
    work: str
    inside: bool
    replaces: bool

    @property
    def model_dir(self) -> str:
        """Folder that the files are staged in."""
        return os.path.join(self.work, "model")


def choose_place(out: str | os.PathLike[str], *, overwrite: bool, inputs: tuple[str, ...] = ()) -> OutputPlace:
    """Decide where to work; OutputExistsError when OUT may not be touched, UsageError when it cannot be meant."""
    text = os.fspath(out)
    path = os.path.abspath(text)
    if text.endswith(_WEIGHT_ENDINGS):
        msg = f"OUT is a folder, and {text} is named like a file"
        raise UsageError(msg, hint="name a folder; the weights become OUT/model*.safetensors")
    for given in inputs:
        if os.path.realpath(given) == os.path.realpath(path):
            msg = f"OUT is the input folder {given}"
            raise UsageError(msg, hint="choose another folder: the checkpoint is never changed")
    if not os.path.lexists(path):
        return OutputPlace(path, path + ".partial", inside=False, replaces=False)
    if not os.path.isdir(path):
        msg = f"{text} is there and is not a folder"
        raise OutputExistsError(msg, hint="choose another OUT")
    entries = set(os.listdir(path)) - {_INNER, "lost+found"}
    mount = os.path.ismount(path)
    if not entries:
        return OutputPlace(path, os.path.join(path, _INNER), inside=True, replaces=False)
    if not overwrite:
        msg = f"{text} is there and holds {len(entries)} entries ({', '.join(sorted(entries)[:3])}, ...)"
        raise OutputExistsError(
            msg, hint="choose another OUT, or give --overwrite to replace it once the new model is whole"
        )
    _check_replaceable(path, entries)
    if mount:
        msg = f"{text} is a mount point and not empty, so it cannot be swapped for the new model at once"
        raise OutputExistsError(msg, hint="empty it, or choose a folder below it")
    return OutputPlace(path, path + ".partial", inside=False, replaces=True)


def _check_replaceable(path: str, entries: set[str]) -> None:
    """Refuse to replace a folder that is not a model: --overwrite must not delete somebody's home."""
    is_model = "config.json" in entries or any(e.endswith((".safetensors", ".index.json")) for e in entries)
    strange = sorted(e for e in entries if os.path.isdir(os.path.join(path, e)) and e not in {"lora_adapter", ".cache"})
    if not is_model or strange:
        found = f"the folder {strange[0]}" if strange else f"{min(entries)} and no model"
        msg = f"--overwrite would delete {path}, which holds {found}"
        raise OutputExistsError(msg, hint="only a folder with a model and nothing else is replaced; remove it yourself")
    if os.path.lexists(path + ".old"):
        msg = f"{path}.old is there; --overwrite needs that name while it swaps the folders"
        raise OutputExistsError(msg, hint="move or remove it")


def finish_interrupted_commit(out: str | os.PathLike[str]) -> bool:
    """Finish the renames of a run that was killed while it committed; True when there was one."""
    path = os.path.abspath(os.fspath(out))
    for place in (
        OutputPlace(path, path + ".partial", inside=False, replaces=True),
        OutputPlace(path, os.path.join(path, _INNER), inside=True, replaces=False),
    ):
        if os.path.exists(os.path.join(place.work, _MARK)):
            _rename(place)
            return True
    return False


def commit(place: OutputPlace) -> None:
    """Make the staged model visible as OUT; everything in it must be checked and synced."""
    sync_folder(place.model_dir)
    with open(os.path.join(place.work, _MARK), "w", encoding="ascii") as file:
        file.write("all checks passed; only renames are left\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(place.work)
    _rename(place)


def _rename(place: OutputPlace) -> None:
    model, out, old = place.model_dir, place.out, place.out + ".old"
    try:
        if place.inside:
            names = sorted(os.listdir(model), key=lambda n: (n in _LAST, n)) if os.path.isdir(model) else []
            for name in names:
                os.rename(os.path.join(model, name), os.path.join(out, name))
            sync_folder(out)
        elif os.path.isdir(model):
            if os.path.lexists(out):
                os.rename(out, old)
            os.rename(model, out)
            sync_folder(os.path.dirname(out))
    except OSError as error:
        msg = f"the finished model could not be moved to {out}: {error.strerror}"
        raise MergeStreamError(msg, hint=f"it is whole in {model}; the same command tries the move again") from error
    if place.replaces and os.path.isdir(old):
        shutil.rmtree(old)
    with contextlib.suppress(OSError):
        shutil.rmtree(place.work)


def sync_folder(path: str) -> None:
    """Fsync of a folder's entries; file systems that cannot are left as they are."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
