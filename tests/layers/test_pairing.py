"""Depth rules, names, and what has no partner."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import nearest_block, pair_sites
from tests.helpers.tiny import TINY


@pytest.mark.parametrize(
    ("depth_A", "depth_B", "expected"),
    [
        (6, 12, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        (12, 6, [0, 2, 4, 7, 9, 11]),
        (4, 4, [0, 1, 2, 3]),
        (1, 3, [0, 0, 0]),
        (3, 1, [0]),
        (3, 2, [0, 2]),
        (2, 3, [0, 1, 1]),  # a half is rounded up
        (12, 24, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11]),
    ],
)
def test_the_paper_s_round_rule(depth_A: int, depth_B: int, expected: list[int]) -> None:
    assert [nearest_block(j, depth_A, depth_B) for j in range(depth_B)] == expected


def test_roles_meet_across_families() -> None:
    """timm, Hugging Face and OpenCLIP image towers name the same things differently."""
    timm, vit = find_sites(TINY["timm"].model(16, 2, 0)), find_sites(TINY["vit"].model(24, 3, 0))
    pairs, unpaired = pair_sites(timm, vit)
    assert {pair.target.weight for pair in pairs} == {
        site.weight for site in vit if site.block is not None or site.role == "patch"
    }
    assert list(unpaired) == ["pooler.dense"]
    assert all(pair.source.role == pair.target.role for pair in pairs)


def test_a_llama_feeds_a_qwen() -> None:
    llama, qwen = find_sites(TINY["llama"].model(16, 2, 0)), find_sites(TINY["qwen3"].model(24, 3, 0))
    pairs, unpaired = pair_sites(llama, qwen)
    assert len(pairs) == 7 * 3
    assert list(unpaired) == ["lm_head"]
    assert "task head" in unpaired["lm_head"]


def test_what_has_no_partner_says_why() -> None:
    bert, llama = find_sites(TINY["bert"].model(16, 2, 0)), find_sites(TINY["llama"].model(16, 2, 0))
    pairs, unpaired = pair_sites(bert, llama)
    assert "no layer 'mlp.gate'" in unpaired["model.layers.0.mlp.gate_proj"]
    assert {pair.target.role for pair in pairs} == {"attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down"}
    t5 = find_sites(TINY["t5"].model(16, 2, 0))
    _, unpaired = pair_sites(bert, t5)
    assert "no stack of blocks 'decoder'" in unpaired["decoder.block.0.layer.0.SelfAttention.q"]


class Grouped(nn.Module):
    """Two inner layers of one role in every block."""

    def __init__(self, d: int) -> None:
        super().__init__()
        inner = [nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(d, d), nn.Linear(d, d)])}) for _ in range(2)]
        self.blocks = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for layer in block["inner"]:  # type: ignore[index]
                x = x + torch.tanh(layer(x))
        return x


def test_inner_layers_keep_their_order() -> None:
    pairs, unpaired = pair_sites(find_sites(Grouped(6)), find_sites(Grouped(8)))
    assert not unpaired
    assert all(pair.source.name == pair.target.name for pair in pairs)
