"""Small model folders whose files beside the weights are damaged, for `fuzz --kind side`. Made without torch."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save_file

__all__ = ["look", "make_folders"]

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "head_dim": 4, "hidden_size": 8, "intermediate_size": 12,
    "model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 1,
    "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 10, "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default"}, "eos_token_id": [1, 2], "rms_norm_eps": 1e-6,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (10, 8),
}
BESIDE: Mapping[str, object] = {
    "config.json": CONFIG,
    "generation_config.json": {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7},
    "tokenizer.json": {
        "version": "1.0", "added_tokens": [{"id": 9, "content": "<s>", "special": True}],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": "{{ x }}",
        "added_tokens_decoder": {"9": {"content": "<s>", "special": True}},
    },
    "special_tokens_map.json": {"bos_token": {"content": "<s>"}},
    "added_tokens.json": {"<s>": 9},
    "preprocessor_config.json": {"image_mean": [0.5, 0.5, 0.5], "size": {"height": 2}},
    "quantization_config.json": {"quant_method": "fp8", "ignored_layers": ["lm_head"]},
}  # fmt: skip
ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"],
    "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False, "bias": "none",
    "fan_in_fan_out": False, "modules_to_save": None, "init_lora_weights": True, "layers_to_transform": None,
}  # fmt: skip


def make_folders(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Kind -> folder: a model in two files, one with a LoRA in it, an adapter alone, and a base model."""
    tensors = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}
    folders = {kind: root / kind for kind in ("model", "lora", "adapter", "base")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    for kind in ("model", "base"):
        _two_files(folders[kind], tensors)
    adapted = ("self_attn.q_proj", "self_attn.v_proj")
    factors, wrapped = {}, {}
    for name, value in tensors.items():
        module = next((m for m in adapted if m in name), None)
        key = f"base_model.model.{name}"
        wrapped[key.replace(".weight", ".base_layer.weight") if module else key] = value
        if module:
            at = f"base_model.model.model.layers.0.{module}"
            factors[f"{at}.lora_A.weight"] = np.ones((2, value.shape[1]), np.float32)
            factors[f"{at}.lora_B.weight"] = np.ones((value.shape[0], 2), np.float32)
    named = {key.replace(".weight", ".default.weight"): value for key, value in factors.items()}
    save_file(wrapped | named, folders["lora"] / "model.safetensors")
    save_file(factors, folders["adapter"] / "adapter_model.safetensors")
    for kind in ("model", "lora", "base"):
        for name, content in BESIDE.items():
            (folders[kind] / name).write_text(json.dumps(content))
    for kind in ("lora", "adapter"):
        (folders[kind] / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (folders["lora"] / "lora_train_meta.json").write_text(
        json.dumps({"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"})
    )
    return folders


def _two_files(folder: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    names = list(tensors)
    weight_map = {}
    for number, part in ((1, names[:5]), (2, names[5:])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def look(folder: pathlib.Path, folders: Mapping[str, pathlib.Path], out: pathlib.Path, *, merge: bool) -> None:
    """Every reader of these files: open, plan, check, and perhaps merge and check again."""
    from merge_stream.api import make_plan, open_checkpoint
    from merge_stream.api import merge as do_merge
    from merge_stream.inspection import describe
    from merge_stream.options import MergeOptions
    from merge_stream.verification.check import check_folder

    limit = 400_000_000
    check_folder(folder).lines()
    ckpt, base = (folders["model"], folder) if folder == folders["base"] else (folder, None)
    base = folders["base"] if folder == folders["adapter"] else base
    options = MergeOptions(max_mem=limit, overwrite=True, workers=1, base_model=str(base) if base else None)
    catalog = open_checkpoint([ckpt], max_mem=limit)
    describe(catalog, every_tensor=True).lines()
    make_plan(catalog, options)
    if merge:
        do_merge(ckpt, out, options)
        check_folder(out).lines()
