"""Memory of a device that is too small: halves of the micro-batch, the same result, one line; else what would fit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from taskferry import TaskVector, fit
from taskferry.collect.scale import calibration_loss
from taskferry.errors import TaskferryWarning
from taskferry.evaluation.scoring import evaluate
from taskferry.jobs.settings import TransferSettings
from taskferry.jobs.transfer import transfer
from taskferry.linalg.whitening import Whitened
from taskferry.methods import Job, methods
from taskferry.taskvector import as_dense
from tests.devices import pretend
from tests.devices.test_jobs import language, world  # noqa: F401
from tests.helpers.often import often
from tests.helpers.tiny import TINY, relative, tuned


def peak_of(work: object) -> int:
    pretend.reset_peaks()
    work()  # type: ignore[operator]
    return max(device.peak for device in pretend.DEVICES)


@pytest.mark.parametrize("method", often(["bico", "twofold"], ["bico"]))
def test_a_capture_goes_on_in_halves_with_the_same_result(method: str) -> None:
    tiny = TINY["bert"]
    A, B = tiny.model(16, 2, seed=1).double(), tiny.model(24, 3, seed=2).double()
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))

    def moved(samples: int, device: str) -> TaskVector:
        models = [copy.deepcopy(model).to(device) for model in (A, B)]
        job = Job.of(*models, tau, tiny.calibration(16, samples), tiny.objective)
        return methods()[method].move(job, {}).tau

    expected = moved(16, "cpu")
    most, least = (peak_of(lambda n=n: moved(n, "pretend:0")) for n in (16, 4))
    assert least < most
    told = r"out of memory with \d+ samples at once: going on with (\d+), .*--micro-batch \1"
    with pretend.limited((most + least) // 2, 0), pytest.warns(TaskferryWarning, match=told):
        found = moved(16, "pretend:0")
    assert set(found.deltas) == set(expected.deltas)
    for name, delta in expected.deltas.items():
        assert relative(as_dense(found.deltas[name]).cpu(), as_dense(delta)) < 1e-9, name


def test_sums_take_all_of_the_rows_or_none() -> None:
    """Whichever allocation of theirs fails: the same rows come again, and are not counted twice."""
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    there = [t.to("pretend:0") for t in (x, y)]
    sums, expected = Whitened(4, 3), Whitened(4, 3)
    expected.add(x[:2], y[:2])
    expected.add(x, y)
    sums.add(there[0][:2], there[1][:2])
    for room in range(0, 4000, 24):
        with pretend.limited(pretend.DEVICES[0].used + room, 0):
            try:
                sums.add(*there)
                break
            except torch.OutOfMemoryError:
                continue
    assert sums.rows == expected.rows == 9
    for name in sums.moments:
        assert torch.allclose(getattr(sums, name).cpu(), getattr(expected, name))
    assert float(sums.energy_A) == pytest.approx(float(expected.energy_A))


def test_losses_and_scores_go_on_in_halves() -> None:
    tiny = TINY["llama"]
    model, batches = tiny.model(16, 2, seed=1), tiny.calibration(16, 16).side(1)
    there = copy.deepcopy(model).to("pretend:1")
    loss, score = (
        calibration_loss(model, tiny.objective.bind(model, []), batches),
        evaluate(model, batches, tiny.objective),
    )

    def both() -> tuple[float, object]:
        return calibration_loss(there, tiny.objective.bind(there, []), batches), evaluate(
            there, batches, tiny.objective
        )

    before, peak = pretend.DEVICES[1].used, peak_of(both)
    with pretend.limited(before + (peak - before) * 2 // 3, 1), pytest.warns(TaskferryWarning, match="going on with"):
        found = both()
    assert found[0] == pytest.approx(loss, rel=1e-5)
    assert found[1].loss == pytest.approx(score.loss, rel=1e-5)  # type: ignore[attr-defined]


def test_where_no_sample_fits_the_engine_that_would_is_named() -> None:
    tiny = TINY["bert"]
    A, B = tiny.model(16, 2, seed=1).to("pretend:0"), tiny.model(16, 2, seed=2).to("pretend:0")
    with (
        pretend.limited(pretend.DEVICES[0].used + 2000, 0),
        pytest.warns(TaskferryWarning),
        pytest.raises(ValueError, match=r"a single sample does not fit .*--engine blockwise"),
    ):
        fit(A, B, tiny.calibration(8, 4), tiny.objective)


def test_block_by_block_names_a_smaller_micro_batch(world: Path, tmp_path: Path) -> None:  # noqa: F811
    given = language(world, device="pretend:0", engine="blockwise", out=tmp_path / "out")
    with pretend.limited(60_000), pytest.raises(ValueError, match=r"memory of the device .*--micro-batch"):
        transfer(TransferSettings(**given), command="test")
    assert not (tmp_path / "out").exists()
