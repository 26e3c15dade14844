"""Real pre-trained models on real data: fit and apply, coverage complete, outputs changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from taskferry import Prototypes, TaskVector, fit, image_calibration, text_calibration
from taskferry.layers import family_of
from taskferry.layers.discovery import find_sites
from tests.helpers import real

pytestmark = [pytest.mark.real, pytest.mark.every]  # the real encoders go through the command in tests/cli


def a_few_steps(model: nn.Module, batches: list, steps: int = 4) -> dict[str, torch.Tensor]:
    """A short real fine-tune towards the class prototypes; the model itself stays as it was."""
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = Prototypes().bind(model, batches)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-5)
    for step in range(steps):
        optimiser.zero_grad()
        loss(batches[step % len(batches)]).backward()
        optimiser.step()
    tuned = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    return tuned


def check(A: nn.Module, B: nn.Module, calibration) -> None:
    tau = TaskVector.between(A, a_few_steps(A, calibration.side(0)))
    model_A = {name: p.detach().clone() for name, p in A.named_parameters()}
    assert tau.norm() > 0
    alignment = fit(A, B, calibration)
    moved = alignment.apply(tau)
    coverage = moved.coverage
    assert coverage is not None
    for site in find_sites(B):
        if site.block is not None:
            assert coverage[site.weight].status == "moved", coverage[site.weight]
            assert site.bias is None or coverage[site.bias].status == "moved"
    assert all(row.reason for row in coverage if row.status != "moved")
    assert all(bool(torch.isfinite(d).all()) for d in moved.deltas.values())
    assert 0.05 < moved.norm() / tau.norm() < 3  # partial isometries never lengthen a block's change
    # Related spaces are seen as related: inputs of real models align far better than chance.
    similarity = [q.similarity for q in alignment.quality_in.values()]
    assert sum(similarity) / len(similarity) > 0.3
    batch = calibration.side(1)[0]
    with torch.no_grad():
        before = family_of(B).features(B, batch)
        moved.add_to(B)
        after = family_of(B).features(B, batch)
    change = float((after - before).norm() / before.norm())
    assert 1e-4 < change < 1
    assert all(torch.equal(p, model_A[name]) for name, p in A.named_parameters())


def test_deit_tiny_to_vit_tiny(shared: Path) -> None:
    """The same architecture, pre-trained independently."""
    A = real.vit(shared, "deit_tiny_patch16_224")
    B = real.vit(shared, "vit_tiny_patch16_224_tinyimagenet")
    pixels, labels = real.pictures(shared, "cifar10", 64)
    calibration = image_calibration(list(pixels), lambda x: x, key=("x", "x"), labels=labels.tolist())
    check(A, B, calibration)


@pytest.mark.parametrize(
    ("source", "target"),
    [("all-MiniLM-L6-v2", "gte-small"), ("gte-small", "all-MiniLM-L6-v2")],
    ids=["deeper", "back"],
)
def test_sentence_encoders_of_other_depth(shared: Path, source: str, target: str) -> None:
    (A, tokenizer_A), (B, tokenizer_B) = real.bert(shared, source), real.bert(shared, target)
    rows = real.texts(shared, "rte", 12)  # fewer tokens than the widest map: its decomposition is that of the rows
    calibration = text_calibration(
        [row["text"] for row in rows],
        tokenizer_A,
        tokenizer_B,
        pairs=[row["text_pair"] for row in rows],
        labels=[row["label"] for row in rows],
        max_length=32,
    )
    check(A, B, calibration)
