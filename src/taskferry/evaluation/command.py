"""From settings to a score: a model folder, perhaps something added to it, and held-out samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from taskferry.choices import TEMPLATE
from taskferry.config import EvaluateSettings
from taskferry.data.language import segments_of
from taskferry.data.samples import Samples, choose, held_out_split, load_samples
from taskferry.display.bars import Tell
from taskferry.errors import TaskferryError
from taskferry.evaluation.pool import LazyBatches, Pool
from taskferry.evaluation.scoring import Score, evaluate
from taskferry.models import Loaded, by_reason, load_model, load_tuned
from taskferry.models.classifiers import has_own_head
from taskferry.models.models import resolve
from taskferry.objectives.answers import answers_of
from taskferry.objectives.heads import has_text_tower, named_classifier
from taskferry.objectives.language import is_language_model
from taskferry.objectives.objectives import Classifier, Contrastive, LanguageModel, Objective
from taskferry.objectives.preparation import check_pairs


def evaluate_command(settings: EvaluateSettings, progress: Tell | None = None) -> tuple[Score, str, list[str]]:
    """The score, what scored, and what of a fine-tune had no part in it."""
    loaded = load_model(settings.model, dtype=settings.dtype)
    loaded.to(settings.device)
    left: list[str] = []
    if settings.add is not None:
        tuned = load_tuned(settings.add, loaded)
        rest = tuned.add_to(loaded.model, settings.scale)
        left = by_reason(rest, "was not added")
        given = set() if tuned.adapter is None else set(tuned.adapter.saved).difference(rest)
        loaded = replace(loaded, absent=loaded.absent - given)
        _take_template(loaded, Path(resolve(settings.add)))
    shots = None if settings.shots is None else load_samples(settings.shots, label_column=settings.label_column)
    known = () if shots is None else shots.classes
    test = load_samples(
        settings.test, label_column=settings.label_column, classes=known, split=held_out_split(settings.test)
    )
    test = test if shots is None else replace(test, sorted=shots.sorted)  # which numbered their classes
    objective = _objective(settings, loaded, test)
    if isinstance(objective, Classifier) and objective.fitted and shots is None:
        raise TaskferryError(
            f"{type(loaded.model).__name__} is scored here by {objective.words}: give --shots, samples that it is made "
            "from"
        )
    pool = Pool(test, loaded, max_length=settings.max_length)
    batches = LazyBatches(pool, sorted(choose(len(test), settings.test_samples)), settings.micro_batch)
    support = []
    if shots is not None:
        support = Pool(shots, loaded, max_length=settings.max_length).batches(range(len(shots)), settings.micro_batch)
    score = evaluate(loaded.model, batches, objective, support, progress)
    if score.exact is not None and not settings.quick and test.kind in ("prompt", "messages"):
        samples = [segments_of(row) for row in test.take(batches.indices).rows]
        answers = answers_of(loaded.model, loaded.tokenizer(), samples, batch=settings.micro_batch, progress=progress)
        facts: dict[str, Any] = answers.facts()
        score = replace(score, **facts)
    if pool.full:
        told = f"{len(pool.full)} of {score.samples} samples fill all {pool.max_length} tokens"
        left = [*left, f"{told}: what is longer is left out; give a larger --max-length"]
    return score, objective.words, left


def _take_template(loaded: Loaded, added: Path) -> None:
    """Give a tokenizer without a chat template the one that stands beside what was added."""
    file = added / TEMPLATE
    if is_language_model(loaded.model) and file.is_file() and not getattr(loaded.tokenizer(), "chat_template", None):
        loaded.tokenizer().chat_template = file.read_text(encoding="utf-8")


def _objective(settings: EvaluateSettings, loaded: Loaded, test: Samples) -> Objective:
    name = settings.objective
    if is_language_model(loaded.model):
        if name not in ("auto", "language"):
            raise TaskferryError(f"the objective '{name}' is for encoders; a language model is scored by its loss")
        return LanguageModel()
    if test.kind == "pairs":
        check_pairs(name)
        return Contrastive()
    if name == "auto":
        if has_own_head(loaded.model) and settings.shots is None:
            name = "head"
        else:
            name = "zero-shot" if has_text_tower(loaded) and test.kind == "image" and test.classes else "probe"
    return named_classifier(name, loaded, test, settings.templates)
