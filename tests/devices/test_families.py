"""Every family and every method with the source on one device and the target on another: as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from taskferry import Calibration, TaskVector, fit
from taskferry.config import DEFAULT_METHOD
from taskferry.methods import Job, methods
from taskferry.taskvector import LowRank, as_dense
from tests.helpers.often import often
from tests.helpers.tiny import TINY, relative, tuned

PLACES = ("pretend:0", "pretend:1")


@pytest.fixture(autouse=True)
def _plain_attention() -> Iterator[None]:
    """A CPU has an attention of its own, which adds up in another order; every device has the plain one."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def both(name: str, source: tuple[int, int], target: tuple[int, int]) -> tuple[nn.Module, nn.Module, Calibration]:
    tiny = TINY[name]
    return tiny.model(*source, seed=1), tiny.model(*target, seed=2), tiny.calibration(10, 6)


def same(a: TaskVector, b: TaskVector, within: float = 0.0) -> None:
    assert set(a.deltas) == set(b.deltas)
    for name, delta in a.deltas.items():
        assert isinstance(delta, LowRank) == isinstance(b.deltas[name], LowRank)
        here, there = as_dense(delta).cpu(), as_dense(b.deltas[name]).cpu()
        assert torch.equal(here, there) or relative(there, here) <= within, name


def low_rank(model: nn.Module) -> TaskVector:
    """A LoRA on the attention's inputs, as adapters are read: on the host."""
    generator = torch.Generator().manual_seed(3)
    names = [n for n, p in model.named_parameters() if p.ndim == 2 and "query.weight" in n]
    factors = [(torch.randn(16, 2, generator=generator), torch.randn(2, 16, generator=generator)) for _ in names]
    return TaskVector({name: LowRank(0.05 * a, b) for name, (a, b) in zip(names, factors, strict=True)})


@pytest.mark.parametrize("name", often(sorted(TINY), ("bert", "clip", "llama", "t5", "timm")))
def test_maps_of_every_family(name: str) -> None:
    A, B, calibration = both(name, (16, 2), (24, 3))
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    here = fit(A, B, calibration, TINY[name].objective)
    moved = here.apply(tau)
    assert moved.norm() > 0
    there = fit(A.to(PLACES[0]), B.to(PLACES[1]), calibration, TINY[name].objective)
    same(moved, there.apply(tau), 1e-3)  # attention of decoders adds up in another order


@pytest.mark.parametrize("form", often(["full", "LoRA"], ["full"]))
@pytest.mark.parametrize("method", often(methods(), (DEFAULT_METHOD, "bico")))
def test_every_method(method: str, form: str) -> None:
    A, B, calibration = both("bert", (16, 2), (16, 2))
    tau = low_rank(A) if form == "LoRA" else TaskVector.between(dict(A.named_parameters()), tuned(A))
    found = []
    for places in (("cpu", "cpu"), PLACES):
        models = [copy.deepcopy(model).to(place) for model, place in zip((A, B), places, strict=True)]
        job = Job.of(models[0], models[1], tau, calibration, TINY["bert"].objective)
        torch.manual_seed(0)
        moved = methods()[method].move(job, {})
        found.append((moved.tau, job.losses(moved.tau, [0.0, 0.5, 1.0]), job.best_scale(moved.tau).points))
    same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
