"""What holds for a merge in every scheme: whole folders, and what must not change their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merge_stream import api, cli
from merge_stream.encodings.base import Scheme, schemes
from merge_stream.engine.assembler import Assembler
from merge_stream.engine.budget import MemoryBudget
from merge_stream.engine.events import Silent
from merge_stream.engine.executor import StopFlag, execute
from merge_stream.engine.largest import measure_largest
from merge_stream.job import Job
from merge_stream.options import MergeOptions
from merge_stream.planning.segments import segments_of
from merge_stream.storage.local import LocalSource
from merge_stream.testing.staging import MemoryStaging
from merge_stream.verification.check import check_folder
from tests.folder.models import checkpoint, config_of, llama, llama_config, merge, tensors_of

PLAIN = [scheme for scheme in schemes() if not scheme.transposed]
ids = pytest.mark.parametrize("scheme", PLAIN, ids=lambda scheme: scheme.name)


def model() -> dict[str, torch.Tensor]:
    """Norms, embeddings and 14 linear layers, all of which every scheme can take."""
    generator = torch.Generator().manual_seed(5)
    tensors = llama(layers=2, vocab=64, hidden=128, dtype=torch.float32)
    return {n: (torch.randn(t.shape, generator=generator) * 0.02).bfloat16() for n, t in tensors.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    return checkpoint(tmp_path_factory.mktemp("source") / "ckpt", model(), llama_config(**sizes))


def job_of(source: Path, scheme: Scheme, **options: Any) -> Job:
    return api.make_plan(api.open_checkpoint([source]), MergeOptions(quantize=scheme.name, **options))


def run(job: Job, staging: MemoryStaging, segment: int, workers: int) -> None:
    """Both passes over a plan."""
    reader, budget = LocalSource(), MemoryBudget(slots=workers, slab_bytes=8 * segment + (1 << 18))
    how: dict[str, Any] = {"budget": budget, "segment_bytes": segment, "observer": Silent(), "stop": StopFlag()}
    largest = measure_largest(job.plan, lambda: Assembler(reader, job.plan.files, job.encoding), staging.done, **how)
    execute(job.plan, staging, reader, job.encoding, **how, largest=largest.magnitudes)


def files_of(job: Job, staging: MemoryStaging) -> Iterator[bytes]:
    for output in job.plan.outputs:
        whole = bytearray(output.nbytes)
        staging.sink.read_into(output.name, 0, memoryview(whole))
        yield bytes(whole)


def written(job: Job, segment: int, workers: int) -> list[bytes]:
    staging = MemoryStaging(job.plan)
    run(job, staging, segment, workers)
    return list(files_of(job, staging))


@ids
def test_a_folder_that_verifies_and_checks(tmp_path: Path, source: Path, scheme: Scheme) -> None:
    assert merge(source, tmp_path / "out", "--quantize", scheme.name, "--verify") == 0
    tensors, found = model(), tensors_of(tmp_path / "out")
    linear = {name for name in tensors if "_proj" in name}
    parts = {p.name: p for name in linear for p in scheme.parts(name, tuple(tensors[name].shape))}
    assert set(found) == (set(tensors) - linear) | set(parts)
    for name, part in parts.items():
        assert (tuple(found[name].shape), str(found[name].dtype)) == (part.shape, f"torch.{part.dtype.torch_name}")
    assert all(torch.equal(found[name], tensors[name]) for name in set(tensors) - linear)
    config = config_of(tmp_path / "out")
    assert scheme.wrote(config["quantization_config"])
    assert config["torch_dtype"] == "bfloat16"
    assert check_folder(tmp_path / "out").ok
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0


@ids
def test_the_index_counts_the_elements_of_the_model(tmp_path: Path, source: Path, scheme: Scheme) -> None:
    assert merge(source, tmp_path / "out", "--quantize", scheme.name, "--max-shard-size", "90KB") == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = tensors_of(tmp_path / "out")
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in model().values())
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 0


@ids
def test_bytes_depend_on_neither_segments_nor_workers_nor_files(source: Path, scheme: Scheme) -> None:
    """With small files, a weight and its scales stand in two of them."""
    for shard_size in (5_000_000_000, 40_000):
        job = job_of(source, scheme, max_shard_size=shard_size)
        wanted = written(job, 1 << 20, 1)
        for segment in (2000, 40_000, 70_001):
            for workers in (1, 3):
                assert written(job, segment, workers) == wanted


@ids
def test_segments_cover_every_byte_once(source: Path, scheme: Scheme) -> None:
    plan = job_of(source, scheme, max_shard_size=40_000).plan
    for segment_bytes in (300, 5000, 100_000):
        spans = sorted((s.output, s.start, s.stop) for seg in segments_of(plan, segment_bytes) for s in seg.spans)
        for number, output in enumerate(plan.outputs):
            at = len(output.header)
            for _, start, stop in (s for s in spans if s[0] == number):
                assert start == at
                at = stop
            assert at == output.nbytes


@ids
def test_a_run_that_was_cut_off_writes_the_same(source: Path, scheme: Scheme) -> None:
    """After the first ranges, with other segments; a weight without its scales does not count as done."""
    job = job_of(source, scheme, max_shard_size=40_000)
    wanted = written(job, 1 << 20, 1)
    first = MemoryStaging(job.plan)
    run(job, first, 8000, 1)
    for kept in (1, len(first.ranges) // 2, len(first.ranges) - 1):
        second = MemoryStaging(job.plan, ranges=tuple(first.ranges[:kept]))
        for r in first.ranges[:kept]:  # what the first run had written
            data = bytearray(r.stop - r.start)
            first.sink.read_into(job.plan.outputs[r.output].name, r.start, memoryview(data))
            second.sink.write_at(job.plan.outputs[r.output].name, r.start, memoryview(data))
        run(job, second, 20_000, 2)
        assert list(files_of(job, second)) == wanted


@ids
def test_verify_finds_one_other_byte_in_each_part(tmp_path: Path, source: Path, scheme: Scheme) -> None:
    assert merge(source, tmp_path / "out", "--quantize", scheme.name, "-q") == 0
    file = tmp_path / "out" / "model.safetensors"
    good = load_file(file)
    for part in scheme.parts("model.layers.0.mlp.up_proj.weight", (256, 128)):
        tensors = {name: tensor.clone() for name, tensor in good.items()}
        tensors[part.name].view(-1).view(torch.uint8)[1] ^= 1
        save_file(tensors, file, {"format": "pt"})
        assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source)]) == 3


@ids
def test_errors_are_those_of_what_engines_compute_with(
    tmp_path: Path, source: Path, scheme: Scheme, capsys: pytest.CaptureFixture[str]
) -> None:
    """SNR as in a plain computation over the whole tensor."""
    assert merge(source, tmp_path / "out", "--quantize", scheme.name, "-q") == 0
    capsys.readouterr()
    assert cli.run(["verify", str(tmp_path / "out"), "--against", str(source), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["quantized"]
    assert [e["snr_db"] for e in told] == sorted(e["snr_db"] for e in told)
    assert len(told) == 14
    least, most = {4: (15, 25), 8: (30, 46)}[4 if scheme.name in {"int4", "mxfp4", "nvfp4"} else 8]
    assert all(least < e["snr_db"] < most for e in told)


@ids
@pytest.mark.parametrize("fault", ["shape", "absent", "unnamed"])
def test_check_finds_what_loaders_would_misread(tmp_path: Path, source: Path, scheme: Scheme, fault: str) -> None:
    assert merge(source, tmp_path / "out", "--quantize", scheme.name, "-q") == 0
    file, name = tmp_path / "out" / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)
    parts = [part.name for part in scheme.parts(name, (128, 256))]
    scale = tensors.pop(parts[1])
    if fault == "shape":
        tensors[parts[1]] = torch.cat([scale.view(torch.uint8)] * 2).view(scale.dtype)
    elif fault == "unnamed":
        for part in parts[:1] + parts[2:]:
            del tensors[part]
        tensors[name] = torch.zeros(128, 256, dtype=torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    rules = {f.rule for f in check_folder(tmp_path / "out").findings if f.severity == "error"}
    wanted = {"excluded"} if fault == "unnamed" else {"scales", "fp8-scales"}
    assert rules & wanted
