"""The governor: parks under pressure, gives back, tells it, ends nothing."""

from __future__ import annotations

import time

import pytest

from merge_stream.engine import governor as module
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Event, Parked, Progress
from merge_stream.engine.governor import Governor
from merge_stream.engine.limits import Limit
from merge_stream.engine.memory import MemoryPlan, resident

PLENTY = Limit(1 << 50, "the host")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.005)


def plan(allowed: int, projected: int) -> MemoryPlan:
    return MemoryPlan(3, 1 << 20, 1 << 20, 0, projected, allowed, "--max-mem")


def watch(monkeypatch: pytest.MonkeyPatch, free: list[Limit], memory: MemoryPlan) -> tuple[Governor, list[Event]]:
    """A governor that sees these figures one after another, and the last one from then on."""
    seen: list[Event] = []
    left = list(free)
    monkeypatch.setattr(module, "free_memory", lambda: left.pop(0) if len(left) > 1 else left[0])
    governor = Governor(MemoryBudget(slots=3, slab_bytes=1 << 20), memory, seen.append)
    with governor:
        end = time.monotonic() + 5
        while (left[1:] or len(governor.samples) < len(free) + 3) and time.monotonic() < end:
            time.sleep(0.005)
    return governor, seen


def test_memory_taken_by_others_parks_all_slabs_but_one_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Limit(1000, "the container")
    governor, seen = watch(monkeypatch, [short] * 6 + [PLENTY], plan(1 << 40, 1 << 39))
    states = [(e.slabs, e.slots, e.why) for e in seen if isinstance(e, Parked)]
    assert states == [(n, 3, "the container") for n in (2, 1, 2, 3)]
    assert governor.parked == 2
    assert governor.fewest == 1
    assert governor.text.startswith("the container was short of memory for 0.0 s: 1 of 3 slabs in use")
    assert {s.slabs for s in governor.samples} == {1, 2, 3}


def test_no_pressure_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    governor, seen = watch(monkeypatch, [PLENTY] * 3, plan(1 << 40, 1 << 39))
    assert not seen
    assert governor.text == ""


def test_a_plan_that_fills_its_bound_exactly_is_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    room = resident() + (32 << 20)
    assert watch(monkeypatch, [PLENTY] * 3, plan(room, room))[0].parked == 0
    governor, _ = watch(monkeypatch, [PLENTY] * 3, plan(1 << 20, 1 << 20))  # it is far above
    assert governor.parked == 2
    assert governor.why == "this process"


def test_all_slabs_are_free_again_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget(slots=3, slab_bytes=1 << 20)
    monkeypatch.setattr(module, "free_memory", lambda: Limit(0, "the host"))
    with Governor(budget, plan(1 << 40, 1 << 39), lambda _: None):
        end = time.monotonic() + 5
        while budget.allowed > 1 and time.monotonic() < end:
            time.sleep(0.005)
        assert budget.allowed == 1
    assert budget.allowed == 3


@pytest.mark.parametrize(
    ("total", "scarce"),
    [(100 << 20, 10 << 20), (1 << 30, 32 << 20), (24 << 30, (24 << 30) // 50), (2 << 40, 1 << 30)],
)
def test_when_memory_is_scarce(total: int, scarce: int) -> None:
    assert module._scarce(total) == scarce


def test_samples_tell_what_was_written_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Event] = []
    monkeypatch.setattr(module, "free_memory", lambda: PLENTY)
    governor = Governor(MemoryBudget(slots=3, slab_bytes=1 << 20), plan(1 << 40, 1 << 39), seen.append)
    events = [Progress(5, resumed=True), Progress(70), Progress(30)]
    with governor:
        for event in events:
            governor.counted(event)
        end = time.monotonic() + 5
        while (not governor.samples or governor.samples[-1].done < 100) and time.monotonic() < end:
            time.sleep(0.005)
    assert governor.samples[-1].done == 100
    assert seen == events
