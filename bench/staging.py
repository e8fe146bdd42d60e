"""Small tensors in a store against plain files: 2,000 of 4 KB each, on the disk of a folder.

    python bench/staging.py [FOLDER] [ROUNDS]

Rounds are interleaved, figures are medians of wall seconds and of CPU seconds. Both ways end on
stable storage: plain files with one fsync each, or all with one syncfs; the store as `stage` makes it,
planning, journal and metadata included.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from merge_stream.engine.zarr_staging import sync_file_system
from merge_stream.options import MergeOptions
from merge_stream.through_store import stage

__all__ = ["main"]

COUNT, ELEMENTS = 2000, 2048


def main(folder: str | None = None, rounds: int = 5) -> None:
    """Print one line for each way, and the ratios to the store."""
    at = pathlib.Path(tempfile.mkdtemp(prefix="staging", dir=folder))
    names = [f"model.layers.{k}.norm.weight" for k in range(COUNT)]
    data = np.arange(ELEMENTS).astype(ml_dtypes.bfloat16)
    (at / "ckpt").mkdir()
    save_file(dict.fromkeys(names, data), at / "ckpt" / "model.safetensors")

    def plain(*, each: bool) -> None:
        (at / "made").mkdir()
        for name in names:
            with open(at / "made" / name, "wb") as file:
                file.write(data.tobytes())
                if each:
                    file.flush()
                    os.fsync(file.fileno())
        if not each:
            sync_file_system(str(at))

    def store() -> None:
        stage(at / "ckpt", at / "made", MergeOptions(layout="as-is", write_config=False))

    ways: dict[str, Callable[[], None]] = {
        "plain files, an fsync each": lambda: plain(each=True),
        "plain files, one syncfs": lambda: plain(each=False),
        "store": store,
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    try:
        for number in range(rounds + 1):
            for way, run in ways.items():
                shutil.rmtree(at / "made", ignore_errors=True)
                os.sync()
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                if number:  # the first round warms up
                    taken[way].append((time.perf_counter() - wall, time.process_time() - cpu))
    finally:
        shutil.rmtree(at)
    middle = {
        way: [statistics.median(column) for column in zip(*figures, strict=True)] for way, figures in taken.items()
    }
    for way, (wall, cpu) in middle.items():
        print(f"{way:28} {wall:6.2f} s, {cpu:5.2f} s of CPU; the store takes {middle['store'][0] / wall:4.2f} of it")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
