r"""What Megatron-Bridge and mbridge export from the small models of tests/data/megatron_bridges, as digests.

    PYTHONPATH=SITE:. .venv/bin/python -m tests.makers.megatron_exports SITE [FAMILY ...]
    PYTHONPATH=SITE:. .venv/bin/python -m tests.makers.megatron_exports SITE CASE/check.json ...

SITE and all stand-ins are those of `megatron_bridges`. Their whole export needs a live model: modules of Megatron-core
and Transformer Engine, a process group for each kind of rank, and mbridge a GPU (`torch.cuda.current_device`). What
turns weights into those of the repository does not: each mapping's `megatron_to_hf`, the registry that finds it by
name, the hooks and the stacking of experts behind it (Megatron-Bridge), `_weight_to_hf_format` (mbridge). These run
here on plain tensors, with one rank of each kind.

The result, tests/data/megatron_exports.json: FAMILY.BRIDGE -> `digest` of all that was exported. The second
form reads real torch_dist checkpoints of megatron-core with torch's own reader, and compares what both export with the
model that the checkpoint was made from.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import json
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.makers import megatron_bridges as made
from tests.makers.megatron_bridges import Tensors


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, shapes and fp32 bytes."""
    state = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {list(tensor.shape)}\n".encode())
        state.update(tensor.detach().to(torch.float32).contiguous().numpy().tobytes())
    return state.hexdigest()


