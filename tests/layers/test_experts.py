"""Experts as sites: slices of stacked parameters, in each of transformers' layouts, and their pairs."""

from __future__ import annotations

import pytest
import torch

from taskferry.coverage import reasons_to_keep
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import Mixture, pair_sites
from taskferry.layers.site import Site
from tests.helpers.mixtures import mixture
from tests.helpers.tiny import hf


def sites_of(name: str, **more: object) -> dict[str, Site]:
    return {site.name: site for site in find_sites(mixture(name, **more))}


def test_gate_and_up_of_every_expert() -> None:
    sites = sites_of("Mixtral")
    up = sites["model.layers.1.mlp.experts.gate_up_proj#3.up"]
    assert (up.role, up.block, up.shape, up.rows, up.expert) == ("experts.up", 1, (12, 16), (12, 24), 3)
    stored = torch.randn(4, 24, 16)
    assert torch.equal(up.read(stored), stored[3, 12:])
    assert len([site for site in sites.values() if site.expert is not None]) == 2 * 4 * 3
    assert sites["model.layers.0.mlp.gate"].role == "router"


def test_stored_the_other_way_round_and_in_turn() -> None:
    sites = sites_of("GptOss")
    both = sites["model.layers.0.mlp.experts.gate_up_proj#2"]
    assert (both.shape, both.rows, both.transposed) == ((24, 16), None, True)
    weight, bias = torch.randn(4, 16, 24), torch.randn(4, 24)
    assert torch.equal(both.read(weight), weight[2].T)
    assert torch.equal(both.read(bias), bias[2])
    assert both.bias == "model.layers.0.mlp.experts.gate_up_proj_bias"


def test_experts_pair_as_they_are_matched_and_routers_with_them() -> None:
    A, B = (list(sites_of("Mixtral").values()) for _ in range(2))
    chosen = {("blocks", block): Mixture(source=(2, 0, 3, 1)) for block in range(2)}
    pairs, unpaired = pair_sites(A, B, mixtures=chosen)
    by_target = {pair.target.name: pair for pair in pairs}
    assert by_target["model.layers.1.mlp.experts.down_proj#2"].source.expert == 3
    assert by_target["model.layers.0.mlp.gate"].experts == (2, 0, 3, 1)
    assert list(unpaired) == ["lm_head"]


def test_shares_of_a_plain_mlp() -> None:
    torch.manual_seed(0)
    plain = find_sites(hf("LlamaForCausalLM", 16, 2, vocab_size=40, num_key_value_heads=2))
    mixed = list(sites_of("Mixtral").values())
    shares = {("blocks", block): Mixture(shares=(0.4, 0.3, 0.2, 0.1)) for block in range(2)}
    pairs, _ = pair_sites(mixed, plain, mixtures=shares)
    down = [pair for pair in pairs if pair.target.weight == "model.layers.0.mlp.down_proj.weight"]
    assert [(pair.source.expert, pair.target.share) for pair in down] == [(0, 0.4), (1, 0.3), (2, 0.2), (3, 0.1)]
    back, unpaired = pair_sites(plain, mixed)
    assert {p.source.name for p in back if p.target.expert == 3 and p.target.block == 0} == {
        f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")
    }
    assert unpaired["model.layers.0.mlp.gate"] == "the source has no 'router' to take it from"


def test_experts_of_another_form_have_their_reason() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    config = transformers.Llama4TextConfig(hidden_size=8, intermediate_size=8, num_local_experts=2)
    experts = Llama4TextExperts(config)
    assert find_sites(experts) == []
    assert set(reasons_to_keep(experts)) == {"gate_up_proj", "down_proj"}
    assert "computes in a way of its own" in reasons_to_keep(experts)["down_proj"]
