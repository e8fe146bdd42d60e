"""A part that every layer lacks is missed: for each family, every part that all of its models have."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re

import pytest

from merge_stream.architectures.base import BaseTensor, ModelInfo
from merge_stream.architectures.naming import map_names
from merge_stream.architectures.parts import check_parts, known_parts, strange_names
from merge_stream.architectures.structure import check_structure, layer_of
from merge_stream.errors import CheckpointError, IncompleteShardsError
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef
from tests.families.test_goldens import BF16, GOLDENS, mapped, read
from tests.folder.models import llama, llama_config

LLAMA = {name: tuple(tensor.shape) for name, tensor in llama(2).items()}


def names_of(path: pathlib.Path) -> tuple[list[str], ModelInfo]:
    golden = read(path)
    return list(golden["outputs"]), ModelInfo(golden["config"], "config.json")


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
class TestFamily:
    def test_a_whole_model_lacks_nothing_and_its_family_is_known(self, path: pathlib.Path) -> None:
        names, model = names_of(path)
        assert check_parts(names, model) == ()

    def test_the_last_layer_is_missed(self, path: pathlib.Path) -> None:
        names, model = names_of(path)
        stem, last = max((stem, number) for stem, number, _ in filter(None, map(layer_of, names)))
        counted = {**(model.config or {}), "num_hidden_layers": last + 2, "num_layers": last + 2}
        with pytest.raises(IncompleteShardsError, match=rf"{stem}{last + 1} is missing: .* says {last + 2} layers"):
            check_structure(dict.fromkeys(names, ()), ModelInfo(counted))

    def test_a_projection_that_is_nowhere_is_named(self, path: pathlib.Path) -> None:
        names, model = names_of(path)
        kinds = {re.sub(r"\.\d+\.", ".N.", n) for n in names if re.search(r"layers\.\d+\..*(_proj|w[123])\.weight$", n)}
        found = 0
        for kind in sorted(kinds):
            left = [name for name in names if re.sub(r"\.\d+\.", ".N.", name) != kind]
            with contextlib.suppress(IncompleteShardsError):
                check_parts(left, model)
                continue
            found += 1
        assert found * 10 >= len(kinds) * 7, f"{found} of {len(kinds)}"


@pytest.mark.parametrize("family", ["cohere2_moe.tf5", "flex_olmo.tf4", "hunyuan_v1_moe.tf5", "jamba.tf4", "olmoe.tf5"])
def test_experts_of_some_families_are_intermediate_size_wide(family: str) -> None:
    """Their config may hold a `moe_intermediate_size`, which their classes do not read."""
    golden = read(next(path for path in GOLDENS if path.stem == family))
    shapes = {name: tuple(told[2]) for name, told in golden["outputs"].items()}
    config = {**golden["config"], "intermediate_size": 48, "moe_intermediate_size": 24}
    check_structure(shapes, ModelInfo(config))
    with pytest.raises(CheckpointError, match=r"says 96 (rows|columns) \(intermediate_size\)"):
        check_structure(shapes, ModelInfo({**config, "intermediate_size": 96}))


PLAIN = sorted((pathlib.Path(__file__).parents[1] / "data/megatron_bridges").glob("*.json"))
PARTS = sorted(name.removeprefix("model.layers.0.") for name in LLAMA if name.startswith("model.layers.0."))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", ["upstream", "as-is"])
def test_each_part_of_a_llama_is_wanted_in_both_layouts(part: str, layout: str) -> None:
    shapes = {name: shape for name, shape in LLAMA.items() if not name.endswith(part)}
    tensors = {n: TensorRef(n, BF16, s, ShardTable.of([], len(s))) for n, s in shapes.items()}
    model = ModelInfo(llama_config(num_hidden_layers=2), "config.json")
    with pytest.raises(IncompleteShardsError) as caught:
        map_names(Catalog("test", "/ckpt", tensors, ()), model, layout)  # type: ignore[arg-type]
    assert f"model.layers.0.{part}, model.layers.1.{part} are missing" in caught.value.message
    assert "all shards" in caught.value.hint


def test_the_base_model_knows_better() -> None:
    shapes = {name: shape for name, shape in LLAMA.items() if "up_proj" not in name}
    mapping = mapped(shapes, llama_config(num_hidden_layers=2), shapes)
    assert len(mapping.parameters) == len(shapes)
    assert BaseTensor(BF16, (1,)).shape == (1,)


def test_an_unknown_family_gets_a_remark() -> None:
    (note,) = check_parts(LLAMA, ModelInfo({"model_type": "own_llama"}))
    assert "model of type 'own_llama'" in note
    odd = {"model_type": "llava", "text_config": {"model_type": "own_llama"}}
    assert known_parts(ModelInfo(odd)) is None
    nests = {"text_config": {"model_type": "Glm4vMoe_text"}, "vision_config": {"model_type": "glm4v_moe"}}
    assert known_parts(ModelInfo({"model_type": "glm4v_moe", **nests})) is not None, "as 4.57 writes them"


def test_the_bare_model_and_other_attentions_are_whole() -> None:
    bare = [name.removeprefix("model.") for name in LLAMA if name != "lm_head.weight"]
    assert check_parts(bare, ModelInfo({"model_type": "llama"})) == ()
    with pytest.raises(IncompleteShardsError, match=r"model\.norm\.weight is missing"):
        check_parts([name for name in bare if name != "norm.weight"], ModelInfo({"model_type": "llama"}))


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_a_whole_model_has_no_strange_names(path: pathlib.Path) -> None:
    document = json.loads(path.read_text())
    assert strange_names(document["hf"], ModelInfo(document["config"])) == []


def test_names_that_no_plain_model_has() -> None:
    model = ModelInfo({"model_type": "llama"})
    more = ["lm_head.weight", "score.bias", "v_head.summary.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    bare = [name.removeprefix("model.") for name in LLAMA]
    assert strange_names([*LLAMA, *more, *bare, "model.layers.9.mlp.up_proj.bias"], model) == []
    strange = ["model.layers.0.mlp.extra.weight", "model.layers.0.self_attn.q_norm.weight", "ema", "norm"]
    assert strange_names([*strange, *LLAMA], model) == strange
    assert strange_names(strange, ModelInfo({"model_type": "llama", "auto_map": {"AutoModel": "own.Model"}})) == []
    assert strange_names(strange, ModelInfo({"model_type": "jamba"})) == [], (
        "a family with a table has patterns instead"
    )
    opt = ["model.decoder.project_in.weight", "model.decoder.layers.0.fc1.bias"]
    assert strange_names(opt, ModelInfo({"model_type": "opt"})) == []
    assert strange_names(["transformer.h.0.attn.bias", "h.0.attn.masked_bias"], ModelInfo({"model_type": "gpt2"})) == []


def test_the_table_is_json_of_sets() -> None:
    folder = pathlib.Path(check_parts.__code__.co_filename).parent
    table = json.loads((folder / "parts.json").read_text())
    assert len(table) > 130
    assert all(
        sets and all(isinstance(kind, list) for kind in sets) for kinds in table.values() for sets in kinds.values()
    )
