"""Coverage-guided fuzzing of the readers (atheris): pickles, torch files, safetensors headers, JSON, DCP metadata.

    python -m tests.hostile.coverage_fuzz CORPUS -max_total_time=600 -rss_limit_mb=1500 -timeout=10

Run by `make fuzz` in an environment of its own (`.venv-fuzz`: atheris is for CPython 3.11 to 3.13 on Linux and macOS).
The first byte of an input chooses the reader. Only a MergeStreamError may come out.
"""

from __future__ import annotations

import pathlib
import sys

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["merge_stream"]):
    from merge_stream.containers.json_file import read_json
    from merge_stream.containers.pickle_reader import read_pickle
    from merge_stream.containers.safetensors_file import read_header
    from merge_stream.containers.torch_file import open_torch_file
    from merge_stream.errors import MergeStreamError
    from merge_stream.formats._dcp_metadata import read_metadata
    from merge_stream.storage.allowance import MetadataAllowance
    from merge_stream.storage.memory import MemoryTree

_READERS = (
    lambda tree: read_pickle(tree.read("x"), "x"),
    lambda tree: open_torch_file(tree, "x"),
    lambda tree: read_header(tree, "x"),
    lambda tree: read_json(tree, "x", 1 << 20),
    read_metadata,
)


def one_input(data: bytes) -> None:
    """Give the rest of `data` to the reader that its first byte names."""
    if not data:
        return
    tree = MemoryTree({"x": data[1:], ".metadata": data[1:]}, "fuzz", MetadataAllowance(1_000_000_000))
    try:
        _READERS[data[0] % len(_READERS)](tree)
    except MergeStreamError as error:
        str(error)


def seeds(corpus: pathlib.Path) -> None:
    """Small files of real checkpoints as the first inputs."""
    corpus.mkdir(parents=True, exist_ok=True)
    data = pathlib.Path(__file__).resolve().parents[1] / "data"
    kinds = {".pt": 1, ".bin": 1, ".distcp": 1, ".safetensors": 2, ".json": 3, ".metadata": 4}
    for number, path in enumerate(sorted(data.rglob("*"))):
        kind = kinds.get(path.suffix or path.name)
        if kind is not None and path.is_file() and path.stat().st_size < 60_000:
            (corpus / f"seed-{number}").write_bytes(bytes([kind]) + path.read_bytes())


if __name__ == "__main__":
    seeds(pathlib.Path(sys.argv[1]))
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
