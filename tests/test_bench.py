"""The bench's own tools: the generator makes what trainers make, the measuring tool measures what it says."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import zipfile
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch

from bench import measure, read_ways
from bench.peers.race import CHECKPOINT, OUT, Peer, Race, hold
from bench.read_ways import WAYS
from bench.results import Results
from bench.tables import replace_between_markers
from merge_stream.benchmark.shapes import SHAPES, model_of
from merge_stream.benchmark.synthetic import Layout, Synthetic, as_rank, main, make_checkpoint
from merge_stream.benchmark.values import Values

RANKS = 4
RANK_LAYOUTS = ("fsdp2", "shard1", "hsdp", "tp")


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bits of a tensor."""
    signed = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.contiguous().view(signed).numpy().view(f"u{tensor.element_size()}")


@contextlib.contextmanager
def loaded(folder: pathlib.Path, rank: int, ranks: int = RANKS) -> Iterator[dict[str, Any]]:
    """A rank's file, loaded as that rank."""
    with as_rank(rank, ranks):
        yield torch.load(folder / f"model_world_size_{ranks}_rank_{rank}.pt", weights_only=False)


def gathered(made: Synthetic) -> dict[str, np.ndarray[Any, Any]]:
    """Assemble rank files by torch's own arithmetic of placements; every rank writes its part, replicas too."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: dict[str, np.ndarray[Any, Any]] = {}
    for rank in range(RANKS):
        with loaded(made.folder, rank) as state:
            for name, tensor in state.items():
                mesh = tensor.device_mesh
                size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
                local = raw(tensor._local_tensor)
                assert local.shape == tuple(size), (name, rank)
                out = whole.setdefault(name, np.zeros(tuple(tensor.shape), local.dtype))
                out[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] = local
    return whole


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("shape", ["tiny", "tiny-odd"])
@pytest.mark.parametrize("layout", RANK_LAYOUTS)
def test_rank_files_gather_to_the_expected_values(layout: Layout, shape: str, tmp_path: pathlib.Path) -> None:
    made = make_checkpoint(tmp_path / "c", shape=shape, ranks=RANKS, layout=layout)
    found = gathered(made)
    assert list(found) == list(made.model.parameters)
    for name, values in found.items():
        np.testing.assert_array_equal(values, made.expected(name), err_msg=name)


def test_layouts_place_as_their_names_say(tmp_path: pathlib.Path) -> None:
    seen = {}
    for layout in RANK_LAYOUTS:
        make_checkpoint(tmp_path / layout, shape="tiny", ranks=RANKS, layout=layout)
        with loaded(tmp_path / layout, 3) as state:
            seen[layout] = {k: (v.device_mesh.mesh_dim_names, str(v.placements)) for k, v in state.items()}
    q, o, norm = (f"model.{n}.weight" for n in ("layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj", "norm"))
    assert seen["fsdp2"][q] == (("fsdp",), "(Shard(dim=0),)")
    assert seen["shard1"][q] == (("fsdp",), "(Shard(dim=1),)")
    assert seen["shard1"][norm] == (("fsdp",), "(Shard(dim=0),)")
    assert seen["hsdp"][q] == (("ddp", "fsdp"), "(Replicate(), Shard(dim=0))")
    assert seen["tp"][q] == (("fsdp", "tp"), "(_StridedShard(dim=0, sf=2), Shard(dim=0))")
    assert seen["tp"][o] == (("fsdp", "tp"), "(Shard(dim=0), Shard(dim=1))")
    assert seen["tp"][norm] == (("fsdp",), "(Shard(dim=0),)")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-odd", "tiny-moe"])
def test_dcp_consolidates_to_the_expected_values(shape: str, dtype: str, tmp_path: pathlib.Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    made = make_checkpoint(tmp_path / "c", shape=shape, ranks=RANKS, layout="dcp", dtype=dtype)
    assert len(list(made.folder.glob("*.distcp"))) == RANKS
    dcp_to_torch_save(str(made.folder), tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt")
    assert sorted(state) == sorted(made.model.parameters)
    for name, tensor in state.items():
        np.testing.assert_array_equal(raw(tensor), made.expected(name), err_msg=name)


def test_full_is_one_intact_file(tmp_path: pathlib.Path) -> None:
    made = make_checkpoint(tmp_path / "c", shape="tiny-odd", ranks=1, layout="full", dtype="bfloat16")
    file = made.folder / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
    for name, tensor in torch.load(file).items():
        np.testing.assert_array_equal(raw(tensor), made.expected(name), err_msg=name)


def test_tied_ends_share_a_storage(tmp_path: pathlib.Path) -> None:
    made = make_checkpoint(tmp_path / "c", shape="qwen", scale=0.001, ranks=2, layout="fsdp2", dtype="bfloat16")
    with loaded(made.folder, 1, 2) as state:
        ends = [state[n]._local_tensor.untyped_storage().data_ptr() for n in next(iter(made.model.tied.items()))]
    assert ends[0] == ends[1]


def test_short_last_shards_keep_fsdps_padding(tmp_path: pathlib.Path) -> None:
    make_checkpoint(tmp_path / "c", shape="tiny-odd", ranks=RANKS, layout="fsdp2")
    with loaded(tmp_path / "c", 3) as state:
        local = state["model.embed_tokens.weight"]._local_tensor
    assert local.shape == (32, 33)
    assert local.untyped_storage().nbytes() == 33 * 33 * 4


def test_no_two_rows_are_equal() -> None:
    rows = Values("float32").whole("model.embed_tokens.weight", (3000, 64))
    assert len(np.unique(rows, axis=0)) == 3000


@pytest.mark.parametrize("shape", [s for s in SHAPES if not s.startswith("tiny")])
def test_scale_is_about_size(shape: str) -> None:
    whole, part = (model_of(shape, scale=s, itemsize=4).elements for s in (1, 0.25))
    assert 0.1 * whole < part < 0.6 * whole


def test_the_command_line_refuses_what_exists(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--shape", "tiny", "--ranks", "2"]) == 1
    assert "exists" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- measure

TOUCH = "x = bytearray({0})\nfor i in range(0, {0}, 4096): x[i] = 1\n"


def test_peak_is_the_commands_own() -> None:
    """A large parent (this process, which has torch in it) must not show in the measure of a small child."""
    small = measure.run([sys.executable, "-c", "pass"])
    large = measure.run([sys.executable, "-c", TOUCH.format(100_000_000)])
    assert small.peak < 40e6
    assert 95e6 < large.peak - small.peak < 110e6


def test_tree_counts_children() -> None:
    child = f"import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', {TOUCH.format(60_000_000)!r} "
    child += "+ 'import time; time.sleep(0.5)'])\n" + TOUCH.format(60_000_000) + "p.wait()"
    used = measure.run([sys.executable, "-c", child])
    assert used.tree > 120e6
    assert used.peak < 100e6


def test_cpu_counts_children_and_not_sleep() -> None:
    spin = "import time\nwhile time.process_time() < 0.4: pass"
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {spin!r}]); time.sleep(0.5)"
    used = measure.run([sys.executable, "-c", code])
    assert 0.4 <= used.cpu < 1.5
    assert used.wall > 0.9


def test_a_failing_command_is_an_error_with_its_output() -> None:
    with pytest.raises(measure.CommandFailedError, match="no such thing") as caught:
        measure.run([sys.executable, "-c", "import sys; sys.exit('no such thing')"])
    assert caught.value.code == 1


def test_drop_and_warm_change_the_cached_share(tmp_path: pathlib.Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 8_000_000)
    measure.warm([tmp_path])
    assert measure.cached_share([tmp_path]) == 1
    measure.drop([tmp_path])
    if measure.cached_share([tmp_path]) > 0:
        pytest.skip("this file system does not drop pages (tmpfs)")


def test_ratios_are_taken_round_by_round() -> None:
    assert measure.ratios([1, 4, 9], [2, 2, 3]) == measure.Spread(0.5, 2, 3)


def test_interleave_runs_each_contender_in_each_round(tmp_path: pathlib.Path) -> None:
    prepared: list[str] = []
    ways = [
        measure.Contender(name, (sys.executable, "-c", f"print({name!r})"), lambda name=name: prepared.append(name))
        for name in ("a", "b", "c")
    ]
    runs = measure.interleave(ways, rounds=2, inputs=[tmp_path], cold=True)
    assert {k: [r.stdout for r in v] for k, v in runs.items()} == {k: [f"{k}\n"] * 2 for k in "abc"}
    assert sorted(prepared[:3]) == sorted(prepared[3:]) == ["a", "b", "c"]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_reading_reads_every_byte_behind_the_header(
    way: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = (9_000_001, 5_000, 30_000_000)
    for number, nbytes in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(b"x" * nbytes)
    try:
        assert read_ways.main([way, str(tmp_path)]) == 0
    except OSError as error:
        pytest.skip(f"{way}: {error}")
    assert int(capsys.readouterr().out) == sum(sizes) - 3 * 704


def test_tables_of_two_writers_stand_in_one_page(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    for text in ("one", "two"):
        for writer in ("bench.compare", "bench.io"):
            replace_between_markers(page, f"{text} of {writer}", writer=writer)
    wanted = "# Title\n\n" + "\n".join(
        f"<!-- {writer} writes from here -->\n\ntwo of {writer}\n<!-- to here -->\n"
        for writer in ("bench.compare", "bench.io")
    )
    assert page.read_text() == wanted


# ---------------------------------------------------------------------------------- groups and peers


def test_a_run_goes_on_group_by_group_on_the_same_machine_only(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results.json"

    def measured(title: str) -> dict[str, object]:
        return {"seconds": 3, "imports": {"a": 1}, "faults": [], "experiments": [{"title": title}]}

    here = {"cpu": "x", "date": "2026-12-01"}
    Results.of(file, here).add("b", measured("two"))
    later = Results.of(file, {**here, "date": "2026-12-02"})
    assert later.document("abc")["groups"] == ["b"]
    later.add("a", measured("one"))
    document = Results.of(file, here).document("abc")
    assert [experiment["title"] for experiment in document["experiments"]] == ["one", "two"]
    assert document["machine"]["date"] == "2026-12-02, 2026-12-01"
    assert document["machine"]["seconds"] == 6
    later.add("b", measured("two again"))
    assert later.document("abc")["experiments"][1]["title"] == "two again"
    assert not Results.of(file, {**here, "cpu": "y"}).groups


_TOOL = """
import pathlib, sys
from merge_stream.__main__ import main
sys.argv = ["merge-stream", sys.argv[1], sys.argv[2], "-q"]
try:
    main()
