"""Fine-tuning: equal to the same written by hand, to itself after an interrupt, and ended by a judge."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from taskferry import Prototypes, TaskferryError
from taskferry.disk.files import open_safetensors
from taskferry.fitting.objectives import NewHead
from taskferry.training import FineTuning, History, finetune
from taskferry.training.finetuning import CHECKPOINT, KIND, order, rate, split
from tests.helpers import tiny
from tests.helpers.pictures import Pictures, Small

SETTINGS = FineTuning(steps=10, batch=8, learning_rate=1e-2, warmup=3, every=4, seed=3)


def trained(folder: Path | None = None, stop: int | None = None, settings: FineTuning = SETTINGS) -> nn.Module:
    torch.manual_seed(1)
    model = Small()

    def interrupt(step: int, _steps: int, _loss: float) -> None:
        if step == stop:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        finetune(model, Pictures(), NewHead(3), settings, folder=folder, progress=interrupt)
    return model


def test_a_resumed_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    for stop in (2, 5, 9):
        folder = tmp_path / str(stop)
        half = trained(folder, stop)
        assert not torch.equal(half.blocks[0].weight, whole.blocks[0].weight)
        resumed = trained(folder)
        for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)
        assert (folder / CHECKPOINT).read_bytes() == (tmp_path / "whole" / CHECKPOINT).read_bytes()


def test_other_settings_do_not_resume(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(TaskferryError, match=r"another run \(batch, learning_rate differ\)"):
        trained(tmp_path, settings=SETTINGS.model_copy(update={"batch": 4, "learning_rate": 1e-3}))


def test_equal_to_the_protocol_written_by_hand() -> None:
    """AdamW, linear warm-up, half a cosine, a new head at ten times the rate, no validation sample seen."""
    data = Pictures()
    settings = SETTINGS.model_copy(update={"validation": 0.25})
    torch.manual_seed(1)
    model = Small().eval()
    model.drop.p = 0.0
    twin, head = copy.deepcopy(model), NewHead(3)
    history = finetune(model, data, head, settings)
    kept, held_out = split(len(data), settings)
    assert len(held_out) == 10
    assert not set(kept) & set(held_out)
    assert len(set(kept) | set(held_out)) == 40
    torch.manual_seed(settings.seed)
    layer = nn.Linear(12, 3)
    groups = [{"params": list(twin.parameters()), "lr": 1.0}, {"params": list(layer.parameters()), "lr": 10.0}]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.1)
    for step in range(10):
        factor = (step + 1) / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 7))
        for group, times in zip(optimiser.param_groups, (1.0, 10.0), strict=True):
            group["lr"] = 1e-2 * factor * times
        batch = data.batch(order(kept, step, settings))
        assert not set(batch.ids) & set(held_out)
        optimiser.zero_grad()
        F.cross_entropy(layer(twin(batch.inputs["x"])), batch.labels).backward()
        optimiser.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    evaluations = [step for step, _, _ in history.evaluations]
    assert evaluations == [4, 8, 10]
    logits = layer(twin(data.batch(held_out).inputs["x"]))
    by_hand = 100 * float((logits.argmax(1) == data.labels[held_out]).float().mean())
    assert history.validation == pytest.approx(by_hand)


def test_the_paper_s_protocol_is_the_default() -> None:
    chosen = FineTuning()
    given = (chosen.steps, chosen.batch, chosen.learning_rate, chosen.weight_decay, chosen.warmup, chosen.validation)
    assert given == (2000, 128, 1e-5, 0.1, 200, 0.1)
    assert rate(0, chosen) == 1 / 200
    assert rate(199, chosen) == 1
    assert rate(200, chosen) == 1
    assert rate(1100, chosen) == pytest.approx(0.5)
    assert rate(2000, chosen) == pytest.approx(0)


def test_every_sample_is_seen_once_an_epoch() -> None:
    settings = FineTuning(steps=10, batch=7)
    kept = list(range(100, 121))
    seen = [i for step in range(3) for i in order(kept, step, settings)]
    assert sorted(seen) == kept
    again = [i for step in range(3, 6) for i in order(kept, step, settings)]
    assert sorted(again) == kept
    assert again != seen


def test_only_what_may_learn_learns() -> None:
    """Frozen parameters stay, as those of the base of a PEFT model; blocks alone where asked for."""
    model = Small()
    model.blocks[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    finetune(model, Pictures(), NewHead(3), SETTINGS)
    assert torch.equal(model.blocks[0].weight, before["blocks.0.weight"])
    assert not torch.equal(model.blocks[1].weight, before["blocks.1.weight"])
    assert not model.blocks[0].weight.requires_grad
    assert model.blocks[1].weight.requires_grad
    vit = tiny.timm_vit(16, 2)
    still = vit.pos_embed.detach().clone()
    finetune(vit, Pictures(size=32), NewHead(3), SETTINGS.model_copy(update={"train": "blocks", "steps": 2}))
    assert torch.equal(vit.pos_embed, still)
    assert all(p.grad is None for p in vit.parameters())


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    data = Pictures()
    data.pixels[:] = float("nan")
    with pytest.raises(TaskferryError, match="lower the learning rate"):
        finetune(Small(), data, NewHead(3), SETTINGS)


class Normed(Small):
    """With a normalisation that counts: its running means are state, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


