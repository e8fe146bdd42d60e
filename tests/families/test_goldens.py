"""Every family from the state dicts of transformers 4.57 and 5.x: what the tables give is what a repository has.

The goldens hold, for a tiny model of each family, names and shapes of the state dict, and for
each tensor of the repository the source, offset, sizes and strides (made by make_goldens.py
with the real transformers). Elements are numbered, the takes applied naively, and every
number must stand where transformers put it.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from merge_stream.architectures.base import BaseTensor, ModelInfo
from merge_stream.architectures.naming import map_names
from merge_stream.errors import UnsupportedError
from merge_stream.tensors.dtype import dtype_named
from merge_stream.tensors.parameter import Mapping, Parameter
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

GOLDENS = sorted((pathlib.Path(__file__).parent / "goldens").glob("*.json"))
BF16 = dtype_named("BF16")
assert BF16 is not None

# Names that no common spelling brings together (`router.weight` and `router.layer.weight` ...): only tables know them.
ONLY_TABLES = {
    "aria.tf5",
    "ernie4_5_moe.tf5",
    "exaone_moe.tf5",
    "granitemoe.tf5",
    "granitemoehybrid.tf5",
    "granitemoeshared.tf5",
}

Shapes = dict[str, tuple[int, ...]]


def read(path: pathlib.Path) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads(path.read_text())
    golden["sources"] = {name: tuple(shape) for name, shape in golden["sources"].items()}
    return golden


def mapped(shapes: Shapes, config: dict[str, Any] | None, base: Shapes | None = None) -> Mapping:
    tensors = {n: TensorRef(n, BF16, s, ShardTable.of([], len(s))) for n, s in shapes.items()}
    base_tensors = None if base is None else {n: BaseTensor(BF16, s) for n, s in base.items()}
    return map_names(Catalog("test", "/ckpt", tensors, ()), ModelInfo(config, "config.json", base_tensors), "upstream")


def numbered(shapes: Shapes) -> dict[str, np.ndarray]:
    arrays, at = {}, 0
    for name, shape in shapes.items():
        arrays[name] = np.arange(at, at + math.prod(shape)).reshape(shape)
        at += math.prod(shape)
    return arrays


def replay(parameter: Parameter, sources: dict[str, np.ndarray]) -> np.ndarray:
    """What the takes of a parameter give, element by element; -1 where none writes."""
    view = np.full(parameter.view, -1)
    for take in parameter.takes:
        source = sources[take.source]
        seen = source.reshape(*take.split, *source.shape[1:]) if take.split else source
        part = seen[take.source_box.slices((0,) * seen.ndim)]
        view[take.dest_box.slices((0,) * view.ndim)] = part.transpose(take.permute) if take.permute else part
    return view.reshape(parameter.shape)


def wanted(golden: dict[str, Any], sources: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays = {}
    for name, (source, offset, size, stride) in golden["outputs"].items():
        flat = sources[source].reshape(-1)[offset:]
        arrays[name] = np.lib.stride_tricks.as_strided(flat, size, [s * flat.itemsize for s in stride])
    return arrays


def assert_equal(mapping: Mapping, golden: dict[str, Any]) -> None:
    sources = numbered(golden["sources"])
    got, want = {p.name: p for p in mapping.parameters}, wanted(golden, sources)
    assert sorted(got) == sorted(want)
    for name, parameter in got.items():
        assert parameter.shape == want[name].shape, name
        assert np.array_equal(replay(parameter, sources), want[name]), name


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
class TestFamily:
    def test_tables_give_the_layout_of_the_repository(self, path: pathlib.Path) -> None:
        golden = read(path)
        assert_equal(mapped(golden["sources"], golden["config"]), golden)

    def test_the_base_model_alone_gives_the_same(self, path: pathlib.Path) -> None:
        """An unknown model_type, so that only the names and shapes of the base decide."""
        golden = read(path)
        base = {name: tuple(size) for name, (_, _, size, _) in golden["outputs"].items()}
        config = {**golden["config"], "model_type": "not_known_at_all", "text_config": None}
        if path.stem in ONLY_TABLES:
            with pytest.raises(UnsupportedError, match="not those of the base model"):
                mapped(golden["sources"], config, base)
        else:
            assert_equal(mapped(golden["sources"], config, base), golden)

    def test_the_base_model_and_the_table_agree(self, path: pathlib.Path) -> None:
        golden = read(path)
        base = {name: tuple(size) for name, (_, _, size, _) in golden["outputs"].items()}
        assert_equal(mapped(golden["sources"], golden["config"], base), golden)

    def test_names_of_the_repository_stay(self, path: pathlib.Path) -> None:
        golden = read(path)
        shapes = {name: tuple(size) for name, (_, _, size, _) in golden["outputs"].items()}
        mapping = mapped(shapes, golden["config"])
        assert {p.name: p.shape for p in mapping.parameters} == shapes
        assert all(take.source == p.name and not take.permute for p in mapping.parameters for take in p.takes)

    def test_both_versions_give_one_layout(self, path: pathlib.Path) -> None:
        other = path.with_name(path.name.replace(".tf4.", ".tf5."))
        if not other.exists():
            pytest.skip("the other version does not know the family")
        ours, theirs = read(path), read(other)
        assert {n: v[2] for n, v in ours["outputs"].items()} == {n: v[2] for n, v in theirs["outputs"].items()}


def test_every_family_has_goldens() -> None:
    assert len(GOLDENS) > 100
