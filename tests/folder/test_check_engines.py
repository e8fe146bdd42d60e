"""`check` on what engines build, read and have classes for: each fault in a folder that has it and one that has not."""

from __future__ import annotations

import json
import pathlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from merge_stream.api import make_plan, open_checkpoint
from merge_stream.verification.check import check_folder
from merge_stream.verification.engine_classes import classes_of
from tests.folder.models import checkpoint, llama, llama_config, merge, model_folder, run_tool, tensors_of
from tests.folder.test_check_families import folder as headers_only

BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"
RIGHT = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
RULES = {
    "bias",
    "class",
    "class-spelled",
    "dense-layers",
    "head-bias",
    "head-lost",
    "head-refused",
    "keys",
    "llama4-experts",
    "router",
    "router-bias",
    "shared-expert",
    "text-model",
    "tower",
    "voxtral",
}
TABLE = pathlib.Path(__file__).parents[2] / "docs" / "architectures.md"
GOLDENS = pathlib.Path(__file__).parents[1] / "families" / "goldens"


def told(tmp_path: Path, extra: dict[str, torch.Tensor], **config: Any) -> dict[str, str]:
    folder = model_folder(tmp_path / "out", llama() | extra, llama_config(**config))
    return {
        f.rule: f"{f.severity} {f.text} [{f.loaders}] {f.hint}"
        for f in check_folder(folder).findings
        if f.rule in RULES
    }


def test_a_llama_is_known_to_all(tmp_path: Path) -> None:
    assert told(tmp_path, {}) == {}


@pytest.mark.parametrize("key", ["topk_method", "scoring_func"])
def test_a_correction_bias_wants_its_router(tmp_path: Path, key: str) -> None:
    bias = {BIAS: torch.ones(4)}
    assert "router" not in told(tmp_path / "right", bias, model_type="deepseek_v3", **RIGHT)
    assert not told(tmp_path / "none", {}, model_type="deepseek_v3")
    found = told(tmp_path / "wrong", bias, model_type="deepseek_v3", **{k: v for k, v in RIGHT.items() if k != key})
    assert f"error {key} is None" in found["router"]
    assert f'set "{key}": "{RIGHT[key]}"' in found["router"]


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (("n_group", "route_norm", "score_func", "topk_group"), "afmoe"),
        (("block_dim", "conv_dim"), "lfm2"),
        (("head_dim", "use_qk_norm"), "glm4v_moe"),
        (("head_dim",), "glm4_moe"),
        (("first_k_dense_replace",), "glm4_moe_lite"),
        (("mla_scale_kv_lora", "mla_scale_q_lora", "zero_expert_type"), "longcat_flash"),
        (("rotary_dim", "scoring_func"), "minimax_m2"),
    ],
)
def test_keys_that_vllm_reads_and_transformers_does_not_write(tmp_path: Path, keys: tuple[str, ...], kind: str) -> None:
    def config(*there: str) -> dict[str, Any]:
        given = dict.fromkeys(there, 1)
        return {"text_config": given | {"model_type": "glm4v_moe_text"}} if kind == "glm4v_moe" else given

    assert "keys" not in told(tmp_path / "whole", {}, model_type=kind, **config(*keys))
    found = told(tmp_path / "bare", {}, model_type=kind, **config(*keys[1:]))["keys"]
    assert found.startswith("error")
    assert f"lacks {keys[0]}, without which vLLM" in found


def test_tgi_never_reads_a_correction_bias(tmp_path: Path) -> None:
    found = told(tmp_path / "a", {BIAS: torch.ones(4)}, model_type="deepseek_v3", **RIGHT)
    assert found["router-bias"].startswith("warning TGI takes zeros")
    assert "router-bias" not in told(tmp_path / "b", {BIAS: torch.ones(4)}, model_type="deepseek_v32", **RIGHT)


def test_a_left_over_shared_expert(tmp_path: Path) -> None:
    found = told(tmp_path / "wrong", {}, model_type="qwen3_moe", shared_expert_intermediate_size=64)
    assert "error shared_expert_intermediate_size is 64" in found["shared-expert"]
    right = told(tmp_path / "right", {}, model_type="qwen3_moe", shared_expert_intermediate_size=0)
    assert "shared-expert" not in right


