"""Start the rank processes of a small distributed job, and be sure that they end.

`run_ranks` starts one interpreter per rank with the same module and arguments, waits, and returns when
all have ended with 0; otherwise it raises `RanksFailedError` with the output of the ranks that failed.
No rank outlives the call: each ends itself (stacks dumped) at its deadline, is killed by the kernel when
the parent dies, and its whole process group is killed when any other rank fails.

`rank_job` is what the module calls inside a rank: it joins the gloo process group over a file store
(no ports to collide) and leaves it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import faulthandler
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["RankEnvironment", "RanksFailedError", "rank_job", "run_ranks"]

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1


class RanksFailedError(RuntimeError):
    """At least one rank process failed or did not end in time."""


class RankEnvironment:
    """Names of the variables by which a rank learns its place."""

    RANK = "MAKER_RANK"
    WORLD_SIZE = "MAKER_WORLD_SIZE"
    STORE = "MAKER_STORE"
    SECONDS = "MAKER_SECONDS"


def run_ranks(module: str, arguments: Sequence[str], *, world_size: int, seconds: float) -> None:
    """Run `python -m module arguments` once per rank; raise unless every rank ends well within `seconds`."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch_name:
        scratch = pathlib.Path(scratch_name)
        logs = [scratch / f"rank_{rank}.log" for rank in range(world_size)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                environment = {
                    **os.environ,
                    RankEnvironment.RANK: str(rank),
                    RankEnvironment.WORLD_SIZE: str(world_size),
                    RankEnvironment.STORE: str(scratch / "store"),
                    RankEnvironment.SECONDS: str(seconds),
                    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
                }
                with log.open("wb") as sink:
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, "-m", module, *arguments],
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=sink,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            codes = _wait(ranks, seconds=seconds)
        finally:
            _kill(ranks)
        if any(codes):
            raise RanksFailedError(_describe(module, codes, logs))


@contextlib.contextmanager
def rank_job() -> Iterator[tuple[int, int]]:
    """Inside a rank: join the process group, give (rank, world size), leave the group."""
    import torch
    import torch.distributed as dist

    seconds = float(os.environ[RankEnvironment.SECONDS])
    faulthandler.dump_traceback_later(seconds, exit=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    rank, world_size = int(os.environ[RankEnvironment.RANK]), int(os.environ[RankEnvironment.WORLD_SIZE])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ[RankEnvironment.STORE]}",
        rank=rank,
        world_size=world_size,
        timeout=dt.timedelta(seconds=seconds),
    )
    try:
        yield rank, world_size
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], *, seconds: float) -> list[int | None]:
    """Exit codes of the ranks, as soon as all have ended, or one has failed, or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code is not None for code in codes) or any(codes) or time.monotonic() > deadline:
            return [-signal.SIGALRM if code is None and not any(codes) else code for code in codes]
        time.sleep(0.02)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the process groups of all ranks that still run."""
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def _describe(module: str, codes: Sequence[int | None], logs: Sequence[pathlib.Path]) -> str:
    """One text with the last lines of every rank that failed."""
    parts = [f"{module}: ranks ended with {list(codes)} (None: killed because another failed)"]
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        if code and log.exists():
            tail = log.read_text(errors="replace").splitlines()[-30:]
            parts.append(f"--- rank {rank} ({code})\n" + "\n".join(tail))
    return "\n".join(parts)
