"""The weight files of a folder: complete, readable, the index agrees with them, and nothing else is there."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Generator, Iterator

from merge_stream.containers.safetensors_file import read_header
from merge_stream.errors import MergeStreamError
from merge_stream.output.index import INDEX_NAME
from merge_stream.verification.finding import CheckedFolder, Finding, listed, some

__all__ = ["check_adapter", "check_files", "is_adapter"]

ADAPTER = "adapter_model.safetensors"
_ALL = "all"
_NUMBERED = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_OTHER_WEIGHTS = re.compile(r".*\.(bin|pt|pth|gguf|h5|msgpack|onnx|ckpt|distcp)|.*\.bin\.index\.json", re.IGNORECASE)
_UNFINISHED = re.compile(r".*\.(partial|tmp|incomplete|lock)|\.merge-stream")
_LFS_POINTER = b"version https://git-lfs"
_READ_BY_ALL = stat.S_IROTH
_MOVE = "move them out of the folder"
_COPY = "copy the folder again, or merge again"


def check_files(folder: CheckedFolder) -> Iterator[Finding]:
    """Findings about the files; fills `headers` and `tensors` of the folder."""
    yield from _links_and_strays(folder)
    index = folder.json(INDEX_NAME)
    names = [n for n in folder.names if n.endswith(".safetensors")]
    if isinstance(index, str):
        yield Finding("error", "files", "index-readable", _ALL, index, _COPY)
        index = None
    weight_map = index.get("weight_map") if index is not None else None
    if index is not None and not (
        isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    ):
        yield Finding("error", "files", "index-readable", _ALL, f"{INDEX_NAME} has no weight_map of names to files")
        weight_map = None
    files = yield from _model_files(folder, names, weight_map)
    for name in files:
        yield from _header(folder, name)
    yield from _double_tensors(folder)
    if weight_map is not None and index is not None:
        yield from _index_and_files(folder, weight_map, index)
    yield from _alignment(folder)
    yield from _modes(folder)


def is_adapter(folder: CheckedFolder) -> bool:
    """Whether the folder itself is what peft writes: an adapter, and no model around it."""
    names = set(folder.names)
    return (
        ADAPTER in names
        and "config.json" not in names
        and not any(name.endswith(".safetensors") and name != ADAPTER for name in names)
    )


def check_adapter(folder: CheckedFolder, at: str = "lora_adapter/") -> Iterator[Finding]:
    """Findings about the adapter in the sub-folder `at`, where there is one; "" is the folder itself."""
    files = [name for name in folder.tree.files if name.startswith(at)]
    if not files:
        return
    config = folder.json(f"{at}adapter_config.json")
    if not isinstance(config, dict):
        text = config or f"{at}adapter_config.json is not there"
        yield Finding("error", "adapter", "adapter-config", "peft, vLLM", text)
    elif not config.get("peft_type"):
        text = f"{at}adapter_config.json names no peft_type"
        yield Finding("error", "adapter", "adapter-config", "peft, vLLM", text, _COPY)
    elif not config.get("lora_alpha"):
        text = f"{at}adapter_config.json says lora_alpha {config.get('lora_alpha')}: the adapter has no effect"
        yield Finding("error", "adapter", "adapter-alpha", "peft, vLLM", text, "write it again with --lora-alpha N")
    name = f"{at}{ADAPTER}"
    if name not in folder.tree.files:
        yield Finding("error", "adapter", "adapter-weights", "peft, vLLM", f"{name} is not there")
        return
    try:
        read_header(folder.tree, name)
    except (MergeStreamError, OSError) as error:
        yield Finding("error", "adapter", "adapter-weights", "peft, vLLM", str(error).partition("\n")[0], _COPY)


def _links_and_strays(folder: CheckedFolder) -> Iterator[Finding]:
    for name in folder.broken_links:
        yield Finding(
            "error", "files", "link", _ALL, f"{name} is a link that leads nowhere", "download the snapshot again"
        )
    other = [name for name in folder.names if _OTHER_WEIGHTS.fullmatch(name)]
    if other and any(name.endswith(".safetensors") for name in folder.names):
        text = f"other weights stand beside the model: {listed(other)}; a loader that prefers them takes old values"
        yield Finding("warning", "files", "other-weights", "llama.cpp, TGI, tools", text, "move them out")
    unfinished = [name for name in (*folder.names, *folder.folders) if _UNFINISHED.fullmatch(name)]
    if unfinished:
        yield Finding("warning", "files", "unfinished", _ALL, f"the rest of an unfinished write: {listed(unfinished)}")
    if "original" in folder.folders:
        yield Finding(
            "note", "files", "original", "Hub", "original/ holds another copy of weights, which no loader needs"
        )


def _model_files(
    folder: CheckedFolder, names: list[str], weight_map: dict[str, str] | None
) -> Generator[Finding, None, list[str]]:
    """Yields findings; returns (through `yield from`) the files that are the model."""
    wanted = sorted(set(weight_map.values())) if weight_map is not None else []
    if weight_map is not None:
        missing = [name for name in wanted if name not in folder.tree.files]
        if missing:
            text = f"{len(missing)} of {len(wanted)} files that {INDEX_NAME} names are not there: {listed(missing)}"
            yield Finding("error", "files", "index-files", "transformers, vLLM, SGLang, TGI, llama.cpp", text, _COPY)
        extra = [name for name in names if name not in wanted]
        if extra:
            text = f"{listed(extra)} stand beside the model, and {INDEX_NAME} does not name them"
            if any(name.startswith("model") for name in extra):
                rule = "its tensors are in no index, so the conversion stops"
                yield Finding("error", "files", "stale-files", "llama.cpp", f"{text}: {rule}", _MOVE)
            else:
                yield Finding("warning", "files", "stale-files", "tools that load every *.safetensors", text, _MOVE)
        return [name for name in wanted if name in folder.tree.files]
    plain = [name for name in names if name == "model.safetensors" or _NUMBERED.fullmatch(name)]
    if not plain:
        has_adapter = any(name.startswith("lora_adapter/") for name in folder.tree.files)
        others = [name for name in folder.names if _OTHER_WEIGHTS.fullmatch(name)]
        if has_adapter and not names and not others and "config.json" not in folder.names:
            yield Finding("note", "files", "adapter-only", _ALL, "the folder holds an adapter and no model")
        else:
            kind = f"; it has {listed([*names, *others])}" if names or others else ""
            text = f"there is no model.safetensors and no {INDEX_NAME}{kind}"
            hint = "of a checkpoint, `merge-stream CKPT OUT` makes a model" if others else ""
            yield Finding("error", "files", "no-weights", "transformers, vLLM, SGLang, TGI", text, hint)
        return names
    numbered = [match for name in plain if (match := _NUMBERED.fullmatch(name))]
    for count in sorted({int(match[2]) for match in numbered}):
        there = {int(match[1]) for match in numbered if int(match[2]) == count}
        missing = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1) if n not in there]
        if missing:
            text = f"{len(missing)} of {count} files are not there: {listed(missing)}"
            yield Finding("error", "files", "files-complete", _ALL, text, _COPY)
    if len(plain) > 1:
        text = f"{len(plain)} weight files and no {INDEX_NAME}: which tensor is where cannot be told"
        yield Finding("error", "files", "index-missing", "transformers, SGLang, TGI", text, "merge again")
    extra = [name for name in names if name not in plain]
    if extra:
        text = f"{listed(extra)} stand beside the model; without an index vLLM loads every *.safetensors it finds"
        yield Finding("error", "files", "stale-files", "vLLM", text, _MOVE)
    return plain


def _header(folder: CheckedFolder, name: str) -> Iterator[Finding]:
    try:
        start = folder.tree.read(name, 0, min(len(_LFS_POINTER), folder.tree.files[name].nbytes))
        if start == _LFS_POINTER:
            text = f"{name} is the pointer of Git LFS, not the file itself"
            yield Finding("error", "files", "lfs-pointer", _ALL, text, "git lfs pull, or `hf download`")
            return
        header = read_header(folder.tree, name)
    except MergeStreamError as error:
        yield Finding("error", "files", "header", "safetensors, so all", error.message, error.hint)
        return
    except OSError as error:
        yield Finding("error", "files", "readable", _ALL, f"{name} cannot be read: {error.strerror}")
        return
    folder.headers[name] = header
    written = header.metadata.get("format")
    if written is None:
        text = f'{name} has no "format" in its metadata'
        yield Finding("warning", "files", "format", "transformers before 5, MLX", text, "merge-stream rewrites it")
    elif written not in {"pt", "mlx"}:
        text = f'{name} says format "{written}", transformers wants "pt"'
        yield Finding("error", "files", "format", "transformers", text, "merge-stream rewrites it")


def _double_tensors(folder: CheckedFolder) -> Iterator[Finding]:
    homes: dict[str, str] = {}
    double = []
    for file, header in folder.headers.items():
        for name, tensor in header.tensors.items():
            if name in homes:
                double.append(f"{name} ({homes[name]}, {file})")
            homes[name] = file
            folder.tensors.setdefault(name, tensor)
    if double:
        text = f"tensors stand in two files: {listed(double)}"
        yield Finding("error", "files", "double", "llama.cpp; others take one of them", text, _COPY)


def _index_and_files(folder: CheckedFolder, weight_map: dict[str, str], index: dict[str, object]) -> Iterator[Finding]:
    read = folder.headers
    absent = [n for n, file in weight_map.items() if file in read and n not in read[file].tensors]
    if absent:
        text = f"{INDEX_NAME} names tensors that their files do not hold: {listed(absent)}"
        yield Finding("error", "files", "index-tensors", "transformers, vLLM, SGLang, llama.cpp", text, _COPY)
    extra = [n for header in read.values() for n in header.tensors if n not in weight_map]
    if extra:
        text = f"{INDEX_NAME} lacks tensors that the files hold: {listed(extra)}"
        yield Finding("error", "files", "index-tensors", "llama.cpp refuses, transformers skips them", text, _COPY)
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(t.nbytes for t in folder.tensors.values())
    if isinstance(total, int | float) and int(total) != held and len(read) == len(set(weight_map.values())):
        text = f"{INDEX_NAME} says total_size {int(total)}, the tensors have {held} bytes"
        yield Finding("warning", "files", "total-size", "memory estimates of accelerate and TGI", text)
    if len(set(weight_map.values())) == 1:
        yield Finding("note", "files", "index-of-one", _ALL, f"{INDEX_NAME} for one file is not needed")


def _alignment(folder: CheckedFolder) -> Iterator[Finding]:
    odd = [
        name
        for header in folder.headers.values()
        for name, t in header.tensors.items()
        if t.nbytes and t.offset % t.dtype.itemsize
    ]
    if odd:
        text = f"{some(len(odd), 'tensor')} not aligned to the element size: {listed(odd)}"
        yield Finding(
            "warning", "files", "alignment", "numpy, MLX and zero-copy readers", text, "merge-stream rewrites the files"
        )


def _modes(folder: CheckedFolder) -> Iterator[Finding]:
    closed = []
    for name in folder.names:
        path = folder.tree.files[name].path
        try:
            mode = os.stat(path).st_mode
        except OSError:
            continue
        if not mode & _READ_BY_ALL:
            closed.append(name)
    if closed:
        text = f"{some(len(closed), 'file')} not readable by other users: {listed(closed)}"
        yield Finding("warning", "files", "modes", "every engine that runs as another user", text, "chmod a+r")
