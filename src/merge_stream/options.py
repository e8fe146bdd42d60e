"""The options of a run, with their defaults; the one place that knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "DtypeName",
    "IoName",
    "LayoutName",
    "LoraChoice",
    "LoraMode",
    "MergeOptions",
    "OpenOptions",
    "QuantizeName",
    "StagingName",
    "WeightsName",
]

DtypeName = Literal["keep", "bf16", "fp16", "fp32"]
LayoutName = Literal["upstream", "as-is"]
StagingName = Literal["direct", "zarr"]
IoName = Literal["auto", "pread", "mmap"]
QuantizeName = Literal["auto", "auto-fp8", "fp8", "fp8-block", "fp8-dynamic", "int4", "int8", "mxfp4", "mxfp8", "nvfp4"]
LoraMode = Literal["merge", "keep", "both"]
WeightsName = Literal["master", "module"]


@dataclass(frozen=True, slots=True)
class LoraChoice:
    """What becomes of LoRA tensors: `mode` None folds when alpha is known; `alpha` overrides the files beside."""

    mode: LoraMode | None = None
    alpha: float | None = None


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to read a checkpoint; all are overrides of what detection finds.

    format          name of the format to use, or None to detect it
    mesh_dim_names  names for the dims of the device mesh, outermost first (only labels)
    root            key of the sub-tree of a nested state dict that is the model, or None
    tp_first        tensor parallelism split first where torch 2.3 did not record the order
    tag             which save of a DeepSpeed run, where `latest` does not tell
    weights         "master": fp32 masters; "module": the weights as trained; None: masters, where there are any
    exclude_frozen  leave parameters out that were not trained
    no_mtp          leave layers of multi-token prediction out
    rules           a user's table of names (TOML), or None for the tables of merge-stream
    """

    format: str | None = None
    mesh_dim_names: tuple[str, ...] = ()
    root: str | None = None
    tp_first: bool = False
    tag: str | None = None
    weights: WeightsName | None = None
    exclude_frozen: bool = False
    rules: str | None = None
    no_mtp: bool = False


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """What to write and how; bytes are plain numbers here.

    quantize        scheme in which the linear layers are written, or None; `dtype` governs all others. "auto": one
                    that fits the model, "auto-fp8": one of float8
    quantize_ignore globs of modules that stay plain
    force           quantize also where a loader is known to read the result wrongly
    base_model      folder with config.json, tokenizer and (where present) safetensors headers
    model_card      write a README.md with the origin of the weights where the folder brings none
    materialize_tied  write the output head although it is tied to the embedding
    max_shard_size  largest output file in bytes of tensor data (a larger tensor stands alone)
    max_mem         bound of the whole process in bytes
    max_mem_origin  whose limit that is, in words ("--max-mem", "half of the host's memory")
    workers         threads, or None for the number of cores
    io              how source bytes are read: "pread", "mmap", or "auto" for what measured best; the
                    bytes are the same, so another one may continue a run
    staging         "direct" into the files of the model, or through a "zarr" store
    keep_store      folder of that store, which stays; None: beside the output, and removed with success
    sparse          leave blocks of zeros out of new files, as holes
    """

    dtype: DtypeName = "keep"
    quantize: QuantizeName | None = None
    quantize_ignore: tuple[str, ...] = ()
    force: bool = False
    layout: LayoutName = "upstream"
    max_shard_size: int = 5_000_000_000
    base_model: str | None = None
    lora: LoraChoice = LoraChoice()
    write_config: bool = True
    model_card: bool = True
    materialize_tied: bool = False
    check_crc: bool = False
    check_replicas: bool = False
    strict: bool = False
    verify: bool = False
    sha256: bool = False
    overwrite: bool = False
    restart: bool = False
    max_mem: int = 8_000_000_000
    max_mem_origin: str = "--max-mem"
    workers: int | None = None
    io: IoName = "auto"
    staging: StagingName = "direct"
    keep_store: str | None = None
    sparse: bool = False
