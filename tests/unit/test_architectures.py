"""Names, checks against the config, and ties: tables of what is accepted and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merge_stream.architectures.base import BaseTensor, ModelInfo
from merge_stream.architectures.base_match import compare_with_base
from merge_stream.architectures.naming import map_names
from merge_stream.architectures.ties import tied_by_config
from merge_stream.errors import CheckpointError, IncompleteShardsError, UnsupportedError
from merge_stream.tensors.dtype import dtype_named
from merge_stream.tensors.parameter import Mapping, Parameter
from merge_stream.tensors.ref import Catalog, ShardTable, TensorRef

Shapes = dict[str, tuple[int, ...]]

BF16 = dtype_named("BF16")
assert BF16 is not None
FIXTURES = Path("/work/shared/fixtures")


def catalog(shapes: Shapes, naming: str = "hf") -> Catalog:
    tensors = {n: TensorRef(n, BF16, s, ShardTable.of([], len(s))) for n, s in shapes.items()}
    return Catalog("test", "/ckpt", tensors, (), naming=naming)


def llama(layers: int = 2, *, vocab: int = 16, head: bool = True, prefix: str = "") -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, 8), "model.norm.weight": (8,)}
    for n in range(layers):
        for part, shape in {
            "self_attn.q_proj.weight": (8, 8),
            "self_attn.k_proj.weight": (4, 8),
            "mlp.up_proj.weight": (12, 8),
            "input_layernorm.weight": (8,),
        }.items():
            shapes[f"model.layers.{n}.{part}"] = shape
    if head:
        shapes["lm_head.weight"] = (vocab, 8)
    return {prefix + name: shape for name, shape in shapes.items()}


@pytest.fixture(autouse=True)
def _parts_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are small cuts; what a family must have whole is shown in tests/families/test_parts.py."""
    monkeypatch.setattr("merge_stream.architectures.naming.check_parts", lambda _names, _model: ())


def info(model_type: str = "llama", base: Shapes | None = None, **config: Any) -> ModelInfo:
    base_tensors = None if base is None else {n: BaseTensor(BF16, s) for n, s in base.items()}
    return ModelInfo({"model_type": model_type, **config}, "/ckpt/huggingface/config.json", base_tensors)


def names(mapping: Mapping) -> set[str]:
    return {parameter.name for parameter in mapping.parameters}


def experts(*, fused: bool) -> Shapes:
    if fused:
        return {
            "model.layers.0.mlp.experts.gate_up_proj": (4, 12, 8),
            "model.layers.0.mlp.experts.down_proj": (4, 8, 6),
        }
    return {f"model.layers.0.mlp.experts.{e}.gate_proj.weight": (6, 8) for e in range(4)}


