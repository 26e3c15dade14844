"""The package moves what a plain second writing of the methods moves, to the last digits of double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry import Batch, Calibration, TaskVector, fit
from taskferry.collect.maps import Maps
from tests.helpers.tiny import TINY, double, hf, per_sample, relative, text
from tests.properties import reference

BOUND = 1e-9  # ‖product − reference‖ / ‖reference‖ of every parameter; rounding leaves 4e-12 or less
MICRO_BATCH = 8
IGNORED = -100


def by_class(features: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy with a frozen head of waves: any width, and a gradient in every sample."""
    waves = torch.arange(1, 4)[:, None] * torch.arange(features.shape[1])
    return F.cross_entropy(features @ torch.sin(waves.to(features)).T / 4, batch.labels, reduction="sum")


def of_images(model: nn.Module, batch: Batch) -> Tensor:
    return by_class(model(**batch.inputs).last_hidden_state[:, 0], batch)


def of_texts(model: nn.Module, batch: Batch) -> Tensor:
    mask = batch.inputs["attention_mask"][..., None]
    return by_class((model(**batch.inputs).last_hidden_state * mask).sum(1) / mask.sum(1), batch)


def of_tokens(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = model(**batch.inputs).logits, batch.inputs["labels"]
    if not model.config.is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Case:
    """Two models of a family that differ in all that may differ, and the samples that both read."""

    model: Callable[[int], nn.Module]  # 0 is the narrow and shallow one, 1 the wide and deep one
    batch: Callable[[int, int, int], Batch]  # (which model, first sample, number)
    loss: Callable[[nn.Module, Batch], Tensor]
    grids: tuple[tuple[int, int], ...] = ()


def pictures(which: int, first: int, n: int) -> Batch:
    size = (32, 32) if which == 0 else (32, 48)  # patches of 8: grids of 4 × 4 and 4 × 6
    pixels = per_sample(first, n, lambda g: torch.randn(3, 32, 48, generator=g))
    pixels = F.interpolate(pixels, size, mode="bilinear")
    return Batch({"pixel_values": pixels}, torch.arange(first, first + n) % 3, tuple(range(first, first + n)))


def vit(which: int) -> nn.Module:
    size = (32, 32) if which == 0 else (32, 48)
    built = replace(TINY["vit"], build=lambda w, d: hf("ViTModel", w, d, image_size=size, patch_size=8))
    return built.model(*((16, 2), (24, 3))[which], seed=which)


def llama(which: int) -> nn.Module:
    heads = ({"num_attention_heads": 4, "num_key_value_heads": 2}, {"num_attention_heads": 6, "num_key_value_heads": 2})
    built = replace(TINY["llama"], build=lambda w, d: hf("LlamaForCausalLM", w, d, vocab_size=40, **heads[which]))
    return built.model(*((16, 2), (36, 4))[which], seed=which)


CASES = {
    "vit": Case(vit, pictures, of_images, ((4, 4), (4, 6))),
    "bert": Case(lambda i: TINY["bert"].model(*((16, 2), (24, 4))[i], seed=i), lambda _, *at: text(*at), of_texts),
    "llama": Case(llama, lambda _, *at: text(*at, "causal"), of_tokens),
    "t5": Case(lambda i: TINY["t5"].model(*((16, 2), (24, 4))[i], seed=i), lambda _, *at: text(*at, "sequence"),
               of_tokens),
}  # fmt: skip


def masks(batch: Batch) -> list[Tensor]:
    """Which tokens count: no padding, and of a decoder those that have something to predict."""
    found = [batch.inputs["attention_mask"] == 1] if "attention_mask" in batch.inputs else []
    return [*found, batch.inputs["labels"] != IGNORED] if "labels" in batch.inputs else found


def random_change(model: nn.Module) -> dict[str, Tensor]:
    """Of every weight and bias of a linear layer but the head, which no method moves."""
    g = torch.Generator().manual_seed(7)
    layers = (n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and n != "lm_head")
    parameters = [(f"{n}.{k}", p) for n in layers for k, p in model.get_submodule(n).named_parameters()]
    return {name: torch.randn(p.shape, generator=g, dtype=torch.float64) for name, p in parameters}


def moved_by_the_package(
    method: str, A: nn.Module, B: nn.Module, calibration: Calibration, loss: Callable[..., Tensor], tau: TaskVector
) -> dict[str, Tensor]:
    """The one place that knows how the package is asked for each method."""
    if method == "bico":
        alignment = fit(A, B, calibration, loss)
    else:
        alignment = fit(A, B, calibration, loss, maps=Maps(outputs="activations"))
    return dict(alignment.apply(tau).deltas)


def check(name: str, source: int, method: str, samples: int = 24) -> None:
    case, target = CASES[name], 1 - source
    A, B = case.model(source).double(), case.model(target).double()
    tau = random_change(A)
    at = [(first, min(MICRO_BATCH, samples - first)) for first in range(0, samples, MICRO_BATCH)]
    pairs = [(double(case.batch(source, *one)), double(case.batch(target, *one))) for one in at]
    moved = moved_by_the_package(method, A, B, Calibration(pairs), case.loss, TaskVector(tau))
    expected = reference.move(
        A, B, case.loss, [(a, b, masks(b)) for a, b in pairs], tau, outputs="g" if method == "bico" else "y",
        grids=(case.grids[source], case.grids[target]) if case.grids else None,
    )  # fmt: skip
    reached = {n for n in random_change(B) if method == "theseus" or "pooler" not in n}  # no loss reads the pooler
    assert moved.keys() == expected.keys() == reached
    errors = {n: relative(moved[n], expected[n]) for n in expected}
    assert all(error < BOUND for error in errors.values()), {n: e for n, e in errors.items() if not e < BOUND}


@pytest.mark.parametrize("method", ["bico", "theseus"])
@pytest.mark.parametrize("source", [0, 1], ids=["to-wide-and-deep", "to-narrow-and-shallow"])
@pytest.mark.parametrize("name", CASES)
def test_the_package_equals_the_reference(name: str, source: int, method: str) -> None:
    check(name, source, method)


@pytest.mark.parametrize("samples", [3, 10])
def test_samples_that_show_few_directions(samples: int) -> None:
    """Only the class token has a gradient in the last block: three rows for maps of 24 to 48 directions."""
    check("vit", 0, "bico", samples)
