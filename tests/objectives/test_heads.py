"""The cross-fitted probe: a sample's loss never comes from a probe that saw it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from taskferry import TaskferryError
from taskferry.data.batch import Batch
from taskferry.objectives.objectives import CrossProbe, LinearProbe, fit_probe
from tests.helpers.pictures import Pictures, Small


def test_each_half_is_scored_by_the_other_half_s_probe() -> None:
    data, model = Pictures(30), Small().eval()
    batches = [data.batch(range(0, 11)), data.batch(range(11, 30))]
    logits = CrossProbe(2.0).loss_logits(model, batches)
    with torch.no_grad():
        features = model(data.pixels)
        unit = (features - features.mean(0)) / features.std(0, unbiased=False)
    half = torch.zeros(30, dtype=torch.long)
    for label in range(3):
        members = (data.labels == label).nonzero()[:, 0]
        half[members] = (torch.arange(len(members)) + label) % 2
    probes = [fit_probe(unit[half == k], data.labels[half == k], ridge=2.0) for k in (0, 1)]
    for batch in batches:
        for place, i in enumerate(batch.ids):
            weight, bias = probes[1 - int(half[i])]
            assert torch.allclose(logits(batch)[place], unit[i] @ weight.T + bias, atol=1e-4)
    # Whatever its ids say, a sample that is scored was seen by neither: the mean of both.
    stranger = Batch({"x": data.pixels[:4] + 0.1}, data.labels[:4], (0, 1, 2, 3))
    with torch.no_grad():
        x = (model(stranger.inputs["x"]) - features.mean(0)) / features.std(0, unbiased=False)
        mean = sum(x @ weight.T + bias for weight, bias in probes) / 2
        assert torch.allclose(CrossProbe(2.0).logits(model, batches)(stranger), mean, atol=1e-4)


def test_a_gradient_stays_where_a_plain_probe_leaves_none() -> None:
    """Random labels: a plain probe fits them to near-zero loss, a cross-fitted one cannot."""
    generator = torch.Generator().manual_seed(0)
    data = Pictures(20)
    data.pixels = torch.randn(20, 3, 16, 16, generator=generator)
    model = torch.nn.Flatten()
    batch = Batch({"input": data.pixels}, data.labels, tuple(range(20)))
    losses = {}
    for head in (LinearProbe(1e-3), CrossProbe(1e-3)):
        scores = head.loss_logits(model, [batch])(batch)
        losses[type(head).__name__] = float(F.cross_entropy(scores, data.labels))
    assert losses["LinearProbe"] < 0.01
    assert losses["CrossProbe"] > 0.5


def test_samples_need_ids_of_their_own() -> None:
    data, model = Pictures(12), Small().eval()
    same = Batch({"x": data.pixels}, data.labels, ())
    for batches in ([same], [same, same]):
        with pytest.raises(TaskferryError, match="ids"):
            CrossProbe().bind(model, batches)