class TestIdentity:
    @pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "smollm3", "olmo2"])
    def test_dense_text_families_keep_every_name(self, kind: str) -> None:
        shapes = llama()
        mapping = map_names(catalog(shapes), info(kind), "upstream")
        assert names(mapping) == set(shapes)
        assert mapping.architecture == "identity"
        assert all(take.source == p.name for p in mapping.parameters for take in p.takes)

    @pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "olmoe", "glm4_moe"])
    def test_experts_of_4_57_are_the_upstream_ones_already(self, kind: str) -> None:
        shapes = llama() | experts(fused=False)
        assert names(map_names(catalog(shapes), info(kind), "upstream")) == set(shapes)

    @pytest.mark.parametrize(
        ("kind", "block", "words"),
        [
            ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
            ("deepseek_v3", "mlp", ("gate_proj", "up_proj", "down_proj")),
            ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ],
    )
    @pytest.mark.parametrize("hidden_first", [False, True])
    def test_case_109_fused_experts_become_one_tensor_each(
        self, kind: str, block: str, words: tuple[str, ...], hidden_first: bool
    ) -> None:
        shapes = llama() | experts(fused=True)
        sources = {n: np.random.default_rng(1).random(s, dtype=np.float32) for n, s in shapes.items()}
        gate_up, down = (sources[f"model.layers.0.mlp.experts.{n}"] for n in ("gate_up_proj", "down_proj"))
        if hidden_first:
            for name in list(experts(fused=True)):
                sources[name] = np.ascontiguousarray(sources[name].swapaxes(1, 2))
        mapping = map_names(catalog({n: v.shape for n, v in sources.items()}), info(kind), "upstream")
        got = {p.name: replay(p, sources) for p in mapping.parameters}
        assert len(got) == len(llama()) + 12
        for e in range(4):
            at = f"model.layers.0.{block}.experts.{e}."
            assert np.array_equal(got[f"{at}{words[0]}.weight"], gate_up[e, :6])
            assert np.array_equal(got[f"{at}{words[1]}.weight"], gate_up[e, 6:])
            assert np.array_equal(got[f"{at}{words[2]}.weight"], down[e])

    def test_fused_experts_are_written_as_is_when_asked(self) -> None:
        shapes = llama() | experts(fused=True)
        assert names(map_names(catalog(shapes), info("qwen3_moe"), "as-is")) == set(shapes)

    @pytest.mark.parametrize("kind", ["llama", "qwen3"])
    def test_fused_experts_of_a_family_without_any_are_refused(self, kind: str) -> None:
        with pytest.raises(UnsupportedError, match=r"2 fused expert tensors .*gate_up_proj") as caught:
            map_names(catalog(llama() | experts(fused=True)), info(kind), "upstream")
        assert "--layout as-is" in caught.value.hint

    @pytest.mark.parametrize(
        ("more", "error", "match"),
        [
            ({"model.layers.0.mlp.experts.gate_up_proj": (4, 12, 8)}, IncompleteShardsError, "down_proj is missing"),
            (experts(fused=True) | {"model.layers.0.mlp.experts.down_proj": (4, 8, 5)}, CheckpointError, "two halves"),
            ({"model.layers.0.mlp.experts.w1": (4, 12, 8)}, UnsupportedError, r"1 of \d+ tensors have no place .*w1"),
            (
                {"model.visual.patch.weight": (4, 12)},
                UnsupportedError,
                r"no place in a repository of qwen3_moe: .*visual",
            ),
        ],
    )
    def test_what_the_rules_do_not_explain_is_refused(self, more: Shapes, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            map_names(catalog(llama() | more), info("qwen3_moe"), "upstream")

    def test_fused_experts_of_gpt_oss_are_its_own_layout(self) -> None:
        shapes = llama() | experts(fused=True)
        assert names(map_names(catalog(shapes), info("gpt_oss", attention_bias=False), "upstream")) == set(shapes)

    def test_case_114_lora_is_refused_with_count_example_and_way_out(self) -> None:
        shapes = llama(prefix="base_model.model.")
        shapes["base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"] = (2, 8)
        shapes["base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"] = (12, 2)
        with pytest.raises(UnsupportedError, match=r"2 LoRA tensors .*lora_A") as caught:
            map_names(catalog(shapes), info(), "upstream")
        assert "as-is" in caught.value.hint
        assert names(map_names(catalog(shapes), info(), "as-is")) == set(shapes)

    def test_value_model_keeps_its_score_head(self) -> None:
        shapes = llama(head=False) | {"score.weight": (1, 8), "score.bias": (1,)}
        mapping = map_names(catalog(shapes), info("qwen2", num_labels=1, tie_word_embeddings=False), "upstream")
        assert names(mapping) == set(shapes)
        assert not mapping.ties
        assert not mapping.notes

    def test_number_of_labels_that_differs_is_told(self) -> None:
        shapes = llama(head=False) | {"score.weight": (1, 8)}
        (note,) = map_names(catalog(shapes), info("qwen2", num_labels=2), "upstream").notes
        assert "1 rows" in note
        assert "2 labels" in note

    @pytest.mark.parametrize(
        ("kind", "upstream"),
        [
            ("qwen2_5_vl", {"model.embed_tokens.weight", "visual.patch_embed.weight", "lm_head.weight"}),
            (
                "llava",
                {
                    "language_model.model.embed_tokens.weight",
                    "language_model.lm_head.weight",
                    "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
                },
            ),
            (
                "qwen2_5_omni",
                {"thinker.model.embed_tokens.weight", "thinker.lm_head.weight", "thinker.audio_tower.ln_post.weight"},
            ),
        ],
    )
    def test_case_107_names_in_memory_become_those_of_the_repository(self, kind: str, upstream: set[str]) -> None:
        own = {"qwen2_5_vl": "visual.patch_embed", "llava": "vision_tower.encoder.layers.0.mlp.fc1"}
        tower = own.get(kind, "audio_tower.ln_post")
        shapes: Shapes = {
            "model.language_model.embed_tokens.weight": (16, 8),
            f"model.{tower}.weight": (8, 3),
            "lm_head.weight": (16, 8),
        }
        mapping = map_names(catalog(shapes), info(kind, tie_word_embeddings=True), "upstream")
        assert names(mapping) == upstream
        (tie,) = mapping.ties
        assert (tie.name, tie.twin) == tuple(n for k in ("lm_head", "embed_tokens") for n in upstream if k in n)
        again = map_names(catalog({p.name: p.shape for p in mapping.parameters}), info(kind), "upstream")
        assert names(again) == upstream
        assert again.architecture == "identity"

    @pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava", "gemma3", "qwen3_vl_moe"])
    def test_value_heads_of_vision_models_keep_their_names(self, kind: str) -> None:
        shapes: Shapes = {
            "model.language_model.norm.weight": (8,),
            "score.weight": (1, 8),
            "v_head.summary.weight": (1, 8),
        }
        assert {"score.weight", "v_head.summary.weight"} < names(map_names(catalog(shapes), info(kind), "upstream"))

    def test_experts_of_a_nested_text_model_are_split(self) -> None:
        shapes = {n.replace("model.", "model.language_model."): s for n, s in experts(fused=True).items()}
        mapping = map_names(catalog(shapes), info("internvl", text_config={"model_type": "qwen3_moe"}), "upstream")
        assert len(names(mapping)) == 12
        assert "language_model.model.layers.0.mlp.experts.3.up_proj.weight" in names(mapping)

    def test_qwen3_vl_moe_keeps_its_experts_fused_with_the_hidden_size_first(self) -> None:
        shapes = {n.replace("model.", "model.language_model."): s for n, s in experts(fused=True).items()}
        wanted = {n: (s[0], s[2], s[1]) for n, s in shapes.items()}
        for source in (shapes, wanted):
            mapping = map_names(catalog(source), info("qwen3_vl_moe"), "upstream")
            assert {p.name: p.shape for p in mapping.parameters} == wanted

    def test_vision_family_without_a_table_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="no rules for it") as caught:
            map_names(catalog({"model.visual.w": (8, 3)}), info("kimi_vl"), "upstream")
        assert "--layout as-is" in caught.value.hint

    def test_vision_model_with_upstream_names_is_accepted(self) -> None:
        shapes = llama() | {"visual.patch_embed.proj.weight": (8, 3)}
        assert names(map_names(catalog(shapes), info("qwen2_5_vl"), "upstream")) == set(shapes)

    def test_text_config_with_vision_tensors_is_refused(self) -> None:
        shapes = llama() | {"model.visual.patch_embed.proj.weight": (8, 3)}
        with pytest.raises(UnsupportedError, match="text model"):
            map_names(catalog(shapes), info("qwen2"), "upstream")

    def test_unknown_model_type_names_both_ways_out(self) -> None:
        with pytest.raises(UnsupportedError, match="'brand_new'") as caught:
            map_names(catalog(llama()), info("brand_new"), "upstream")
        assert "--base-model DIR" in caught.value.hint
        assert "--layout as-is" in caught.value.hint
        assert names(map_names(catalog(llama()), info("brand_new"), "as-is")) == set(llama())

    @pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
    @pytest.mark.parametrize("prefix", ["model.", "actor.", "actor.module."])
    @pytest.mark.parametrize("with_base", [False, True])
    def test_case_116_doubled_prefix_is_left_out_and_told(self, kind: str, prefix: str, with_base: bool) -> None:
        shapes = llama(prefix=prefix)
        mapping = map_names(catalog(shapes), info(kind, base=llama() if with_base else None), "upstream")
        assert names(mapping) == set(llama())
        assert any(f"began with {prefix!r} once too often" in note for note in mapping.notes)
        body = llama(prefix="model.", head=False) | {"lm_head.weight": (16, 8)}
        assert names(map_names(catalog(body), info(kind), "upstream")) == set(llama())

    def test_names_of_no_layer_are_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="no name of the checkpoint is one of a layer"):
            map_names(catalog({"a.b.c.model.layers.0.w": (2,), "d.w": (2,)}), info(), "upstream")

    def test_head_that_transformers_5_renamed_gets_its_old_name(self) -> None:
        shapes = {"gpt_neox.layers.0.attention.dense.weight": (8, 8), "lm_head.weight": (16, 8)}
        mapping = map_names(catalog(shapes), info("gpt_neox", attention_bias=False), "upstream")
        assert "embed_out.weight" in names(mapping)

    def test_recomputed_buffers_are_left_out_and_told(self) -> None:
        shapes = llama() | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
        mapping = map_names(catalog(shapes), info(), "upstream")
        assert names(mapping) == set(llama())
        assert any("left out" in note for note in mapping.notes)
        assert names(map_names(catalog(shapes), info(), "as-is")) == set(shapes)

    def test_no_tensors_at_all_is_an_error(self) -> None:
        with pytest.raises(CheckpointError, match="no model tensors"):
            map_names(catalog({}), info(), "upstream")


