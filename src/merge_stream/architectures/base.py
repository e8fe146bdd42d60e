"""What an architecture is: the protocol, and the model folder it is told about."""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from typing import Any, Protocol

from merge_stream.options import LayoutName
from merge_stream.tensors.dtype import DType
from merge_stream.tensors.parameter import Mapping
from merge_stream.tensors.ref import Catalog

__all__ = ["Architecture", "BaseTensor", "ModelInfo", "Named", "class_names"]


def class_names(config: MappingABC[str, Any] | None) -> tuple[str, ...]:
    """The names in a config's `architectures`; whatever else stands there counts as nothing."""
    names = (config or {}).get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A tensor of the base model's own files: dtype and shape, from a safetensors header."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known about the model beside its weights.

    config        parsed config.json, or None (weights alone)
    config_path   where it was read, for messages
    base_tensors  names of the base model on disk with dtype and shape; empty when unknown
    kept_wide     tensors that a cast to 16 bits leaves in their type, where that is decided already
    """

    config: MappingABC[str, Any] | None
    config_path: str = ""
    base_tensors: MappingABC[str, BaseTensor] | None = None
    kept_wide: frozenset[str] | None = None

    @property
    def model_type(self) -> str:
        """`model_type` of the config, or ""."""
        return str((self.config or {}).get("model_type") or "")


@dataclass(frozen=True, slots=True)
class Named(Mapping):
    """A mapping that tells which tensors of the checkpoint it leaves out on purpose (name -> reason).

    `repeated` are tensors that are written more than once on purpose, `shifted` those to which a number is added
    (vectors: weights of norms, which some trainers store less one).
    """

    dropped: MappingABC[str, str] = field(default_factory=dict)
    repeated: frozenset[str] = frozenset()
    shifted: MappingABC[str, float] = field(default_factory=dict)


class Architecture(Protocol):
    """Names of one family: from the trainer's state dict to the original repository.

    `claims` says whether this file knows how to name this catalog; `parameters` makes the
    mapping or raises (UnsupportedError, CheckpointError) with the unmapped names.
    """

    name: str

    def claims(self, catalog: Catalog, model: ModelInfo) -> bool:
        """True when this architecture is responsible."""
        ...

    def parameters(self, catalog: Catalog, model: ModelInfo, layout: LayoutName) -> Mapping:
        """Every parameter of the output; uses every tensor of the catalog exactly once or names what it drops."""
        ...
