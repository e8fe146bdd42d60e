"""The LLaVA family and models built like it: language_model.model, vision_tower, multi_modal_projector on disk.

    in memory (4.52 to 5.24)                on disk
    model.language_model.X                  language_model.model.X
    lm_head.X                               language_model.lm_head.X
    model.vision_tower.X (and the others)   vision_tower.X

transformers 5 has no `vision_model.` between a CLIP or SigLIP tower and its parts, every
repository has. Such towers are known by their names: InternVL writes `encoder.layer.N`
and `embeddings.cls_token`, Pixtral `transformer.layers.N`, GOT-OCR `layers.N`;
Aria's SigLIP is that of Idefics3 and has no such prefix anywhere.
"""

from __future__ import annotations

from merge_stream.architectures.rules import Rename
from merge_stream.architectures.tables.base import Family, Table, words

__all__ = ["MEMBER"]

_TOWERS = "vision_tower|image_tower|video_tower"
_CLIP = (
    "embeddings\\.(?:class_embedding|patch_embedding|position_embedding|position_ids)(?:\\..+)?|encoder\\.layers\\..+"
    "|pre_layrnorm\\..+|post_layernorm\\..+|head\\..+"
)
_PARTS = "multi_modal_projector|image_newline|vision_embed_tokens|vision_model|vqmodel"

TOWER = Rename(f"{{p:(?:model\\.)?}}{{t:{_TOWERS}}}.{{rest:{_CLIP}}}", "{p}{t}.vision_model.{rest}")
_BELOW = (
    Rename(f"model.{{t:{_TOWERS}|{_PARTS}}}{{rest:(?:\\..+)?}}", "{t}{rest}"),
    Rename("model.{m:language_model|text_model}.{rest}", "{m}.model.{rest}"),
)
_RULES = (TOWER, *_BELOW)
_UPSTREAM = (
    "{m:language_model|text_model}.{k:model|lm_head}.{rest}",
    f"{{t:{_TOWERS}|{_PARTS}}}{{rest:(?:\\..+)?}}",
)

MEMBER = Table(
    "llava",
    (
        Family(
            "llava",
            words("""
            aya_vision fuyu gemma3 got_ocr2 internvl llava llava_next llava_next_video llava_onevision mistral3
            mllama paligemma shieldgemma2 video_llava vipllava
            """),
            (*_RULES, Rename("lm_head.{rest}", "language_model.lm_head.{rest}")),
            _UPSTREAM,
        ),
        Family(
            "aria",
            words("aria"),
            (
                Rename("{at}.mlp.experts.gate_up_proj", "{at}.mlp.experts.fc1.weight"),
                Rename("{at}.mlp.experts.down_proj", "{at}.mlp.experts.fc2.weight"),
                *_BELOW,
                Rename("lm_head.{rest}", "language_model.lm_head.{rest}"),
            ),
            _UPSTREAM,
        ),
        Family("emu3", words("emu3"), (*_RULES, Rename("lm_head.{rest}", "text_model.lm_head.{rest}")), _UPSTREAM),
        Family(
            "idefics",
            words("idefics2 idefics3 smolvlm"),
            (),
            ("model.{m:text_model|vision_model|connector}.{rest}",),
        ),
        Family(
            "nested-vlm",
            words("cohere2_vision lfm2_vl lfm2-vl"),
            (TOWER,),
            ("model.{m:language_model|vision_tower|multi_modal_projector}.{rest}",),
        ),
    ),
)