class TestWithoutConfig:
    def test_plain_text_names_are_accepted_with_a_note(self) -> None:
        mapping = map_names(catalog(llama()), ModelInfo(None), "upstream")
        assert names(mapping) == set(llama())
        assert "no config.json" in mapping.notes[0]

    @pytest.mark.parametrize(
        "other",
        [
            "visual.patch_embed.weight",
            "model.language_model.norm.weight",
            "model.layers.0.mlp.experts.gate_up_proj",
            "decoder.final_layernorm.weight",
        ],
    )
    def test_any_other_name_is_refused(self, other: str) -> None:
        with pytest.raises(UnsupportedError) as caught:
            map_names(catalog(llama() | {other: (4, 8, 8)}), ModelInfo(None), "upstream")
        assert "--layout as-is" in caught.value.hint

    def test_a_gap_between_layers_is_found(self) -> None:
        shapes = {n: s for n, s in llama(3).items() if ".layers.1." not in n}
        with pytest.raises(IncompleteShardsError, match=r"model\.layers\.1 is missing"):
            map_names(catalog(shapes), ModelInfo(None), "upstream")


class TestBaseModel:
    def test_names_of_the_base_are_accepted_for_any_model_type(self) -> None:
        shapes = {"strange.block.0.w": (2, 3)}
        mapping = map_names(catalog(shapes), info("brand_new", base=shapes), "upstream")
        assert names(mapping) == set(shapes)
        assert "base model" in mapping.notes[0]

    def test_memory_names_are_accepted_when_the_base_has_them(self) -> None:
        shapes = {"model.language_model.layers.0.mlp.w": (2, 3), "model.visual.w": (2,)}
        assert names(map_names(catalog(shapes), info("qwen2_5_vl", base=shapes), "upstream")) == set(shapes)

    def test_differences_are_listed_with_the_first_five(self) -> None:
        match = compare_with_base({"a": (1,), "c": (2,)}, info(base={f"b{k}": (1,) for k in range(7)} | {"c": (3,)}))
        assert not match.fits
        assert "missing: b0, b1, b2, b3, b4 and 2 more" in str(match)
        assert "not in the base model: a" in str(match)
        assert "c [2] (base model: [3])" in str(match)

    @pytest.mark.parametrize(
        ("ours", "base", "config"),
        [
            (llama(head=False), llama(), {"tie_word_embeddings": True}),
            (llama(), llama(head=False), {"tie_word_embeddings": True}),
            (llama(), llama(head=False), {}),
            (llama(head=False) | {"score.weight": (1, 8)}, llama(), {}),
            (llama(vocab=20), llama(), {}),
            (llama(), llama() | {"model.layers.0.mlp.up_proj.weight_scale_inv": (1, 1)}, {}),
            (llama(), llama() | {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}, {}),
            (llama(), llama(3), {"num_hidden_layers": 2}),
            (llama(), llama() | {"mtp.0.proj.weight": (8, 8)}, {}),
        ],
    )
    def test_differences_that_training_makes_are_understood(
        self, ours: Shapes, base: Shapes, config: dict[str, Any]
    ) -> None:
        assert compare_with_base(ours, info(base=base, **config)).fits

    def test_case_65_prediction_layers_left_out_are_told(self) -> None:
        base = llama() | {"mtp.0.proj.weight": (8, 8)}
        mapping = map_names(catalog(llama()), info("deepseek_v3", base=base), "upstream")
        assert any("multi-token-prediction" in note for note in mapping.notes)

    def test_another_model_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match=r"not the base model.*missing: model\.layers\.2"):
            map_names(catalog(llama() | {"model.extra.weight": (1,)}), info(base=llama(3)), "upstream")

    def test_a_lost_tensor_is_named(self) -> None:
        shapes = llama()
        del shapes["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(IncompleteShardsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
            map_names(catalog(shapes), info(base=llama()), "upstream")

    def test_experts_of_the_base_decide_how_fused_ones_are_split(self) -> None:
        base = llama() | experts(fused=False)
        base |= {n.replace("gate_proj", "up_proj"): s for n, s in experts(fused=False).items()}
        base |= {n.replace("gate_proj", "down_proj"): s[::-1] for n, s in experts(fused=False).items()}
        fused = llama() | experts(fused=True)
        for kind, how in (("qwen3_moe", "qwen-moe"), ("brand_new", "base-index"), ("mixtral", "base-index")):
            mapping = map_names(catalog(fused), info(kind, base=base), "upstream")
            assert {p.name: p.shape for p in mapping.parameters} == base
            assert mapping.architecture == how
        hidden_first = llama() | {n: (s[0], s[2], s[1]) for n, s in experts(fused=True).items()}
        mapping = map_names(catalog(fused), info("qwen3_moe", base=hidden_first), "upstream")
        assert {p.name: p.shape for p in mapping.parameters} == hidden_first

    def test_a_renamed_unknown_family_is_matched_with_the_index_of_the_base(self) -> None:
        ours = {
            "model.language_model.layers.0.w.weight": (4, 8),
            "model.tower.patch.weight": (2, 3),
            "lm_head.weight": (9, 8),
        }
        base = {"language_model.model.layers.0.w.weight": (4, 8), "tower.patch.weight": (2, 3)}
        base["language_model.lm_head.weight"] = (8, 8)
        mapping = map_names(catalog(ours), info("brand_new", base=base), "upstream")
        assert names(mapping) == set(base)
        assert any("vocabulary was resized" in note for note in mapping.notes)
        base["tower.other.weight"] = (2, 3)
        with pytest.raises(UnsupportedError, match=r"missing: tower\.other\.weight"):
            map_names(catalog(ours), info("brand_new", base=base), "upstream")

    def test_a_spelling_that_two_names_share_tells_nothing(self) -> None:
        ours = {"model.language_model.norm.weight": (8,), "model.norm.weight": (8,)}
        base = {"language_model.model.norm.weight": (8,), "text_model.norm.weight": (8,)}
        with pytest.raises(UnsupportedError, match="not in the base model"):
            map_names(catalog(ours), info("brand_new", base=base), "upstream")


class TestStructure:
    def test_missing_layer_is_named(self) -> None:
        with pytest.raises(IncompleteShardsError, match=r"model\.layers\.2 is missing: .*says 3 layers, .*holds 2"):
            map_names(catalog(llama(2)), info(num_hidden_layers=3), "upstream")

    def test_layer_too_many_is_a_contradiction(self) -> None:
        with pytest.raises(CheckpointError, match=r"says 1 layer, but the checkpoint holds model\.layers\.1"):
            map_names(catalog(llama(2)), info(num_hidden_layers=1), "upstream")

    def test_prediction_layers_may_follow(self) -> None:
        map_names(catalog(llama(3)), info("deepseek_v3", num_hidden_layers=2, num_nextn_predict_layers=1), "upstream")

    def test_part_of_a_layer_that_others_have_is_missed(self) -> None:
        shapes = llama(3)
        del shapes["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(IncompleteShardsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
            map_names(catalog(shapes), info(num_hidden_layers=3), "upstream")

    def test_case_133_vocabulary_of_config_and_shapes_must_agree(self) -> None:
        with pytest.raises(
            CheckpointError, match=r"embed_tokens\.weight has 16 rows, .*config\.json says vocab_size 20"
        ):
            map_names(catalog(llama()), info(vocab_size=20), "upstream")

    def test_padded_vocabulary_is_said(self) -> None:
        with pytest.raises(CheckpointError, match=r"6 rows more look like padding to a multiple of 64") as caught:
            map_names(catalog(llama(vocab=64)), info(vocab_size=58), "upstream")
        assert "vocab_size to 64" in caught.value.hint

    def test_hidden_size_must_agree(self) -> None:
        with pytest.raises(CheckpointError, match=r"8 columns, .* hidden size 16"):
            map_names(catalog(llama()), info(hidden_size=16), "upstream")

    @pytest.mark.parametrize("nest", ["text_config", "llm_config", "thinker_config"])
    def test_case_111_numbers_are_found_in_nests(self, nest: str) -> None:
        config = {nest: {"num_hidden_layers": 2, "vocab_size": 16, "hidden_size": 8}, "vocab_size": 999}
        map_names(catalog(llama()), info(**config), "upstream")
        with pytest.raises(IncompleteShardsError):
            map_names(catalog(llama(1)), info(**config), "upstream")
        deeper = {"thinker_config": {"text_config": {"num_hidden_layers": 3}}}
        with pytest.raises(IncompleteShardsError, match="says 3 layers"):
            map_names(catalog(llama(1)), info(**deeper), "upstream")

    def test_no_key_is_demanded(self) -> None:
        map_names(catalog(llama()), info(), "upstream")

    def test_lost_output_head_is_missed(self) -> None:
        config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
        with pytest.raises(IncompleteShardsError, match=r"lm_head\.weight is missing"):
            map_names(catalog(llama(head=False)), info(**config), "upstream")
        map_names(catalog(llama(head=False)), info(**config | {"tie_word_embeddings": True}), "upstream")

    @pytest.mark.parametrize("lost", ["model.norm.weight", "model.embed_tokens.weight"])
    def test_norm_and_embedding_of_a_llama_must_be_there(self, lost: str) -> None:
        shapes = llama()
        del shapes[lost]
        with pytest.raises(IncompleteShardsError, match=rf"{lost} is missing"):
            map_names(catalog(shapes), info(), "upstream")

    @pytest.mark.parametrize("kind", ["olmo", "brand_new"])
    def test_a_family_without_a_last_norm(self, kind: str) -> None:
        shapes = llama()
        del shapes["model.norm.weight"]
        map_names(catalog(shapes), info(kind), "as-is")

    @pytest.mark.parametrize(
        ("more", "match"),
        [
            ({"model.norm.weight": (4,)}, r"model\.norm\.weight is \[4\], .* says 8 length \(hidden size\)"),
            ({"model.layers.1.input_layernorm.weight": (16,)}, "hidden size"),
            ({"model.layers.1.self_attn.q_proj.weight": (8, 4)}, "says 8 columns .hidden size"),
            ({"model.layers.1.self_attn.q_proj.weight": (4, 8)}, "says 8 rows .num_attention_heads"),
            ({"model.layers.1.self_attn.k_proj.weight": (2, 8)}, "says 4 rows .num_key_value_heads"),
            ({"model.layers.1.mlp.up_proj.weight": (6, 8)}, "says 12 rows .intermediate_size"),
            ({f"model.layers.{n}.mlp.down_proj.weight": (8, 6) for n in (0, 1)}, "says 12 columns"),
            ({f"model.layers.{n}.mlp.down_proj.weight": (4, 12) for n in (0, 1)}, "says 8 rows"),
        ],
    )
    def test_shapes_that_contradict_the_sizes(self, more: Shapes, match: str) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "head_dim": 4}
        sizes["num_key_value_heads"] = 1
        map_names(catalog(llama()), info(**sizes), "upstream")
        with pytest.raises(CheckpointError, match=match) as caught:
            map_names(catalog(llama() | more), info(**sizes), "upstream")
        assert "--no-config" in caught.value.hint
        map_names(catalog(llama() | more), info(), "upstream")
        map_names(catalog(llama() | more), info(**sizes, quantization_config={}), "as-is")

    def test_an_expert_that_others_surround_is_missed(self) -> None:
        shapes = llama() | experts(fused=False)
        del shapes["model.layers.0.mlp.experts.2.gate_proj.weight"]
        with pytest.raises(IncompleteShardsError, match=r"experts\.2 is missing: the highest expert is 3"):
            map_names(catalog(shapes), info("qwen3_moe"), "upstream")

    def test_a_part_of_an_expert_is_missed(self) -> None:
        shapes = llama() | experts(fused=False)
        shapes |= {n.replace("gate_proj", "up_proj"): s for n, s in experts(fused=False).items()}
        del shapes["model.layers.0.mlp.experts.2.up_proj.weight"]
        with pytest.raises(IncompleteShardsError, match=r"experts\.2\.up_proj\.weight is missing, .*other experts"):
            map_names(catalog(shapes), info("qwen3_moe"), "upstream")

    @pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
    @pytest.mark.parametrize("nested", [False, True])
    def test_number_of_experts_must_agree(self, key: str, nested: bool) -> None:
        def says(count: int) -> ModelInfo:
            return info("qwen3_moe", **({"text_config": {key: count}} if nested else {key: count}))

        for fused in (False, True):
            shapes = llama() | experts(fused=fused)
            map_names(catalog(shapes), says(4), "upstream")
            with pytest.raises(IncompleteShardsError, match=r"experts\.4, .*experts\.5 are missing: .*says 6 experts"):
                map_names(catalog(shapes), says(6), "upstream")
            with pytest.raises(CheckpointError, match=r"experts\.3 is there, but .* says 3 experts"):
                map_names(catalog(shapes), says(3), "upstream")
        for count in (3, 6):
            with pytest.raises(CheckpointError, match=rf"_proj holds 4 experts, but .* says {count}"):
                map_names(catalog(shapes), says(count), "as-is")
        with pytest.raises(IncompleteShardsError, match="and 999999999991 more are missing"):
            map_names(catalog(llama() | experts(fused=False)), says(10**12), "upstream")


class TestTies:
    @pytest.mark.parametrize(
        ("config", "tied"),
        [
            ({"model_type": "llama"}, False),
            ({"model_type": "llama", "tie_word_embeddings": True}, True),
            ({"model_type": "gemma2"}, True),
            ({"model_type": "gpt2", "tie_word_embeddings": False}, False),
            ({"model_type": "brand_new"}, False),
            ({"model_type": "qwen2_vl", "text_config": {"tie_word_embeddings": True}}, True),
            ({"model_type": "x", "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, False),
            ({"model_type": "llama", "tie_word_embeddings": None}, False),
        ],
    )
    def test_config_nests_and_family_defaults(self, config: dict[str, Any], tied: bool) -> None:
        assert tied_by_config(ModelInfo(config)) is tied

    def test_case_70_pair_is_reported_in_both_layouts(self) -> None:
        for layout in ("upstream", "as-is"):
            (tie,) = map_names(catalog(llama()), info(tie_word_embeddings=True), layout).ties  # type: ignore[arg-type]
            assert (tie.name, tie.twin, tie.by_config) == ("lm_head.weight", "model.embed_tokens.weight", True)

    def test_no_pair_without_both_names(self) -> None:
        assert map_names(catalog(llama(head=False)), info(tie_word_embeddings=True), "upstream").ties == ()

    def test_head_without_its_tied_embedding_is_incomplete(self) -> None:
        shapes = llama()
        del shapes["model.embed_tokens.weight"]
        with pytest.raises(IncompleteShardsError, match=r"embed_tokens\.weight is missing"):
            map_names(catalog(shapes), info(tie_word_embeddings=True), "upstream")

    def test_gpt2_names(self) -> None:
        shapes = {"transformer.wte.weight": (16, 8), "transformer.h.0.attn.c_attn.weight": (8, 24)}
        (tie,) = map_names(catalog(shapes | {"lm_head.weight": (16, 8)}), info("gpt2"), "upstream").ties
        assert (tie.twin, tie.by_config) == ("transformer.wte.weight", True)


def titan(*, nested: bool = False, head: str = "output", normed: bool = False) -> Shapes:
    at = "attention.qkv_linear" if nested else "attention"
    shapes: Shapes = {"tok_embeddings.weight": (16, 8), "norm.weight": (8,), f"{head}.weight": (16, 8)}
    shapes |= {
        f"layers.0.{at}.wq.weight": (8, 8),
        f"layers.0.{at}.wk.weight": (4, 8),
        f"layers.0.{at}.wv.weight": (4, 8),
    }
    shapes |= {"layers.0.attention.wo.weight": (8, 8), "layers.0.attention_norm.weight": (8,)}
    shapes |= {"layers.0.ffn_norm.weight": (8,), "layers.0.feed_forward.w1.weight": (12, 8)}
    shapes |= {"layers.0.feed_forward.w2.weight": (8, 12), "layers.0.feed_forward.w3.weight": (12, 8)}
    if normed:
        shapes |= {"layers.0.attention.q_norm.weight": (4,), "layers.0.attention.k_norm.weight": (4,)}
    return shapes


HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 8}


def replay(parameter: Parameter, sources: dict[str, np.ndarray]) -> np.ndarray:
    """What the takes of a parameter give."""
    view = np.empty(parameter.view, dtype=np.float32)
    for take in parameter.takes:
        source = sources[take.source]
        seen = source.reshape(*take.split, *source.shape[1:]) if take.split else source
        part = seen[take.source_box.slices((0,) * seen.ndim)]
        view[take.dest_box.slices((0,) * view.ndim)] = part.transpose(take.permute) if take.permute else part
    return view.reshape(parameter.shape)


class TestTorchtitan:
    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("head", ["output", "lm_head"])
    def test_both_spellings_are_mapped_and_permuted(self, nested: bool, head: str) -> None:
        shapes = titan(nested=nested, head=head)
        sources = {n: np.random.default_rng(1).random(s, dtype=np.float32) for n, s in shapes.items()}
        mapping = map_names(catalog(shapes, "torchtitan"), info(**HEADS), "upstream")
        got = {p.name: replay(p, sources) for p in mapping.parameters}
        assert len(got) == len(shapes)
        for hf, own, heads in (("q_proj", "wq", 2), ("k_proj", "wk", 1)):
            source = next(v for n, v in sources.items() if n.endswith(f"{own}.weight"))
            want = source.reshape(heads, len(source) // heads // 2, 2, 8).swapaxes(1, 2).reshape(source.shape)
            assert np.array_equal(got[f"model.layers.0.self_attn.{hf}.weight"], want)
            (parameter,) = (p for p in mapping.parameters if p.name.endswith(f"{hf}.weight"))
            assert len(parameter.takes) == 1
        assert np.array_equal(got["model.layers.0.mlp.up_proj.weight"], sources["layers.0.feed_forward.w3.weight"])
        assert np.array_equal(got["lm_head.weight"], sources[f"{head}.weight"])

    def test_qwen3_is_not_permuted(self) -> None:
        mapping = map_names(catalog(titan(normed=True), "torchtitan"), info("qwen3", **HEADS), "upstream")
        assert not any(take.permute for p in mapping.parameters for take in p.takes)
        assert "model.layers.0.self_attn.q_norm.weight" in names(mapping)

    def test_as_is_leaves_names_untouched(self) -> None:
        assert names(map_names(catalog(titan(), "torchtitan"), info(**HEADS), "as-is")) == set(titan())

    @pytest.mark.parametrize(
        ("config", "match"),
        [
            ({"num_attention_heads": 4, "head_dim": 4}, "8 rows, .*4 heads of 4 rows"),
            ({"num_key_value_heads": 2, "num_attention_heads": 2, "hidden_size": 8}, "wk.weight has 4 rows, .*2 heads"),
            ({}, "no num_attention_heads"),
        ],
    )
    def test_head_counts_are_checked_against_shapes(self, config: dict[str, Any], match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            map_names(catalog(titan(), "torchtitan"), info(**config), "upstream")

    @pytest.mark.parametrize(
        ("more", "match"),
        [
            ("layers.0.moe.experts.w1", "mixture-of-experts"),
            ("layers.0.attention.qkv_linear.wqkv.weight", "fused query-key-value"),
            ("layers.0.something.weight", "no place"),
        ],
    )
    def test_names_without_a_place_are_refused(self, more: str, match: str) -> None:
        with pytest.raises(UnsupportedError, match=match):
            map_names(catalog(titan() | {more: (4, 8)}, "torchtitan"), info(**HEADS), "upstream")

    def test_without_config_or_with_another_family_it_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="heads are not known"):
            map_names(catalog(titan(), "torchtitan"), ModelInfo(None), "upstream")
        with pytest.raises(UnsupportedError, match="'gpt2'"):
            map_names(catalog(titan(), "torchtitan"), info("gpt2"), "upstream")
        with pytest.raises(CheckpointError, match="q_norm"):
            map_names(catalog(titan(normed=True), "torchtitan"), info(**HEADS), "upstream")

    @pytest.mark.skipif(not FIXTURES.is_dir(), reason="the shared fixtures are not here")
    def test_real_checkpoint_gives_the_values_of_transformers(self) -> None:
        from safetensors.numpy import load_file

        case = FIXTURES / "fsdp/dcp_titan_llama3_w2"
        sources = load_file(case / "expected_state.safetensors")
        wanted = load_file(case / "expected/model.safetensors")
        config = json.loads((case / "ckpt/hf_config/config.json").read_text())
        shapes = {n: v.shape for n, v in sources.items()}
        mapping = map_names(catalog(shapes, "torchtitan"), ModelInfo(config), "upstream")
        assert names(mapping) == set(wanted)
        assert all(np.array_equal(replay(p, sources), wanted[p.name]) for p in mapping.parameters)


def test_an_unknown_naming_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'jax'"):
        map_names(catalog(llama(), "jax"), info(), "upstream")
