"""Tiny mixtures of experts of transformers' classes, and the same function with experts and bases in another order."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from taskferry import TaskVector
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


def flat_norms(model: nn.Module) -> nn.Module:
    """With gains of one, which a rotation keeps."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
    return model


class Planted:
    """A mixture whose residual stream is rotated, whose experts are permuted, and the units inside each of them too.

    RMS norms of gain one know only lengths, and a gated unit acts alone: all this keeps the function.
    """

    def __init__(self, A: nn.Module, seed: int = 0) -> None:
        config: Any = A.config
        self.g = torch.Generator().manual_seed(seed)
        width, depth = config.hidden_size, config.num_hidden_layers
        self.Q = torch.linalg.qr(torch.randn(width, width, generator=self.g, dtype=torch.float64))[0]
        count, hidden = A.get_parameter("model.layers.0.mlp.experts.down_proj").shape[::2]
        self.experts = [torch.randperm(count, generator=self.g) for _ in range(depth)]  # the source's for each
        self.units = [[torch.randperm(hidden, generator=self.g) for _ in range(count)] for _ in range(depth)]

    def model(self, A: nn.Module) -> nn.Module:
        """The other model."""
        B = type(A)(copy.deepcopy(A.config)).to(next(A.parameters()).dtype).eval()
        B.load_state_dict({name: self(name, value) for name, value in A.state_dict().items()})
        return B

    def tau(self, tau: TaskVector) -> TaskVector:
        """What a change of the one is in the other."""
        return TaskVector({name: self(name, delta) for name, delta in tau.dense().deltas.items()})  # type: ignore[arg-type]

    def __call__(self, name: str, W: Tensor) -> Tensor:
        Q = self.Q.to(W)
        if "norm" in name or W.ndim < 2:
            return W
        if ".experts." in name:
            layer = int(name.split(".")[2])
            order = self.experts[layer]
            W = W[order]
            for e, units in enumerate(self.units[layer]):
                if name.endswith("down_proj"):
                    W[e] = Q.T @ W[e][:, units]
                else:
                    W[e] = W[e][torch.cat([units, units + len(units)])] @ Q
            return W
        if name.endswith(("mlp.gate.weight", "router.weight")):
            return W[self.experts[int(name.split(".")[2])]] @ Q
        return Q.T @ W if name.endswith("o_proj.weight") else W @ Q