def test_dense_layers_of_a_mixture_in_the_converter(tmp_path: Path) -> None:
    named = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    assert told(tmp_path / "a", {}, **named)["dense-layers"].startswith("warning llama.cpp's converter knows no layers")


def test_the_bias_of_a_phimoe_head(tmp_path: Path) -> None:
    named = {"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"]}
    assert "[vLLM, SGLang, TGI]" in told(tmp_path / "a", {"lm_head.bias": torch.ones(16)}, **named)["head-bias"]
    assert not told(tmp_path / "b", {}, **named)


@pytest.mark.parametrize(
    ("kind", "name", "loaders"),
    [
        ("gemma2", "Gemma2", "SGLang, llama.cpp"),
        ("cohere", "Cohere", "SGLang, vLLM"),
        ("gemma3_text", "Gemma3", "SGLang"),
    ],
)
def test_a_head_of_its_own_that_a_loader_never_reads(tmp_path: Path, kind: str, name: str, loaders: str) -> None:
    named = {"model_type": kind, "architectures": [f"{name}ForCausalLM"]}
    found = told(tmp_path / "untied", {}, **named, tie_word_embeddings=False)
    assert found["head-lost"].startswith("error")
    assert f"[{loaders}]" in found["head-lost"]
    assert "head-lost" not in told(tmp_path / "tied", {}, **named, tie_word_embeddings=True)
    assert "head-lost" not in told(tmp_path / "other", {}, tie_word_embeddings=False)  # llama's head is read


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "name", "engine"),
    [
        ("gemma2", "Gemma2ForCausalLM", "vLLM"),
        ("cohere2_vision", "Cohere2VisionForConditionalGeneration", "vLLM"),
        ("cohere2", "Cohere2ForCausalLM", "llama.cpp"),
        ("lfm2_moe", "Lfm2MoeForCausalLM", "llama.cpp"),
    ],
)
def test_some_engine_has_no_place_for_a_head(tmp_path: Path, kind: str, name: str, engine: str, *, tied: bool) -> None:
    named = {"model_type": kind, "architectures": [name], "tie_word_embeddings": tied}
    assert told(tmp_path / "a", {}, **named)["head-refused"].startswith(
        f"error {engine} has no place for lm_head.weight"
    )
    tensors = {n: t for n, t in llama().items() if n != "lm_head.weight"}
    without = check_folder(model_folder(tmp_path / "b", tensors, llama_config(**named))).findings
    assert "head-refused" not in {f.rule for f in without}


def test_a_class_that_vllm_leaves_to_transformers(tmp_path: Path) -> None:
    found = told(tmp_path / "a", {}, model_type="vipllava", architectures=["VipLlavaForConditionalGeneration"])
    assert "vLLM tries transformers' own model inside" in found["class"]
    known = told(tmp_path / "b", {}, model_type="qwen3_moe", architectures=["Qwen3MoeForTokenClassification"])
    assert "vLLM" not in known["class"]  # a classifier is made of the language model


def test_a_class_that_engines_spell_otherwise(tmp_path: Path) -> None:
    found = told(tmp_path / "a", {}, model_type="phimoe", architectures=["PhimoeForCausalLM"])
    assert found["class-spelled"].endswith('set "architectures": ["PhiMoEForCausalLM"] in config.json')
    by_name = check_folder(tmp_path / "a" / "out").findings
    spelled = {f.loaders: f.severity for f in by_name if f.rule == "class-spelled"}
    assert spelled == {"SGLang": "error", "llama.cpp": "warning"}
    of_vllm = told(tmp_path / "c", {}, model_type="ernie4_5", architectures=["Ernie4_5ForCausalLM"])["class-spelled"]
    assert of_vllm.startswith("warning")  # vLLM and the converter have it as it stands
    assert "set " not in of_vllm
    only_converter = told(tmp_path / "b", {}, model_type="bitnet", architectures=["BitNetForCausalLM"])
    assert only_converter["class-spelled"].startswith("warning")


