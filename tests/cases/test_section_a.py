"""Section A: memory of converters. Each peak is that of a fresh process tree, measured from outside."""

from __future__ import annotations

import pathlib
import random

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import Shard

from merge_stream.api import merge
from merge_stream.engine import memory
from merge_stream.options import MergeOptions
from tests.cases.memory_of import holes, measured
from tests.cases.naive import assert_holds, merged, numbered
from tests.crash.faults import Faults
from tests.folder.models import llama, llama_config
from tests.makers.dtensor import Spread, write_config, write_dcp, write_hub, write_ranks
from tests.makers.zero_files import ZeroRun, write_zero

pytestmark = pytest.mark.memory
MB = 1_000_000
W = "model.layers.0.mlp.down_proj.weight"


def test_case_001_peak_grows_neither_with_ranks_nor_with_the_model(tmp_path: pathlib.Path) -> None:
    peaks = []
    for ranks, rows in ((2, 1 << 14), (4, 1 << 16), (16, 1 << 18)):
        spread = {W: Spread(holes(rows, 1 << 10), [Shard(0)])}
        source = write_ranks(tmp_path / f"ckpt{ranks}", (ranks,), spread, sparse=True)
        peaks.append(measured(source, tmp_path / f"out{ranks}", "100M").peak)
    assert max(peaks) - min(peaks) < 6 * MB


def test_case_001_bytes_are_those_of_a_merge_in_memory(tmp_path: pathlib.Path) -> None:
    tensors = {f"model.layers.{k}.w": torch.randn(2048, 1024) for k in range(4)}
    spread = {name: Spread(tensor, [Shard(k % 2)]) for k, (name, tensor) in enumerate(tensors.items())}
    measured(write_ranks(tmp_path / "ckpt", (4,), spread), tmp_path / "out", "80M")
    assert_holds(tmp_path / "out", tensors)


def test_case_003_moments_of_adam_are_not_read(tmp_path: pathlib.Path) -> None:
    weights = {"model.w": numbered(400, 300), "model.norm": numbered(300)}
    source = write_zero(tmp_path / "ckpt", ZeroRun([weights], stage=3, ranks=4, dtype=torch.float32))
    report = merged(source, tmp_path / "out")
    assert_holds(tmp_path / "out", weights)
    assert report.read_nbytes <= 1.2 * 4 * (400 * 300 + 300)


def test_case_004_zero_3_of_eight_ranks_needs_a_window(tmp_path: pathlib.Path) -> None:
    weights = {f"model.layers.{k}.w": torch.randn(1024, 1024) for k in range(12)}
    source = write_zero(tmp_path / "ckpt", ZeroRun([weights], stage=3, ranks=8))
    measured(source, tmp_path / "out", "100M")
    assert_holds(tmp_path / "out", weights)