finally:
    for file in pathlib.Path(sys.argv[2]).glob("*.safetensors"):
        with file.open("r+b") as wrong:
            wrong.seek(-1, 2)
            last = wrong.read(1)
            wrong.seek(-1, 2)
            wrong.write(bytes([last[0] ^ CHANGE]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("change", [0, 1])
def test_a_peer_that_writes_one_other_bit_is_told(change: int, tmp_path: pathlib.Path) -> None:
    made = make_checkpoint(tmp_path / "ckpt", shape="tiny", ranks=2, layout="fsdp2")
    words = ("python", "-c", _TOOL.replace("CHANGE", str(change)), CHECKPOINT, OUT)
    race = Race("a race", made.folder, ("--dtype", "keep"), {"other": words})
    peer = Peer("numpy", (), "import numpy", lambda _folder, _size: (yield race))
    text, faults = hold(peer, race, pathlib.Path(sys.prefix), 1, lambda _line: None)
    assert [fault.startswith("other and merge-stream differ in 1 tensors") for fault in faults] == [True] * change
    assert ("**differ**" in text) == bool(change)
    assert "| other | " in text


def test_layouts_are_all_tested() -> None:
    assert {*RANK_LAYOUTS, "dcp", "full"} == set(get_args(Layout))
    json.dumps(measure.machine(pathlib.Path.cwd()))
