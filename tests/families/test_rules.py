"""The vocabulary of rules, one by one, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from merge_stream.architectures.rules import (
    Concat,
    Converted,
    Drop,
    HiddenFirstExperts,
    Rename,
    SplitExperts,
    Transpose,
    Unstack,
    convert,
    pattern_of,
    take_of_view,
)
from merge_stream.errors import CheckpointError, IncompleteShardsError
from tests.families.test_goldens import numbered, replay

SPLIT = SplitExperts("{at}.experts", "{at}.{e}.gate", "{at}.{e}.up", "{at}.{e}.down")


def values(converted: Converted, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    sources = numbered(shapes)
    return {p.name: replay(p, sources) for p in converted.parameters}


class TestPatterns:
    @pytest.mark.parametrize(
        ("template", "name", "holes"),
        [
            ("model.layers.{i}.{rest}", "model.layers.12.mlp.w", {"i": "12", "rest": "mlp.w"}),
            ("model.layers.{i}.{rest}", "model.layers.x.mlp.w", None),
            ("model.norm", "modelxnorm", None),
            ("{at}.{k:w1|w3}.b", "a.b.w3.b", {"at": "a.b", "k": "w3"}),
            ("{at}.x.{at}", "q.x.q", {"at": "q"}),
            ("{at}.x.{at}", "q.x.r", None),
        ],
    )
    def test_dots_are_dots_and_holes_hold(self, template: str, name: str, holes: dict[str, str] | None) -> None:
        match = pattern_of(template).fullmatch(name)
        assert (match.groupdict() if match else None) == holes

    def test_renames_run_in_order_over_what_the_other_rules_made(self) -> None:
        rules = (Rename("b.{rest}", "c.{rest}"), Unstack("a.w", "b.{e}"), Rename("c.{i}", "d.{i}"))
        assert [p.name for p in convert(rules, {"a.w": (2, 3, 4), "b.x": (1,)}).parameters] == ["d.0", "d.1", "c.x"]


class TestExperts:
    @pytest.mark.parametrize("hidden_first", [False, True])
    @pytest.mark.parametrize("sizes", [(3, 6, 8), (2, 1, 1), (1, 5, 10), (2, 8, 4), (4, 4, 4)])
    def test_both_orientations_are_told_by_their_shapes(self, sizes: tuple[int, ...], hidden_first: bool) -> None:
        count, inner, hidden = sizes
        shapes = {"m.experts.gate_up_proj": (count, 2 * inner, hidden), "m.experts.down_proj": (count, hidden, inner)}
        if hidden_first:
            shapes = {n: (s[0], s[2], s[1]) for n, s in shapes.items()}
        got = values(convert((SPLIT,), shapes), shapes)
        fused, down = (v.swapaxes(1, 2) if hidden_first else v for v in numbered(shapes).values())
        for e in range(count):
            assert np.array_equal(got[f"m.{e}.gate"], fused[e, :inner])
            assert np.array_equal(got[f"m.{e}.up"], fused[e, inner:])
            assert np.array_equal(got[f"m.{e}.down"], down[e])
        assert len(got) == 3 * count

    def test_hidden_first_turns_only_what_is_not(self) -> None:
        shapes = {"m.experts.gate_up_proj": (2, 6, 4), "m.experts.down_proj": (2, 4, 3)}
        rules = (HiddenFirstExperts("{at}.experts"),)
        got = values(convert(rules, shapes), shapes)
        assert all(np.array_equal(got[n], v.swapaxes(1, 2)) for n, v in numbered(shapes).items())
        turned = {n: v.shape for n, v in got.items()}
        assert all(not t.permute for p in convert(rules, turned).parameters for t in p.takes)

    @pytest.mark.parametrize("down", [(2, 4, 4), (3, 4, 3), (2, 6, 2)])
    def test_what_is_no_pair_is_refused(self, down: tuple[int, ...]) -> None:
        with pytest.raises(
            CheckpointError, match=r"m\.experts\.gate_up_proj \[2, 6, 4\] and .* are not the two halves"
        ):
            convert((SPLIT,), {"m.experts.gate_up_proj": (2, 6, 4), "m.experts.down_proj": down})

    def test_a_lost_half_is_named(self) -> None:
        with pytest.raises(IncompleteShardsError, match=r"m\.experts\.down_proj is missing"):
            convert((SPLIT,), {"m.experts.gate_up_proj": (2, 6, 4)})

    def test_two_dims_are_no_stack(self) -> None:
        shapes = {"m.experts.gate_up_proj": (6, 4), "m.experts.down_proj": (4, 3)}
        assert [p.name for p in convert((SPLIT, Unstack("{at}.down_proj", "{at}.{e}")), shapes).parameters] == list(
            shapes
        )


class TestOthers:
    @pytest.mark.parametrize("axis", [0, 1])
    def test_concat(self, axis: int) -> None:
        shapes = {"0.a": (2, 3), "0.b": (2, 3), "0.c": (2, 3), "x": (1,)}
        converted = convert((Concat(("{i}.a", "{i}.b", "{i}.c"), "{i}.abc", axis),), shapes)
        got, arrays = values(converted, shapes), numbered(shapes)
        assert np.array_equal(got["0.abc"], np.concatenate([arrays["0.a"], arrays["0.b"], arrays["0.c"]], axis))
        assert list(got) == ["0.abc", "x"]
        with pytest.raises(IncompleteShardsError, match=r"0\.b is missing"):
            convert((Concat(("{i}.a", "{i}.b"), "{i}.ab"),), {"0.a": (2, 3)})

    def test_transpose(self) -> None:
        shapes = {"a.w": (2, 3, 4)}
        got = values(convert((Transpose("{at}.w", "{at}.t", (2, 0, 1)),), shapes), shapes)
        assert np.array_equal(got["a.t"], numbered(shapes)["a.w"].transpose(2, 0, 1))

    def test_drop_tells_the_reason(self) -> None:
        converted = convert((Drop("{at}.cache", "made at run time"),), {"a.cache": (3,), "a.w": (2,)})
        assert [p.name for p in converted.parameters] == ["a.w"]
        assert converted.dropped == {"a.cache": "made at run time"}


class TestViews:
    @pytest.mark.parametrize(
        "index",
        [
            lambda a: a,
            lambda a: a[2],
            lambda a: a[1, 3:],
            lambda a: a[3, :, 2:5],
            lambda a: a.swapaxes(1, 2),
            lambda a: a[0, 4:].T,
            lambda a: a[:, 0],
            lambda a: a[1:2, 2:3],
            lambda a: a[..., :1],
        ],
    )
    def test_a_strided_view_becomes_a_take(self, index: Any) -> None:
        shapes = {"a": (4, 6, 5)}
        view = index(numbered(shapes)["a"])
        offset, stride = int(view.flat[0]), tuple(s // view.itemsize for s in view.strides)
        parameter = take_of_view("x", "a", shapes["a"], offset, view.shape, stride)
        assert parameter is not None
        assert np.array_equal(replay(parameter, numbered(shapes)), view)

    def test_what_is_no_box_is_none(self) -> None:
        assert take_of_view("x", "a", (4, 6), 0, (24,), (1,)) is None
        assert take_of_view("x", "a", (4, 6), 0, (2, 6), (12, 1)) is None
