"""Tensors of a staging store: named when they were staged, so every name stays."""

from __future__ import annotations

from merge_stream.architectures.base import ModelInfo, Named
from merge_stream.options import LayoutName
from merge_stream.tensors.parameter import identity
from merge_stream.tensors.ref import Catalog

__all__ = ["MEMBER", "Staged"]


class Staged:
    """The names of the store."""

    name = "staged"

    def claims(self, catalog: Catalog, model: ModelInfo) -> bool:
        """Responsible for stores, whatever the model."""
        del model
        return catalog.naming == "staged"

    def parameters(self, catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Named:
        """Every tensor as it is, under the architecture that named it."""
        del model, layout
        told = catalog.staged.architecture if catalog.staged is not None else self.name
        return Named(told, tuple(identity(name, tensor.shape) for name, tensor in catalog.tensors.items()))


MEMBER = Staged()
