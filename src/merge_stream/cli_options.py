"""Options shared by the commands, and how they become the option records of the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import click

from merge_stream.errors import UsageError
from merge_stream.options import LoraChoice, MergeOptions, OpenOptions, QuantizeName, StagingName
from merge_stream.units import format_bytes, parse_bytes
from merge_stream.verl_spelling import VerlOptions, explain_and_check

if TYPE_CHECKING:
    from merge_stream.engine.limits import Bound
    from merge_stream.output.hub import PushTarget

__all__ = [
    "NOT_FOR_FINALIZE",
    "NOT_FOR_STAGE",
    "WORDS",
    "both",
    "bound",
    "hub",
    "lora",
    "lora_choice",
    "memory",
    "memory_bound",
    "merge_options",
    "naming",
    "open_options",
    "opening",
    "output",
    "planning",
    "push_target",
    "sources_and_out",
    "staging",
    "verl",
    "verl_options",
    "writing",
]

F = TypeVar("F", bound=Callable[..., object])


class _Words(click.types.StringParamType):
    """A name or path: anything but nothing. An empty one is a shell variable that is not set."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """The text, or a usage error when there is none."""
        if not str(value).strip():
            self.fail("an empty name (is a variable of the shell not set?)", param, ctx)
        return super().convert(value, param, ctx)


WORDS = _Words()


def _all(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


opening = _all(
    click.option(
        "--input",
        "inputs",
        multiple=True,
        type=WORDS,
        metavar="DIR",
        help="Further folder of the same checkpoint (node-local disks); repeatable.",
    ),
    click.option(
        "--format", "format_name", type=WORDS, metavar="NAME", help="Format of the checkpoint; detected by default."
    ),
    click.option(
        "--root", type=WORDS, metavar="KEY", help="Key of the sub-tree of a nested state dict that is the model."
    ),
    click.option(
        "--mesh-dim-names", metavar="A,B", help="Names of the device mesh's dims, outermost first; labels only."
    ),
    click.option(
        "--tp-first",
        is_flag=True,
        help="Tensor parallelism split first (FSDP2+TP saved by torch 2.3, which did not record it).",
    ),
    click.option(
        "--tag", type=WORDS, metavar="TAG", help="Which save of a DeepSpeed run; default: what its file latest says."
    ),
    click.option(
        "--weights",
        type=click.Choice(["master", "module"]),
        help="The optimizer's fp32 masters, or the weights as trained. Default: masters, where they are saved.",
    ),
    click.option("--exclude-frozen", is_flag=True, help="Leave out parameters that were not trained (DeepSpeed)."),
    click.option("--no-mtp", is_flag=True, help="Leave out the layers of multi-token prediction (Megatron)."),
    click.option("--rules", type=WORDS, metavar="FILE.toml", help="Your own table of names, where none is known."),
)

bound = click.option(
    "--max-mem",
    metavar="SIZE",
    help="Bound of the whole process: 32G, 512M, 8GiB, 80%. Default: half of the memory there is.",
)

memory = _all(
    bound,
    click.option("--workers", type=click.IntRange(1, 64), metavar="N", help="Threads; default: the number of cores."),
    click.option(
        "--io",
        type=click.Choice(["auto", "pread", "mmap"]),
        default="auto",
        show_default=True,
        help="How sources are read: positioned reads, memory maps, or what measured best.",
    ),
)

lora = _all(
    click.option(
        "--lora",
        "lora_mode",
        type=click.Choice(["merge", "keep", "both"]),
        help="LoRA in the checkpoint: fold it, keep it as OUT/lora_adapter, or both. Default: fold.",
    ),
    click.option(
        "--lora-alpha",
        type=click.FloatRange(min=0, min_open=True),
        metavar="N",
        help="lora_alpha of the training, where no file beside the checkpoint tells it.",
    ),
)

naming = _all(
    click.option(
        "--base-model",
        type=WORDS,
        metavar="DIR|ORG/NAME",
        help="Original model, for config.json, tokenizer and names: a folder, or a name on the Hub.",
    ),
    click.option(
        "--layout",
        type=click.Choice(["upstream", "as-is"]),
        default="upstream",
        show_default=True,
        help="Names of the original repository, or the trainer's own.",
    ),
    lora,
    click.option(
        "--materialize-tied", is_flag=True, help="Write lm_head although it is tied to the embedding; config stays."
    ),
    click.option(
        "--check-crc",
        is_flag=True,
        help="First compare all bytes that are read with the checksums in the checkpoint's files.",
    ),
    click.option("--check-replicas", is_flag=True, help="Compare stored copies of the same data bit by bit."),
)

writing = _all(
    click.option(
        "--dtype",
        type=click.Choice(["keep", "bf16", "fp16", "fp32", "fp8"]),
        help="Type of floating tensors. Default: keep. fp8 means --quantize auto-fp8.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(get_args(QuantizeName)),
        help="Write the linear layers quantized in this scheme.",
    ),
    click.option(
        "--quantize-ignore",
        multiple=True,
        type=WORDS,
        metavar="GLOB",
        help="With --quantize: modules that stay plain; repeatable.",
    ),
    click.option("--force", is_flag=True, help="With --quantize: also where a loader is known to misread the result."),
    click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Largest output file."),
    click.option("--no-model-card", is_flag=True, help="Write no README.md with the origin of the weights."),
)

both = _all(
    click.option("--no-config", is_flag=True, help="Write weights alone: no config.json, no tokenizer."),
    click.option("--strict", is_flag=True, help="Replicas that differ and broken ties are errors, not warnings."),
    memory,
)

planning = _all(naming, writing, both)

staging = _all(
    click.option(
        "--staging",
        type=click.Choice(["direct", "zarr"]),
        default="direct",
        show_default=True,
        help="Assemble in the files of the model, or first in a zarr store.",
    ),
    click.option("--keep-store", type=WORDS, metavar="DIR", help="With --staging zarr: make the store here; it stays."),
)

output = _all(
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
    click.option("-q", "--quiet", is_flag=True, help="No progress and no remarks."),
)

hub = _all(
    click.option("--private", is_flag=True, help="Make the repository private."),
    click.option("--revision", type=WORDS, metavar="BRANCH", help="Branch to upload to; made when it is not there."),
    click.option("--create-pr", is_flag=True, help="Upload as a pull request."),
    click.option("--commit-message", type=WORDS, metavar="TEXT", help="Message of the commit on the Hub."),
)

_VERL: tuple[tuple[str, str, str], ...] = (
    ("--backend", "NAME", "fsdp or megatron; what the folder holds is found out in any case."),
    ("--local-dir", "CKPT", "The checkpoint."),
    ("--target-dir", "OUT", "The model folder to be; default: tmp."),
    ("--test-hf-dir", "REF", "The model to compare with."),
    ("--hf-upload-path", "REPO", "Repository of the Hub to upload to."),
    ("--hf-model-path", "DIR", "No effect: config and tokenizer are those beside the shards, or of --base-model."),
)
_VERL_FLAGS = ("--use-cpu-initialization", "--tie-word-embedding", "--is-value-model", "--trust-remote-code")


def verl(*shown: str) -> Callable[[F], F]:
    """Options of verl, with `-` for `_`; only those named are in the help."""
    return _all(
        *(
            click.option(name, type=WORDS, metavar=metavar, help=told, hidden=name not in shown)
            for name, metavar, told in _VERL
        ),
        *(
            click.option(name, is_flag=True, help="No effect; accepted for verl's scripts.", hidden=name not in shown)
            for name in _VERL_FLAGS
        ),
    )


def open_options(given: Mapping[str, Any]) -> OpenOptions:
    """How to read the checkpoint."""
    names = tuple(n.strip() for n in (given["mesh_dim_names"] or "").split(",") if n.strip())
    return OpenOptions(
        given["format_name"],
        names,
        given["root"],
        given["tp_first"],
        given["tag"],
        given["weights"],
        given["exclude_frozen"],
        given["rules"],
        given["no_mtp"],
    )


def memory_bound(given: Mapping[str, Any]) -> Bound:
    """`--max-mem`, or its default; never above the memory there is."""
    from merge_stream.engine.limits import bound_for

    bound = bound_for(given["max_mem"])
    if bound.note and not given["quiet"]:
        click.echo(f"note: {bound.note} ({format_bytes(bound.nbytes)})", err=True)
    return bound


def merge_options(given: Mapping[str, Any], *, default_dtype: Literal["keep", "bf16"]) -> MergeOptions:
    """What to write."""
    bound = memory_bound(given)
    return MergeOptions(
        dtype=default_dtype if given["dtype"] in {None, "fp8"} else given["dtype"],
        layout=given["layout"],
        max_shard_size=parse_bytes(given["max_shard_size"]),
        quantize=_quantize(given),
        quantize_ignore=_quantize_ignore(given),
        force=given["force"],
        base_model=given["base_model"],
        lora=lora_choice(given),
        write_config=not given["no_config"],
        model_card=not given["no_model_card"],
        materialize_tied=given["materialize_tied"],
        check_crc=given["check_crc"],
        check_replicas=given["check_replicas"],
        strict=given["strict"],
        verify=given["verify"],
        sha256=given.get("sha256", False),
        overwrite=given["overwrite"],
        restart=given["restart"],
        max_mem=bound.nbytes,
        max_mem_origin=bound.words,
        workers=given["workers"],
        io=given["io"],
        staging=_staging(given),
        keep_store=given.get("keep_store"),
        sparse=given.get("sparse", False),
    )


def _quantize(given: Mapping[str, Any]) -> QuantizeName | None:
    """`--quantize`, or what `--dtype fp8` means; UsageError when both are given."""
    name: QuantizeName | None = given["quantize"]
    if given["dtype"] != "fp8":
        return name
    if name is not None:
        msg = f"--dtype fp8 means --quantize auto-fp8, and --quantize {name} is given too"
        raise UsageError(msg, hint="give one of them; --dtype is then the type of what stays plain")
    return "auto-fp8"


def _quantize_ignore(given: Mapping[str, Any]) -> tuple[str, ...]:
    """`--quantize-ignore`; UsageError when it or `--force` is given and nothing is quantized."""
    if given["quantize_ignore"] and _quantize(given) is None:
        msg = "--quantize-ignore says what stays plain, and nothing is quantized"
        raise UsageError(msg, hint="add --quantize fp8-dynamic")
    if given["force"] and _quantize(given) is None:
        msg = "--force is for a quantization that a loader misreads, and nothing is quantized"
        raise UsageError(msg, hint="leave it out, or add --quantize")
    return tuple(given["quantize_ignore"])


def _staging(given: Mapping[str, Any]) -> StagingName:
    """`--staging`; UsageError for what has no meaning with or without a store."""
    name: StagingName = given.get("staging") or "direct"
    if given.get("sparse") and name == "zarr":
        msg = "--sparse leaves holes in the files of the model, and --staging zarr writes a store first"
        raise UsageError(msg, hint="leave one of them out")
    if given.get("keep_store") and name != "zarr":
        msg = "--keep-store names the folder of a store, and none is made"
        raise UsageError(msg, hint="add --staging zarr")
    return name


NOT_FOR_STAGE: Mapping[str, Any] = {
    "dtype": "keep",
    "quantize": None,
    "quantize_ignore": (),
    "force": False,
    "max_shard_size": "5GB",
    "no_model_card": True,
    "verify": False,
    "overwrite": False,
}
"""Options of a merge that are decided when a store is finalized."""

NOT_FOR_FINALIZE: Mapping[str, Any] = {
    "base_model": None,
    "layout": "upstream",
    "lora_mode": None,
    "lora_alpha": None,
    "materialize_tied": False,
    "check_crc": False,
    "check_replicas": False,
}
"""Options of a merge that are decided when a store is staged."""


def push_target(given: Mapping[str, Any], repo: str | None) -> PushTarget | None:
    """Where the model is uploaded to, or None; `repo` is what --push-to-hub or verl's --hf_upload_path says."""
    if repo is None:
        lone = [name for name in ("private", "revision", "create_pr", "commit_message") if given[name]]
        if lone:
            msg = f"--{lone[0].replace('_', '-')} says how to upload, and nothing is uploaded"
            raise UsageError(msg, hint="add --push-to-hub ORG/NAME")
        return None
    from merge_stream.output.hub import PushTarget

    return PushTarget(repo, given["private"], given["revision"], given["create_pr"], given["commit_message"])


