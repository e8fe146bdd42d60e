"""The command line; the only module that prints results or exits.

    merge-stream [merge] CKPT OUT      inspect CKPT      plan CKPT [OUT]      verify OUT --against REF
    merge-stream check OUT             push OUT REPO      stage CKPT STORE      finalize STORE OUT      bench

Results go to stdout, everything else to stderr. Exit codes: 0 ok, 1 failure, 2 usage, 3
mismatch, 4 memory or disk does not suffice, 5 input incomplete or corrupt, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from merge_stream import cli_options as opt
from merge_stream.cli_bench import bench
from merge_stream.cli_frame import exit_code_of, full_disk, running, show
from merge_stream.cli_words import Commands
from merge_stream.errors import OutputExistsError, UsageError
from merge_stream.units import counted

if TYPE_CHECKING:
    from merge_stream.output.hub import Pushed, PushTarget

__all__ = ["app", "run"]

_SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda token: token.replace("_", "-")}


@click.group(
    cls=Commands,
    context_settings=_SETTINGS,
    epilog="`merge-stream CKPT OUT` is short for `merge-stream merge CKPT OUT`.",
)
@click.version_option(package_name="merge-stream")
def app() -> None:
    """Turn the sharded checkpoint of a distributed trainer into one Hugging Face model."""


@app.command(short_help="Merge a checkpoint into a Hugging Face folder.")
@click.argument("paths", nargs=-1, type=opt.WORDS, metavar="CKPT OUT")
@opt.opening
@opt.planning
@opt.verl()
@click.option(
    "--push-to-hub", type=opt.WORDS, metavar="REPO", help="Upload OUT to this repository of the Hub; implies --verify."
)
@opt.hub
@opt.staging
@click.option("--verify", is_flag=True, help="Read the whole output and the source again and compare all values.")
@click.option("--sha256", is_flag=True, help="Tell the SHA-256 of each weight file, as the Hub does; reads OUT again.")
@click.option("--sparse", is_flag=True, help="Leave blocks of zeros out of the files of OUT, as holes on the disk.")
@click.option("--overwrite", is_flag=True, help="Replace OUT by the new model once that is whole.")
@click.option("--restart", is_flag=True, help="Begin anew instead of continuing an interrupted run.")
@opt.output
def merge(paths: tuple[str, ...], **given: Any) -> None:  # noqa: ANN401 - click's options, typed in cli_options
    """Merge the checkpoint CKPT into the new Hugging Face folder OUT.

    CKPT is the folder the trainer wrote (or its parent). A run that was interrupted
    continues when the same command is given again.
    """
    verl, remarks = opt.verl_options(given)
    sources, out = opt.sources_and_out(paths, given, verl)
    repo = _one_repo(given["push_to_hub"], verl.hf_upload_path)
    if verl.used and repo is None and given["private"]:
        given["private"] = False
        remarks.append("--private has no effect: nothing is uploaded without --hf_upload_path")
    target = opt.push_target(given, repo)
    given["verify"] = given["verify"] or target is not None
    options = opt.merge_options(given, default_dtype="bf16" if verl.used else "keep")
    with running(given, options.max_mem) as (console, stop):
        for text in remarks:
            console.line(f"note: {text}")
        if target is not None:
            from merge_stream.output.hub import prepare_push

            prepare_push(target)
        from merge_stream.api import merge as do_merge

        opening = opt.open_options(given)
        with full_disk(out), _or_push(out, target):
            report = do_merge(sources, out, options, opening=opening, observer=console, stop=stop)
    lines = [*(f"note: {n}" for n in report.notes), *report.lines()]
    if target is None:
        show(given, report.as_json(), lines)
        return
    if not given["as_json"]:
        show(given, {}, lines)
    pushed = _upload(out, target, given)
    show(given, {**report.as_json(), "pushed": pushed.as_json()}, pushed.lines())


@contextmanager
def _or_push(out: str, target: PushTarget | None) -> Iterator[None]:
    """An OUT that is there may be the finished model whose upload failed."""
    try:
        yield
    except OutputExistsError as error:
        if target is None:
            raise
        hint = f"{error.hint}; if it is the finished model, `{target.command(out)}` uploads it"
        raise OutputExistsError(error.message, hint=hint) from None


def _one_repo(push_to_hub: str | None, hf_upload_path: str | None) -> str | None:
    if push_to_hub and hf_upload_path and push_to_hub != hf_upload_path:
        msg = f"--push-to-hub {push_to_hub} and --hf_upload_path {hf_upload_path} name two repositories"
        raise UsageError(msg, hint="give one of them")
    return push_to_hub or hf_upload_path


def _upload(out: str, target: PushTarget, given: dict[str, Any]) -> Pushed:
    with running(given, 0) as (console, _):
        from merge_stream.api import push
        from merge_stream.engine.events import Phase

        console(Phase(f"uploading {out} to {target.repo}"))
        return push(out, target, quiet=given["quiet"])


@app.command(short_help="Assemble a checkpoint in a zarr store.")
@click.argument("paths", nargs=-1, type=opt.WORDS, metavar="CKPT STORE")
@opt.opening
@opt.naming
@opt.both
@click.option("--restart", is_flag=True, help="Begin anew instead of continuing an interrupted run.")
@click.option("--dry-run", is_flag=True, help="Tell what would be written, read and needed; write nothing.")
@opt.output
def stage(paths: tuple[str, ...], **given: Any) -> None:  # noqa: ANN401
    """Assemble the checkpoint CKPT in the new zarr store STORE, in its own element types.

    `finalize STORE OUT` then writes models from it, in any --dtype, without the checkpoint.
    """
    if len(paths) + bool(given["inputs"]) < 2 or len(paths) > 2 or not paths:
        msg = f"stage takes two paths, CKPT and STORE; got {counted(len(paths), 'path')}"
        raise UsageError(msg, hint="merge-stream stage CKPT STORE; further folders of the same checkpoint: --input DIR")
    sources, store = [*paths[:-1], *given["inputs"]], paths[-1]
    options = opt.merge_options({**opt.NOT_FOR_STAGE, **given}, default_dtype="keep")
    opening = opt.open_options(given)
    with running(given, options.max_mem) as (console, stop):
        if given["dry_run"]:
            from merge_stream.forecast_store import forecast_stage

            told = forecast_stage(sources, store, options, opening=opening, observer=console, stop=stop)
            show({**given, "quiet": False}, told.as_json(), told.lines())
            return
        from merge_stream.through_store import stage as do_stage

        with full_disk(store, smaller=""):
            report = do_stage(sources, store, options, opening=opening, observer=console, stop=stop)
    show(given, report.as_json(), [*(f"note: {n}" for n in report.notes), *report.lines()])


@app.command(short_help="Write a model from a zarr store.")
@click.argument("store", type=opt.WORDS, metavar="STORE")
@click.argument("out", type=opt.WORDS, metavar="OUT")
@opt.writing
@opt.both
@click.option("--verify", is_flag=True, help="Read the whole output and the store again and compare all values.")
@click.option("--sha256", is_flag=True, help="Tell the SHA-256 of each weight file, as the Hub does; reads OUT again.")
@click.option("--overwrite", is_flag=True, help="Replace OUT by the new model once that is whole.")
@click.option("--restart", is_flag=True, help="Begin anew instead of continuing an interrupted run.")
@opt.output
def finalize(store: str, out: str, **given: Any) -> None:  # noqa: ANN401
    """Write the Hugging Face folder OUT from STORE, which `stage` made.

    Every chunk is compared with its checksum. Names, ties and LoRA are as they were staged.
    """
    options = opt.merge_options({**opt.NOT_FOR_FINALIZE, **given}, default_dtype="keep")
    with running(given, options.max_mem) as (console, stop):
        from merge_stream.through_store import finalize_store

        with full_disk(out):
            report = finalize_store(store, out, options, observer=console, stop=stop)
    show(given, report.as_json(), [*(f"note: {n}" for n in report.notes), *report.lines()])


@app.command(short_help="Upload a finished model to the Hub.")
@click.argument("out", type=opt.WORDS, metavar="OUT")
@click.argument("repo", type=opt.WORDS, metavar="REPO")
@opt.hub
@opt.output
def push(out: str, repo: str, **given: Any) -> None:  # noqa: ANN401
    """Upload the model folder OUT to the repository REPO (ORG/NAME), after a look at its files.

    The same command again continues an upload that failed. The token is HF_TOKEN, or that
    of `hf auth login`.
    """
    target = opt.push_target(given, repo)
    assert target is not None
    pushed = _upload(out, target, given)
    show(given, {"ok": True, **pushed.as_json()}, pushed.lines())


@app.command(short_help="Is OUT a complete model that every engine loads?")
@click.argument("out", type=opt.WORDS, metavar="OUT")
@opt.output
def check(out: str, **given: Any) -> None:  # noqa: ANN401
    """Look at headers and JSON files of the model folder OUT (no tensor data); exit 3 when an error is found.

    Each finding names the loaders that refuse the model or misread it.
    """
    with running(given, 0):
        from merge_stream.verification.check import check_folder

        found = check_folder(out)
    show({**given, "quiet": given["quiet"] and found.ok}, found.as_json(), found.lines())
    if not found.ok:
        raise SystemExit(3)


@app.command(short_help="Tell what a checkpoint is and holds.")
@click.argument("paths", nargs=-1, type=opt.WORDS, metavar="CKPT")
@opt.opening
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option(
    "--base-model",
    type=opt.WORDS,
    metavar="DIR|ORG/NAME",
    help="Tell of this model too, and whether an adapter belongs to it; headers only.",
)
@opt.bound
@opt.output
def inspect(paths: tuple[str, ...], **given: Any) -> None:  # noqa: ANN401
    """Tell format, trainer, mesh, ranks, tensors and types of CKPT, from metadata alone."""
    with running(given, 0):
        from merge_stream.inspection import describe
        from merge_stream.opening import open_checkpoint

        if not paths and not given["inputs"]:
            raise UsageError("inspect takes CKPT, a checkpoint's folder", hint="merge-stream inspect CKPT")
        max_mem = opt.memory_bound(given).nbytes
        catalog = open_checkpoint([*paths, *given["inputs"]], opt.open_options(given), max_mem=max_mem)
        every = given["tensors"] or given["as_json"]
        description = describe(catalog, every_tensor=every, base_model=given["base_model"], max_mem=max_mem)
    show({**given, "quiet": False}, description.as_json(), description.lines())


@app.command(short_help="Dry run: what would be written, read and needed.")
@click.argument("paths", nargs=-1, type=opt.WORDS, metavar="CKPT [OUT]")
@opt.opening
@opt.planning
@click.option("--verify", is_flag=True, help="Plan for a merge with --verify.")
@click.option("--sha256", is_flag=True, help="Plan for a merge with --sha256.")
@click.option("--overwrite", is_flag=True, help="Plan for a merge with --overwrite.")
@click.option("--restart", is_flag=True, help="Plan for a merge with --restart.")
@opt.staging
@opt.output
def plan(paths: tuple[str, ...], **given: Any) -> None:  # noqa: ANN401
    """Do everything a merge does before its first byte; fails where the merge would fail."""
    sources = [*given["inputs"], *paths[:1]] if paths else list(given["inputs"])
    if not sources or len(paths) > 2:
        msg = f"plan takes CKPT and, if it is to be checked too, OUT; got {counted(len(paths), 'path')}"
        raise UsageError(msg)
    options = opt.merge_options(given, default_dtype="keep")
    with running(given, options.max_mem) as (console, stop):
        from merge_stream.forecast import forecast
        from merge_stream.forecast_store import forecast_through_store

        out = paths[1] if len(paths) == 2 else None
        told = forecast_through_store if options.staging == "zarr" else forecast
        result = told(sources, out, options, opening=opt.open_options(given), observer=console, stop=stop)
    show({**given, "quiet": False}, result.as_json(), result.lines())


@app.command(short_help="Compare a model with a reference model or a checkpoint.")
@click.argument("out", type=opt.WORDS, metavar="OUT")
@click.option(
    "--against",
    multiple=True,
    required=True,
    type=opt.WORDS,
    metavar="REF_OR_CKPT",
    help="Reference folder or checkpoint; several for node-local parts.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Absolute tolerance; without tolerances bits must be equal.",
)
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance.")
@click.option("--check-crc", is_flag=True, help="First compare the reference with the checksums in its own files.")
@opt.opening
@opt.memory
@opt.lora
@click.option(
    "--base-model", type=opt.WORDS, metavar="DIR", help="Folder with config.json for a checkpoint that has none."
)
@opt.output
def verify(out: str, against: tuple[str, ...], atol: float, rtol: float, **given: Any) -> None:  # noqa: ANN401
    """Compare names, shapes, types and values of the model OUT; exit 3 when they differ."""
    _verify(out, [*against, *given["inputs"]], atol, rtol, given)


@app.command(short_help="verl's spelling of verify.")
@opt.verl("--backend", "--local-dir", "--test-hf-dir", "--hf-model-path", "--trust-remote-code")
@opt.opening
@opt.memory
@opt.lora
@click.option("--private", is_flag=True, hidden=True)
@click.option(
    "--base-model", type=opt.WORDS, metavar="DIR", help="Folder with config.json for a checkpoint that has none."
)
@opt.output
def test(**given: Any) -> None:  # noqa: ANN401
    """Compare a checkpoint with a model, in verl's words.

    test --backend fsdp --local_dir CKPT --test_hf_dir REF does what `verify REF --against
    CKPT` does. All options may be written with _ or with -.
    """
    verl, remarks = opt.verl_options(given)
    if verl.local_dir is None or verl.test_hf_dir is None:
        msg = "test needs --local_dir CKPT and --test_hf_dir REF"
        raise UsageError(msg, hint="the same comparison is: merge-stream verify REF --against CKPT")
    _verify(verl.test_hf_dir, [verl.local_dir], 0.0, 0.0, given, remarks)


def _verify(  # noqa: PLR0917 - one call's facts
    out: str, against: list[str], atol: float, rtol: float, given: dict[str, Any], remarks: Sequence[str] = ()
) -> None:
    bound = opt.memory_bound(given)
    with running(given, bound.nbytes) as (console, stop):
        from merge_stream.api import verify as do_verify
        from merge_stream.engine.compare import Tolerance

        for text in remarks:
            console.line(f"note: {text}")
        verdict = do_verify(
            out,
            against,
            max_mem=bound.nbytes,
            max_mem_origin=bound.words,
            workers=given["workers"],
            io=given["io"],
            tolerance=Tolerance(atol, rtol),
            opening=opt.open_options(given),
            base_model=given["base_model"],
            lora=opt.lora_choice(given),
            check_crc=given.get("check_crc", False),
            observer=console,
            stop=stop,
        )
    show({**given, "quiet": given["quiet"] and verdict.ok}, verdict.as_json(), verdict.lines())
    if not verdict.ok:
        raise SystemExit(3)


app.add_command(bench)


def run(argv: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    return exit_code_of(app, argv)
