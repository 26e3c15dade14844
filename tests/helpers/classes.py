"""Model classes of transformers that people bring, each at a tiny size with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY = 400


@dataclass(frozen=True)
class Class:
    """One class of transformers: what kind of model it is, and what its configuration needs beside the usual."""

    name: str
    group: str
    more: dict[str, Any] = field(default_factory=dict)
    heads: int = 4
    modules: str | tuple[str, ...] = "all-linear"  # that a LoRA adapts

    def build(self, width: int, depth: int, seed: int) -> nn.Module:
        """Random weights of a size that a trained model could have."""
        import transformers

        model_class = getattr(transformers, self.name)
        torch.manual_seed(seed)
        config = model_class.config_class(**self.settings(width, depth))
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    def settings(self, width: int, depth: int) -> dict[str, Any]:
        """Of its configuration: the usual names, then its own, where `width` and `depth` may stand for numbers."""
        known = {"width": width, "depth": depth, "double": 2 * width, "head": width // self.heads}
        text = {
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        drop = self.more.get("without", ())
        usual = {name: value for name, value in text.items() if name not in drop}
        return {**usual, **_filled({k: v for k, v in self.more.items() if k != "without"}, known)}


def _filled(value: Any, known: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each, known) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, known) for each in value]
    return known.get(value, value) if isinstance(value, str) else value


HEAD = {"head_dim": "head"}
SIDES = {
    "d_model": "width",
    "encoder_layers": "depth",
    "decoder_layers": "depth",
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": "double",
    "decoder_ffn_dim": "double",
    "decoder_start_token_id": 1,
    "init_std": 0.4,  # with weights as small as usual the encoder hardly hears the loss, and rounding shows
    "without": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads"),
}
GPT = {
    "n_embd": "width",
    "n_layer": "depth",
    "n_head": 4,
    "n_positions": 128,
    "without": (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ),
}
WITHOUT_GROUPS = {"without": ("num_key_value_heads",)}
NO_TEXT = {
    "without": (
        "vocab_size",
        "num_key_value_heads",
        "max_position_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    )
}
IMAGES = {"image_size": 32, "patch_size": 8, **NO_TEXT}
TOWER = {"hidden_size": "width", "intermediate_size": "double", "num_hidden_layers": "depth", "num_attention_heads": 4}
STAGES = {"image_size": 32, "patch_size": 2, "depths": [2, "depth"], "without": (*NO_TEXT["without"], *TOWER)}
TOWERS = {
    "vision_config": {**TOWER, "image_size": 32, "patch_size": 8},
    "text_config": {
        **TOWER,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "without": (*NO_TEXT["without"], *TOWER),
}
SOUND = {
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "without": ("num_key_value_heads", "max_position_embeddings"),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": "width"}

CLASSES = (
    *(
        Class(f"{name}ForCausalLM", "decoders")
        for name in (
            "Llama",
            "Mistral",
            "Qwen2",
            "Olmo",
            "Olmo2",
            "Starcoder2",
            "StableLm",
            "Granite",
            "Cohere",
            "Nemotron",
        )
    ),
    Class("Qwen3ForCausalLM", "decoders", HEAD),
    Class("GemmaForCausalLM", "decoders", HEAD),
    Class("Gemma2ForCausalLM", "decoders", HEAD),
    Class("Gemma3ForCausalLM", "decoders", HEAD),
    Class("HeliumForCausalLM", "decoders", HEAD),
    Class("Glm4ForCausalLM", "decoders", HEAD),
    Class("SmolLM3ForCausalLM", "decoders", HEAD),
    Class("Ernie4_5ForCausalLM", "decoders", HEAD),
    Class("PhiForCausalLM", "decoders", heads=2),  # half of a head turns by pairs
    Class("Phi3ForCausalLM", "decoders"),
    Class("GPTNeoXForCausalLM", "decoders", WITHOUT_GROUPS),
    Class("FalconForCausalLM", "decoders", {"without": ("num_key_value_heads", "intermediate_size")}),
    Class("BloomForCausalLM", "decoders", {"n_layer": "depth", "n_head": 4, "without": GPT["without"][1:]}),
    Class(
        "OPTForCausalLM",
        "decoders",
        {"ffn_dim": "double", "word_embed_proj_dim": "width", "without": ("intermediate_size", "num_key_value_heads")},
    ),
    Class("GPT2LMHeadModel", "decoders", GPT),
    Class("GPTBigCodeForCausalLM", "decoders", GPT),
    Class("GPTJForCausalLM", "decoders", {**GPT, "rotary_dim": 4}),
    Class(
        "MptForCausalLM",
        "decoders",
        {
            "d_model": "width",
            "n_heads": 4,
            "n_layers": "depth",
            "max_seq_len": 128,
            "expansion_ratio": 2,
            "without": GPT["without"],
        },
    ),
    *(
        Class(f"{name}Model", "encoders", WITHOUT_GROUPS)
        for name in ("Bert", "Roberta", "XLMRoberta", "Electra", "MPNet")
    ),
    Class(
        "DistilBertModel",
        "encoders",
        {"dim": "width", "hidden_dim": "double", "n_layers": "depth", "n_heads": 4, "without": GPT["without"][:5]},
    ),
    Class("ModernBertModel", "encoders", {"cls_token_id": 1, "sep_token_id": 2, **WITHOUT_GROUPS}),
    Class("DebertaV2Model", "encoders", WITHOUT_GROUPS),
    Class("AlbertModel", "encoders", {"embedding_size": "width", **WITHOUT_GROUPS}),
    Class(
        "T5ForConditionalGeneration",
        "encoder-decoders",
        {
            "d_model": "width",
            "d_kv": "head",
            "d_ff": "double",
            "num_layers": "depth",
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "without": GPT["without"],
        },
    ),
    Class("BartForConditionalGeneration", "encoder-decoders", SIDES),
    Class("MBartForConditionalGeneration", "encoder-decoders", SIDES),
    Class("PegasusForConditionalGeneration", "encoder-decoders", SIDES),
    Class("MixtralForCausalLM", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Class("Qwen3MoeForCausalLM", "experts", {**EXPERTS, **HEAD}),
    Class("OlmoeForCausalLM", "experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    Class("GptOssForCausalLM", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2, **HEAD}),
    Class(
        "MambaForCausalLM",
        "hybrids",
        {
            "state_size": 4,
            "without": ("num_attention_heads", "intermediate_size", "num_key_value_heads", "max_position_embeddings"),
        },
        modules=("in_proj", "x_proj"),
    ),
    Class(
        "Qwen3NextForCausalLM",
        "hybrids",
        {
            **EXPERTS,
            **HEAD,
            "linear_key_head_dim": "head",
            "linear_value_head_dim": "head",
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "shared_expert_intermediate_size": "width",
        },
    ),
    Class("Lfm2ForCausalLM", "hybrids", {"full_attn_idxs": [0]}),
    *(
        Class(name, "vision", IMAGES)
        for name in (
            "ViTModel",
            "ViTForImageClassification",
            "DeiTModel",
            "BeitModel",
            "Data2VecVisionModel",
            "Dinov2Model",
            "Dinov2WithRegistersModel",
            "CLIPVisionModel",
            "SiglipVisionModel",
        )
    ),
    Class("DINOv3ViTModel", "vision", {**IMAGES, "num_attention_heads": 2}),  # a head turns in quarters
    Class("SwinModel", "vision", {**STAGES, "embed_dim": "width", "num_heads": [2, 4], "window_size": 4}),
    Class("ConvNextModel", "vision", {**STAGES, "hidden_sizes": ["width", "double"], "num_stages": 2}),
    Class("CLIPModel", "vision", {**TOWERS, "projection_dim": "head"}),
    Class("SiglipModel", "vision", TOWERS),
    Class("WhisperForConditionalGeneration", "audio", {**SIDES, "num_mel_bins": 8, "max_source_positions": 20}),
    Class("Wav2Vec2ForCTC", "audio", SOUND, modules=("q_proj", "v_proj")),
    Class("HubertModel", "audio", SOUND),
)
