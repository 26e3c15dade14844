"""Padding on the left: a sample gives the same loss and the same rows as it does alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from taskferry import Batch, Calibration, LanguageModel, Objective, TaskVector, evaluate, fit
from taskferry.collect.recorder import Recorder
from taskferry.data.batch import IGNORED
from taskferry.layers import family_of
from taskferry.layers.discovery import find_sites
from tests.helpers.tiny import TINY, VOCABULARY, hf, relative, tuned

PAD = 1  # RoBERTa's
LENGTHS = (9, 4, 7, 2)


def opt(width: int, depth: int) -> nn.Module:
    return hf("OPTForCausalLM", width, depth, vocab_size=VOCABULARY, ffn_dim=2 * width, word_embed_proj_dim=width)


def model_of(name: str, seed: int = 0, width: int = 16) -> nn.Module:
    if name != "opt":
        return TINY[name].model(width, 2, seed).double()
    torch.manual_seed(seed)
    return opt(width, 2).double().eval()


def sample(i: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(i))


def padded(name: str, left: bool) -> Batch:
    """All samples in one micro-batch."""
    ids = torch.full((len(LENGTHS), max(LENGTHS)), PAD)
    mask = torch.zeros_like(ids)
    for i, length in enumerate(LENGTHS):
        place = slice(ids.shape[1] - length, None) if left else slice(0, length)
        ids[i, place], mask[i, place] = sample(i, length), 1
    return batch_of(name, ids, mask, range(len(LENGTHS)))


def alone(name: str) -> list[Batch]:
    """Each sample in a micro-batch of its own, without padding."""
    singles = [sample(i, length)[None] for i, length in enumerate(LENGTHS)]
    return [batch_of(name, ids, torch.ones_like(ids), range(i, i + 1)) for i, ids in enumerate(singles)]


def batch_of(name: str, ids: Tensor, mask: Tensor, samples: range) -> Batch:
    inputs = {"input_ids": ids, "attention_mask": mask}
    if isinstance(objective_of(name), LanguageModel):
        inputs["labels"] = ids.masked_fill(mask == 0, IGNORED)
    return Batch(inputs, torch.tensor([i % 2 for i in samples]), tuple(samples))


def objective_of(name: str) -> Objective:
    return LanguageModel() if name == "opt" else TINY[name].objective


def rows_of(model: nn.Module, objective: Objective, batches: list[Batch], bound: list[Batch]) -> dict[str, Tensor]:
    """Loss, inputs and output gradients of every site, padding left out."""
    loss, rows = objective.bind(model, bound), {}
    for batch in batches:
        real = batch.inputs["attention_mask"].bool()

        def note(key: str, x: Tensor, real: Tensor = real) -> None:
            x = x[real] if x.shape[1] == real.shape[1] and x.shape[1] > 1 else x.flatten(0, 1)
            rows[key] = torch.cat([rows[key], x.detach()]) if key in rows else x.detach()

        with Recorder(
            model, [site for site in find_sites(model) if site.fixed is None], samples=len(batch),
            on_forward=lambda call, x, y: note(f"{call.site.name} in", x),
            on_gradient=lambda call, g: note(f"{call.site.name} out", g),
        ):  # fmt: skip
            value = loss(batch)
        value.backward()
        rows["loss"] = rows.get("loss", 0.0) + value.detach()
    return rows


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "opt", "bert", "roberta"])
def test_a_padded_sample_gives_what_it_gives_alone(name: str, left: bool) -> None:
    model, objective = model_of(name), objective_of(name)
    together = rows_of(model, objective, [padded(name, left)], alone(name))
    one_by_one = rows_of(model, objective, alone(name), alone(name))
    assert together.keys() == one_by_one.keys()
    assert len(together) > 10
    for key, rows in one_by_one.items():
        if "pooler" in key:
            continue  # it reads the first token, whatever that is, and the loss does not read it
        assert relative(together[key], rows) < 1e-5, key


def test_features_and_scores_do_not_see_padding() -> None:
    model = model_of("gpt2")
    family = family_of(model)
    with torch.no_grad():
        features = [family.features(model, batch) for batch in (padded("gpt2", True), *alone("gpt2"))]
    assert relative(features[0], torch.cat(features[1:])) < 1e-5
    padded_score, score = (
        evaluate(model, batches, LanguageModel()).loss for batches in ([padded("gpt2", True)], alone("gpt2"))
    )
    assert padded_score == pytest.approx(score, rel=1e-5)


def test_maps_do_not_see_padding() -> None:
    A, B = model_of("gpt2"), model_of("gpt2", 1, 24)
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    moved = [
        fit(A, B, Calibration((b, b) for b in batches)).apply(tau)
        for batches in ([padded("gpt2", True)], [padded("gpt2", False)], alone("gpt2"))
    ]
    for other in moved[:2]:
        assert all(relative(other.deltas[n], d) < 1e-5 for n, d in moved[2].deltas.items())


def test_positions_that_are_given_stay() -> None:
    model, batch = model_of("gpt2"), padded("gpt2", True)
    own = Batch({**batch.inputs, "position_ids": torch.arange(9).expand(4, 9)})
    assert family_of(model).arguments(model, own)["position_ids"] is own.inputs["position_ids"]
    for name in ("gpt2", "llama"):
        right = padded(name, False)
        assert family_of(model).arguments(model, right).keys() == right.inputs.keys()
    for name in ("opt", "roberta"):  # they count the mask, or the tokens, by themselves
        other = model_of(name)
        assert "position_ids" not in family_of(other).arguments(other, padded(name, True))
