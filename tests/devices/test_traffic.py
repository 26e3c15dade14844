"""How often the host waits for a device, and what it copies: counted, so that nobody adds to it unnoticed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from taskferry import Calibration, TaskVector
from taskferry.collect.capture import Side, collect
from taskferry.collect.statistics import Capture, Statistics
from taskferry.engines.whole import WholePair
from taskferry.linalg.whitening import Whitened
from taskferry.methods import Job, methods
from tests.devices import pretend
from tests.devices.test_families import low_rank
from tests.helpers.often import often
from tests.helpers.tiny import TINY, tuned


def models(name: str) -> tuple[nn.Module, nn.Module, Calibration]:
    tiny = TINY[name]
    A, B = tiny.model(16, 2, seed=1).to("pretend:0"), tiny.model(24, 3, seed=2).to("pretend:1")
    return A, B, tiny.calibration(24, 6)


@pytest.mark.parametrize("sums", ["plain", "whitened"])
@pytest.mark.parametrize("name", often(["bert", "clip", "llama"], ["bert", "llama"]))
def test_a_capture_waits_once_a_micro_batch(name: str, sums: str) -> None:
    A, B, calibration = models(name)
    pair = WholePair(A, B, calibration, TINY[name].objective)
    capture = Capture(sums=Whitened) if sums == "whitened" else Capture()
    losses = [
        objective.bind(model, calibration.side(side))
        for side, (objective, model) in enumerate(zip(pair.objectives, (A, B), strict=True))
    ]
    statistics = Statistics(capture=capture)
    with pretend.counted() as counts:
        collect(statistics, Side(A, losses[0]), Side(B, losses[1]), pair.pairs, calibration, capture)
    with pretend.counted() as bare, torch.enable_grad():
        for batch_A, batch_B in calibration:
            losses[0](batch_A.to("pretend:0"))
            losses[1](batch_B.to("pretend:1"))
    # One more at the end, for the last loss; models that are shown a sample first wait in that pass too.
    first = -(-bare.waits // len(calibration))
    assert counts.waits - bare.waits <= len(calibration) + 1 + first, counts.where
    assert counts.to_host <= bare.to_host + len(calibration) + first
    assert statistics.outputs


@pytest.mark.parametrize("form", often(["full", "LoRA"], ["LoRA"]))
def test_apply_does_not_wait(form: str) -> None:
    A, B, calibration = models("bert")
    alignment = WholePair(A, B, calibration, TINY["bert"].objective).fit(
        Capture(), Job.of(A, B, TaskVector({}), calibration).maps(), {}
    )
    tau = low_rank(A) if form == "LoRA" else TaskVector.between(dict(A.named_parameters()), tuned(A))
    with pretend.counted() as counts:
        moved = alignment.apply(tau)
    assert len(moved)
    assert counts.waits == 0, counts.where
    assert counts.between == 0
    factors = 2 * len(tau) if form == "LoRA" else 0  # an adapter is read on the host
    assert counts.to_device == factors


def test_the_copies_of_a_transfer() -> None:
    """BiCo of a full fine-tune between two small encoders: hashes of both models, and two copies a micro-batch."""
    A, B, calibration = models("bert")
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    job = Job.of(A, B, tau, calibration, TINY["bert"].objective)
    weights = sum(1 for model in (A, B) for _ in model.parameters())
    with pretend.counted() as counts:
        methods()["bico"].move(copy.copy(job), {})
    assert counts.to_host == weights + 2 * len(calibration), counts.where
