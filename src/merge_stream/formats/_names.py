"""Parameter names as trainers write them: wrapper prefixes to drop, framework noise to leave out.

Facts (torch 2.13, accelerate 1.15, verl 0.9.1, torchtitan and VeOmni of Aug 2026): torch.compile
adds the segment `_orig_mod` (leading or per layer), activation checkpointing adds
`_checkpoint_wrapped_module`, FSDP1 `_fsdp_wrapped_module`, DDP a leading `module`. They are path
segments: `module.` is also the tail of `_fsdp_wrapped_module.` and a legal name of a model's child.
"""

from __future__ import annotations

__all__ = ["clean_name", "noise_kind"]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

# first path segment -> kind; a trainer's state beside the model, never a transformers module name
_NOISE_ROOTS = {
    "optim": "optimizer state",
    "optimizer": "optimizer state",
    "optimizers": "optimizer state",
    "optim_state": "optimizer state",
    "optimizer_state": "optimizer state",
    "optimizer_state_dict": "optimizer state",
    "lr_scheduler": "scheduler state",
    "lr_schedulers": "scheduler state",
    "scheduler": "scheduler state",
    "scaler": "gradient scaler",
    "grad_scaler": "gradient scaler",
    "dataloader": "dataloader state",
    "dataloader_state": "dataloader state",
    "dataloader_state_dict": "dataloader state",
    "sampler": "dataloader state",
    "train_state": "trainer state",
    "trainer_state": "trainer state",
    "extra_state": "trainer state",
    "rng": "random state",
    "rng_state": "random state",
    "rng_states": "random state",
    "cuda_rng_state": "random state",
}
# roots that a model's module may have too; a trainer's state under them has no weights
_MODULE_LIKE = frozenset({"scaler", "grad_scaler", "scheduler", "sampler", "dataloader"})
# whole names (no dot in them)
_NOISE_NAMES = {
    "step": "trainer state",
    "global_step": "trainer state",
    "epoch": "trainer state",
    "iteration": "trainer state",
    "ntokens_seen": "trainer state",
    "loss": "trainer state",
    "args": "trainer state",
    "config": "trainer state",
    "version": "trainer state",
}


def clean_name(name: str) -> str:
    """The name without wrapper segments.

    >>> clean_name("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    >>> clean_name("encoder.module.weight")
    'encoder.module.weight'
    """
    if "_orig_mod" not in name and "_wrapped_module" not in name and not name.startswith("module."):
        return name
    parts = name.split(".")
    kept = [part for part in parts if part not in _WRAPPERS]
    first = 0
    while first < len(kept) - 1 and kept[first] == "module":
        first += 1
    return ".".join(kept[first:])


def noise_kind(name: str) -> str | None:
    """What kind of framework state this name is ("optimizer state"), or None: a model tensor.

    >>> noise_kind("model.layers.0.self_attn._extra_state"), noise_kind("optim.state.0.exp_avg")
    ('extra state', 'optimizer state')
    >>> noise_kind("model.embed_tokens.weight") is None
    True
    """
    first, _, rest = name.partition(".")
    if first in _MODULE_LIKE and name.endswith((".weight", ".bias")):
        return None  # a module of that name: its parameters are the model's
    if first in _NOISE_ROOTS:
        return _NOISE_ROOTS[first]
    if not rest:
        return "extra state" if name == "_extra_state" else _NOISE_NAMES.get(name)
    leaf = name.rpartition(".")[2]
    if leaf.startswith("_extra_state") or "._extra_state." in name:
        return "extra state"
    return None
