"""What a contender wrote, as digests of tensors: two outputs are equal when all names, dtypes, shapes and bytes are."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

import xxhash

from merge_stream.benchmark.synthetic import Synthetic

__all__ = ["differences", "digests_of_synthetic", "digests_of_torch_file", "digests_of_weights"]

_PIECE = 4 << 20
_TORCH_DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
Digests = Mapping[str, str]


def digests_of_weights(folder: pathlib.Path) -> Digests:
    """All tensors of the safetensors files in `folder`, streamed."""
    found = {}
    buffer = bytearray(_PIECE)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, stop = entry["data_offsets"]
                file.seek(8 + length + start)
                digest = xxhash.xxh3_128()
                left = stop - start
                while left:
                    view = memoryview(buffer)[: min(left, _PIECE)]
                    count = file.readinto(view)
                    if not count:
                        msg = f"{path} ends inside {name}"
                        raise EOFError(msg)
                    digest.update(view[:count])
                    left -= count
                found[name] = f"{entry['dtype']} {entry['shape']} {digest.hexdigest()}"
    return found


def digests_of_torch_file(path: pathlib.Path) -> Digests:
    """All tensors of a file that `torch.save` wrote."""
    import torch

    state = torch.load(path, mmap=True)
    return {
        name: f"{_TORCH_DTYPES[str(t.dtype)]} {list(t.shape)} "
        + xxhash.xxh3_128_hexdigest(t.contiguous().view(-1).view(torch.uint8).numpy())
        for name, t in state.items()
    }


def digests_of_synthetic(made: Synthetic) -> Digests:
    """The digests that a lossless merge of a synthetic checkpoint must have."""
    dtype = "F32" if made.values.itemsize == 4 else "BF16"
    return {
        name: f"{dtype} {list(shape)} {xxhash.xxh3_128_hexdigest(made.expected(name))}"
        for name, shape in made.model.parameters.items()
        if name not in made.model.tied
    }


def differences(one: Digests, other: Digests) -> list[str]:
    """Names that are in one only or differ."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
