"""transformers' own conversion on tensors without data: the last resort for families without a table.

Used only where transformers 5 is installed (the extra `merge-stream[transformers]`) and
knows the model: a model without data is built from config.json and its
`revert_weight_conversion` run on tensors of the meta device. Each output is then a view
whose source, offset, sizes and strides are the take. No code of a repository is run.
"""

# ruff: noqa: ANN401, SLF001 - torch and transformers are optional here, so their types are not known

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import Any

from merge_stream.architectures.base import ModelInfo, class_names
from merge_stream.architectures.rules import Converted, take_of_view
from merge_stream.tensors.parameter import Parameter

__all__ = ["dry_run"]

Ints = tuple[int, ...]


def dry_run(shapes: Mapping[str, Ints], model: ModelInfo) -> Converted | None:
    """The names and takes that transformers itself would save; None when it is absent or cannot tell."""
    if not _installed():
        return None
    with _offline():
        return _dry_run(shapes, model)


def _installed() -> bool:
    """True where transformers 5 and torch can be imported; imports neither, so that a refusal is told at once."""
    found = importlib.util.find_spec("transformers")
    folders = found.submodule_search_locations if found is not None else None
    if not folders or PathFinder.find_spec("transformers.conversion_mapping", folders) is None:
        return False
    return importlib.util.find_spec("torch") is not None


def _dry_run(shapes: Mapping[str, Ints], model: ModelInfo) -> Converted | None:
    try:
        import torch
        from transformers.conversion_mapping import get_model_conversion_mapping  # type: ignore[import-not-found,unused-ignore]
        from transformers.core_model_loading import PrefixChange, revert_weight_conversion  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    try:
        net = _empty_model(model, torch)
        if net is None or set(net.state_dict()) != set(shapes):
            return None
        # 5.24 forgets all prefixes of a model that was not loaded; every repository has that of CLIP and SigLIP towers.
        net._weight_conversions = [
            step
            for step in get_model_conversion_mapping(net, add_legacy=False)
            if not isinstance(step, PrefixChange) or step.prefix_to_remove == "vision_model"
        ] or None
        sources = {name: _tracked(torch, shape) for name, shape in shapes.items()}
        owners = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        saved = revert_weight_conversion(net, dict(sources))
        parameters = [_parameter(name, tensor, owners, shapes) for name, tensor in saved.items()]
    except Exception:  # noqa: BLE001 - foreign code: whatever fails there, the refusal that follows says what to do
        return None
    return None if None in parameters else Converted(tuple(p for p in parameters if p is not None), {})


@contextmanager
def _offline() -> Iterator[None]:
    """Without the Hub, which transformers would ask; a push after it must reach the Hub again."""
    if "HF_HUB_OFFLINE" in os.environ:
        yield
        return
    loaded = "huggingface_hub.constants" in sys.modules
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HF_HUB_OFFLINE", None)
        constants = sys.modules.get("huggingface_hub.constants")
        if constants is not None and not loaded:
            constants.HF_HUB_OFFLINE = False  # type: ignore[attr-defined]


def _empty_model(model: ModelInfo, torch: Any) -> Any:
    import transformers  # type: ignore[import-not-found,unused-ignore]

    config = json.loads(json.dumps(dict(model.config or {})))
    kind = config.pop("model_type", None)
    names = class_names(config)
    found = getattr(transformers, str(names[0]), None) if names else None
    if kind is None or found is None:
        return None
    with torch.device("meta"):
        return found(transformers.AutoConfig.for_model(kind, **config))


def _tracked(torch: Any, shape: Ints) -> Any:
    class Tracked(torch.Tensor):  # type: ignore[misc]
        """A tensor that stays a view of its storage where a copy would be made."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in {"contiguous", "clone"}:
                return args[0]
            return super().__torch_function__(func, types, args, kwargs or {})

    return torch.empty(shape, device="meta").as_subclass(Tracked)


def _parameter(name: str, tensor: Any, owners: Mapping[int, str], shapes: Mapping[str, Ints]) -> Parameter | None:
    source = owners.get(tensor.untyped_storage()._cdata)
    if source is None:
        return None
    return take_of_view(
        name, source, shapes[source], int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
    )
