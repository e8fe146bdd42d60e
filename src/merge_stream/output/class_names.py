"""`architectures` of a config that lost it: the class by model type and by the head that is there.

From `auto/modeling_auto.py` of transformers 5.24.0; the classes that 4.57.6 knows too have the same names there.
"""

from __future__ import annotations

from collections.abc import Collection

from merge_stream.architectures.families import HEADS

__all__ = ["class_for"]

# model_type:class without its ending
_STEMS = """
    afmoe:Afmoe apertus:Apertus arcee:Arcee bamba:Bamba biogpt:BioGpt bitnet:BitNet bloom:Bloom codegen:CodeGen
    cohere:Cohere cohere2:Cohere2 cohere2_moe:Cohere2Moe ctrl:CTRL cwm:Cwm dbrx:Dbrx deepseek_v2:DeepseekV2
    deepseek_v3:DeepseekV3 deepseek_v32:DeepseekV32 diffllama:DiffLlama doge:Doge dots1:Dots1 ernie4_5:Ernie4_5
    ernie4_5_moe:Ernie4_5_Moe exaone4:Exaone4 exaone_moe:ExaoneMoe falcon:Falcon falcon_h1:FalconH1
    falcon_mamba:FalconMamba flex_olmo:FlexOlmo gemma:Gemma gemma2:Gemma2 gemma3_text:Gemma3 glm:Glm glm4:Glm4
    glm4_moe:Glm4Moe glm4_moe_lite:Glm4MoeLite glm_moe_dsa:GlmMoeDsa gpt2:GPT2 gpt_bigcode:GPTBigCode gpt_neo:GPTNeo
    gpt_neox:GPTNeoX gpt_oss:GptOss gptj:GPTJ granite:Granite granite_swa:GraniteSWA granitemoe:GraniteMoe
    granitemoehybrid:GraniteMoeHybrid granitemoeshared:GraniteMoeShared helium:Helium hunyuan_v1_dense:HunYuanDenseV1
    hunyuan_v1_moe:HunYuanMoEV1 jais2:Jais2 jamba:Jamba jetmoe:JetMoe lfm2:Lfm2 lfm2_moe:Lfm2Moe llama:Llama
    llama4_text:Llama4 longcat_flash:LongcatFlash mamba:Mamba mamba2:Mamba2 mellum:Mellum minicpm3:MiniCPM3
    minimax:MiniMax minimax_m2:MiniMaxM2 ministral:Ministral ministral3:Ministral3 mistral:Mistral mixtral:Mixtral
    mpt:Mpt nanochat:NanoChat nemotron:Nemotron olmo:Olmo olmo2:Olmo2 olmo3:Olmo3 olmoe:Olmoe openai-gpt:OpenAIGPT
    opt:OPT persimmon:Persimmon phi:Phi phi3:Phi3 phimoe:Phimoe qwen2:Qwen2 qwen2_moe:Qwen2Moe qwen3:Qwen3
    qwen3_moe:Qwen3Moe qwen3_next:Qwen3Next recurrent_gemma:RecurrentGemma rwkv:Rwkv seed_oss:SeedOss smollm3:SmolLM3
    solar_open:SolarOpen stablelm:StableLm starcoder2:Starcoder2 vaultgemma:VaultGemma xglm:XGLM xlstm:xLSTM
    youtu:Youtu zamba:Zamba zamba2:Zamba2
"""

# These have both a token and a sequence classification class of the same stem.
_CLASSIFIERS = """
    arcee biogpt bloom deepseek_v3 diffllama exaone4 falcon gemma gemma2 glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox
    gpt_oss helium llama minimax ministral ministral3 mistral mixtral mpt nemotron persimmon phi phi3 qwen2 qwen2_moe
    qwen3 qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2
"""

# Language models that transformers spells otherwise than the repository: vLLM 0.32, SGLang 0.5.23 and llama.cpp's
# converter find these names; none of them has a Phimoe, and the converter no ExaoneMoe.
_AS_IN_THE_REPOSITORY = {"exaone_moe": "ExaoneMoEForCausalLM", "phimoe": "PhiMoEForCausalLM"}
_LM_HEAD_MODELS = frozenset({"ctrl", "gpt2", "openai-gpt"})

_CONDITIONAL = {
    "aya_vision": "AyaVisionForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}


def class_for(model_type: str, names: Collection[str]) -> str | None:
    """The class that these weights are for, or None when it is not clearly known.

    A `score` with a bias is that of token classification (verl's critics), one without that
    of sequence classification (reward models): the two differ in nothing else.
    """
    heads = {found[1] for name in names if (found := HEADS.fullmatch(name))}
    stem = dict(pair.split(":") for pair in _STEMS.split()).get(model_type)
    if heads - {"lm_head", "embed_out", "score"}:
        return None  # a wrapper's own head: v_head of trl and the like
    if "score" in heads:
        if stem is None or model_type not in _CLASSIFIERS.split():
            return None
        return f"{stem}ForTokenClassification" if "score.bias" in names else f"{stem}ForSequenceClassification"
    if model_type in _CONDITIONAL:
        return _CONDITIONAL[model_type]
    if stem is None:
        return None
    if model_type in _AS_IN_THE_REPOSITORY:
        return _AS_IN_THE_REPOSITORY[model_type]
    return f"{stem}LMHeadModel" if model_type in _LM_HEAD_MODELS else f"{stem}ForCausalLM"
