"""The journal says what is done, never too much: after a kill, a torn write, a power failure, a failed sync."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merge_stream.engine import journal as module
from merge_stream.engine.journal import DoneRanges, Journal, JournalContent, WrittenRange, checksum, read_journal
from merge_stream.errors import CorruptCheckpointError


def rng(output: int, start: int, stop: int) -> WrittenRange:
    return WrittenRange(output, start, stop, checksum(memoryview(b"%d %d" % (output, start))))


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The machine's boot id, to be changed by the test."""
    current = ["boot-1"]
    monkeypatch.setattr(module, "_boot_id", lambda: current[0])
    return current


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


A, B, C, D = (rng(0, 0, 10), rng(0, 10, 20), rng(1, 0, 5), rng(1, 5, 9))


class TestWhatAKillLeaves:
    def test_everything_noted_is_trusted_on_the_same_boot(self, path: str, boot: list[str]) -> None:
        j = Journal(path)
        j.record([A])
        j.record([B, C])
        # no close: the process was killed
        content = read_journal(path)
        assert content.trusted == DoneRanges((A, B, C))
        assert content.doubtful == ()
        assert content.lines == 2

    def test_an_absent_journal_is_an_empty_one(self, path: str) -> None:
        assert read_journal(path).trusted == DoneRanges(())

    def test_a_tail_torn_at_any_byte_is_cut_off_and_groups_are_whole_or_absent(
        self, path: str, boot: list[str]
    ) -> None:
        j = Journal(path)
        j.record([A])
        j.record([B, C])
        j.close()
        text = Path(path).read_bytes()
        ends = [k + 1 for k, c in enumerate(text) if c == ord("\n")]
        allowed: dict[int, tuple[WrittenRange, ...]] = {0: (), 1: (), 2: (A,), 3: (A, B, C)}
        for cut in range(len(text) + 1):
            Path(path).write_bytes(text[:cut])
            whole = sum(e <= cut for e in ends)
            content = read_journal(path)
            assert content.trusted == DoneRanges(allowed[whole])
            assert content.nbytes == ([0, *ends])[whole]
            with_more = Journal(path)  # and a new run goes on behind the part that is whole
            with_more.record([D])
            with_more.close()
            assert read_journal(path).trusted == DoneRanges((*allowed[whole], D))

    def test_a_changed_byte_ends_all_belief(self, path: str, boot: list[str]) -> None:
        """No kill leaves a whole line with a wrong check: the file is damaged, and what stood there is unknown."""
        j = Journal(path)
        for r in (A, B, C):
            j.record([r])
        j.close()
        text = Path(path).read_bytes()
        for k in range(len(text)):
            Path(path).write_bytes(text[:k] + bytes([text[k] ^ 1]) + text[k + 1 :])
            content = read_journal(path)
            assert content.damaged
            assert (content.trusted, content.doubtful) == (DoneRanges(), ())

    def test_what_a_damaged_journal_names_counts_again_once_it_is_recorded_anew(
        self, path: str, boot: list[str]
    ) -> None:
        j = Journal(path)
        for r in (A, C):
            j.record([r])
        j.close()
        with Path(path).open("ab") as file:
            file.write(b"r 0 10 20 0 0\n")
        j = Journal(path)
        assert j.before.damaged
        assert list(j.noted()) == [A, C]
        assert read_journal(path).trusted == DoneRanges()  # for good: the damage is not to be seen any more
        j.record([C])
        j.close()
        content = read_journal(path)
        assert (content.trusted, content.damaged) == (DoneRanges((C,)), False)

    def test_a_full_disk_leaves_no_half_line_before_another_workers_line(
        self, path: str, boot: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        j = Journal(path)
        j.record([A])
        with monkeypatch.context() as patch:
            real = os.pwrite
            patch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:5], at) if len(data) > 20 else _full())
            with pytest.raises(OSError, match="No space"):
                j.record([WrittenRange(0, 10, 20, "0123456789abcdef" * 2)])
        j.record([C])  # of another worker that has not heard of it
        j.close()
        assert read_journal(path) == JournalContent(DoneRanges((A,)), (), 1, Path(path).stat().st_size)

    def test_a_line_that_is_none_is_an_error_with_a_way_out(self, path: str) -> None:
        import xxhash

        body = b"r 0 x 10 abc"
        Path(path).write_bytes(body + b" " + xxhash.xxh3_64_hexdigest(body).encode() + b"\n")
        with pytest.raises(CorruptCheckpointError, match="--restart"):
            read_journal(path)


