"""A lease is memory: never more slabs out than allowed, and never a byte more than a slab has."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from merge_stream.engine.budget import Lease, MemoryBudget


def lease_of(nbytes: int) -> Lease:
    return Lease(np.zeros(nbytes, dtype=np.uint8))


class TestLease:
    def test_takes_are_aligned_and_disjoint(self) -> None:
        lease = lease_of(1000)
        a, b = lease.take(10), lease.take(100)
        a[:], b[:] = 1, 2
        assert (a == 1).all()
        assert b.ctypes.data - a.ctypes.data == 64
        assert (len(a), len(b)) == (10, 100)

    def test_phase_gives_the_alignment_that_bytes_have_in_the_file(self) -> None:
        lease = lease_of(1000)
        base = lease.take(0).ctypes.data
        lease.take(1)
        assert (lease.take(8, phase=4096 + 24).ctypes.data - base) % 64 == 24

    def test_rewind_hands_back_what_was_taken_since_the_mark(self) -> None:
        lease = lease_of(1000)
        lease.take(100)
        mark, left = lease.mark, lease.left
        first = lease.take(500)
        lease.rewind(mark)
        assert lease.left == left
        assert lease.take(500).ctypes.data == first.ctypes.data

    @pytest.mark.parametrize("taken", [0, 1, 63, 64, 65, 999, 1000])
    def test_left_is_exactly_what_one_more_take_gets(self, taken: int) -> None:
        lease = lease_of(1000)
        lease.take(taken)
        left = lease.left
        assert left == max(1000 - -(-taken // 64) * 64, 0)
        with pytest.raises(ValueError, match="cannot give"):
            lease.take(left + 1)
        assert not left or len(lease.take(left)) == left

    def test_asking_for_more_changes_nothing(self) -> None:
        lease = lease_of(128)
        with pytest.raises(ValueError, match="128 bytes cannot give 129 more after 0"):
            lease.take(129)
        assert lease.left == 128


class TestBudget:
    def test_never_more_slabs_out_than_slots(self) -> None:
        budget = MemoryBudget(slots=3, slab_bytes=4096)
        lock = threading.Lock()
        out, most, addresses = 0, 0, set()

        def work() -> None:
            nonlocal out, most
            for _ in range(50):
                with budget.lease() as lease:
                    with lock:
                        out += 1
                        most = max(most, out)
                        addresses.add(lease.take(1).ctypes.data)
                    time.sleep(0.0002)
                    with lock:
                        out -= 1

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert most <= 3
        assert len(addresses) <= 3  # the same slabs, over and over

    def test_two_leases_share_no_byte(self) -> None:
        budget = MemoryBudget(slots=2, slab_bytes=256)
        with budget.lease() as a, budget.lease() as b:
            x, y = a.take(256), b.take(256)
            x[:], y[:] = 1, 2
            assert (x == 1).all()
            assert (y == 2).all()

    def test_a_parked_slab_is_not_handed_out_until_it_is_allowed_again(self) -> None:
        budget = MemoryBudget(slots=2, slab_bytes=256)
        budget.allow(1)
        entered = threading.Event()

        def second() -> None:
            with budget.lease():
                entered.set()

        with budget.lease():
            thread = threading.Thread(target=second)
            thread.start()
            assert not entered.wait(0.05)
            budget.allow(2)
            assert entered.wait(5)
        thread.join()

    def test_lowering_while_all_are_out_takes_effect_when_they_come_back(self) -> None:
        budget = MemoryBudget(slots=2, slab_bytes=256)
        entered = threading.Event()

        def third() -> None:
            with budget.lease():
                entered.set()

        with budget.lease():
            with budget.lease():
                budget.allow(1)
                thread = threading.Thread(target=third)
                thread.start()
            assert not entered.wait(0.05)
        assert entered.wait(5)
        thread.join()

    def test_one_slab_always_stays_allowed_and_the_bound_is_never_raised(self) -> None:
        budget = MemoryBudget(slots=2, slab_bytes=256)
        budget.allow(-5)
        assert budget.allowed == 1
        budget.allow(100)
        assert budget.allowed == 2

    def test_a_slab_that_cannot_be_had_blocks_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Mmap may fail under RLIMIT_AS; the run must end with that error, not hang."""
        budget = MemoryBudget(slots=1, slab_bytes=256)

        def refuse(_: int) -> None:
            raise OSError(12, "Cannot allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr("merge_stream.engine.budget._Slab", refuse)
            with pytest.raises(OSError, match="allocate"), budget.lease():
                pass
        with budget.lease() as lease:
            assert lease.left == 256

    def test_an_error_in_the_block_gives_the_slab_back(self) -> None:
        budget = MemoryBudget(slots=1, slab_bytes=256)
        for _ in range(3):
            with pytest.raises(RuntimeError), budget.lease():
                raise RuntimeError
        with budget.lease() as lease:
            assert lease.left == 256
