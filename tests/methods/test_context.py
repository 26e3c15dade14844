"""Prompts behind each other make the maps of the default; what is judged are single ones, which made none of them."""

from __future__ import annotations

import pytest
import torch

from taskferry import TaskferryError, TaskVector
from taskferry.fitting.objectives import LanguageModel
from taskferry.methods import Job, run
from tests.helpers.texts import WORDS, prompts
from tests.helpers.tiny import hf, relative
from tests.methods.test_twofold import flat


def asked(words: tuple[str, ...] = WORDS, micro_batch: int = 4) -> Job:
    """A pair of decoders that read the questions by two tokenizers."""
    torch.manual_seed(0)
    A, B = (hf("LlamaForCausalLM", width, 2, vocab_size=400, initializer_range=0.2).eval() for width in (16, 24))
    tau = {name: 0.05 * torch.randn(p.shape) for name, p in A.named_parameters() if name.endswith("proj.weight")}
    return Job.of(A, B, TaskVector(tau), prompts(micro_batch, words), LanguageModel())


def test_maps_see_the_others_and_losses_do_not() -> None:
    alone, together = (run("twofold", asked(), context=count, halfway=0.0) for count in (1, 3))
    assert relative(flat(together.tau), flat(alone.tau)) > 0.05
    assert alone.curve is not None
    assert together.curve is not None
    assert together.curve.loss(0.0) == alone.curve.loss(0.0)
    assert together.provenance["calibration"] == alone.provenance["calibration"]
    assert together.provenance["calibration"]["samples"] == len(WORDS)
    assert together.alignment is not None
    assert together.alignment.provenance["settings"]["context"] == 3


def test_how_samples_were_cut_does_not_matter() -> None:
    """Which stand together is a matter of the samples, not of the micro-batches."""
    first, second = (run("twofold", asked(micro_batch=size), context=3, halfway=0.0).tau for size in (2, 7))
    assert relative(flat(first), flat(second)) < 1e-4


def test_what_judges_made_no_map() -> None:
    """Other words in one part of the samples change the maps that are judged on the other part, and only those."""
    others = tuple("the end" if i % 2 == 0 else word for i, word in enumerate(WORDS))
    moved = [run("twofold", asked(words), context=3, halfway=0.0).without for words in (WORDS, others)]
    directions = [[flat(tau) / flat(tau).norm() for tau in some] for some in moved]
    assert relative(directions[0][0], directions[1][0]) < 1e-5
    assert relative(directions[0][1], directions[1][1]) > 0.05


def test_none_at_all_is_refused() -> None:
    with pytest.raises(TaskferryError, match="context is 1 or more"):
        run("twofold", asked(), context=0)
