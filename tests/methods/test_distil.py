"""Distillation: what it starts from, the form of what it learns, and that held-out samples judge it."""

from __future__ import annotations

import pytest
import torch

from taskferry import TaskVector
from taskferry.methods import Job, run
from taskferry.methods.natural import mean_loss
from taskferry.objectives.teacher import lesson_of
from taskferry.taskvector import LowRank, as_dense
from tests.helpers.tiny import job, rebuilt, relative
from tests.methods.test_natural import as_lora


def split(given: Job, tau: TaskVector | None = None) -> Job:
    fit, held_out = given.calibration.split(0)
    return Job.of(given.source, given.target, tau or given.tau, fit, given.pair.objectives, held_out=held_out)


def held_out_losses(given: Job, change: TaskVector) -> tuple[float, float]:
    """Without and with a change, towards the tuned source's answers."""
    lesson = lesson_of((given.source, given.target), given.tau, given.judging, given.pair.objectives)
    return mean_loss(given.target, lesson, TaskVector({})), mean_loss(given.target, lesson, change)


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "clip"])
def test_a_target_learns_what_the_tuned_source_answers(name: str) -> None:
    given = job(name, (16, 2), (24, 3))  # random models: what one sample says does not tell of another
    kept = {n: p.detach().clone() for n, p in given.target.named_parameters()}
    moved = run("distil", given, steps=12)
    before, after = held_out_losses(given, moved.tau)
    assert after < before
    assert moved.curve is not None
    assert moved.curve.helps
    assert moved.notes["start"] == ("nothing" if name == "llama" else "bico")
    assert all(torch.equal(p, kept[n]) for n, p in given.target.named_parameters())


def test_a_lora_gives_a_lora_of_its_rank_on_every_projection() -> None:
    given = job("llama", (16, 2), (24, 3))
    given = split(given, as_lora(given, 3))
    tau = run("distil", given, steps=6).tau
    assert {delta.rank for delta in tau.deltas.values() if isinstance(delta, LowRank)} == {3}
    assert len(tau.deltas) == 7 * 3
    before, after = held_out_losses(given, tau)
    assert after < before


def test_between_equal_bases_the_copy_is_taken_at_full_strength() -> None:
    """On the source's own base the fine-tune as it is says exactly what the tuned source says."""
    given = job("llama")
    given = split(rebuilt(given, target=given.source), as_lora(given, 3))
    moved = run("distil", given)
    assert moved.notes["start"] == "the copied change"
    assert len(moved.notes["distilled"]["losses"]) == 1  # it says all that there is to say: no step was taken
    for name, delta in given.tau.deltas.items():
        assert relative(as_dense(moved.tau.deltas[name]), as_dense(delta)) < 1e-6


def test_where_training_makes_it_no_better_the_start_is_kept() -> None:
    given = job("llama")
    given = split(rebuilt(given, target=given.source), as_lora(given, 3))
    moved = run("distil", given, steps=5, learning_rate=10.0, start="naive")
    assert moved.notes["distilled"]["kept"] == 0
    for name, delta in given.tau.deltas.items():
        assert relative(as_dense(moved.tau.deltas[name]), as_dense(delta)) < 1e-6


def test_it_starts_from_what_another_method_moved() -> None:
    given = split(job("llama", (16, 2), (24, 3)))
    moved = run("distil", given, steps=0, start="bico")
    alone = run("bico", given).tau
    assert moved.notes["start"] == "bico"
    assert set(moved.tau.deltas) == set(alone.deltas)
    for name, delta in alone.deltas.items():
        assert relative(as_dense(moved.tau.deltas[name]), as_dense(delta)) < 1e-6
