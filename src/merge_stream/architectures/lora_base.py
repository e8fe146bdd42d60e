"""An adapter alone and the model it belongs to as one catalog, as if they had been saved together.

The adapter speaks the names of the trainer's memory, the base model those of its repository.
Where they differ, the family's rules say what an adapted tensor becomes in the repository; read
backwards, they say which ranges of the base model's files the tensor is made of. So the joined
catalog holds adapted tensors as they were in memory, and is folded and named like any other.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping

from merge_stream.architectures.base import ModelInfo
from merge_stream.architectures.lookup import family_of
from merge_stream.architectures.lora import PREFIX, plain_name, unwrap
from merge_stream.architectures.rules import Rename, Rule, convert
from merge_stream.errors import CheckpointError
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

__all__ = ["JOINED", "beside", "join_base"]

JOINED = "base model"
"""The fact that tells of a joined catalog where its weights are from."""
_MOST_EXPERTS = 4096
_SCORE = re.compile(r"score\.(weight|bias)")
_LANGUAGE_HEAD = re.compile(r"((language_model|text_model)\.)?(lm_head|embed_out)\.(weight|bias)")


def join_base(adapter: Catalog, base: Catalog, model: ModelInfo) -> Catalog:
    """The joined catalog; CheckpointError when an adapted module is not in the base model."""
    held = _after(base, adapter)
    taken = {plain_name(name) for name in held}
    tensors = {name: tensor for name, tensor in base.tensors.items() if name not in taken}
    holders = {name.rpartition(".")[0] for name in base.tensors}
    family = family_of(model)
    rules = family.rules if family is not None else ()
    for module in dict.fromkeys(m.module for m in unwrap(adapter).modules):
        if module in holders or f"{module}.weight" in taken:
            continue
        found = dict(_in_memory(module, base, rules))
        if not found:
            msg = f"the adapter is for {module}, which the base model {base.root} does not have"
            raise CheckpointError(
                msg, hint="pass the model that was trained; --lora keep writes the adapter as it is, for use with peft"
            )
        for name, (tensor, sources) in found.items():
            tensors[name] = tensor
            for source in sources:
                tensors.pop(source, None)
    heads = _replaced_heads(tensors, taken)
    for head in heads:
        tensors.pop(head)
    whole = {f"{PREFIX}{name}": dataclasses.replace(t, name=f"{PREFIX}{name}") for name, t in tensors.items()}
    return dataclasses.replace(
        adapter,
        tensors={**whole, **held},
        files=(*base.files, *adapter.files),
        config_dirs=tuple(dict.fromkeys((*adapter.config_dirs, *base.config_dirs))),
        facts={**adapter.facts, JOINED: f"{len(base.files)} weight files"},
        notes=(
            *adapter.notes,
            f"the adapter belongs to the weights of {base.root}",
            *(f"{head} of the base model is left out: the adapter brings a head of its own (score)" for head in heads),
        ),
        metadata_nbytes=adapter.metadata_nbytes + base.metadata_nbytes,
        checksums=(*adapter.checksums, *base.checksums),
    )


def beside(model: Catalog, adapter: Catalog) -> Catalog:
    """A plain model and an adapter that is kept beside it; their names never meet."""
    tensors = {**model.tensors, **_after(model, adapter)}
    return dataclasses.replace(
        model,
        tensors=tensors,
        files=(*model.files, *adapter.files),
        checksums=(*model.checksums, *adapter.checksums),
    )


def _replaced_heads(base: Mapping[str, TensorRef], taken: Collection[str]) -> list[str]:
    """Output heads of a language model in whose place the adapter's `score` stands, as peft finds it.

    A value or reward model is trained on a base whose own head its class does not have.
    """
    if not any(_SCORE.fullmatch(name) for name in taken) or any(_SCORE.fullmatch(name) for name in base):
        return []
    return [name for name in base if _LANGUAGE_HEAD.fullmatch(name)]


def _after(first: Catalog, second: Catalog) -> dict[str, TensorRef]:
    """The second catalog's tensors when the first one's files stand before its own."""
    return {name: _moved(tensor, len(first.files)) for name, tensor in second.tensors.items()}


def _in_memory(
    module: str, base: Catalog, rules: tuple[Rule | Rename, ...]
) -> Iterator[tuple[str, tuple[TensorRef, list[str]]]]:
    """(name in memory, (tensor over the base model's files, names in the repository)) of a module's tensors."""
    for last in ("weight", "bias"):
        name = f"{module}.{last}"
        made = convert(rules, {name: (1,) * (2 if last == "weight" else 1)}).parameters
        if len(made) == 1 and made[0].name in base.tensors:
            whole = base.tensors[made[0].name]
            yield name, (dataclasses.replace(whole, name=name), [whole.name])
    fused, other = f"{module}.gate_up_proj", f"{module}.down_proj"
    one = convert(rules, {fused: (1, 2, 1), other: (1, 1, 1)}).parameters
    if len(one) != 3 or any(p.name not in base.tensors for p in one):
        return
    most = {p.name for p in convert(rules, {fused: (_MOST_EXPERTS, 2, 1), other: (_MOST_EXPERTS, 1, 1)}).parameters}
    count = len(most & base.tensors.keys()) // 3
    inner, hidden = base.tensors[one[0].name].shape
    shapes = {fused: (count, 2 * inner, hidden), other: (count, hidden, inner)}
    made = convert(rules, shapes).parameters
    for name, shape in shapes.items():
        rows, sources = [], []
        for parameter in made:
            take = parameter.takes[0]
            if take.source != name:
                continue
            tensor = base.tensors.get(parameter.name)
            if tensor is None or take.permute or tensor.size != take.source_box.size or len(tensor.shards) != 1:
                return
            _, file, offset = tensor.shards.row(0)
            rows.append((take.source_box, file, offset))
            sources.append(parameter.name)
        if sum(math.prod(box.shape) for box, _, _ in rows) != math.prod(shape):
            return
        yield name, (TensorRef(name, base.tensors[sources[0]].dtype, shape, ShardTable.of(rows, 3)), sources)


def _moved(tensor: TensorRef, shift: int) -> TensorRef:
    """The same tensor when `shift` files stand before its own."""
    shards = dataclasses.replace(tensor.shards, file=tensor.shards.file + shift)
    replicas = tensor.replicas
    if replicas is not None:
        replicas = dataclasses.replace(replicas, file=replicas.file + shift)
    return dataclasses.replace(tensor, shards=shards, replicas=replicas)
