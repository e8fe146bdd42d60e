"""OUT appears whole or not at all, nothing that is there is lost, and a cut-off commit is finished."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from merge_stream.errors import MergeStreamError, OutputBusyError, OutputExistsError, UsageError
from merge_stream.output import place as module
from merge_stream.output.place import OutputPlace, choose_place, commit, finish_interrupted_commit, interrupted_commit

MODEL = {"config.json": "{}", "model.safetensors": "new", "tokenizer.json": "t", "model.safetensors.index.json": "i"}
OLD = {"config.json": "old config", "model.safetensors": "old"}


class Killed(BaseException):
    """The process ends here."""


def fill(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def staged(out: Path, *, overwrite: bool = False) -> OutputPlace:
    """A place whose model is finished and not yet visible."""
    place = choose_place(out, overwrite=overwrite)
    fill(Path(place.model_dir), MODEL)
    fill(Path(place.work), {"lock": "", "journal": "", "plan.json": '{"fingerprint": "f", "identity": {}}'})
    return place


def files(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "OUT"


class TestWhereToWork:
    def test_beside_out_when_it_is_not_there(self, out: Path) -> None:
        place = choose_place(out, overwrite=False)
        assert (place.out, place.work, place.inside, place.replaces) == (str(out), f"{out}.partial", False, False)
        assert not out.exists()

    def test_inside_an_empty_folder(self, out: Path) -> None:
        out.mkdir()
        place = choose_place(out, overwrite=False)
        assert (place.work, place.inside, place.replaces) == (f"{out}/.merge-stream", True, False)

    def test_a_fresh_mount_point_counts_as_empty(self, out: Path) -> None:
        (out / "lost+found").mkdir(parents=True)
        (out / ".merge-stream").mkdir()
        assert choose_place(out, overwrite=False).inside

    def test_a_trailing_slash_and_dots_change_nothing(self, out: Path) -> None:
        assert choose_place(f"{out}/", overwrite=False) == choose_place(f"{out}/../OUT/.", overwrite=False)

    def test_a_link_to_a_folder_stands_for_the_folder(self, out: Path, tmp_path: Path) -> None:
        fill(tmp_path / "real", OLD)
        out.symlink_to("real")
        place = staged(out, overwrite=True)
        assert place.out == str(tmp_path / "real")
        commit(place)
        assert out.is_symlink()
        assert files(out) == MODEL
        assert sorted(p.name for p in tmp_path.iterdir()) == ["OUT", "real"]


class TestRefusals:
    @pytest.mark.parametrize("name", ["model.safetensors", "a.bin", "a.pt", "a.pth", "a.gguf", "x/a.ckpt"])
    def test_out_named_like_a_file(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UsageError, match="named like a file"):
            choose_place(tmp_path / name, overwrite=False)

    def test_an_empty_name(self) -> None:
        with pytest.raises(UsageError, match="empty name"):
            choose_place("", overwrite=False)

    def test_a_file(self, out: Path) -> None:
        out.write_text("x")
        for overwrite in (False, True):
            with pytest.raises(OutputExistsError, match="not a folder"):
                choose_place(out, overwrite=overwrite)

    def test_a_dangling_link(self, out: Path) -> None:
        out.symlink_to("nowhere")
        with pytest.raises(OutputExistsError, match="not a folder"):
            choose_place(out, overwrite=True)

    def test_a_folder_that_holds_something(self, out: Path) -> None:
        fill(out, OLD)
        with pytest.raises(OutputExistsError, match="--overwrite"):
            choose_place(out, overwrite=False)

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_the_input_itself_by_any_name(self, out: Path, tmp_path: Path, overwrite: bool) -> None:
        fill(out, OLD)
        (tmp_path / "link").symlink_to(out)
        for given in (out, tmp_path / "link", f"{out}/", f"{tmp_path}/./OUT"):
            with pytest.raises(UsageError, match="OUT is the input"):
                choose_place(out, overwrite=overwrite, inputs=(os.fspath(given),))

    def test_a_folder_that_holds_the_input(self, out: Path) -> None:
        """--overwrite would delete a single-file checkpoint together with its folder."""
        fill(out, {**OLD, "pytorch_model.bin": "x"})
        with pytest.raises(UsageError, match="holds the input"):
            choose_place(out, overwrite=True, inputs=(str(out / "pytorch_model.bin"),))

    def test_a_sibling_with_a_longer_name_is_no_input_inside(self, out: Path, tmp_path: Path) -> None:
        fill(tmp_path / "OUT-ckpt", OLD)
        assert choose_place(out, overwrite=False, inputs=(str(tmp_path / "OUT-ckpt"),)).out == str(out)

    def test_a_mount_point_that_is_not_empty(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(out, OLD)
        monkeypatch.setattr(os.path, "ismount", lambda p: p == str(out))
        with pytest.raises(OutputExistsError, match="mount point"):
            choose_place(out, overwrite=True)


class TestOverwriteDeletesModelsOnly:
    @pytest.mark.parametrize(
        "entries",
        [
            {"notes.txt": "x"},
            {"model.py": "x"},
            {"pytorch_model.bin": "x"},
            {"weights.pt": "x"},
        ],
    )
    def test_a_folder_without_a_model_is_left_alone(self, out: Path, entries: dict[str, str]) -> None:
        fill(out, entries)
        with pytest.raises(OutputExistsError, match="would delete"):
            choose_place(out, overwrite=True)
        assert files(out) == entries

    def test_neither_is_one_with_other_folders_in_it(self, out: Path) -> None:
        """A home, a repository, a run folder with checkpoints: each may hold a config.json."""
        for name in ("checkpoints", ".git", "src"):
            fill(out, OLD)
            (out / name).mkdir()
            with pytest.raises(OutputExistsError, match=f"would delete .*{name}"):
                choose_place(out, overwrite=True)
            (out / name).rmdir()

    def test_an_old_backup_is_never_touched(self, out: Path) -> None:
        fill(out, OLD)
        fill(Path(f"{out}.old"), {"precious": "1"})
        with pytest.raises(OutputExistsError, match=r"\.old is there"):
            choose_place(out, overwrite=True)


class TestCommit:
    @pytest.mark.parametrize("state", ["absent", "empty", "model"])
    def test_out_holds_the_model_and_nothing_is_left_beside_it(self, out: Path, tmp_path: Path, state: str) -> None:
        if state == "empty":
            out.mkdir()
        if state == "model":
            fill(out, OLD)
        commit(staged(out, overwrite=state == "model"))
        assert files(out) == MODEL
        assert [p.name for p in tmp_path.iterdir()] == ["OUT"]
        assert interrupted_commit(out) is None
        assert finish_interrupted_commit(out) is None

    def test_config_and_index_appear_last_in_a_folder_that_is_filled(
        self, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out.mkdir()
        place = staged(out)
        moved: list[str] = []
        rename = os.rename

        def noted(source: str, target: str) -> None:
            moved.append(os.path.basename(target))
            rename(source, target)

        monkeypatch.setattr(os, "rename", noted)
        commit(place)
        assert moved[-2:] == ["config.json", "model.safetensors.index.json"]

    def test_an_out_that_appeared_meanwhile_is_not_touched(self, out: Path, tmp_path: Path) -> None:
        place = staged(out)
        fill(out, {"theirs": "1"})
        with pytest.raises(MergeStreamError, match="could not be moved"):
            commit(place)
        assert files(out) == {"theirs": "1"}
        assert files(Path(place.model_dir)) == MODEL
        shutil.rmtree(out)
        assert finish_interrupted_commit(out) is not None  # once it is out of the way
        assert files(out) == MODEL
        assert [p.name for p in tmp_path.iterdir()] == ["OUT"]

    def test_files_that_appeared_in_an_empty_out_are_not_overwritten(self, out: Path) -> None:
        out.mkdir()
        place = staged(out)
        fill(out, {"config.json": "theirs"})
        with pytest.raises(OutputExistsError, match=r"holds config\.json now"):
            commit(place)
        assert files(out) == {"config.json": "theirs"}
        assert files(Path(place.model_dir)) == MODEL


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End the process before its `step`-th change of the file system, counted over all that commit uses."""
    left = [step]

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*args, **named)

        return call

    for name in ("rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))


class TestInterruptedSwap:
    @pytest.mark.parametrize("state", ["absent", "absent, old", "empty", "empty, old", "model"])
    @pytest.mark.parametrize("step", range(14))
    def test_a_commit_killed_at_any_step_is_finished_by_the_next_start(
        self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, state: str
    ) -> None:
        """And a folder OUT.old that is the user's own is never removed."""
        state, _, user_has_old = state.partition(", ")
        if state == "empty":
            out.mkdir()
        if state == "model":
            fill(out, OLD)
        if user_has_old:
            fill(Path(f"{out}.old"), {"precious": "1"})
        place = staged(out, overwrite=state == "model")
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            try:
                commit(place)
            except Killed:
                pass
            else:
                return  # fewer steps than that
        if state == "model" and not out.exists():
            assert files(Path(f"{out}.old")) == OLD  # one of the two is always there, whole
        began = interrupted_commit(out) is not None
        finish_interrupted_commit(out)
        if not began and Path(place.model_dir).exists():  # killed before the mark: an ordinary resume
            commit(place)
        assert files(out) == MODEL
        left = {"OUT", "OUT.old"} if user_has_old else {"OUT"}
        assert {p.name for p in tmp_path.iterdir()} == left
        assert {p.name for p in out.iterdir()} == set(MODEL)
        assert not user_has_old or files(Path(f"{out}.old")) == {"precious": "1"}
        assert finish_interrupted_commit(out) is None

    def test_a_commit_that_is_just_being_made_is_left_to_its_run(self, out: Path) -> None:
        from merge_stream.engine.staging import locked

        place = staged(out)
        Path(place.work + module._MARK).write_text('{"fingerprint": "f", "replaces": false}')
        fd = locked(place.work)
        with pytest.raises(OutputBusyError):
            finish_interrupted_commit(out)
        assert files(Path(place.model_dir)) == MODEL
        os.close(fd)
        assert finish_interrupted_commit(out) is not None
        assert files(out) == MODEL

    def test_the_fingerprint_of_the_finished_model_is_known(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = staged(out)
        with monkeypatch.context() as patch:
            kill_at(patch, 1)
            with pytest.raises(Killed):
                commit(place)
        assert interrupted_commit(out) == "f"

    def test_a_mark_that_cannot_be_read_replaces_nothing(self, out: Path) -> None:
        place = staged(out)
        fill(Path(f"{out}.old"), {"precious": "1"})
        Path(place.work + module._MARK).write_text("garbage")
        assert finish_interrupted_commit(out) is not None
        assert files(out) == MODEL
        assert files(Path(f"{out}.old")) == {"precious": "1"}


class TestFoldersOfTheUser:
    """Names that a run needs, and that somebody else uses: refused, never emptied."""

    def test_a_partial_folder_of_the_user(self, tmp_path: Path) -> None:
        (tmp_path / "out.partial").mkdir()
        (tmp_path / "out.partial/thesis").write_text("years of work")
        with pytest.raises(OutputExistsError, match="thesis"):
            choose_place(tmp_path / "out", overwrite=False)
        assert (tmp_path / "out.partial/thesis").read_text() == "years of work"

    def test_a_partial_folder_that_is_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OutputExistsError, match="not a folder of an interrupted run"):
            choose_place(tmp_path / "out", overwrite=False)

    @pytest.mark.parametrize("name", ["train.py", "thesis.docx", "optimizer.pt", "trainer_state.json", "rng_state.pth"])
    def test_overwrite_spares_what_is_no_model_file(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "out").mkdir()
        for file in ("config.json", "model.safetensors", name):
            (tmp_path / "out" / file).write_text("x")
        with pytest.raises(OutputExistsError, match=name):
            choose_place(tmp_path / "out", overwrite=True)

    def test_a_name_that_leaves_no_room_for_the_partial_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="bytes"):
            choose_place(tmp_path / ("x" * 240), overwrite=False)
