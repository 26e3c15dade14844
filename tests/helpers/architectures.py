"""Tiny models that pack several layers in one matrix, each in its own way, and models with several kinds of block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from taskferry import LanguageModel, Prototypes
from tests.helpers.tiny import TINY, VOCABULARY, Tiny

COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _built(name: str, **more: object) -> Callable[[int, int], nn.Module]:
    def build(width: int, depth: int) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        sizes = {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        }
        given = {key: value(width, depth) if callable(value) else value for key, value in more.items()}
        given = {"config": f"{name.removesuffix('Model').split('For')[0]}Config", **COMMON, **sizes, **given}
        config = getattr(transformers, given.pop("config"))
        return getattr(transformers, name)(config(**given))

    return build


def _causal(name: str, model: str, **more: object) -> Tiny:
    return Tiny(name, _built(model, **more), TINY["llama"].batch, LanguageModel())


def _encoder(name: str, model: str, **more: object) -> Tiny:
    return Tiny(name, _built(model, **more), TINY["bert"].batch, Prototypes())


def _mpt(width: int, depth: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": width, "n_heads": 4, "n_layers": depth, "expansion_ratio": 2, "max_seq_len": 64}
    return transformers.MptForCausalLM(transformers.MptConfig(**sizes, **COMMON))


GQA = {"num_key_value_heads": 2}
PACKED = {
    tiny.name: tiny
    for tiny in (
        _causal("neox", "GPTNeoXForCausalLM"),
        _causal("bloom", "BloomForCausalLM"),
        _causal("falcon-groups", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2, alibi=False),
        _causal("falcon-one-key", "FalconForCausalLM", multi_query=True, alibi=False),
        _causal("falcon-heads", "FalconForCausalLM", multi_query=False, alibi=False, bias=True),
        _causal("bigcode-one-key", "GPTBigCodeForCausalLM", multi_query=True, n_inner=lambda w, _: 2 * w),
        _causal("bigcode-heads", "GPTBigCodeForCausalLM", multi_query=False, n_inner=lambda w, _: 2 * w),
        _causal("persimmon", "PersimmonForCausalLM"),
        _causal("codegen", "CodeGenForCausalLM", n_inner=lambda w, _: 2 * w, rotary_dim=2, n_ctx=64),
        _causal("gptj", "GPTJForCausalLM", n_inner=lambda w, _: 2 * w, rotary_dim=2),
        _causal("phi", "PhiForCausalLM"),
        _causal("phi3", "Phi3ForCausalLM", **GQA),
        Tiny("mpt", _mpt, TINY["llama"].batch, LanguageModel()),
        _causal("qwen3.5", "Qwen3_5ForCausalLM", config="Qwen3_5TextConfig", **GQA, head_dim=lambda w, _: w // 4,
                layer_types=lambda _, d: ["full_attention"] * d),
        _encoder("modernbert", "ModernBertModel", global_attn_every_n_layers=2, local_attention=4),
        _encoder("nomic", "NomicBertModel"),
        _encoder("deberta", "DebertaModel"),
    )
}  # fmt: skip

BIGCODE = _encoder("bigcode", "GPTBigCodeModel", multi_query=False, n_inner=lambda w, _: 2 * w)  # heads in runs


def _every(n: int, often: str) -> Callable[[int, int], list[str]]:
    """Full attention in every n-th block, another kind in the rest."""
    return lambda _, depth: ["full_attention" if (i + 1) % n == 0 else often for i in range(depth)]


HEADS = {**GQA, "head_dim": lambda w, _: w // 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
MIXED = {
    tiny.name: tiny
    for tiny in (
        _causal("gemma3", "Gemma3ForCausalLM", config="Gemma3TextConfig", **HEADS, sliding_window=4,
                layer_types=_every(3, "sliding_attention")),
        _causal("gemma3-6", "Gemma3ForCausalLM", config="Gemma3TextConfig", **HEADS),
        _causal("qwen3.5", "Qwen3_5ForCausalLM", config="Qwen3_5TextConfig", **HEADS, **LINEAR,
                layer_types=_every(4, "linear_attention")),
        _causal("qwen3-next", "Qwen3NextForCausalLM", **HEADS, **LINEAR, layer_types=_every(4, "linear_attention"),
                num_experts=0),
    )
}  # fmt: skip
