"""DeepSpeed checkpoints: ZeRO stage 0 to 3, pipeline, tensor and expert parallelism, universal ones.

    RUN, --tag           -> DeepSpeedFiles   which file is whose (`_deepspeed_files`)
    files                -> states           names, shapes, flat tensors (`_deepspeed_states`)
    states of one rank   -> LocalModel       the part of a model-parallel rank (`_deepspeed_local`)
    local models         -> Catalog          joined over tensor-parallel ranks, stages and experts

`--weights master` (default) takes the fp32 masters of the optimizer; whatever floats and has none (frozen
parameters, buffers) is widened to fp32, so the model has one type. `--weights module` takes the 16-bit weights
of the model states, which stage 3 does not have. Adam's moments are never read.
"""

from __future__ import annotations

from collections import Counter

from merge_stream.errors import IncompleteShardsError, UnknownFormatError, UnsupportedError
from merge_stream.formats._catalog import FileTable, clean_names, config_dirs, listed
from merge_stream.formats._deepspeed_files import DeepSpeedFiles, choose_tag, files_of, tags_of
from merge_stream.formats._deepspeed_local import LocalModel, read_local_models
from merge_stream.formats._deepspeed_parallel import join_local_models
from merge_stream.formats._deepspeed_universal import read_universal
from merge_stream.formats._roots import naming_of, select_model
from merge_stream.formats._stored_checksums import ZipRecords
from merge_stream.formats.base import CheckpointFormat, Detection
from merge_stream.options import OpenOptions
from merge_stream.storage.base import ByteTree
from merge_stream.tensors.ref import Catalog, TensorRef
from merge_stream.units import counted

__all__ = ["MEMBER", "PIPELINE", "DeepSpeed"]

_LIGHTNING = "_forward_module."

PIPELINE = "deepspeed_pipeline"
"""The naming of a PipelineModule: `<layer>.<name>` and `tied_modules.<key>.<name>`."""


class DeepSpeed:
    """The folder of a run, or of one tag."""

    name = "deepspeed"
    summary = "DeepSpeed: latest + TAG/*_model_states.pt, *_optim_states.pt (ZeRO 0-3, universal)"
    own_options = frozenset({"tag", "weights", "exclude_frozen"})

    def detect(self, tree: ByteTree) -> Detection | None:
        """By the names of the state files, in the folder itself or in those of its tags."""
        tags = tags_of(tree)
        if not tags:
            return None
        count = max(tags.values())
        folders = f" in {listed(sorted(tags), most=3)}" if "" not in tags else ""
        return Detection(f"{count} DeepSpeed state files{folders}", rank=75)

    def open(self, tree: ByteTree, options: OpenOptions) -> Catalog:
        """Every parameter of the chosen tag."""
        tags = tags_of(tree)
        if not tags:
            msg = f"{tree.label} holds no DeepSpeed state files (mp_rank_00_model_states.pt, ...)"
            raise UnknownFormatError(msg, hint="pass the folder with the file `latest`, or that of a tag")
        files = files_of(tree, choose_tag(tree, options.tag))
        table = FileTable(files.tree)
        if files.universal and (files.zero3 or options.weights != "module"):
            if options.weights == "module":
                raise _universal_has_no_module(files)
            model = read_universal(files, table)
        else:
            model = join_local_models(read_local_models(files, table, options), files, table, options)
        if not model.tensors and files.universal:
            raise _universal_has_no_module(files)
        if not model.tensors:
            msg = f"{files.tree.label} holds no weights"
            raise IncompleteShardsError(msg, hint="the save did not finish, or it was told to save no model")
        return self._catalog(tree, files, table, model, options)

    def _catalog(
        self, tree: ByteTree, files: DeepSpeedFiles, table: FileTable, model: LocalModel, options: OpenOptions
    ) -> Catalog:
        where = files.tree.label
        if options.exclude_frozen and not model.frozen_known:
            msg = f"{where}: no file tells which parameters were frozen (there is no param_shapes without ZeRO)"
            raise UnsupportedError(
                msg, hint="merge without --exclude-frozen, or with --weights master if it was not so"
            )
        chosen = select_model({name: (_unwrapped(name, options.root),) for name in model.tensors}, options.root, where)
        clean = clean_names(chosen.names.values(), where)
        tensors: dict[str, TensorRef] = {}
        twins: dict[str, TensorRef] = {}
        for stored, name in chosen.names.items():
            if options.exclude_frozen and stored in model.frozen:
                continue
            tensors[clean[name]] = _named(model.tensors[stored], clean[name])
            if stored in model.twins:
                twins[clean[name]] = _named(model.twins[stored], clean[name])
        if not tensors:
            msg = f"{where}: all its parameters are frozen, and --exclude-frozen leaves them out"
            raise UnsupportedError(msg, hint="merge without --exclude-frozen")
        left_out = len(chosen.names) - len(tensors)
        ignored: Counter[str] = Counter(model.ignored)
        ignored += chosen.ignored
        if left_out:
            ignored["frozen parameters (--exclude-frozen)"] = left_out
        others = sorted(set(tags_of(tree)) - {""} - {files.tag})
        notes = [*files.notes, *model.notes, *chosen.notes]
        if others:
            notes.append(f"the tag {files.tag} is merged; other tags there: {listed(others)} (--tag)")
        return Catalog(
            format=self.name,
            root=tree.label,
            tensors=tensors,
            files=table.files,
            facts={"tag": files.tag, **model.facts},
            ignored=ignored,
            notes=tuple(notes),
            naming=PIPELINE if model.is_pipeline else naming_of(tensors),
            config_dirs=(*config_dirs(tree), *config_dirs(files.tree)),
            metadata_nbytes=model.metadata_nbytes,
            checksums=(ZipRecords(files.tree, tuple(file.name for file in table.files)),),
            twins=twins,
            partial=f"--exclude-frozen leaves out {counted(left_out, 'frozen parameter')}" if left_out else "",
        )


def _unwrapped(name: str, root: str | None) -> str:
    """The name without what Lightning's DeepSpeedStrategy puts before it, unless the user names that."""
    return name if (root or "").startswith(_LIGHTNING[:-1]) else name.removeprefix(_LIGHTNING)


def _universal_has_no_module(files: DeepSpeedFiles) -> UnsupportedError:
    msg = (
        f"{files.tree.label} is a universal checkpoint of ZeRO stage 3 or of a pipeline, which holds fp32 weights alone"
    )
    return UnsupportedError(msg, hint="leave --weights module out; --dtype bf16 writes 16-bit weights")


def _named(tensor: TensorRef, name: str) -> TensorRef:
    return TensorRef(name, tensor.dtype, tensor.shape, tensor.shards, tensor.replicas, tensor.stored)


MEMBER: CheckpointFormat = DeepSpeed()
