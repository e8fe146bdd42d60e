"""The finalizer: from staged weights to a whole Hugging Face folder, checked before it is visible.

Order: every byte journaled -> headers and sizes read back -> side files -> config.json ->
index -> model card. All in the staging folder; making it visible is `output.place.commit`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from merge_stream.containers.safetensors_file import read_header
from merge_stream.encodings.base import scheme_named
from merge_stream.engine.staging import DirectStaging
from merge_stream.errors import VerificationError
from merge_stream.output.config_patch import OutputTensor, PatchedConfig, holds_quantized, patch_config
from merge_stream.output.index import INDEX_NAME, build_index
from merge_stream.output.model_card import CARD_NAME, CardFacts, build_card
from merge_stream.output.model_info import ModelFolder
from merge_stream.output.side_files import SidePlan, copy_side_files
from merge_stream.planning.plan import Plan
from merge_stream.planning.planner import ADAPTER_FILE
from merge_stream.storage.local import LocalTree

__all__ = ["Finished", "beside_the_weights", "check_journal", "finish_folder", "planned_config"]


@dataclass(frozen=True, slots=True)
class Finished:
    """`side_files` maps each file beside the weights to whose it was; `notes` are remarks about the config."""

    side_files: Mapping[str, str]
    notes: tuple[str, ...]


def beside_the_weights(
    plan: Plan, folder: ModelFolder, adapter_config: bytes | None = None, card: CardFacts | None = None
) -> dict[str, str]:
    """Every file that `finish_folder` puts beside the weights, and whose it is."""
    origins = {f.name: f.origin for f in _side_files(plan, folder).files}
    in_model = sum(o.in_model for o in plan.outputs)
    if adapter_config is not None:
        origins[_ADAPTER_CONFIG] = _OURS
    if folder.config_bytes is not None and in_model:
        origins = {"config.json": folder.config_origin, **origins}
    if in_model > 1:
        origins[INDEX_NAME] = _OURS
    if card is not None and not any(name.lower().startswith("readme") for name in origins):
        origins[CARD_NAME] = _OURS
    return origins


def planned_config(plan: Plan, folder: ModelFolder) -> PatchedConfig | None:
    """config.json as it will stand beside these weights; None when none is written."""
    tensors = _model_tensors(plan)
    if folder.config_bytes is None or not tensors:
        return None
    settings = scheme_named(plan.scheme).settings(plan.left_plain) if plan.scheme else None
    return patch_config(folder.config_bytes, tensors, untied=bool(plan.broken_ties), quantization=settings)


def finish_folder(
    plan: Plan,
    staging: DirectStaging,
    folder: ModelFolder,
    adapter_config: bytes | None = None,
    card: CardFacts | None = None,
) -> Finished:
    """Check the staged weights and write everything that stands beside them.

    `card` is what a model card may tell; it is written unless the folder brings a README.
    """
    check_journal(plan, staging)
    _check_headers(plan, staging.model_dir)
    model = [p for p in plan.parameters if plan.outputs[p.output].in_model]
    copy_side_files(_side_files(plan, folder), staging.model_dir)
    origins = beside_the_weights(plan, folder, adapter_config, card)
    notes: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    if adapter_config is not None:
        _write(os.path.join(staging.model_dir, _ADAPTER_CONFIG), adapter_config)
    patched = planned_config(plan, folder)
    if patched is not None:
        notes = patched.notes
        architectures = tuple(str(name) for name in json.loads(patched.data).get("architectures") or ())
        _write(os.path.join(staging.model_dir, "config.json"), patched.data)
    if INDEX_NAME in origins:
        weight_map = {p.name: plan.outputs[p.output].name for p in model}
        size = sum(p.nbytes for p in model)
        count = sum(p.elements for p in model)
        index = build_index(weight_map, total_size=size, total_parameters=count)
        _write(os.path.join(staging.model_dir, INDEX_NAME), index)
    if card is not None and origins.get(CARD_NAME) == _OURS:
        _write(os.path.join(staging.model_dir, CARD_NAME), build_card(replace(card, architectures=architectures)))
    return Finished(origins, notes)


_OURS = "written by merge-stream"
_ADAPTER_CONFIG = os.path.join(os.path.dirname(ADAPTER_FILE), "adapter_config.json")


def _model_tensors(plan: Plan) -> list[OutputTensor]:
    inside = (p for p in plan.parameters if plan.outputs[p.output].in_model)
    return [OutputTensor(p.name, p.dtype, p.size, p.shape) for p in inside]


def _side_files(plan: Plan, folder: ModelFolder) -> SidePlan:
    inside = (p for p in plan.parameters if plan.outputs[p.output].in_model)
    kept = not plan.scheme and holds_quantized(inside)  # settings of others do not fit what we quantize
    return folder.side_files.for_quantized() if kept else folder.side_files


def check_journal(plan: Plan, staging: DirectStaging) -> None:
    """Every byte of every data section must be noted in the journal on disk."""
    done = staging.ranges()
    for number, output in enumerate(plan.outputs):
        gap = done.missing(number, len(output.header), output.nbytes)
        if gap is not None:
            msg = f"{output.name}: bytes {gap[0]} to {gap[1]} were never written"
            raise VerificationError(msg, hint="run the same command again; if it stays, report this as a bug")


def _check_headers(plan: Plan, model_dir: str) -> None:
    """Each file has its size and reads back as the plan says, by our parser and by safetensors' own."""
    tree = LocalTree.of([model_dir])
    for output in plan.outputs:
        where = os.path.join(model_dir, output.name)
        found = os.stat(where).st_size
        if found != output.nbytes:
            msg = f"{where} has {found} bytes, planned were {output.nbytes}"
            raise VerificationError(msg, hint="another program changed it: run again with --restart")
        header = read_header(tree, output.name)
        for index in output.parameters:
            p = plan.parameters[index]
            stored = header.tensors.get(p.name)
            if stored is None or (stored.dtype, stored.shape, stored.offset) != (p.dtype, p.shape, p.start):
                msg = f"{where}: the header says {stored} for {p.name}, planned was {p.dtype} {p.shape} at {p.start}"
                raise VerificationError(msg, hint="another program changed it: run again with --restart")
        if len(header.tensors) != len(output.parameters):
            msg = f"{where} holds {len(header.tensors)} tensors, planned were {len(output.parameters)}"
            raise VerificationError(msg, hint="another program changed it: run again with --restart")
        _check_with_library(where, len(output.parameters))


def _check_with_library(path: str, count: int) -> None:
    """The library that loaders use accepts the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            found = len(file.keys())
    except SafetensorError as error:
        msg = f"{path} is not accepted by the safetensors library: {error}"
        raise VerificationError(msg, hint="report this as a bug") from error
    if found != count:
        msg = f"the safetensors library sees {found} tensors in {path}, planned were {count}"
        raise VerificationError(msg, hint="report this as a bug")


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
