"""Real checkpoints of DeepSpeed 0.19.8 on CPU, with the engine's own weights beside them: how fixtures were made.

    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu PYTHONPATH=DEEPSPEED torchrun --nproc_per_node 4
        tests/makers/deepspeed_engine.py OUT masters16 STAGE
        tests/makers/deepspeed_engine.py OUT autotp STAGE [tied] [frozen]        (needs transformers)
        tests/makers/deepspeed_engine.py OUT moe_tp STAGE EP [cut]               (tensor parallelism 2)

DEEPSPEED is a folder of `pip install --target`, with what bench/peers/zero_to_fp32.py installs and without torch.
Writes OUT/ckpt and OUT/module.safetensors. The fixtures are
`masters16_*` (2 ranks), `tp2_z3_tied_w4`, `uc_tp2_z2_frozen_w4` (then `ds_to_universal --no_strict`), `moe_tp2_*`;
`uc_autoep_*` are `ds_to_universal` of others. Routing does not run on gloo: the loss is that of the weights.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

TP = 2
WIDTH, INNER, EXPERTS = 8, 12, 4


class _Mpu:
    """Tensor-parallel ranks are neighbours, as Megatron has them."""

    def __init__(self) -> None:
        world, self.rank = dist.get_world_size(), dist.get_rank()
        self.groups: dict[str, Any] = {}
        for kind, sets in (
            ("model", [list(range(k, k + TP)) for k in range(0, world, TP)]),
            ("data", [list(range(k, world, TP)) for k in range(TP)]),
        ):
            for ranks in sets:
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    self.groups[kind] = group

    def __getattr__(self, name: str) -> Any:
        world = dist.get_world_size()
        answers = {
            "model_parallel_rank": self.rank % TP,
            "model_parallel_world_size": TP,
            "model_parallel_group": self.groups.get("model"),
            "tensor_model_parallel_src_rank": self.rank // TP * TP,
            "data_parallel_rank": self.rank // TP,
            "data_parallel_world_size": world // TP,
            "data_parallel_group": self.groups.get("data"),
            "pipeline_model_parallel_world_size": 1,
            "pipeline_model_parallel_rank": 0,
        }
        key = name.removeprefix("get_")
        key = key if key in answers else key.removeprefix("tensor_")
        if key not in answers:
            raise AttributeError(name)
        return lambda: answers[key]


class _Weights(torch.nn.Module):
    """Its loss is the sum of the squares of its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().sum() * 0 + sum(p.float().pow(2).sum() for p in self.parameters())


def _masters16() -> tuple[torch.nn.Module, None]:
    model = _Weights()
    model.model = torch.nn.Module()
    model.model.a, model.model.b = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False)
    model.model.register_buffer("scale", torch.tensor([1.5, 2.5]))
    return model, None


class _Parts:
    """Parameters of this rank; `truth` are the whole ones, of values that follow from their names."""

    def __init__(self) -> None:
        self.truth: dict[str, torch.Tensor] = {}

    def part(self, name: str, *shape: int, dim: int | None = None) -> torch.nn.Parameter:
        drawn = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = self.truth[name] = torch.randn(*shape, generator=drawn).bfloat16()
        own = whole if dim is None else whole.chunk(TP, dim)[dist.get_rank() % TP].contiguous()
        return torch.nn.Parameter(own.clone())

    def mlp(self, prefix: str, *, cut: bool) -> torch.nn.Module:
        module = torch.nn.Module()
        up, down = module.dense_h_to_4h, module.dense_4h_to_h = torch.nn.Module(), torch.nn.Module()
        up.weight = self.part(f"{prefix}dense_h_to_4h.weight", INNER, WIDTH, dim=0 if cut else None)
        up.bias = self.part(f"{prefix}dense_h_to_4h.bias", INNER, dim=0 if cut else None)
        down.weight = self.part(f"{prefix}dense_4h_to_h.weight", WIDTH, INNER, dim=1 if cut else None)
        down.bias = self.part(f"{prefix}dense_4h_to_h.bias", WIDTH)
        return module


def _moe_tp(ep: int, *, cut: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from deepspeed.moe.layer import MoE

    parts, model = _Parts(), _Weights()
    model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for k, layer in enumerate(model.layers):
        layer.input_layernorm = torch.nn.Module()
        layer.input_layernorm.weight = parts.part(f"layers.{k}.input_layernorm.weight", WIDTH)
    model.layers[0].mlp = parts.mlp("layers.0.mlp.", cut=True)
    moe = MoE(WIDTH, torch.nn.Linear(1, 1), EXPERTS, ep, k=1, enable_expert_tensor_parallelism=cut)
    model.layers[1].moe = moe
    prefix = "layers.1.moe.deepspeed_moe."
    every = [parts.mlp(f"{prefix}experts.deepspeed_experts.{k}.", cut=cut) for k in range(EXPERTS)]
    place, share = (dist.get_rank() // TP if cut else dist.get_rank()) % ep, EXPERTS // ep
    own = torch.nn.ModuleList(every[place * share : (place + 1) * share])
    for parameter in own.parameters():
        parameter.allreduce, parameter.group_name = False, moe.expert_group_name
    moe.deepspeed_moe.experts.deepspeed_experts = own
    moe.deepspeed_moe.gate.wg.weight = parts.part(f"{prefix}gate.wg.weight", EXPERTS, WIDTH)
    return model, parts.truth


def _autotp(out: pathlib.Path, *, tied: bool, frozen: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=66, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=tied,
    )  # fmt: skip
    config.save_pretrained(out / "hf")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if tied:
        del truth["lm_head.weight"]
    for parameter in model.model.layers[0].parameters() if frozen else ():
        parameter.requires_grad_(requires_grad=False)
    return model, truth


def main(out: pathlib.Path, kind: str, stage: int, more: Iterable[str]) -> None:
    """Two steps (none where the rate is 0: then the weights stay what they were made of), and a save."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from safetensors.torch import save_file

    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    words = list(more)
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    settings["zero_optimization"] = {"stage": stage}
    mpu, rate = None, 0.0
    if kind == "masters16":
        model, truth = _masters16()
        settings["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        rate = 0.01
    elif kind == "autotp":
        model, truth = _autotp(out, tied="tied" in words, frozen="frozen" in words)
        settings["tensor_parallel"] = {"autotp_size": TP}
    else:
        mpu = _Mpu()
        model, truth = _moe_tp(int(words[0]), cut="cut" in words)
    trained: Any = [p for p in model.parameters() if p.requires_grad]
    trained = split({"params": trained, "name": "all"}) if kind == "moe_tp" else trained
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=settings, optimizer=optimizer, mpu=mpu)
    for _ in range(2):
        tokens = torch.randint(0, 66, (1, 8))
        loss = engine(input_ids=tokens, labels=tokens).loss if kind == "autotp" else engine(torch.ones(1, 5).bfloat16())
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(out / "ckpt"))
    found: Mapping[str, torch.Tensor] = truth or _live(engine, deepspeed)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out / "module.safetensors")
    dist.barrier()


def _live(engine: Any, deepspeed: Any) -> dict[str, torch.Tensor]:
    found = {name: buffer.detach().clone() for name, buffer in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
