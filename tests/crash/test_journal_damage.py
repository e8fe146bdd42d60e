"""A journal that was cut, or has a flipped bit, never makes a byte be believed that is not there."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merge_stream.engine import journal as module
from merge_stream.engine.journal import DoneRanges, Journal, WrittenRange, checksum, read_journal
from tests.crash.conftest import Reported, Small
from tests.crash.faults import Faults, in_a_child

Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 5)),
        st.tuples(st.sampled_from(["lose", "sync", "kill", "reboot"]), st.integers(0, 1), st.just(0)),
    ),
    max_size=12,
)


@dataclasses.dataclass
class History:
    """A journal file after some runs, what is really on the disk, and how much of the file no power failure takes."""

    text: bytes
    truth: set[tuple[int, int]]
    durable: int
    boot: str


def lived(path: Path, steps: Sequence[Step], patch: pytest.MonkeyPatch) -> History:
    """Runs that write, lose files, sync, are killed and find the machine booted anew; blocks of ten bytes."""
    boots = iter(f"boot-{k}" for k in range(100))
    boot = [next(boots)]
    patch.setattr(module, "_boot_id", lambda: boot[0])
    patch.setattr(os, "fdatasync", lambda _: None)  # no power is lost here, and a disk takes its time
    path.unlink(missing_ok=True)
    journal, truth, durable = Journal(str(path)), set[tuple[int, int]](), 0
    for what, output, block in steps:
        if what == "write":
            at = WrittenRange(output, 10 * block, 10 * block + 10, checksum(memoryview(b"%d" % block)))
            journal.record([at])
            truth.add((output, block))
        elif what == "lose":
            journal.forget(output)
            truth = {(o, b) for o, b in truth if o != output}
            durable = path.stat().st_size
        elif what == "sync":
            journal.synced(journal.mark)
            durable = path.stat().st_size
        else:
            if what == "reboot":
                boot[0] = next(boots)
            journal.close()
            journal = Journal(str(path))
    journal.close()
    return History(path.read_bytes(), truth, durable, boot[0])


def believed(done: DoneRanges) -> set[tuple[int, int]]:
    return {(o, b) for o in (0, 1) for b in range(6) if done.covers(o, 10 * b, 10 * b + 10)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal") / "journal"


PROPERTY = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@PROPERTY
@given(STEPS)
def test_every_prefix_that_a_crash_can_leave_claims_only_what_is_there(path: Path, steps: Sequence[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        history = lived(path, steps, patch)
        for cut in range(history.durable, len(history.text) + 1):
            path.write_bytes(history.text[:cut])
            content = read_journal(str(path))
            assert not content.damaged
            assert believed(content.trusted) <= history.truth
        assert believed(content.trusted) | {(r.output, r.start // 10) for r in content.doubtful} >= history.truth


@PROPERTY
@given(STEPS, st.randoms(use_true_random=False))
def test_any_flipped_bit_claims_only_what_is_there(path: Path, steps: Sequence[Step], pick: random.Random) -> None:
    """Also in a line that took something back; and after the run that finds it was killed too."""
    with pytest.MonkeyPatch.context() as patch:
        history = lived(path, steps, patch)
        for _ in range(30):
            at, bit = pick.randrange(len(history.text)), pick.randrange(8)
            flipped = bytearray(history.text)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            assert believed(read_journal(str(path)).trusted) <= history.truth
            Journal(str(path)).close()
            assert believed(read_journal(str(path)).trusted) <= history.truth


@pytest.mark.usefixtures("small_segments")
class TestTheWholeTool:
    @pytest.fixture
    def begun(self, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder whose `out.partial` was left by kill -9 after a good part of the output."""
        folder = tmp_path / "begun"
        with monkeypatch.context() as patch:
            faults = Faults(patch, folder)
            faults.kill_at(70)
            assert in_a_child(lambda: small.merge(folder / "out", "-q", "--workers", "2")) == -9
        assert (folder / "out.partial" / "journal").stat().st_size > 800
        return folder

    def resumed(self, small: Small, begun: Path, journal: bytes, reported: Reported) -> int:
        """Bytes that were not written again, after a journal as given."""
        folder = begun.parent / "again"
        shutil.copytree(begun, folder)
        (folder / "out.partial" / "journal").write_bytes(journal)
        assert small.merge(folder / "out", "--json", "-q") == 0
        small.assert_whole(folder / "out")
        shutil.rmtree(folder)
        return int(reported()["resumed_nbytes"])

    def test_a_journal_cut_anywhere(self, small: Small, begun: Path, reported: Reported) -> None:
        text = (begun / "out.partial" / "journal").read_bytes()
        cuts = sorted({0, 1, *random.Random(4).sample(range(len(text)), 12), len(text) - 1, len(text)})
        kept = [self.resumed(small, begun, text[:cut], reported) for cut in cuts]
        assert kept == sorted(kept)
        assert kept[0] == 0
        assert kept[-1] > 100_000

    def test_a_journal_with_a_flipped_bit(self, small: Small, begun: Path, reported: Reported) -> None:
        """What stands before the damage is read and compared, and counts."""
        text = (begun / "out.partial" / "journal").read_bytes()
        for at in [*random.Random(5).sample(range(len(text)), 12), len(text) - 1]:
            flipped = bytearray(text)
            flipped[at] ^= 1 << (at % 8)
            kept = self.resumed(small, begun, bytes(flipped), reported)
            assert kept >= 20_000 * (text[:at].count(b"\\nr ") - 1)

    def test_a_flipped_bit_in_the_plans_identity_is_refused_with_a_way_out(
        self, small: Small, begun: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = begun / "out.partial" / "plan.json"
        text = path.read_bytes()
        for at in range(0, len(text), 23):
            flipped = bytearray(text)
            flipped[at] ^= 2
            path.write_bytes(flipped)
            code = small.merge(begun / "out", "-q")
            told = capsys.readouterr().err
            if code == 0:  # a byte that means nothing: white space, or the copy of the fingerprint
                small.assert_whole(begun / "out")
                return
            assert code == 1
            assert "--restart" in told
            small.assert_nothing_wrong(begun / "out")
        path.write_bytes(text)
        assert small.merge(begun / "out", "-q") == 0
        small.assert_whole(begun / "out")
