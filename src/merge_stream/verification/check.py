"""Is this folder a complete model that every engine loads? Told from headers and JSON files, in seconds.

    files       index <-> files both ways, headers, sizes, gaps, strays, modes          check_files
    config      readable, fits the shapes, dtype keys, tie flags, architectures         check_config
    names       names that an engine refuses, or skips without a word                   check_names
    quantized   quantization settings <-> tensors                                       check_quantized
    beside      tokenizer, templates, generation config, processor, code                check_beside

A finding is an `error` when some engine refuses the folder or computes with wrong weights, a
`warning` when one reads it otherwise than meant, a `note` otherwise; it names the engines and the
rule. Facts: `docs/folder.md` (transformers 5.24 and 4.57, vLLM 0.33, SGLang 0.5.23, llama.cpp's converter,
TGI of January 2026).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

from merge_stream.errors import UnknownFormatError
from merge_stream.output.side_files import list_folder
from merge_stream.storage.local import LocalTree
from merge_stream.storage.unfinished import refuse_unfinished
from merge_stream.verification.check_beside import check_beside
from merge_stream.verification.check_config import check_config
from merge_stream.verification.check_files import check_adapter, check_files, is_adapter
from merge_stream.verification.check_names import check_names
from merge_stream.verification.check_quantized import check_quantized
from merge_stream.verification.finding import Checked, CheckedFolder, Finding

__all__ = ["Checked", "Finding", "check_folder"]

_PARTS: tuple[Callable[[CheckedFolder], Iterator[Finding]], ...] = (
    check_config,
    check_names,
    check_quantized,
    check_beside,
)
_ORDER = {"error": 0, "warning": 1, "note": 2}


def check_folder(out: str | os.PathLike[str]) -> Checked:
    """Everything that is wrong with the model folder `out`; reads no tensor data.

    UnknownFormatError when it is no folder, or that of a run that has not ended; all else is a finding.
    """
    path = os.fspath(out)
    if not os.path.isdir(path):
        kind = "a file, not a folder" if os.path.exists(path) else "not there"
        msg = f"{path} is {kind}"
        raise UnknownFormatError(msg, hint="pass the folder of the model; in a Hub cache that is snapshots/REVISION")
    refuse_unfinished(path)
    folder = _listed(path)
    if is_adapter(folder):
        text = "the folder is an adapter, and no model: peft and vLLM load it beside the model it belongs to"
        findings = [Finding("note", "files", "adapter-only", "all", text), *check_adapter(folder, "")]
        return Checked(path, tuple(sorted(findings, key=lambda f: _ORDER[f.severity])), files=1)
    findings = list(check_files(folder))
    if folder.tensors or "config.json" in folder.tree.files:
        for part in _PARTS:
            findings += part(folder)
    findings += check_adapter(folder)
    findings.sort(key=lambda finding: _ORDER[finding.severity])
    dtypes = Counter(t.dtype.name for t in folder.tensors.values())
    return Checked(
        path,
        tuple(findings),
        files=len(folder.headers),
        tensors=len(folder.tensors),
        nbytes=sum(t.nbytes for t in folder.tensors.values()),
        dtypes=dict(dtypes.most_common()),
    )


def _listed(path: str) -> CheckedFolder:
    """The folder's own files and those of its sub-folders that belong to a model; links that lead nowhere aside."""
    files = list_folder(path)
    broken, folders = [], []
    with os.scandir(path) as entries:
        for item in entries:
            if item.is_dir(follow_symlinks=False):
                folders.append(item.name)
            elif item.is_symlink() and not os.path.exists(item.path):
                broken.append(item.name)
    adapter = os.path.join(path, "lora_adapter")
    if os.path.isdir(adapter):
        files |= {f"lora_adapter/{name}": entry for name, entry in list_folder(adapter).items()}
    return CheckedFolder(LocalTree(path, files, {}), tuple(sorted(broken)), tuple(sorted(folders)))