def test_the_converter_asks_the_text_model_first(tmp_path: Path) -> None:
    vision = {"vision_config": {"model_type": "internvl_vision"}, "model_type": "internvl"}
    named = {"architectures": ["InternVLForConditionalGeneration"], **vision}
    assert "llama.cpp's converter refuses InternVLFor" in told(tmp_path / "a", {}, **named)["class"]
    inner = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    assert "llama.cpp" not in told(tmp_path / "b", {}, **named, text_config=inner)["class"]


def test_value_models(tmp_path: Path) -> None:
    tensors = {n: t for n, t in llama().items() if n != "lm_head.weight"}
    tensors |= {"score.weight": torch.ones(1, 8).bfloat16(), "score.bias": torch.ones(1).bfloat16()}
    config = llama_config(architectures=["LlamaForTokenClassification"], id2label={"0": "V"})
    found = {f.rule: f.text for f in check_folder(model_folder(tmp_path / "out", tensors, config)).findings}
    assert "SGLang refuses LlamaForTokenClassification" in found["class"]
    assert "llama.cpp's converter refuses LlamaForTokenClassification; TGI asks for an lm_head" in found["class"]


def test_biases_of_cohere2_and_types_without_a_name_in_the_converter(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(8).bfloat16()}
    named = {"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "tie_word_embeddings": True}
    assert "refuses the biases of cohere2" in told(tmp_path / "a", bias, **named)["bias"]
    assert "bias" not in told(tmp_path / "b", {}, **named)
    scale = {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.zeros(1, 1, dtype=torch.float8_e8m0fnu)}
    folder = model_folder(tmp_path / "c", llama() | scale, llama_config())
    texts = [f.text for f in check_folder(folder).findings if f.loaders == "llama.cpp"]
    assert texts == [
        "llama.cpp's converter knows no tensors of type F8_E8M0: model.layers.0.mlp.up_proj.weight_scale_inv"
    ]


@pytest.mark.parametrize("text_model", ["llama", "qwen2"])
def test_text_models_inside_vision_models_of_tgi(tmp_path: Path, text_model: str) -> None:
    found = told(tmp_path, {}, model_type="llava_next", text_config={"model_type": text_model})
    assert ("text-model" in found) is (text_model == "qwen2")


def rows() -> list[tuple[str, str, str, str]]:
    """(family, cells of vLLM, SGLang and TGI) of the table in the documentation, without most marks."""
    found = []
    for line in TABLE.read_text().splitlines():
        cells = [re.sub(r" \(.*\)", "", cell.strip()) for cell in line.strip("|").split("|")]
        if len(cells) == 8 and re.fullmatch("[a-z0-9_]+", cells[0]) and cells[0] != "model":
            within = "(a, d)" in line  # this vLLM has no class of its own for it
            found.append((cells[0], "inside" if within else cells[5], cells[6], cells[7]))
    return found


@pytest.mark.parametrize(("family", "vllm", "sglang", "tgi"), rows())
def test_the_table_in_the_documentation_says_what_check_says(
    tmp_path: Path, family: str, vllm: str, sglang: str, tgi: str
) -> None:
    golden = next(iter(sorted(GOLDENS.glob(f"{family}.*.json"), reverse=True)))
    value = json.loads(golden.read_text())
    config, shapes = value["config"], {name: output[2] for name, output in value["outputs"].items()}
    if family == "phimoe":
        config = {**config, "architectures": ["PhiMoEForCausalLM"]}  # as in the repository
    if any("vision" in name or "visual" in name for name in shapes):
        towers = {"llava_clip": "clip_vision_model", "llava_siglip": "siglip_vision_model", "llava_pixtral": "pixtral"}
        config = {**config, "vision_config": {"model_type": towers.get(family, "tower")}}
    if any("audio" in name or name.startswith("encoder") for name in shapes):
        config = {**config, "audio_config": {"model_type": "tower"}}
    findings = [f for f in check_folder(headers_only(tmp_path, shapes, config)).findings if f.rule in RULES]
    text = "; ".join(
        f"{f.rule}: {f.text}"
        for f in findings
        if f.rule not in {"keys", "router", "head-lost", "head-refused", "head-bias"}
    )
    says_sglang = {
        "loads": "SGLang" not in text,
        "inside": "SGLang runs transformers' own model inside" in text,
        "refused": "SGLang refuses the names" in text or "SGLang refuses it" in text,
        "no class": "SGLang refuses" in text and "token classifier" in text,
        "no tower": "tower: SGLang" in text,
        "no experts": "llama4-experts" in text,
    }
    says_tgi = {
        "loads": "TGI" not in text and value["config"]["model_type"] in classes_of("TGI"),
        "inside": "TGI" not in text,
        "no class": "TGI refuses model_type" in text,
        "no head": "TGI asks for an lm_head" in text,
        "zero bias": "router-bias" in text,
    }
    assert ("vLLM tries transformers' own model inside" in text) is (vllm == "inside"), text
    assert ("vLLM reads Voxtral in Mistral's own form alone" in text) is (vllm == "refused"), text
    assert says_sglang[sglang], text
    assert says_tgi[tgi], text


def test_names_that_no_model_of_the_family_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two engines stop at them; a merge writes them, and says so."""
    tensors = llama() | {"model.layers.0.mlp.extra.weight": torch.ones(2)}
    source = checkpoint(tmp_path / "ckpt", tensors, llama_config())
    assert merge(source, tmp_path / "out") == 0
    text = "1 name that no llama has: model.layers.0.mlp.extra.weight"
    assert text in capsys.readouterr().err
    assert "model.layers.0.mlp.extra.weight" in tensors_of(tmp_path / "out")
    (finding,) = [f for f in check_folder(tmp_path / "out").findings if f.severity == "error"]
    assert text in finding.text
    assert finding.loaders == "vLLM, llama.cpp"


@pytest.mark.parametrize("command", ["merge", "plan"])
def test_a_merge_warns_of_engines_before_its_first_byte(tmp_path: Path, command: str) -> None:
    config = llama_config(model_type="gemma2", architectures=["Gemma2ForCausalLM"], tie_word_embeddings=False)
    source = checkpoint(tmp_path / "ckpt", gemma2(), config)
    out = [] if command == "plan" else [str(tmp_path / "out")]
    done = run_tool(command, str(source), *out)
    assert done.returncode == 0, done.stderr
    warning = "SGLang and llama.cpp never read lm_head.weight of gemma2"
    assert warning in done.stderr + done.stdout
    if command == "merge":  # and check says the same of what was written
        assert warning in " ".join(f.text for f in check_folder(tmp_path / "out").findings)


def test_a_plan_warns_of_the_config_that_is_written_not_of_the_one_that_was_read(tmp_path: Path) -> None:
    """A tie that the values deny is undone in config.json, and only then is the head lost in SGLang."""
    named = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    config = llama_config(**named, tie_word_embeddings=True)
    untied = open_checkpoint([checkpoint(tmp_path / "untied", gemma2(), config)])
    assert any("never read lm_head.weight" in text for text in make_plan(untied).warnings)
    tied = gemma2() | {"lm_head.weight": gemma2()["model.embed_tokens.weight"]}
    assert not make_plan(open_checkpoint([checkpoint(tmp_path / "tied", tied, config)])).warnings


def test_the_converter_reads_some_vocabularies_from_tokenizer_model_alone(tmp_path: Path) -> None:
    named = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": True}
    files = {"tokenizer.json": "{}", "tokenizer_config.json": '{"tokenizer_class": "GemmaTokenizer"}'}
    for name, more, wanted in (("a", {}, True), ("b", {"tokenizer.model": "x"}, False)):
        folder = model_folder(tmp_path / name, gemma2(), llama_config(**named), {**files, **more})
        assert ("tokenizer-model" in {f.rule for f in check_folder(folder).findings}) is wanted


def gemma2() -> dict[str, torch.Tensor]:
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return llama() | {f"model.layers.0.{name}.weight": torch.ones(8).bfloat16() for name in norms}