def test_running_means_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Normed()
    again = copy.deepcopy(model)
    finetune(model, Pictures(), NewHead(3), SETTINGS, folder=tmp_path)
    finetune(again, Pictures(), NewHead(3), SETTINGS, folder=tmp_path)
    assert float(model.norm.running_mean.abs().sum()) > 0
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_checkpoint_of_another_model_or_objective_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    torch.manual_seed(2)
    with pytest.raises(TaskferryError, match=r"another run \(weights differ\)"):
        finetune(Small(), Pictures(), NewHead(3), SETTINGS, folder=tmp_path)
    torch.manual_seed(1)
    with pytest.raises(TaskferryError, match=r"another run \(samples, objective differ\)"):
        finetune(Small(), Pictures(36), NewHead(4), SETTINGS, folder=tmp_path)


def test_a_head_made_from_samples_does_not_learn() -> None:
    with pytest.raises(TaskferryError, match="NewHead"):
        finetune(Small(), Pictures(), Prototypes(), SETTINGS)


def judged(values: list[float], folder: Path | None = None, stop: int | None = None) -> tuple[nn.Module, History]:
    """A run whose judge says these losses, the start's first; the judge of a resumed run goes on where it was."""
    torch.manual_seed(1)
    model = Small()

    def judge() -> float:
        return values[said.pop(0)]

    def interrupt(step: int, _steps: int, _loss: float) -> None:
        if step == stop:
            raise KeyboardInterrupt

    kept = 0 if folder is None or not (folder / CHECKPOINT).exists() else 1 + looks_of(folder)
    said = list(range(kept, len(values)))
    history = History()
    with contextlib.suppress(KeyboardInterrupt):
        history = finetune(
            model, Pictures(), NewHead(3), JUDGED, folder=folder, judge=judge, dropout=False, progress=interrupt
        )
    return model, history


JUDGED = SETTINGS.model_copy(update={"every": 1, "validation": 0.0})


def looks_of(folder: Path) -> int:
    with open_safetensors(folder / CHECKPOINT, KIND) as (_, header):
        return len(header["evaluations"])


def test_the_weights_that_the_judge_likes_best_are_left() -> None:
    falling, history = judged([5.0, *(4.0 - i / 10 for i in range(10))])
    assert history.best == 10
    third, history = judged([5.0, 4.0, 3.0, 1.0, *[2.0] * 6, 9.0])
    assert history.best == 3
    assert [step for step, _ in history.judged] == list(range(11))  # to the end: a rise is often made good there
    late, history = judged([5.0, *[6.0] * 9, 1.0])
    assert history.best == 10
    assert torch.equal(late.blocks[0].weight, falling.blocks[0].weight)
    first, _ = judged([5.0, 4.0, 3.0, 1.0, 1.5, 2.5, 3.5, 1.2, 1.1, 9.0, 9.0])  # other words, the same choice
    assert torch.equal(third.blocks[0].weight, first.blocks[0].weight)
    assert not torch.equal(third.blocks[0].weight, falling.blocks[0].weight)


def test_a_judge_that_nothing_pleases_leaves_the_start() -> None:
    torch.manual_seed(1)
    start = Small()
    model, history = judged([1.0, 2.0, math.nan, *[2.0] * 8])
    assert history.best == 0
    for a, b in zip(model.parameters(), start.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_judged_run_that_was_killed_ends_with_the_same_bytes(tmp_path: Path, stop: int) -> None:
    values = [5.0, 4.0, 3.0, 1.0, *[2.0] * 6, 9.0]
    whole, _ = judged(values, tmp_path / "whole")
    judged(values, tmp_path / "half", stop)
    resumed, history = judged(values, tmp_path / "half")
    assert history.best == 3
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "half" / CHECKPOINT).read_bytes() == (tmp_path / "whole" / CHECKPOINT).read_bytes()
