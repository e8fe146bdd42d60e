"""Start the rank processes of a small distributed job, and be sure that they end.

`run_ranks` starts one interpreter per rank with the same module and arguments, waits, and returns when
all have ended with 0; otherwise it raises `RanksFailedError` with the output of the ranks that failed.
No rank outlives the call: each ends itself (stacks dumped) at its deadline, is killed by the kernel when
the parent dies, and its whole process group is killed when any other rank fails.

`rank_job` is what the module calls inside a rank: it joins the gloo process group over a file store
(no ports to collide).

A rank runs as `python -m tests.makers.ranks MODULE ARGUMENTS`: when the module's work is done it leaves by
`os._exit`. gloo's threads still run then, and taking them down in order now and then ends in
"terminate called without an active exception" (torch 2.13, about one run in a few hundred).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import faulthandler
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
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
                            [sys.executable, "-m", __name__, module, *arguments],
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
    """Inside a rank: join the process group, give (rank, world size), wait until every rank is through."""
    import torch
    import torch.distributed as dist

    seconds = float(os.environ[RankEnvironment.SECONDS])
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    rank, world_size = int(os.environ[RankEnvironment.RANK]), int(os.environ[RankEnvironment.WORLD_SIZE])
    patience = dt.timedelta(seconds=seconds)
    store = dist.FileStore(os.environ[RankEnvironment.STORE], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
    yield rank, world_size
    dist.barrier()
    store.set(f"through/{rank}", "")  # a rank that left at once could cut the barrier of a slower one short
    store.wait([f"through/{other}" for other in range(world_size)], patience)


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


def _run_module() -> None:
    """This process is one rank: run the module named on the command line, then leave at once."""
    module, *arguments = sys.argv[1:]
    sys.argv[:] = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - told, and turned into the exit code
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _run_module()
