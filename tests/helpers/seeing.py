"""Tiny decoders that also see, with processors as their folders have them, and rows with pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.texts import SECOND, TEXTS, train

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}"
)
MARKS = {  # the token of a picture in a text, and others that its processor writes
    "llava": ("<image>",),
    "gemma3": ("<boi>", "<soft>", "<eoi>"),
    "qwen2-vl": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
}
PICTURES = {  # what a template writes for one; the processor makes as many tokens of it as the picture has
    "llava": "<image>",
    "gemma3": "<boi>",
    "qwen2-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "mistral3": "[IMG]",
}
TOKENS = {"llava": "<image>", "gemma3": "<soft>", "mistral3": "[IMG]"}  # that the model replaces by a picture


def _text(width: int, depth: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {**sizes, **heads, **tokens, "vocab_size": 400, "max_position_embeddings": 128, "initializer_range": 0.2}


def _vision(depth: int = 2) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": depth, "num_attention_heads": 4}
    return {**sizes, "image_size": 32, "patch_size": 8}


def gemma3(width: int, depth: int, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    settings = {"text_config": _text(width, depth), "vision_config": _vision(), "mm_tokens_per_image": 4, **more}
    model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**settings))
    with torch.no_grad():  # a new projection is zero: the text would hear nothing of an image
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.2)
    return model


def llava(width: int, depth: int, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    text, vision = transformers.LlamaConfig(**_text(width, depth)), transformers.CLIPVisionConfig(**_vision())
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, **more)
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl(width: int, depth: int, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "mrope_section": [1, 1, width // 8 - 2], "rope_theta": 10_000.0}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": width, "num_heads": 4, "patch_size": 8}
    text = {**_text(width, depth), "rope_parameters": rope}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **more)
    return transformers.Qwen2VLForConditionalGeneration(config)


def mistral3(width: int, depth: int, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    text, vision = transformers.MistralConfig(**_text(width, depth)), transformers.PixtralVisionConfig(**_vision(5))
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, **more)
    return transformers.Mistral3ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "gemma3": gemma3,
    "llava": llava,
    "qwen2-vl": qwen2_vl,
    "mistral3": mistral3,
}


def folder(out: Path, family: str, width: int, depth: int, seed: int) -> Path:
    """A model with the processor of its family."""
    processor = _processor(family)
    ids = {mark: processor.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS[family]}
    if family == "qwen2-vl":
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        more = dict(zip(names, ids.values(), strict=True))
    else:
        more = {"image_token_index": ids[TOKENS[family]]}
    if family == "gemma3":
        more |= {"boi_token_index": ids["<boi>"], "eoi_token_index": ids["<eoi>"]}
    torch.manual_seed(seed)
    FAMILIES[family](width, depth, **more).save_pretrained(out)
    processor.save_pretrained(out)
    return out


def _processor(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizer = train("pieces")
    marks = MARKS[family]
    template = TEMPLATE.replace("IMAGE", PICTURES[family])
    if family == "gemma3":
        named = dict(zip(("boi_token", "image_token", "eoi_token"), marks, strict=True))
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
            unk_token="<unk>", extra_special_tokens=named,
        )  # fmt: skip
        images = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32})
        return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    tokenizer.add_special_tokens({"extra_special_tokens": list(marks)})
    if family == "qwen2-vl":
        size = {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}
        images = transformers.Qwen2VLImageProcessor(size=size, patch_size=8)
        videos = transformers.Qwen2VLVideoProcessor(patch_size=8)
        return transformers.Qwen2VLProcessor(images, tokenizer, videos, chat_template=template)
    if family == "mistral3":
        images = transformers.PixtralImageProcessor(size={"longest_edge": 32}, patch_size={"height": 16, "width": 16})
        return transformers.PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=2,
                                             chat_template=template)  # fmt: skip
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return transformers.LlavaProcessor(images, tokenizer, patch_size=8, vision_feature_select_strategy="default",
                                       chat_template=template, num_additional_image_tokens=1)  # fmt: skip


def rows(path: Path, form: str = "prompt") -> Path:
    """Twelve rows, each with a picture of its own in a folder beside the file: prompts, or chats with image parts."""
    from PIL import Image

    (path.parent / "pictures").mkdir(exist_ok=True)
    generator, lines = torch.Generator().manual_seed(4), []
    for i, (asked, answer) in enumerate(zip(TEXTS, SECOND, strict=True)):
        pixels = torch.randint(0, 255, (32, 32, 3), generator=generator, dtype=torch.uint8)
        name = f"pictures/{i}.png"
        Image.frombytes("RGB", (32, 32), pixels.numpy().tobytes()).save(path.parent / name)
        if form == "prompt":
            lines.append({"image": name, "prompt": asked, "completion": answer})
            continue
        parts = [{"type": "image", "image": name}, {"type": "text", "text": asked}]
        lines.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
