"""What a run tells while it goes: plain events to whoever observes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Event", "Noted", "Observer", "Parked", "Phase", "Progress", "Silent", "Warned"]


@dataclass(frozen=True, slots=True)
class Phase:
    """A step of the run begins; `total` counts what `Progress` will count (bytes), 0 when unknown."""

    name: str
    total: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """`nbytes` more of the phase's total are done; `resumed` when an earlier run had done them."""

    nbytes: int
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Noted:
    """Something the user may want to know; all is as it should be."""

    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Something the user should look at; the run goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Parked:
    """Memory is short: `slabs` of `slots` may be in use now, all again when that is over; `why` says who is short."""

    slabs: int
    slots: int
    why: str


Event = Noted | Parked | Phase | Progress | Warned


class Observer(Protocol):
    """Receives events, possibly from several threads; must return quickly."""

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        ...


class Silent:
    """An observer that ignores everything."""

    def __call__(self, event: Event) -> None:
        """Ignore `event`."""
