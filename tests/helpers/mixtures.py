"""Tiny mixtures of experts of transformers' classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.tiny import VOCABULARY, hf

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip


def mixture(
    name: str = "Mixtral", width: int = 16, depth: int = 2, seed: int = 0, experts: int = 4, **more: Any
) -> nn.Module:
    """A decoder with experts; sizes that its class does not have are left out of it."""
    torch.manual_seed(seed)
    counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), experts)
    size = {**SIZES, **counts, "head_dim": width // 4, "intermediate_size": 12, **more}
    if name == "DeepseekV3":
        size |= {"num_key_value_heads": 4, "head_dim": 4}
    model = hf(f"{name}ForCausalLM", width, depth, **size).eval()
    model.set_experts_implementation("eager")  # the default has no double precision on a CPU
    return model