def by_megatron_bridge(module: str, config: Mapping[str, Any], tensors: Tensors, names: Collection[str]) -> Tensors:
    """The repository's tensors, from Megatron's, as `stream_weights_megatron_to_hf` makes them of one rank.

    `names` are those of the repository, which it asks whether experts are in one tensor.
    """
    mappings: Any = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    streaming: Any = importlib.import_module("megatron.bridge.models.conversion.model_bridge")
    made._single_rank(mappings)
    mappings.AutoMapping._detect_parallelism_type = lambda self, module: "replicated"  # noqa: ARG005 - one rank
    mappings.remove_non_pickleables = lambda config, **more: config  # noqa: ARG005
    streaming.parallel_state = types.SimpleNamespace(get_expert_model_parallel_world_size=lambda: 1)
    file, _, name = module.partition(":")
    loaded: Any = importlib.import_module(f"megatron.bridge.models.{file}")
    bridge = object.__new__(getattr(loaded, name))
    bridge.hf_config = made._attributes(config)
    bridge.hf_pretrained = types.SimpleNamespace(
        config=bridge.hf_config, state=types.SimpleNamespace(source=_source(names))
    )
    registry = bridge.mapping_registry()
    sizes = made.sizes_of(config)
    text = config.get("text_config") or config
    experts = (text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    sizes.num_moe_experts = next((count for count in experts if count), 0)
    buffers: dict[str, dict[int, torch.Tensor]] = {}
    exported: Tensors = {}
    for target, tensor in tensors.items():
        mapping = registry.megatron_to_hf_lookup(target)
        if mapping is None:
            raise LookupError(f"Megatron-Bridge does not know {target}")
        holder = torch.nn.Module()
        holder.weight = torch.nn.Parameter(tensor)
        holder.config = made.sizes_of(config, vision=True) if target.startswith("vision_model") else sizes  # type: ignore[assignment]
        task = types.SimpleNamespace(global_param_name=target, param_name=target, mapping=mapping)
        found = mapping.megatron_to_hf(tensor, holder)
        if getattr(mapping, "is_grouped_export", False):
            found = bridge._accumulate_grouped_export(task, found, sizes, buffers, {}) or {}
        else:
            found = bridge.maybe_modify_converted_hf_weight(task, found, {})
        assert exported.keys().isdisjoint(found)
        exported |= found
    return exported


def _source(names: Collection[str]) -> Any:
    return types.SimpleNamespace(
        has_glob=lambda glob: bool(fnmatch.filter(names, glob)), get_all_keys=lambda: list(names)
    )


def by_mbridge(module: str, config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The same by `export_weights` of one rank."""
    bridge = made.mbridge_of(module, config)
    exported: Tensors = {}
    for target, tensor in tensors.items():
        names, values = bridge._weight_to_hf_format(target.replace("mtp_model_layer", "transformer_layer"), tensor)
        names = [one.replace("model.layers.61.", f"model.layers.{config['num_hidden_layers']}.") for one in names]
        assert exported.keys().isdisjoint(names)
        exported |= dict(zip(names, values, strict=True))
    return exported


# ------------------------------------------------------------------------------------------ real checkpoints


def real_tensors(step: pathlib.Path) -> Tensors:
    """The tensors of a torch_dist folder by torch, under core's names in memory (TE, grouped experts, from 0.17)."""
    reader = FileSystemReader(step)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(("optimizer", "chained"))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.load(state, storage_reader=reader, no_dist=True)
    found: Tensors = {}
    for key, tensor in state.items():
        if not key.endswith(("weight", "bias")):
            continue
        stacked = re.fullmatch(r"(decoder\.layers)\.(?!\d)(.+)", key)
        layers = {f"{stacked[1]}.{n}.{stacked[2]}": one for n, one in enumerate(tensor)} if stacked else {key: tensor}
        for name, one in layers.items():
            name = name.replace(".transformer_layer.", ".mtp_model_layer.")  # noqa: PLW2901
            if ".experts.experts." in name:
                short = name.replace(".experts.experts.", ".experts.")
                found |= {f"{short}{e}": expert for e, expert in enumerate(one)}
            else:
                found[name] = one
    return found


def compare_real(check: pathlib.Path) -> None:
    """Print whether both export the model that the checkpoint was made from, byte for byte."""
    case = check.parent
    config = json.loads((case / "expected" / "config.json").read_text())
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    truth = {n: t for path in (case / "expected").glob("*.safetensors") for n, t in load_file(path).items()}
    tensors = real_tensors(next(case.rglob(".metadata")).parent)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in tensors:
            tensors[name] = tensors[name][: config["vocab_size"]]  # of padding neither's functions know
    _, _, theirs, mbridge = made.FAMILIES[config["model_type"]]
    exports: dict[str, Tensors] = {}
    if theirs:
        exports["Megatron-Bridge"] = by_megatron_bridge(theirs, config, tensors, truth.keys())
    if mbridge:
        exports["mbridge"] = by_mbridge(mbridge, config, tensors)
    for bridge, exported in exports.items():
        kept = exported.keys() & truth.keys()
        same = {n for n in kept if exported[n].dtype == truth[n].dtype and torch.equal(exported[n], truth[n])}
        lacks, more = sorted(truth.keys() - same), sorted(exported.keys() - truth.keys())
        print(f"{case.name} {bridge}: {len(same)} of {len(truth)} are equal, lacks {lacks}, more {more}")


def main() -> None:
    from tests.formats.test_megatron_families import MADE, opened

    site, *wanted = sys.argv[1:]
    if wanted and wanted[0].endswith(".json"):
        sys.meta_path.insert(0, made._Finder(pathlib.Path(site)))
        for check in wanted:
            compare_real(pathlib.Path(check))
        return
    goldens = [(path, *opened(path)) for path in MADE if not wanted or path.stem.split(".")[0] in wanted]
    sys.meta_path.insert(0, made._Finder(pathlib.Path(site)))
    place = made.HERE.with_name("megatron_exports.json")
    document: dict[str, str] = json.loads(place.read_text()) if wanted and place.exists() else {}
    for path, config, truth, tensors, _ in goldens:
        family, _, kind = path.stem.partition(".")
        _, _, theirs, mbridge = made.FAMILIES[family]
        if kind == "mbridge":
            exported = by_mbridge(mbridge, config, tensors)
        else:
            exported = by_megatron_bridge(theirs, config, tensors, truth.keys())
        document[path.stem] = digest(exported)
        other = [n for n, t in exported.items() if n in truth and digest({n: t}) != digest({n: truth[n]})]
        lacks, more = sorted(truth.keys() - exported.keys()), sorted(exported.keys() - truth.keys())
        print(path.stem, len(exported), "differ", other, "lacks", lacks, "more", more)
    place.write_text(json.dumps(document, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