def _full() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestWhatAPowerFailureLeaves:
    def test_only_synced_lines_are_trusted_on_another_boot(self, path: str, boot: list[str]) -> None:
        j = Journal(path)
        j.record([A])
        mark = j.mark
        j.record([B])
        j.synced(mark)
        j.record([C])
        j.close()
        boot[0] = "boot-2"
        content = read_journal(path)
        assert content.trusted == DoneRanges((A,))
        assert content.doubtful == (B, C)

    def test_a_later_runs_sync_says_nothing_about_an_earlier_runs_lines(self, path: str, boot: list[str]) -> None:
        """Boot 2 found line A false and wrote something else first: after its sync A is still not to be trusted."""
        j = Journal(path)
        j.record([A])
        j.close()
        boot[0] = "boot-2"
        j = Journal(path)
        j.record([C])
        j.synced(j.mark)
        j.close()
        content = read_journal(path)
        assert content.trusted == DoneRanges((C,))
        assert content.doubtful == (A,)

    def test_a_resumed_run_that_syncs_its_own_files_does_not_vouch_for_those_of_the_killed_one(
        self, path: str, boot: list[str]
    ) -> None:
        j = Journal(path)
        j.record([A])  # output 0, never synced; then kill -9
        j = Journal(path)  # same boot: A is in the page cache, so it is not written again
        j.record([C])
        j.synced(j.mark)  # output 1 was synced
        assert read_journal(path).trusted == DoneRanges((A, C))
        boot[0] = "boot-2"
        content = read_journal(path)
        assert content.trusted == DoneRanges((C,))
        assert content.doubtful == (A,)

    def test_what_was_checked_and_noted_again_is_trusted(self, path: str, boot: list[str]) -> None:
        j = Journal(path)
        j.record([A])
        j.close()
        boot[0] = "boot-2"
        j = Journal(path)
        j.record([A])
        assert read_journal(path).trusted == DoneRanges((A,))

    def test_without_a_boot_id_nothing_unsynced_is_trusted(self, path: str, boot: list[str]) -> None:
        boot[0] = "unknown"
        j = Journal(path)
        j.record([A])
        j.synced(j.mark)
        j.record([B])
        content = read_journal(path)
        assert (content.trusted, content.doubtful) == (DoneRanges((A,)), (B,))


class TestWhatIsTakenBack:
    def test_a_lost_file_is_struck_out_for_good(self, path: str, boot: list[str]) -> None:
        j = Journal(path)
        j.record([A, C])
        j.forget(0)
        j.record([B])
        assert read_journal(path).trusted == DoneRanges((C, B))

    def test_a_failed_sync_takes_back_all_since_the_last_good_one(self, path: str, boot: list[str]) -> None:
        j = Journal(path)
        j.record([A])
        mark = j.mark
        j.record([B])
        j.synced(mark)
        j.record([C])
        j.retract()
        j.record([D])  # another worker, a moment later: ignored
        j.close()
        assert read_journal(path).trusted == DoneRanges((A,))

    def test_a_failed_first_sync_keeps_what_earlier_runs_noted(self, path: str, boot: list[str]) -> None:
        j = Journal(path)
        j.record([A])
        j.close()
        j = Journal(path)
        j.record([B])
        j.retract()
        j.close()
        assert read_journal(path).trusted == DoneRanges((A,))


SPANS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(0, 12)), max_size=12)


class TestDoneRanges:
    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(SPANS, st.integers(0, 40), st.integers(1, 20))
    def test_covers_and_missing_agree_with_a_set_of_bytes(
        self, spans: list[tuple[int, int, int]], start: int, length: int
    ) -> None:
        done = DoneRanges(WrittenRange(o, a, a + n, "") for o, a, n in spans)
        have = {k for o, a, n in spans if o == 0 for k in range(a, a + n)}
        wanted = range(start, start + length)
        lacking = [k for k in wanted if k not in have]
        assert done.covers(0, start, start + length) == (not lacking)
        gap = done.missing(0, start, start + length)
        assert (gap is None) == (not lacking)
        if gap is not None:
            assert gap[0] == lacking[0]
            assert all(k not in have for k in range(*gap))

    def test_many_spans_are_looked_up_quickly(self) -> None:
        import time

        done = DoneRanges(WrittenRange(0, 10 * k, 10 * k + 5, "") for k in range(20_000))
        began = time.process_time()
        assert sum(done.covers(0, 10 * k, 10 * k + 5) for k in range(20_000)) == 20_000
        assert time.process_time() - began < 1
