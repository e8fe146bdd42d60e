"""Finishing a staging store, and what a model that is made from one takes out of it.

Order: every byte journaled -> sizes -> side files -> metadata of the arrays -> root zarr.json ->
seal. Making it visible is `output.place.commit`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace

from merge_stream.architectures.precision import names_kept_wide
from merge_stream.engine.staging import DirectStaging
from merge_stream.engine.zarr_staging import sync_file_system
from merge_stream.errors import UsageError, VerificationError
from merge_stream.formats.zarr_store import ROOT, SEAL, SIDE_FILES, STORE_VERSION, metadata_bytes
from merge_stream.options import LayoutName, MergeOptions
from merge_stream.output.hugging_face import check_journal
from merge_stream.output.model_card import config_names, hub_id_of, step_of
from merge_stream.output.model_info import ModelFolder
from merge_stream.output.side_files import SidePlan, copy_side_files
from merge_stream.output.store_files import BASE_README, CONFIG, metadata_of_nodes, nodes_with_a_file
from merge_stream.planning.plan import Plan
from merge_stream.planning.store_layout import arrays_of
from merge_stream.tensors.ref import Catalog
from merge_stream.tensors.staged import StagedFacts

__all__ = ["FP32_REMARK", "as_staged", "fingerprint_of_store", "finish_store", "staged_facts"]

FP32_REMARK = "the source is fp32"
"""How the remark begins that tells what a cast would save: it speaks of one merge, not of what is staged."""


def staged_facts(
    catalog: Catalog,
    folder: ModelFolder,
    plan: Plan,
    options: MergeOptions,
    *,
    architecture: str,
    lora: str,
    adapter_config: bytes | None,
) -> StagedFacts:
    """What the store of `plan` tells beside its tensors."""
    origins = {f.name: f.origin for f in (*folder.side_files.files, *folder.side_files.quantization)}
    if folder.config_bytes is not None:
        origins[CONFIG] = folder.config_origin
    return StagedFacts(
        format=catalog.format,
        facts=dict(catalog.facts),
        step=step_of(catalog.root),
        architecture=architecture,
        layout=options.layout,
        keep_wide=tuple(sorted(names_kept_wide([p.name for p in plan.parameters], folder.info))),
        materialized=options.materialize_tied,
        has_config=folder.config_bytes is not None,
        origins=origins,
        dropped=dict(plan.dropped),
        notes=tuple(note for note in plan.notes if not note.startswith(FP32_REMARK)),
        base_id=hub_id_of(folder.base_id, *config_names(folder.info.config, catalog.beside)),
        lora=lora,
        partial=catalog.partial,
        module_dtype=catalog.module_dtype,
        adapter_config=(adapter_config or b"").decode(),
    )


def finish_store(plan: Plan, staging: DirectStaging, folder: ModelFolder, facts: StagedFacts) -> None:
    """Check the staged arrays and write everything that makes them a store."""
    check_journal(plan, staging)
    at = staging.model_dir
    for output in plan.outputs:
        for placed in arrays_of(plan, output):
            path = os.path.join(at, placed.array.file)
            found = os.stat(path).st_size if os.path.exists(path) else 0
            if found != placed.array.file_nbytes:
                msg = f"{path} has {found} bytes, planned were {placed.array.file_nbytes}"
                raise VerificationError(msg, hint="another program changed it: run again with --restart")
    _write_side_files(os.path.join(at, SIDE_FILES), folder)
    texts = metadata_of_nodes(plan)
    for name in nodes_with_a_file(plan, texts):
        os.makedirs(os.path.join(at, name), exist_ok=True)
        _write(os.path.join(at, name, ROOT), texts[name])
    _write(os.path.join(at, ROOT), _root(plan.fingerprint, facts, texts))
    sealed = [ROOT, *sorted(_below(os.path.join(at, SIDE_FILES)))]
    seal = {
        "version": STORE_VERSION,
        "fingerprint": plan.fingerprint,
        "sha256": {name: _sha256(os.path.join(at, name)) for name in sealed},
    }
    _write(os.path.join(at, SEAL), json.dumps(seal, indent=1).encode())
    if not sync_file_system(at):
        for folder_path, _, names in os.walk(at):
            for name in names:
                _sync(os.path.join(folder_path, name))
            _sync(folder_path)


def fingerprint_of_store(store: str) -> str:
    """Fingerprint that the seal of a finished store states; "" when `store` is none."""
    try:
        with open(os.path.join(store, SEAL), encoding="utf-8") as file:
            return str(json.load(file)["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def as_staged(catalog: Catalog, options: MergeOptions, folder: ModelFolder) -> tuple[MergeOptions, ModelFolder]:
    """Options and folder of a model that is made from a store: what was decided when it was staged stays so.

    UsageError for an option that would decide it anew.
    """
    facts = catalog.staged
    if facts is None:
        return options, folder
    again = {
        "--base-model": options.base_model is not None,
        "--lora": options.lora.mode is not None or options.lora.alpha is not None,
        "--check-replicas": options.check_replicas,
        "--materialize-tied": options.materialize_tied and not facts.materialized,
    }
    given = [name for name, is_given in again.items() if is_given]
    if given:
        msg = f"{given[0]} was decided when {catalog.root} was staged"
        raise UsageError(msg, hint=f"leave it out, or stage the checkpoint anew with {given[0]}")
    layout: LayoutName = "as-is" if facts.layout == "as-is" else "upstream"
    told = SidePlan(
        tuple(replace(f, origin=facts.origins.get(f.name, f.origin)) for f in folder.side_files.files),
        tuple(replace(f, origin=facts.origins.get(f.name, f.origin)) for f in folder.side_files.quantization),
        folder.side_files.notes,
    )
    readme = os.path.join(catalog.config_dirs[0], BASE_README) if catalog.config_dirs else ""
    kept = tuple(f for f in told.files if f.name != BASE_README)
    return (
        replace(options, layout=layout, materialize_tied=facts.materialized),
        replace(
            folder,
            info=replace(folder.info, kept_wide=frozenset(facts.keep_wide)),
            side_files=replace(told, files=kept),
            config_origin=facts.origins.get(CONFIG, folder.config_origin),
            base_id=facts.base_id,
            base_readme=readme if os.path.isfile(readme) else "",
        ),
    )


def _root(fingerprint: str, facts: StagedFacts, texts: Mapping[str, bytes]) -> bytes:
    """The root's zarr.json, with the metadata of every array (consolidated) as it was written before."""
    head = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"merge_stream": {"fingerprint": fingerprint, "facts": asdict(facts)}},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": {}},
    }
    arrays = b",".join(json.dumps(name, ensure_ascii=False).encode() + b":" + text for name, text in texts.items())
    return metadata_bytes(head).removesuffix(b"}}}") + arrays + b"}}}"


def _write_side_files(into: str, folder: ModelFolder) -> None:
    shutil.rmtree(into, ignore_errors=True)  # of an attempt that was cut off
    os.makedirs(into)
    every = SidePlan((*folder.side_files.files, *folder.side_files.quantization))
    copy_side_files(every, into)
    if folder.config_bytes is not None:
        _write(os.path.join(into, CONFIG), folder.config_bytes)
    if folder.base_readme:
        shutil.copyfile(folder.base_readme, os.path.join(into, BASE_README))


def _below(folder: str) -> list[str]:
    """Files below the side files' folder, named from the store."""
    parent = os.path.dirname(folder)
    return [os.path.relpath(os.path.join(at, name), parent) for at, _, names in os.walk(folder) for name in names]


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