def lora_choice(given: Mapping[str, Any]) -> LoraChoice:
    """What becomes of LoRA tensors."""
    return LoraChoice(given["lora_mode"], given["lora_alpha"])


def verl_options(given: Mapping[str, Any]) -> tuple[VerlOptions, list[str]]:
    """Verl's options and lines that explain those without a meaning here."""
    names = VerlOptions.__dataclass_fields__
    options = VerlOptions(**{name: given[name] for name in names if name in given})
    return options, explain_and_check(options)


def sources_and_out(paths: tuple[str, ...], given: Mapping[str, Any], verl: VerlOptions) -> tuple[list[str], str]:
    """(input folders, OUT) from positional paths, --input and verl's spelling."""
    inputs = list(given["inputs"])
    if verl.used:
        if paths or verl.local_dir is None:
            msg = "verl's spelling needs --local_dir CKPT and no positional paths"
            raise UsageError(msg, hint="merge --backend fsdp --local_dir CKPT --target_dir OUT, or simply: CKPT OUT")
        return [verl.local_dir, *inputs], verl.target_dir or "tmp"
    if len(paths) == 2:
        return [paths[0], *inputs], paths[1]
    if len(paths) == 1 and inputs:
        return inputs, paths[0]
    msg = f"merge takes two paths, CKPT and OUT; got {len(paths)}: {' '.join(paths) or 'none'}"
    raise UsageError(msg, hint="merge-stream CKPT OUT; further folders of the same checkpoint: --input DIR")
