"""Natural-gradient steps of whole models: against a dense K-FAC of every layer, in every form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from taskferry import TaskVector
from taskferry.methods import Job, run
from taskferry.methods.natural import batches, changed, learning_sites, line_search, mean_loss, moves_from
from taskferry.objectives.teacher import Lesson, lesson_of
from taskferry.taskvector import LowRank, as_dense
from tests.helpers.tiny import job, rebuilt, relative


def lesson(given: Job) -> Lesson:
    return lesson_of((given.source, given.target), given.tau, given.calibration, given.pair.objectives)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2", "t5", "clip", "openclip", "llama"])
def test_models_of_every_family_learn_what_the_tuned_source_answers(name: str) -> None:
    given = job(name, (16, 2), (24, 3))
    before = {n: p.detach().clone() for n, p in given.target.named_parameters()}
    asked, sites = lesson(given), learning_sites(given.pair.target_sites, "all", 1.0)
    start = mean_loss(given.target, asked, TaskVector({}))
    moves = moves_from(given.target, asked, sites, TaskVector({}), 0.1, None, generator())
    slope = sum(move.slope for move in moves.values())
    size, loss = line_search(lambda s: mean_loss(given.target, asked, changed(moves, s)), -start / slope)
    assert size > 0
    assert loss < 0.999 * start
    assert {n: move.at(1.0).shape for n, move in moves.items()} == {n: before[n].shape for n in moves}
    assert all(torch.equal(p, before[n]) for n, p in given.target.named_parameters())


def damped(C: Tensor) -> Tensor:
    return C + 0.1 * C.diagonal().mean() * torch.eye(len(C), dtype=C.dtype)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_every_layer_takes_the_step_of_a_dense_kfac(name: str) -> None:
    """By hooks on the layers themselves, with the same probes."""
    given = job(name, (16, 2), (24, 3))
    asked, sites = lesson(given), learning_sites(given.pair.target_sites, "residual", 1.0)
    moves = moves_from(given.target, asked, sites, TaskVector({}), 0.1, None, generator())
    layers = {site.weight: given.target.get_submodule(site.weight.removesuffix(".weight")) for site in sites}
    rows: dict[tuple[str, str], list[Tensor]] = {}
    phase, probes = "g", generator()

    def hook(weight: str) -> Callable[..., None]:
        def seen(_: object, given: tuple[Tensor], y: Tensor) -> None:
            rows.setdefault((weight, "x"), []).append(given[0].detach().flatten(0, -2))
            y.register_hook(lambda g: rows.setdefault((weight, phase), []).append(g.flatten(0, -2)))  # type: ignore

        return seen

    handles = [layer.register_forward_hook(hook(weight)) for weight, layer in layers.items()]
    for batch in batches(given.target, asked):
        logits, answers = asked.scores(batch)
        phase = "g"
        asked.loss_of(logits, answers).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        phase = "e"
        asked.probe(logits, probes).backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    assert set(moves) == set(layers)
    for weight in layers:
        x, g, e = (torch.cat(rows[weight, kind]).double() for kind in "xge")
        alive = g.norm(dim=1) > 0
        A, S = damped(x[alive].T @ x[alive] / int(alive.sum())), damped(e.T @ e / len(asked))
        wanted = -torch.linalg.solve(S, torch.linalg.solve(A, x.T @ g).T) / len(asked)
        assert relative(as_dense(moves[weight].at(1.0)), wanted) < 1e-6  # scores are compared in float32
        slope = float((g.T @ x * wanted).sum()) / len(asked)
        assert moves[weight].slope == pytest.approx(slope, rel=1e-6)


def as_lora(given: Job, rank: int) -> TaskVector:
    made = generator()
    linear = [site.weight for site in given.pair.source_sites if site.rows is None and not site.transposed]
    shapes = {name: given.source.get_parameter(name).shape for name in linear}
    return TaskVector({
        name: LowRank(*(0.3 * torch.randn(*size, generator=made, dtype=torch.float64)
                        for size in ((shape[0], rank), (rank, shape[1]))))
        for name, shape in shapes.items() if len(shape) == 2
    })  # fmt: skip


@pytest.mark.parametrize("steps", [1, 3])
def test_a_lora_gives_a_lora_of_its_rank(steps: int) -> None:
    given = job("llama", (16, 2), (24, 3))
    given = Job(given.pair, as_lora(given, 3))
    moved = run("natural", given, steps=steps)
    assert moved.curve is not None
    assert moved.curve.helps
    assert {delta.rank for delta in moved.tau.deltas.values() if isinstance(delta, LowRank)} == {3}
    losses = moved.notes["losses after steps"]
    assert losses == sorted(losses, reverse=True)
    assert 2 <= len(losses) <= 1 + steps  # a step that the held-out samples do not want is not taken


def test_a_second_step_adds_to_the_first() -> None:
    """Of size 0 it leaves what was there; of full rank it is what dense changes are."""
    given = job("llama", (16, 2), (24, 3))
    asked, sites = lesson(given), learning_sites(given.pair.target_sites, "residual", 1.0)
    first = {
        site.weight: LowRank(0.1 * torch.randn(24, 24).double(), torch.randn(24, site.shape[1]).double())
        for site in sites
    }
    tau = TaskVector(first)
    low = moves_from(given.target, asked, sites, tau, 0.1, 24, generator())
    full = moves_from(given.target, asked, sites, tau.dense(), 0.1, None, generator())
    for weight, change in first.items():
        assert relative(as_dense(low[weight].at(0.0)), change.dense()) < 1e-6
        assert relative(as_dense(low[weight].at(0.7)), as_dense(full[weight].at(0.7))) < 1e-6


def test_where_there_is_nothing_to_learn_nothing_helps() -> None:
    given = job("llama")
    moved = run("natural", rebuilt(given, target=given.source, tau=TaskVector({})))
    assert moved.curve is not None
    assert not moved.curve.helps
    assert len(moved.tau) > 0  # a change that is refused, not nothing


def test_layers_are_chosen_by_their_roles_and_blocks() -> None:
    sites = job("llama", (16, 2), (16, 3)).pair.target_sites
    residual = {site.name.split(".")[-2] for site in learning_sites(sites, "residual", 0.5)}
    assert residual == {"o_proj", "down_proj"}
    assert {site.block for site in learning_sites(sites, "residual", 0.5)} == {1, 2}
    assert len(learning_sites(sites, "all", 1.0)) == 7 * 3


def test_the_line_search_finds_a_valley_above_and_below_its_start() -> None:
    for best in (0.05, 0.9, 20.0):
        size, loss = line_search(lambda s, best=best: (torch.tensor(s / best).log().item()) ** 2, 1.0)
        assert size == pytest.approx(best, rel=0.05)
        assert loss < 0.01
    assert line_search(lambda s: s if s < 1 else float("nan"), 1.0)[0] < 0.1
