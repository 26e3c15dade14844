"""Hugging Face transformers: BERT, ModernBERT, ViT, CLIP, T5, GPT-2, GPT-NeoX, Llama, Phi, Whisper and similar models.

transformers itself is never imported: a model brings its classes, and its `config` says the rest.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from taskferry.data.batch import IGNORED, Batch
from taskferry.layers.family import Family, image_grid
from taskferry.layers.packing import parts_of
from taskferry.layers.registry import register
from taskferry.layers.tokens import Layout

_CROSS = r"(?:encoder_attn|layer\.1\.EncDecAttention|crossattention(?:\.self)?)"
_SELF = r"(?:self_attn|self_attention|attention(?:\.self|\.attention)?|attn|layer\.0\.SelfAttention)"


@register
class HuggingFace(Family):
    """Names of the sites of transformers' models, old and new."""

    name = "huggingface"
    roles = (
        (rf"{_CROSS}\.(?:q_proj|query|q)", "cross.q"),
        (rf"{_CROSS}\.(?:k_proj|key|k)", "cross.k"),
        (rf"{_CROSS}\.(?:v_proj|value|v)", "cross.v"),
        (rf"{_CROSS}\.(?:out_proj|o)|crossattention\.output\.dense", "cross.o"),
        (rf"{_SELF}\.(?:q_proj|query|q|q_lin|query_proj)", "attn.q"),
        (rf"{_SELF}\.(?:k_proj|key|k|k_lin|key_proj)", "attn.k"),
        (rf"{_SELF}\.(?:v_proj|value|v|v_lin|value_proj)", "attn.v"),
        (
            rf"{_SELF}\.(?:out_proj|o_proj|o|out_lin|c_proj|dense|Wo|proj|projection)|attention\.output\.dense",
            "attn.o",
        ),
        (rf"{_SELF}\.(?:c_attn|qkv_proj|qkv|Wqkv|query_key_value|in_proj)", "attn.qkv"),
        (r"linear_attn\.in_proj_qkvz?", "linear.qkv"),
        (r"linear_attn\.in_proj_(?:b|ba)", "linear.b"),
        (r"linear_attn\.in_proj_a", "linear.a"),
        (r"linear_attn\.in_proj_z", "linear.z"),
        (r"linear_attn\.out_proj", "linear.o"),
        (r"shared_experts?\.gate_proj", "shared.gate"),
        (r"shared_experts?\.up_proj", "shared.up"),
        (r"shared_experts?\.down_proj", "shared.down"),
        # A router of its own class, or a plain linear layer: `mlp.gate` is no gate of an MLP.
        (r"(?:mlp|block_sparse_moe|feed_forward|moe)\.(?:gate|router)", "router"),
        (r"mlp\.(?:gate_up_proj|Wi)", "mlp.gate_up"),
        (r"mlp\.gate_proj|DenseReluDense\.wi_0", "mlp.gate"),
        (
            r"(?:mlp|ffn)\.(?:up_proj|(?:linear_)?fc1|c_fc|dense_h_to_4h|fc_in|lin1)|intermediate\.dense|fc1|"
            r"DenseReluDense\.wi(?:_1)?",
            "mlp.up",
        ),
        (
            r"(?:mlp|ffn)\.(?:down_proj|(?:linear_)?fc2|c_proj|dense_4h_to_h|fc_out|lin2|Wo)|output\.dense|fc2|"
            r"DenseReluDense\.wo",
            "mlp.down",
        ),
        (r"pooler\.dense", "pooler"),
        (r"visual_projection|text_projection", "proj"),
        (r"patch_embeddings?(?:\.projection)?", "patch"),
    )
    stacks = (
        # Towers by their own name: in some models every tower calls its blocks "layers".
        (r"vision_model\.global_transformer\.layers", "vision.global"),
        (r"[^.]*(?:vision|visual)[^.]*(?:\.[^.]+)*\.(?:layers|layer|blocks)", "vision"),
        (r"[^.]*audio[^.]*(?:\.[^.]+)*\.(?:layers|layer|blocks)", "audio"),
        (r"text_model(?:\.encoder)?\.layers", "text"),
        (r"decoder\.(?:layers|block)", "decoder"),
        (r"encoder\.(?:layers|block)", "encoder"),
        (r"(?:h|layers|blocks|encoder\.layer|transformer\.layer)", "blocks"),
    )
    heads = (
        r"(?:^|\.)(?:lm_head|embed_out|classifier|score|qa_outputs|proj_out|pre_classifier)(?:\.|$)",
        r"(?:^|\.)(?:cls|generator|classification_head)\.",
        r"^decoder(?:\.(?:weight|bias))?$",  # to the vocabulary (ModernBERT), no stack of blocks
    )

    def owns(self, model: nn.Module) -> bool:
        """Models with transformers' configuration."""
        return hasattr(getattr(model, "config", None), "model_type")

    def parts(self, model: nn.Module, path: str, rows: int, columns: int) -> tuple[tuple[str, int], ...]:
        """q, k and v, gate and up, as each architecture packs them."""
        return parts_of(model, path, rows, columns)

    def kind(self, model: nn.Module, block: str) -> str:
        """Sliding, full or linear attention, as the block's own layers or their configuration say."""
        for module in model.get_submodule(block).modules():
            layer: Any = module
            types = getattr(getattr(layer, "config", None), "layer_types", None)
            place = getattr(layer, "layer_idx", None)
            if types and isinstance(place, int) and place < len(types):
                return _kind(types[place])
            for name in ("layer_type", "attention_type", "block_type"):
                if isinstance(getattr(layer, name, None), str):
                    return _kind(getattr(layer, name))
            if isinstance(getattr(layer, "is_sliding", None), bool):
                return "sliding attention" if layer.is_sliding else "full attention"
        return ""

    def stream(self, model: nn.Module, path: str, role: str) -> str:
        """Towers of CLIP and both sides of an encoder-decoder have tokens of their own."""
        config: Any = model.config
        if role == "patch":
            return "patches"
        if hasattr(config, "vision_config"):
            if "vision" in path or "visual" in path:
                return "vision"
            return "pictures" if re.search("projector|connector|aligner", path) else "text"
        if getattr(config, "is_encoder_decoder", False):
            # Keys and values of cross-attention read the encoder's tokens.
            return "decoder" if "decoder." in path and role not in ("cross.k", "cross.v") else "encoder"
        return "tokens"

    def layouts(self, model: nn.Module, batch: Batch) -> dict[str, Layout]:
        """Text by mask, ids and offsets; images by their grid of patches."""
        config: Any = model.config
        inputs = batch.inputs
        text = Layout(inputs.get("attention_mask"), inputs.get("input_ids"), batch.spans.get("tokens"))
        if getattr(config, "is_encoder_decoder", False):
            # Audio frames are halved before the first block: a mask over them is no mask over tokens.
            encoder = Layout() if "input_features" in inputs else text
            return {"encoder": encoder, "decoder": _decoder_layout(batch)}
        layouts = {"tokens": text, "text": text}
        if "pixel_values" in inputs:
            vision: Any = getattr(config, "vision_config", config)
            pixels, patch = inputs["pixel_values"], getattr(vision, "patch_size", None)
            grid = None if patch is None or pixels.ndim != 4 else image_grid(pixels, patch)
            # Swin and ConvNeXt have fewer tokens in each stage, some of them window by window.
            staged = grid is None or hasattr(vision, "depths")
            image = Layout(in_place=True) if staged else Layout(prefix=_class_tokens(model), grid=grid)
            layouts["vision"] = image
            layouts["patches"] = Layout(grid=grid)
            layouts["pictures"] = Layout(in_place=True)
            if not hasattr(config, "vision_config"):
                layouts["tokens"] = image
        return layouts

    def arguments(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """With positions where padding on the left would shift those that the model counts."""
        inputs = dict(batch.inputs)
        grids, pixels = inputs.get("image_grid_thw"), inputs.get("pixel_values")
        if grids is not None and pixels is not None and pixels.ndim == 3:  # padded, so that samples come first
            inputs["pixel_values"] = torch.cat([p[:n] for p, n in zip(pixels, grids.prod(1).tolist(), strict=True)])
        mask = inputs.get("attention_mask")
        if mask is None or mask.ndim != 2 or bool(mask[:, 0].all()) or not _takes_positions(model):
            return inputs
        return {"position_ids": (mask.long().cumsum(1) - 1).clamp_min(0), **inputs}

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        """The class token of an image model, the image embedding of CLIP, the mean token of a text model."""
        config: Any = model.config
        inputs = batch.inputs
        decoder = hasattr(config, "vision_config") and not hasattr(model, "get_text_features")  # reads both at once
        if hasattr(config, "vision_config") and not decoder:
            output = model.get_image_features(pixel_values=inputs["pixel_values"])  # type: ignore[operator]
            # transformers 5 returns the tower's output with the projected embedding as its pooled one.
            return output if isinstance(output, Tensor) else output.pooler_output
        body: Any = getattr(model, "base_model", model)
        if "pixel_values" in inputs and "pixel_values" not in inspect.signature(body.forward).parameters:
            body = model  # DINOv3 calls its blocks alone the base model
        if getattr(config, "is_encoder_decoder", False):
            body = body.get_encoder()
        names = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "pixel_values", "input_features")
        given = self.arguments(body, batch)
        kept = {k: v for k, v in given.items() if (k != "labels" if decoder else k in names)}
        hidden: Tensor = body(**kept).last_hidden_state
        if "pixel_values" in inputs and not decoder:
            if hidden.ndim == 4:  # channels first
                return hidden.mean((2, 3))
            return hidden[:, 0] if _class_tokens(body) else hidden.mean(1)
        mask = inputs.get("attention_mask")
        if mask is None or mask.shape[1] != hidden.shape[1]:
            return hidden.mean(1)
        weights = mask[..., None].to(hidden)
        return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)

    def text_features(self, model: nn.Module, tokens: Any) -> Tensor:
        """CLIP's text embedding."""
        output = model.get_text_features(**tokens)  # type: ignore[operator]
        return output if isinstance(output, Tensor) else output.pooler_output


