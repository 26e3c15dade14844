"""What makes a fit small: rows let go, maps left out or left factored."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from taskferry import TaskVector, fit
from taskferry.collect.capture import BICO, MicroBatch, Side
from taskferry.collect.device import frozen
from taskferry.collect.scale import copied_bytes, moved_by
from taskferry.collect.solve import MapOptions, Solved
from taskferry.collect.statistics import Capture, Statistics
from taskferry.engines import whole
from taskferry.engines.pair import Work
from taskferry.engines.whole import WholePair
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import pair_sites
from taskferry.linalg.procrustes import Map
from taskferry.linalg.whitening import Whitened
from taskferry.methods import Job
from taskferry.objectives.objectives import LanguageModel
from taskferry.taskvector import LowRank
from tests.helpers.tiny import TINY, relative

LLAMA = TINY["llama"]


def test_the_sources_rows_go_with_their_last_reader() -> None:
    """Also where one source block serves several target blocks."""
    A, B = LLAMA.model(32, 2, 0), LLAMA.model(48, 5, 1)
    calibration = LLAMA.calibration(samples=4)
    pairs, _ = pair_sites(find_sites(A), find_sites(B))
    sides = [Side(m, LanguageModel().bind(m, calibration.side(i))) for i, m in enumerate((A, B))]
    found = Statistics()
    with frozen(A), frozen(B):
        batch = MicroBatch(*sides, {p.target.name: p for p in pairs}, found, BICO, *next(iter(calibration)), False)
        batch.run()
    assert len(found.outputs) == len(pairs)
    assert not batch.inputs
    assert not batch.outputs


def test_a_lora_goes_through_maps_that_are_never_formed() -> None:
    A, B = LLAMA.model(32, 2, 0), LLAMA.model(48, 2, 1)
    generator = torch.Generator().manual_seed(0)
    tau = TaskVector(
        {
            name: LowRank(
                torch.randn(p.shape[0], 2, generator=generator), torch.randn(2, p.shape[1], generator=generator)
            )
            for name, p in A.named_parameters()
            if name.endswith(("q_proj.weight", "v_proj.weight"))
        }
    )
    assert tau.low_rank
    assert not tau.dense().low_rank
    calibration = LLAMA.calibration(samples=8)
    factored = fit(A, B, calibration, only=tau.deltas.keys(), factored=tau.low_rank)
    formed = fit(A, B, calibration)
    assert all(R.R is None for R in [*factored.R_in.values(), *factored.R_out.values()])
    assert {key.rsplit(".", 1)[-1] for key in factored.R_out} == {"q_proj", "v_proj"}  # no MLP map is solved
    one, other = factored.apply(tau), formed.apply(tau)
    for name, delta in other.deltas.items():
        assert relative(one.dense().deltas[name], delta.dense()) < 1e-5


def test_weights_that_were_stored_in_half_precision_are_copied_in_it() -> None:
    """Half of the memory, and after trying scales the same bits; other weights are copied as they are."""
    generator = torch.Generator().manual_seed(0)
    for stored, precision, size in (
        (torch.bfloat16, torch.float32, 2),
        (torch.float16, torch.float32, 2),
        (torch.float32, torch.float32, 4),
        (torch.bfloat16, torch.bfloat16, 2),
    ):
        model = LLAMA.model(32, 2, 0).to(stored).to(precision)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        name = next(name for name in before if name.endswith("q_proj.weight"))
        rows, columns = before[name].shape
        change = LowRank(torch.randn(rows, 2, generator=generator), torch.randn(2, columns, generator=generator))
        assert copied_bytes(model.get_parameter(name)) == size * rows * columns
        with moved_by(model, TaskVector({name: change})) as set_scale:
            for scale in (0.5, 2.0):
                set_scale(scale)
            wanted = before[name].double() + 2.0 * change.dense().double()
            assert relative(model.get_parameter(name).detach(), wanted) < (1e-6 if precision == torch.float32 else 5e-3)
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_maps_without_a_fold_go_with_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them, where they only say how far the models go for a second point."""
    A, B = LLAMA.model(32, 2, 0), LLAMA.model(48, 6, 1)
    names = [name for name, _ in A.named_parameters() if "q_proj" in name or "up_proj" in name]
    tau = TaskVector({name: torch.randn_like(A.get_parameter(name)) for name in names})
    alive: weakref.WeakSet[Map] = weakref.WeakSet()
    found: list[int] = []
    solve = WholePair.solve

    def counted(self: WholePair, *given: Any) -> Solved:
        solved = solve(self, *given)
        for R, _ in [*solved.inputs.values(), *solved.outputs.values()]:
            alive.add(R)
        found.append(len(alive))
        return solved

    monkeypatch.setattr(WholePair, "solve", counted)
    job = Job(WholePair(A, B, LLAMA.calibration(samples=8)), tau).in_folds()
    moved = job.move(Capture(again=True), MapOptions())
    block = found[0]
    assert moved.alignment is None
    assert found == 6 * [block]
    found.clear()
    moved = job.move(Capture(), MapOptions())
    assert found == [*(12 * [block]), *(n * block for n in range(1, 7))]
    assert len(moved.without) == 2


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_few_tokens_of_a_wide_model_are_captured_in_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are what takes memory: matrices of all directions would not fit, and do not arise."""
    tiny = TINY[name]
    A, B, calibration = tiny.model(96, 2, 0), tiny.model(128, 2, 1), tiny.calibration(samples=3)
    tokens = calibration.tokens()
    assert tokens is not None
    seen: list[int] = []
    real = whole.collect

    def collect(statistics: Statistics, *given: Any, **named: Any) -> None:
        real(statistics, *given, **named)
        held = [statistics, *statistics.parts]
        sums = [S for each in held for some in (each.inputs, each.outputs) for S in some.values()]
        seen.append(sum(t.numel() for S in sums for both in S._pending for t in both))
        seen[-1] += sum(S.C.numel() for S in sums if S.C is not None)

    monkeypatch.setattr(whole, "collect", collect)
    pair = WholePair(A, B, calibration, tiny.objective)
    capture = Capture(sums=Whitened)
    foretold = sum(capture.numbers(each, tokens) for each in pair.pairs)
    assert 2 * foretold < sum(capture.numbers(each) for each in pair.pairs)
    pair = WholePair(A, B, calibration, tiny.objective, work=Work(sums_memory=4 * foretold))
    pair.fit(capture, MapOptions(), {})
    assert len(seen) == 1
    assert seen[0] <= foretold
