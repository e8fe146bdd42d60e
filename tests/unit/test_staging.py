"""The partial folder: what a run wrote is resumed, never believed wrongly, and never shared by two runs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from merge_stream.encodings.cast import Cast
from merge_stream.engine import journal as journal_module
from merge_stream.engine import staging as module
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Phase, Progress, Silent, Warned
from merge_stream.engine.executor import Executed, StopFlag, execute
from merge_stream.engine.staging import DirectStaging, locked
from merge_stream.errors import InterruptedRunError, OutputBusyError, PlanMismatchError
from merge_stream.options import MergeOptions
from merge_stream.planning.plan import Plan
from merge_stream.planning.planner import Resolved, make_plan
from merge_stream.planning.resolve import resolve
from merge_stream.storage.local import LocalSink
from merge_stream.storage.memory import MemorySource
from merge_stream.tensors.box import Box
from merge_stream.tensors.dtype import DTYPES
from merge_stream.tensors.parameter import identity
from merge_stream.tensors.ref import Catalog, ShardTable, SourceFile, TensorRef
from merge_stream.testing.faulty import FaultySink, FaultySource, os_error

SHAPE = (64, 256)  # 64 KiB of fp32 a tensor
TENSORS = 4
DATA = np.random.default_rng(0).bytes(TENSORS * 65536)
SEGMENT = 8192


def small_plan(shard_size: int = 2 * 65536) -> Plan:
    """Two output files of two tensors each."""
    tensors = {}
    for k in range(TENSORS):
        table = ShardTable.of([(Box.whole(SHAPE), 0, k * 65536)], 2)
        tensors[f"w{k}"] = TensorRef(f"w{k}", DTYPES[1], SHAPE, table)
    catalog = Catalog("test", "memory", tensors, (SourceFile("rank0", "rank0", len(DATA), 0),))
    resolved = [Resolved(p, resolve(catalog, p)) for p in (identity(name, SHAPE) for name in tensors)]
    return make_plan(catalog, resolved, Cast("keep"), MergeOptions(max_shard_size=shard_size))


PLAN = small_plan()


@contextlib.contextmanager
def holding(work: str) -> Iterator[None]:
    fd = locked(work)
    try:
        yield
    finally:
        os.close(fd)


class StopAfter:
    """An observer that asks for the end after `count` writes; `resumed` counts bytes found done."""

    def __init__(self, count: int) -> None:
        self.stop = StopFlag()
        self.resumed = 0
        self._left = count

    def __call__(self, event: Phase | Progress | Warned) -> None:
        if isinstance(event, Progress) and event.resumed:
            self.resumed += event.nbytes
        elif isinstance(event, Progress):
            self._left -= 1
            if self._left <= 0:
                self.stop.set("test")


def run(
    staging: DirectStaging, *, segment: int = SEGMENT, workers: int = 2, watch: StopAfter | None = None
) -> Executed:
    return execute(
        PLAN,
        staging,
        MemorySource({"rank0": DATA}),
        Cast("keep"),
        budget=MemoryBudget(slots=workers, slab_bytes=1 << 18),
        segment_bytes=segment,
        observer=watch or Silent(),
        stop=watch.stop if watch else StopFlag(),
    )


def half_done(work: str, writes: int = 10) -> None:
    """Leave `work` as a run that was stopped after some writes."""
    watch = StopAfter(writes)
    staging = DirectStaging(work, PLAN, restart=False)
    with pytest.raises(InterruptedRunError):
        run(staging, watch=watch)
    staging.close()


def contents(work: str) -> dict[str, bytes]:
    return {o.name: (Path(work) / "model" / o.name).read_bytes() for o in PLAN.outputs}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    work = str(tmp_path_factory.mktemp("whole") / "work")
    staging = DirectStaging(work, PLAN, restart=False)
    run(staging)
    staging.close()
    return contents(work)


@pytest.fixture
def work(tmp_path: Path) -> str:
    return str(tmp_path / "OUT.partial")


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    current = ["boot-1"]
    monkeypatch.setattr(journal_module, "_boot_id", lambda: current[0])
    return current


def finish(work: str, segment: int = SEGMENT, workers: int = 2) -> tuple[DirectStaging, Executed]:
    staging = DirectStaging(work, PLAN, restart=False)
    try:
        return staging, run(staging, segment=segment, workers=workers)
    finally:
        staging.close()


class TestResume:
    def test_a_stopped_run_goes_on_and_gives_the_same_bytes(self, work: str, whole: dict[str, bytes]) -> None:
        half_done(work)
        staging, executed = finish(work)
        assert staging.resumed
        assert executed.resumed_nbytes >= 10 * SEGMENT - SEGMENT
        assert executed.resumed_nbytes + executed.written_nbytes == len(DATA)
        assert contents(work) == whole

    @pytest.mark.parametrize(("segment", "workers"), [(1000, 1), (65536, 4), (3 * 8192, 3)])
    def test_with_another_segment_size_and_worker_count_too(
        self, work: str, whole: dict[str, bytes], segment: int, workers: int
    ) -> None:
        half_done(work)
        finish(work, segment=segment, workers=workers)
        assert contents(work) == whole

    def test_a_finished_run_has_nothing_to_do(self, work: str, whole: dict[str, bytes]) -> None:
        finish(work)
        _, executed = finish(work)
        assert (executed.written_nbytes, executed.resumed_nbytes) == (0, len(DATA))
        assert contents(work) == whole

    def test_the_journal_on_disk_covers_every_byte(self, work: str) -> None:
        staging, _ = finish(work)
        done = staging.ranges()
        assert all(done.covers(k, len(o.header), o.nbytes) for k, o in enumerate(PLAN.outputs))

    def test_restart_begins_anew(self, work: str, whole: dict[str, bytes]) -> None:
        half_done(work)
        (Path(work) / "model" / "stray").write_text("x")
        staging = DirectStaging(work, PLAN, restart=True)
        assert not staging.resumed
        assert run(staging).written_nbytes == len(DATA)
        staging.close()
        assert contents(work) == whole
        assert not (Path(work) / "model" / "stray").exists()


class TestAnotherPlan:
    @pytest.mark.parametrize("key", sorted(PLAN.identity))
    def test_is_refused_with_the_name_of_the_difference(self, work: str, key: str) -> None:
        half_done(work)
        before = contents(work)
        other = dataclasses.replace(PLAN, identity={**PLAN.identity, key: "something else"})
        with pytest.raises(PlanMismatchError, match="--restart") as caught:
            DirectStaging(work, other, restart=False)
        assert key in caught.value.message
        assert "something else" in caught.value.message
        assert contents(work) == before
        assert finish(work)[1].resumed_nbytes  # and the lock was let go

    def test_a_plan_file_that_cannot_be_read_is_refused_too(self, work: str) -> None:
        half_done(work)
        for text in ("", "{", "[]", '{"identity": 3}', "null"):
            (Path(work) / "plan.json").write_text(text)
            with pytest.raises(PlanMismatchError, match="--restart"):
                DirectStaging(work, PLAN, restart=False)

    @pytest.mark.parametrize("restart", [False, True])
    def test_a_journal_without_a_plan_is_not_believed(self, work: str, whole: dict[str, bytes], restart: bool) -> None:
        """A killed --restart may have removed plan.json only; whose the rest is, nobody knows."""
        half_done(work)
        (Path(work) / "plan.json").unlink()
        staging = DirectStaging(work, PLAN, restart=restart)
        assert not staging.resumed
        assert run(staging).written_nbytes == len(DATA)
        staging.close()
        assert contents(work) == whole

    def test_restart_takes_the_folder_over(self, work: str) -> None:
        half_done(work)
        other = dataclasses.replace(PLAN, identity={**PLAN.identity, "--dtype": "fp16"})
        DirectStaging(work, other, restart=True).close()
        assert json.loads((Path(work) / "plan.json").read_text())["identity"]["--dtype"] == "fp16"


class TestLock:
    def test_a_second_run_is_turned_away_and_the_first_goes_on(self, work: str, whole: dict[str, bytes]) -> None:
        staging = DirectStaging(work, PLAN, restart=False)
        for restart in (False, True):
            with pytest.raises(OutputBusyError, match="wait for it"):
                DirectStaging(work, PLAN, restart=restart)
        run(staging)
        staging.close()
        assert contents(work) == whole

    def test_a_killed_run_leaves_no_lock(self, work: str) -> None:
        program = (
            f"import os\nfrom merge_stream.engine.staging import locked\nlocked({work!r})\nos.kill(os.getpid(), 9)"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
        with holding(work):
            pass

    def test_a_lock_file_that_its_holder_removed_is_not_taken_for_a_lock(self, work: str) -> None:
        """The last step of a commit removes the folder: who waited at the old file must not believe to hold it."""
        with holding(work):
            os.unlink(os.path.join(work, "lock"))
            with holding(work):  # another folder's worth of lock by now
                assert os.path.exists(os.path.join(work, "lock"))


class TestFilesThatChanged:
    @pytest.mark.parametrize("how", ["removed", "cut", "grown"])
    def test_a_file_of_another_size_is_written_anew_also_after_another_kill(
        self, work: str, whole: dict[str, bytes], how: str
    ) -> None:
        """The second run lays the file out at full size and is killed at once: the third must not be misled."""
        half_done(work, writes=12)
        path = Path(work) / "model" / PLAN.outputs[0].name
        if how == "removed":
            path.unlink()
        else:
            os.truncate(path, PLAN.outputs[0].nbytes + (1 if how == "grown" else -1))
            if how == "cut":
                os.truncate(path, 5)
        second = DirectStaging(work, PLAN, restart=False)
        second.close()
        finish(work)
        assert contents(work) == whole

    def test_headers_are_written_again_at_each_start(self, work: str, whole: dict[str, bytes]) -> None:
        half_done(work)
        path = Path(work) / "model" / PLAN.outputs[1].name
        with path.open("r+b") as file:
            file.write(b"\0" * 100)
        finish(work)
        assert contents(work) == whole


class TestAfterAPowerFailure:
    def lose(self, work: str, output: int, start: int, nbytes: int) -> None:
        with (Path(work) / "model" / PLAN.outputs[output].name).open("r+b") as file:
            file.seek(start)
            file.write(b"\0" * nbytes)

    def test_doubtful_ranges_are_believed_when_their_checksum_holds(
        self, work: str, whole: dict[str, bytes], boot: list[str]
    ) -> None:
        half_done(work)
        boot[0] = "boot-2"
        _, executed = finish(work)
        assert executed.resumed_nbytes >= 9 * SEGMENT
        assert contents(work) == whole

    def test_those_whose_bytes_were_lost_are_written_again(
        self, work: str, whole: dict[str, bytes], boot: list[str]
    ) -> None:
        half_done(work)
        self.lose(work, 0, len(PLAN.outputs[0].header) + 100, 10)
        boot[0] = "boot-2"
        _, executed = finish(work)
        assert executed.written_nbytes >= len(DATA) - 10 * SEGMENT
        assert contents(work) == whole

    def test_a_lost_range_is_not_believed_later_because_something_else_was_synced(
        self, work: str, whole: dict[str, bytes], boot: list[str]
    ) -> None:
        """Boot 2 syncs other ranges, is killed before the lost one is written again, and boot 2 resumes."""
        half_done(work)
        start = len(PLAN.outputs[0].header)
        self.lose(work, 0, start, 4096)
        boot[0] = "boot-2"
        second = DirectStaging(work, PLAN, restart=False)
        last = PLAN.outputs[1]
        second.write(1, last.nbytes - 4096, memoryview(whole[last.name][-4096:]))
        second.sync()
        second.close()
        finish(work)
        assert contents(work) == whole


def faulty(staging: DirectStaging, on: str, fail_at: int, error: Callable[[], BaseException]) -> FaultySink:
    assert on in {"write_at", "sync"}
    sink = FaultySink(staging.sink, on="sync" if on == "sync" else "write_at", fail_at=fail_at, error=error, stays=True)
    staging.sink = sink
    return sink


@pytest.fixture
def small_flushes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_FLUSH_BYTES", 3 * SEGMENT)
    monkeypatch.setattr(module, "_MOST_WINDOWS", 2)
    return iter(())


class TestFailures:
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
    @pytest.mark.parametrize("fail_at", [0, 1, 7, 30])
    def test_a_failed_write_surfaces_and_the_run_can_go_on(
        self, work: str, whole: dict[str, bytes], fail_at: int, number: int
    ) -> None:
        staging = DirectStaging(work, PLAN, restart=False)
        faulty(staging, "write_at", fail_at, os_error(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            run(staging)
        staging.close()
        _, executed = finish(work)
        assert executed.resumed_nbytes >= (fail_at - 2) * SEGMENT
        assert contents(work) == whole

    def test_a_failed_read_surfaces_and_half_a_buffer_is_never_written(
        self, work: str, whole: dict[str, bytes]
    ) -> None:
        staging = DirectStaging(work, PLAN, restart=False)
        source = FaultySource(MemorySource({"rank0": DATA}), fail_at=5, error=os_error(errno.EIO), stays=True)
        with pytest.raises(OSError, match="Input/output"):
            execute(
                PLAN,
                staging,
                source,
                Cast("keep"),
                budget=MemoryBudget(slots=2, slab_bytes=1 << 18),
                segment_bytes=SEGMENT,
                observer=Silent(),
                stop=StopFlag(),
            )
        staging.close()
        _, executed = finish(work)
        assert executed.resumed_nbytes == 5 * SEGMENT
        assert contents(work) == whole

    def test_a_failed_sync_at_the_end_surfaces_and_nothing_unsynced_is_believed(
        self, work: str, whole: dict[str, bytes]
    ) -> None:
        """After a failed fdatasync the kernel may have dropped the pages (NFS and quotas tell only then)."""
        staging = DirectStaging(work, PLAN, restart=False)
        faulty(staging, "sync", 1, os_error(errno.ENOSPC))
        with pytest.raises(OSError, match="No space"):
            run(staging)
        staging.close()
        for output in PLAN.outputs:  # what such a kernel leaves
            os.truncate(Path(work) / "model" / output.name, 0)
            os.truncate(Path(work) / "model" / output.name, output.nbytes)
        finish(work)
        assert contents(work) == whole

    @pytest.mark.usefixtures("small_flushes")
    @pytest.mark.parametrize("error", [os_error(errno.EIO), lambda: RuntimeError("a bug in a sink")])
    def test_a_failed_sync_in_the_flusher_surfaces_at_a_writer(
        self, work: str, whole: dict[str, bytes], error: Callable[[], BaseException]
    ) -> None:
        staging = DirectStaging(work, PLAN, restart=False)
        faulty(staging, "sync", 0, error)
        with pytest.raises(type(error())):
            run(staging)
        staging.close()
        _, executed = finish(work)
        assert executed.resumed_nbytes == 0
        assert contents(work) == whole

    @pytest.mark.usefixtures("small_flushes")
    def test_a_flush_that_worked_before_is_kept(self, work: str, whole: dict[str, bytes]) -> None:
        staging = DirectStaging(work, PLAN, restart=False)
        faulty(staging, "sync", 2, os_error(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            run(staging, workers=1)
        staging.close()
        _, executed = finish(work)
        assert 3 * SEGMENT <= executed.resumed_nbytes < len(DATA)
        assert contents(work) == whole

    @pytest.mark.usefixtures("small_flushes")
    def test_writers_wait_while_too_much_is_unsynced(self, work: str, whole: dict[str, bytes]) -> None:
        staging = DirectStaging(work, PLAN, restart=False)
        slow = _SlowSync(staging)
        run(staging, workers=4)
        staging.close()
        assert slow.most <= 6 * SEGMENT + 4 * SEGMENT  # and one segment that each worker had written
        assert contents(work) == whole


class _SlowSync(LocalSink):
    """Notes how much was unsynced whenever a sync began."""

    def __init__(self, staging: DirectStaging) -> None:
        super().__init__(staging.model_dir)
        self._staging = staging
        self.most = 0
        staging.sink = self

    def sync(self, name: str) -> None:
        time.sleep(0.01)
        self.most = max(self.most, sum(self._staging._unsynced.values()))
        super().sync(name)


class TestWorkers:
    def test_an_interrupt_of_the_main_thread_ends_all_workers_first(
        self, work: str, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker that writes on after the journal was closed could write into another file of that number."""
        join = threading.Thread.join
        raised: list[int] = []

        class Slow(StopAfter):
            def __call__(self, event: Phase | Progress | Warned) -> None:
                time.sleep(0.002)

        def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
            if self.name.startswith("worker") and not raised:
                raised.append(1)
                raise KeyboardInterrupt
            join(self, timeout)

        staging = DirectStaging(work, PLAN, restart=False)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(staging, watch=Slow(10**9))
        assert not [t for t in threading.enumerate() if t.name.startswith("worker")]
        staging.close()
        finish(work)
        assert contents(work) == whole

    def test_events_come_one_at_a_time(self, work: str) -> None:
        """Also those of ranges found done."""
        half_done(work)
        inside = threading.Semaphore(1)
        clashes = []

        class Slow(StopAfter):
            def __call__(self, event: Phase | Progress | Warned) -> None:
                if not inside.acquire(blocking=False):
                    clashes.append(event)
                    return
                time.sleep(0.0005)
                inside.release()

        staging = DirectStaging(work, PLAN, restart=False)
        run(staging, workers=4, watch=Slow(10**9), segment=2048)
        staging.close()
        assert clashes == []
