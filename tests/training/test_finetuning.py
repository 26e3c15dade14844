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
from taskferry.objectives.objectives import NewHead
from taskferry.training import FineTuning, History, finetune
from taskferry.training.finetuning import CHECKPOINT, order, rate, split
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


def test_a_judge_is_asked_on_the_way_and_changes_nothing(tmp_path: Path) -> None:
    """A killed run ends with the same bytes, and hears what the judge has said before."""
    said: list[float] = []

    def run(folder: Path, stop: int | None = None) -> tuple[nn.Module, History]:
        torch.manual_seed(1)
        model = Small()

        def judge() -> float:
            said.append(float(model.blocks[0].weight.detach().sum()))
            return said[-1]

        def interrupt(step: int, _steps: int, _loss: float) -> None:
            if step == stop:
                raise KeyboardInterrupt

        history = History()
        with contextlib.suppress(KeyboardInterrupt):
            history = finetune(
                model, Pictures(), NewHead(3), JUDGED, folder=folder, judge=judge, dropout=False, progress=interrupt
            )
        return model, history

    whole, history = run(tmp_path / "whole")
    assert history.judged == list(enumerate(said, 1))
    torch.manual_seed(1)
    alone = Small()
    finetune(alone, Pictures(), NewHead(3), JUDGED, dropout=False)
    run(tmp_path / "half", stop=4)
    resumed, after = run(tmp_path / "half")
    assert after.judged == history.judged
    for a, b, c in zip(whole.parameters(), resumed.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert (tmp_path / "half" / CHECKPOINT).read_bytes() == (tmp_path / "whole" / CHECKPOINT).read_bytes()


def test_a_checkpoint_of_another_run_is_refused_or_begun_anew(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Small()
    begin = copy.deepcopy(model)
    finetune(model, Pictures(), NewHead(3), JUDGED, folder=tmp_path)
    other = JUDGED.model_copy(update={"learning_rate": 2 * JUDGED.learning_rate})
    with pytest.raises(TaskferryError, match="learning_rate differ"):
        finetune(begin, Pictures(), NewHead(3), other, folder=tmp_path)
    history = finetune(begin, Pictures(), NewHead(3), other, folder=tmp_path, anew=True)
    assert history.resumed == 0


JUDGED = SETTINGS.model_copy(update={"every": 1, "validation": 0.0})
