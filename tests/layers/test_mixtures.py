"""Experts of mixtures and their routers stay, each with its reason; everything else of the model moves."""

from __future__ import annotations

import pytest

from taskferry import TaskVector, fit
from taskferry.layers.discovery import find_sites
from taskferry.layers.family import EXPERT, ROUTER
from tests.helpers.mixtures import mixture
from tests.helpers.tiny import TINY, tuned


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss"])
def test_experts_and_routers_stay(name: str) -> None:
    A, B, llama = mixture(name, 16, 2, 0), mixture(name, 24, 3, 1), TINY["llama"]
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    moved = fit(A, B, llama.calibration(8), llama.objective).apply(tau)
    assert moved.coverage is not None
    kept = moved.coverage.kept()
    experts = [name for name, _ in B.named_parameters() if ".experts." in name]
    routers = [name for name, _ in B.named_parameters() if name.endswith((".gate.weight", ".router.weight"))]
    assert len(experts) >= 6
    assert len(routers) == 3
    assert {kept[name] for name in experts} == {EXPERT}
    assert {kept[name] for name in routers} == {ROUTER}
    attention = [site.weight for site in find_sites(B) if site.role.startswith("attn.")]
    assert len(attention) >= 3
    assert set(attention) <= set(moved.deltas)
    unused = {name for name in tau.deltas if ".experts." in name}
    assert unused <= set(moved.coverage.unused)