def test_case_006_a_stacked_tensor_larger_than_the_bound(tmp_path: pathlib.Path) -> None:
    """Of the experts of two layers; each is taken apart within less than one layer's tensor."""
    experts, wide, hidden = 64, 768, 1024
    config = llama_config(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=experts,
        moe_intermediate_size=wide,
        hidden_size=hidden,
        num_hidden_layers=2,
    )
    rest = {n: t for n, t in llama(layers=2, hidden=hidden).items() if ".mlp." not in n}
    norms = (f"model.layers.{layer}.self_attn.{k}_norm.weight" for layer in range(2) for k in "qk")
    rest |= {name: torch.ones(hidden // 2).bfloat16() for name in norms}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp."
        rest[f"{at}gate.weight"] = torch.zeros(experts, hidden).bfloat16()
        rest[f"{at}experts.gate_up_proj"] = holes(experts, 2 * wide, hidden, dtype=torch.bfloat16)
        rest[f"{at}experts.down_proj"] = holes(experts, hidden, wide, dtype=torch.bfloat16)
    source = write_hub(tmp_path / "ckpt", rest, config=config)
    found = measured(source, tmp_path / "out", "110M", "--with-config")
    assert found.report["tensors"] == len(rest) - 4 + 2 * 3 * experts
    assert 2 * experts * 2 * wide * hidden > 2 * 90 * MB


def test_case_006_chunks_of_a_dcp(tmp_path: pathlib.Path) -> None:
    tensor = numbered(8, 16, 64, 64)
    merged(write_dcp(tmp_path / "small", 4, {"model.w": tensor}), tmp_path / "out")
    assert_holds(tmp_path / "out", {"model.w": tensor})
    measured(write_dcp(tmp_path / "ckpt", 4, {W: holes(8, 16, 1024, 1024)}, sparse=True), tmp_path / "large", "80M")


def test_case_008_many_inputs_are_not_buffered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 files, each tensor cut over all of them: bytes are written long before the last file is read last."""
    spread = {f"model.w{k}": Spread(torch.randn(256, 128), [Shard(0)]) for k in range(8)}
    source = write_ranks(tmp_path / "ckpt", (64,), spread)
    monkeypatch.setattr(memory, "_SEGMENTS", (64 << 10, 16 << 10))
    watch = Faults(monkeypatch, tmp_path)
    merged(source, tmp_path / "out")
    data = [(call, name) for call, name in watch.seen if call in {"preadv", "pwritev"} and name.endswith((".pt", "rs"))]
    writes = [k for k, (call, _) in enumerate(data) if call == "pwritev"][1:]  # the first is the header
    for rank in range(64):
        assert max(k for k, (_, name) in enumerate(data) if name.endswith(f"rank_{rank}.pt")) > writes[0]


def test_case_008_nor_do_they_need_memory(tmp_path: pathlib.Path) -> None:
    spread = {W: Spread(holes(1 << 16, 1 << 10), [Shard(0)])}
    measured(write_ranks(tmp_path / "ckpt", (64,), spread, sparse=True), tmp_path / "out", "80M")


def test_case_009_tensors_that_come_in_any_order_go_to_their_places(tmp_path: pathlib.Path) -> None:
    """1000 tensors into 10 files, from a source in random order: files have their size from the start."""
    names = [f"model.layers.{k}.w" for k in range(1000)]
    random.Random(3).shuffle(names)
    source = write_hub(tmp_path / "ckpt", {name: holes(256, 256) for name in names})
    found = measured(source, tmp_path / "out", "80M", "--max-shard-size", str(100 * 256 * 256 * 4))
    assert len(found.report["files"]) == 10
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            assert len(file.keys()) == 100


def test_case_009_every_value_stands_in_its_place(tmp_path: pathlib.Path) -> None:
    """The same with values that tell one tensor from another, and three workers."""
    names = [f"model.layers.{k}.w" for k in range(60)]
    random.Random(4).shuffle(names)
    tensors = {name: torch.full((16, 24), float(k)) + numbered(16, 24) / 1000 for k, name in enumerate(names)}
    options = MergeOptions(layout="as-is", write_config=False, workers=3, max_shard_size=6 * 16 * 24 * 4)
    report = merge(write_hub(tmp_path / "ckpt", tensors), tmp_path / "out", options)
    assert len(report.files) == 10
    assert_holds(tmp_path / "out", tensors)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--dtype", "bf16"),
        ("--materialize-tied",),
        ("--verify",),
        ("--sha256",),
        ("--staging", "zarr"),
    ],
    ids=str,
)
def test_case_010_the_bound_holds_for_every_option(tmp_path: pathlib.Path, words: tuple[str, ...]) -> None:
    """Folding a LoRA within the bound: tests/lora/test_memory.py; quantizing: tests/quantize/test_memory.py."""
    vocab, hidden = 80_000, 1024
    tensors = {n: holes(*t.shape) for n, t in llama(hidden=hidden, head=False, dtype=torch.float32).items()}
    tensors["model.embed_tokens.weight"] = holes(vocab, hidden)
    config = llama_config(hidden_size=hidden, intermediate_size=2 * hidden, vocab_size=vocab, tie_word_embeddings=True)
    source = write_hub(tmp_path / "ckpt", tensors)
    write_config(source, config)
    found = measured(source, tmp_path / "out", "100M", "--with-config", *words)
    assert found.report["tensors"] == len(tensors) + ("--materialize-tied" in words)


def test_case_011_saving_adds_no_copy(tmp_path: pathlib.Path) -> None:
    """A tensor of 400 MB; Python and its packages are 50 MB of it."""
    assert measured(write_hub(tmp_path / "ckpt", {W: holes(100, 1000, 1000)}), tmp_path / "out", "2G").peak < 110 * MB


def test_case_012_one_file_larger_than_the_memory(tmp_path: pathlib.Path) -> None:
    source = write_hub(tmp_path / "ckpt", {f"model.layers.{k}.w": holes(1 << 16, 1 << 10) for k in range(2)})
    found = measured(source, tmp_path / "out", "100M", "--max-shard-size", "10GB")
    assert found.report["files"] == ["model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert len(file.keys()) == 2
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 5 * 100 * MB