def _kind(name: str) -> str:
    plain = {"global": "full_attention", "attention": "full_attention", "local": "sliding_attention"}
    return plain.get(name, name).replace("_", " ")


def _takes_positions(model: nn.Module) -> bool:
    """Whether the places of a text's tokens can be given, counted from 0, to a model that would not look at the mask.

    A table with a row for padding (RoBERTa) or with more rows than places (OPT) is read by counts of the model's own.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "vision_config"):
        return False
    places = getattr(config, "max_position_embeddings", None)
    tables = (m for name, m in model.named_modules() if isinstance(m, nn.Embedding) and "position" in name)
    own = any(table.padding_idx is not None or table.num_embeddings != places for table in tables)
    return not own and "position_ids" in inspect.signature(model.forward).parameters


def _class_tokens(model: nn.Module) -> int:
    """Class, distillation and register tokens in front of an image's patches, by the parameters that they are."""
    count = 0
    for path, parameter in model.named_parameters():
        name = path.rsplit(".", 1)[-1]
        if name in ("cls_token", "class_embedding", "distillation_token"):
            count += 1
        elif name == "register_tokens":
            count += parameter.shape[-2]
    return count


def _decoder_layout(batch: Batch) -> Layout:
    """Decoder position t predicts label t: labels tell padding and, between tokenizers, the tokens."""
    labels = batch.inputs.get("labels")
    if labels is None:
        return Layout(batch.inputs.get("decoder_attention_mask"), batch.inputs.get("decoder_input_ids"))
    return Layout(mask=labels != IGNORED, ids=labels.to(torch.long), spans=batch.spans.get("decoder"))
