"""From settings to a calibration set and its objectives: samples, labels, tokenizers and transforms of both models.

>>> prepared = prepare(settings, source, target, load_tuned("path/to/tuned", source))
>>> fit(source.model, target.model, prepared.calibration, prepared.objectives)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from taskferry.collect.device import place_of, wide
from taskferry.config import CalibrationSettings
from taskferry.data.batch import Batch, Calibration
from taskferry.data.builders import image_calibration, pair_calibration, text_calibration
from taskferry.data.data import Samples, load_samples, picture
from taskferry.data.language import (
    Segment,
    language_calibration,
    segments_of,
    sequence_calibration,
    with_template,
)
from taskferry.data.samplers import choose
from taskferry.data.seeing import seeing_calibration
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.models import Loaded, Tuned
from taskferry.objectives.answers import answers_of, is_blank, written
from taskferry.objectives.contrastive import Contrastive
from taskferry.objectives.heads import has_text_tower, objectives_of, taught
from taskferry.objectives.language import is_language_model, is_sequence_to_sequence, longest_text
from taskferry.objectives.objectives import LanguageModel, Objective
from taskferry.objectives.teacher import can_answer, teacher_model

_IMAGE_INPUT = {"timm": "x", "openclip": "image"}
_SOUND = ("input_features", "input_values")
LOOKED = 8  # samples whose answers tell whether the tuned source ends them
ENDING = 0.5  # share of its answers that a model ends which ends them at all
ANSWER = 64  # tokens that the tuned source may write where the data has no answer


@dataclass(frozen=True)
class Questions:
    """Prompts with their answers, in the order of the calibration set: what answers are scored on."""

    samples: tuple[Sequence[Segment], ...]
    ends: bool  # whether the tuned source ends its answers, so that ends count
    template: str | None = None  # the chat template of the source, where the target has none of its own


@dataclass(frozen=True)
class Prepared:
    """A calibration set with the objective of each model, and how it came about."""

    calibration: Calibration
    objectives: tuple[Objective, Objective]
    indices: tuple[int, ...]
    labels: str  # where they came from, for people
    by_data: bool = False  # whether each sample came with its class
    longest: int = 0  # text, in tokens: what is longer was cut
    questions: Questions | None = None  # of language models, where samples have prompts

    @property
    def taught(self) -> bool:
        """Whether the tuned source has labelled or answered some of them."""
        return "(teacher)" in self.labels

    def shots(self, side: int) -> list[Batch]:
        """The samples of one model: 0 the source, 1 the target."""
        return self.calibration.side(side)


def prepare(
    settings: CalibrationSettings,
    source: Loaded,
    target: Loaded,
    tuned: Tuned | None,
    classes: Sequence[str] = (),
    samples: Samples | None = None,
) -> Prepared:
    """Choose samples, label them, and prepare them for each model.

    `classes` numbers the names of labels; `samples` are those of `settings.calibration`, where they are loaded already.
    """
    _check_inputs(source, target)
    longest = longest_text(settings.max_length, source.model, target.model)
    settings = settings.model_copy(update={"max_length": longest})
    if samples is None:
        samples = load_samples(settings.calibration, label_column=settings.label_column, classes=classes)
    language = language_kind(source, target)
    lengths = {"max_length": settings.max_length, "micro_batch": settings.micro_batch}
    paired = samples.kind == "pairs"
    if samples.labels is None and settings.labels == "data" and language is None and not paired:
        raise TaskferryError(
            f"{settings.calibration} has no column '{settings.label_column}': name it with --set label_column=NAME, "
            "or let the tuned source give the labels with --labels teacher"
        )

    def features(samples: Samples = samples) -> Tensor:
        return _features(samples, source, **lengths)

    indices = _chosen(settings, samples, features)
    if samples.kind == "text" and language is None:  # texts of one length stand together: less padding to compute
        indices = sorted(
            indices, key=lambda i: sum(len(str(samples.rows[i].get(n, ""))) for n in ("text", "text_pair"))
        )
    chosen = samples.take(indices)
    if language is not None:
        if settings.objective not in ("auto", "language"):
            raise TaskferryError(
                f"the objective '{settings.objective}' is for encoders; language models use their own loss"
            )
        calibration, labels, kept, questions = _language(settings, chosen, source, target, tuned, language)
        return Prepared(
            calibration,
            (LanguageModel(), LanguageModel()),
            tuple(indices[i] for i in kept),
            labels,
            longest=longest,
            questions=questions,
        )
    if paired:
        check_pairs(settings.objective, settings.labels)
        calibration = encoder_calibration(chosen, source, target, **lengths)
        return Prepared(
            calibration, (Contrastive(), Contrastive()), tuple(indices), "the pairs themselves", longest=longest
        )
    by_teacher = settings.labels == "teacher" or chosen.labels is None
    calibration = encoder_calibration(chosen, source, target, **lengths)
    labels = "from the data"
    if samples.left_out:
        labels += f" ({samples.left_out} rows have none and are left out)"
    if by_teacher:
        numbers, classes = taught(settings, calibration, chosen, source, tuned)
        calibration, chosen = calibration.with_labels(numbers), replace(chosen, classes=classes, sorted=True)
        labels = "from the tuned source (teacher)"
        if samples.labels is None and settings.labels == "auto":
            labels += ", because the data has none"
    objectives = objectives_of(settings, chosen, source, target)
    return Prepared(calibration, objectives, tuple(indices), labels, by_data=not by_teacher, longest=longest)


def _chosen(settings: CalibrationSettings, samples: Samples, features: Callable[[], Tensor] | None) -> list[int]:
    return choose(
        len(samples),
        settings.samples,
        labels=samples.labels,
        per_class=settings.per_class,
        sampler=settings.sampler,
        seed=settings.seed,
        features=features,
    )


def check_samples(settings: CalibrationSettings, samples: Samples) -> None:
    """Refuse samples that no causal language model reads, as far as no model is needed for that."""
    check_kind(samples, "causal")
    if samples.kind in ("prompt", "pictured") or settings.sampler.startswith("centroid"):
        return
    for i in _chosen(settings, samples, None):
        segments_of(samples.rows[i])


def check_kind(samples: Samples, language: str | None) -> None:
    """Refuse samples whose columns are for models of another kind."""
    if language is None and samples.kind in ("prompt", "messages"):
        raise TaskferryError(f"{samples.source} has {samples.kind} rows: an encoder needs a text column")
    if language is not None and samples.kind == "image":
        raise TaskferryError(f"{samples.source} has images: a language model needs text, prompts or messages")
    if language == "sequence" and samples.kind not in ("prompt", "pictured"):
        raise TaskferryError(f"{samples.source}: an encoder-decoder needs the columns prompt and completion")


def language_kind(source: Loaded, target: Loaded) -> str | None:
    """ "causal" or "sequence" for two language models, None for encoders."""
    kinds = []
    for loaded in (source, target):
        sequence = is_sequence_to_sequence(loaded.model)
        kinds.append(("sequence" if sequence else "causal") if is_language_model(loaded.model) else None)
    if kinds[0] != kinds[1]:
        raise TaskferryError(
            f"{source.given} is a {type(source.model).__name__}, {target.given} a {type(target.model).__name__}: "
            "their losses differ; give two models of one kind"
        )
    return kinds[0]


def encoder_calibration(
    samples: Samples, source: Loaded, target: Loaded | None, *, max_length: int, micro_batch: int
) -> Calibration:
    """Samples of an encoder or image-text model, prepared for both models, or for one that serves as both."""
    if samples.kind in ("image", "pictured"):
        keys = (_image_key(source), _image_key(target or source))
        images = [picture(row) for row in samples.rows]
        transforms = (source.image_transform(), None if target is None else target.image_transform())
        return image_calibration(images, *transforms, key=keys, labels=samples.labels, micro_batch=micro_batch)
    if samples.kind == "pairs":
        return _pairs(samples, source, target, max_length=max_length, micro_batch=micro_batch)
    check_kind(samples, None)
    if any(not isinstance(row["text"], str) for row in samples.rows):
        raise TaskferryError(f"{samples.source} has rows without text: fill them, or leave them out")
    pairs = [row.get("text_pair") for row in samples.rows]
    missing = sum(pair is None for pair in pairs)
    if 0 < missing < len(pairs):
        raise TaskferryError(
            f"{samples.source}: {missing} of {len(pairs)} rows have no text_pair: fill them, or leave it out"
        )
    return text_calibration(
        [str(row["text"]) for row in samples.rows],
        source.tokenizer(),
        None if target is None else target.tokenizer(),
        pairs=None if missing else [str(p) for p in pairs],
        labels=samples.labels,
        max_length=max_length,
        micro_batch=micro_batch,
    )


def _pairs(
    samples: Samples, source: Loaded, target: Loaded | None, *, max_length: int, micro_batch: int
) -> Calibration:
    for loaded in (source, target or source):
        if has_text_tower(loaded):
            raise TaskferryError(
                f"{samples.source} has pairs of texts, which are for sentence encoders; {loaded.given} is a "
                f"{type(loaded.model).__name__}: give data with other columns"
            )
    tokenizers = source.tokenizer(), None if target is None else target.tokenizer()
    texts = [row["texts"] for row in samples.rows]
    return pair_calibration(texts, *tokenizers, max_length=max_length, micro_batch=micro_batch)


def check_pairs(objective: str, labels: str = "auto") -> None:
    """Pairs of texts have one loss, and no classes."""
    if objective != "auto":
        raise TaskferryError(
            f"the objective '{objective}' scores classes, the samples are pairs of texts: leave objective out"
        )
    if labels == "teacher":
        raise TaskferryError("pairs of texts have no labels that a teacher could give: leave --labels teacher out")


def one_sided(samples: Samples, loaded: Loaded, *, max_length: int, micro_batch: int) -> list[Batch]:
    """Samples as one model takes them: for scoring and training."""
    lengths = {"max_length": max_length, "micro_batch": micro_batch}
    if not is_language_model(loaded.model):
        return encoder_calibration(samples, loaded, None, **lengths).side(0)
    kind = language_kind(loaded, loaded)
    if samples.kind == "pictured":
        images = [picture(row) for row in samples.rows]
        return _seeing(samples, images, kind, loaded, None, False, **lengths).side(0)
    build = _builder(kind, samples)
    ends = {} if kind == "sequence" else {"ends": True}
    return build([segments_of(row) for row in samples.rows], loaded.tokenizer(), **lengths, **ends).side(0)


def _check_inputs(*models: Loaded) -> None:
    """Refuse models that read what no data file holds."""
    for loaded in models:
        if getattr(loaded.model, "main_input_name", None) in _SOUND:
            raise TaskferryError(
                f"{loaded.given} is a {type(loaded.model).__name__}, which reads sound, and data files hold texts or "
                "images: call taskferry.fit on a Calibration of its features in Python"
            )


def _image_key(loaded: Loaded) -> str:
    return _IMAGE_INPUT.get(family_of(loaded.model).name, "pixel_values")


def _language(
    settings: CalibrationSettings, samples: Samples, source: Loaded, target: Loaded, tuned: Tuned | None, kind: str
) -> tuple[Calibration, str, list[int], Questions | None]:
    """The calibration set, where its answers came from, which of the samples have one, and the prompts."""
    origin = "the answers in the chats" if samples.kind == "messages" else "the text itself"
    rows = [dict(row) for row in samples.rows]
    kept = list(range(len(rows)))
    lengths = {"max_length": settings.max_length, "micro_batch": settings.micro_batch}
    check_kind(samples, kind)
    if samples.kind == "pictured":
        if settings.labels == "teacher":
            raise TaskferryError("the teacher answers prompts of text: leave --labels teacher out for rows with images")
        images = [picture(row) for row in rows]
        kept = sorted(kept, key=lambda i: images[i].size)  # pictures of one size stand together
        ordered = [images[i] for i in kept]
        seen = _seeing(samples.take(kept), ordered, kind, source, target, True, **lengths)
        return seen, "the answers in the data", kept, None
    tokenizer_A, tokenizer_B = source.tokenizer(), target.tokenizer()
    stopped: bool | None = None
    borrowed = samples.kind == "messages" and with_template(tokenizer_B, tokenizer_A)
    if samples.kind == "prompt":
        origin = "the completions in the data"
        if any(not isinstance(row["prompt"], str) for row in rows):
            raise TaskferryError(f"{settings.calibration} has rows without a prompt: fill them, or leave them out")
        asked = [row for row in rows if settings.labels == "teacher" or row.get("completion") is None]
        if asked and settings.labels == "data":
            raise TaskferryError(f"{settings.calibration}: {len(asked)} rows have no completion: use --labels teacher")
        if asked:
            origin = f"{len(asked)} completions of the tuned source (teacher)"
            prompts = [row["prompt"] for row in asked]
            with teacher_model(source, tuned) as teacher:
                answers = written(teacher.model, tokenizer_A, prompts, length=ANSWER, batch=settings.micro_batch)
            for row, answer in zip(asked, answers, strict=True):
                row["completion"] = answer.text
            stopped = sum(answer.stopped for answer in answers) >= ENDING * len(answers)
            blank = [id(row) for row in asked if is_blank(row["completion"])]
            if len(blank) == len(rows):
                raise TaskferryError("the tuned source answers every prompt with nothing: give completions in the data")
            if blank:
                made = len(asked) - len(blank)
                origin = f"{made} completions of the tuned source (teacher); {len(blank)} blank ones left out"
            kept = [i for i, row in enumerate(rows) if id(row) not in blank]
    elif settings.labels == "teacher":
        raise TaskferryError("the teacher answers prompts: give a prompt column, or leave --labels teacher out")
    read = {i: segments_of(rows[i]) for i in kept}
    kept = sorted(kept, key=lambda i: sum(len(segment.text) for segment in read[i]))  # less padding to compute
    segments: Sequence[list[Segment]] = [read[i] for i in kept]
    build, questions, ends = _builder(kind, samples), None, {}
    if samples.kind != "text":
        questions = Questions(
            tuple(segments),
            ends=kind == "sequence" or (_ends(segments, source, tuned) if stopped is None else stopped),
            template=tokenizer_B.chat_template if borrowed else None,
        )
        ends = {} if kind == "sequence" else {"ends": questions.ends}
        origin += "" if questions.ends else "; the tuned source does not end its answers, so their ends do not count"
        origin += f"; in the chat template of {source.given}, for the target has none" if borrowed else ""
    return build(segments, tokenizer_A, tokenizer_B, **lengths, **ends), origin, kept, questions


def _ends(samples: Sequence[Sequence[Segment]], source: Loaded, tuned: Tuned | None) -> bool:
    """True where the tuned source ends its answers, as fine-tunes usually do: also where it is not there to try."""
    if not can_answer(tuned):
        return True
    with teacher_model(source, tuned) as teacher:
        score = answers_of(teacher.model, source.tokenizer(), samples[:: -(-len(samples) // LOOKED)])
    return score.stopped >= 100 * ENDING


def _seeing(
    samples: Samples,
    images: Sequence[Any],
    kind: str | None,
    source: Loaded,
    target: Loaded | None = None,
    alike: bool = False,
    *,
    max_length: int,
    micro_batch: int,
) -> Calibration:
    """Samples with an image each, for language models that also see."""
    if kind == "sequence":
        raise TaskferryError(
            f"{samples.source} has images with words: an encoder-decoder needs prompt and completion alone"
        )
    processors = source.processor(), None if target is None else target.processor()
    return seeing_calibration(
        samples.rows, images, *processors, max_length=max_length, micro_batch=micro_batch, alike=alike
    )


def _builder(kind: str | None, samples: Samples) -> Callable[..., Calibration]:
    """How samples of a language model are prepared."""
    check_kind(samples, kind)
    return sequence_calibration if kind == "sequence" else language_calibration


def _features(samples: Samples, loaded: Loaded, *, max_length: int, micro_batch: int) -> Tensor:
    """[total, d] of all samples, a part at a time: their tensors together may not fit."""
    family, place, found = family_of(loaded.model), place_of(loaded.model), []
    with torch.no_grad():
        for start in range(0, len(samples), 16 * micro_batch):
            part = samples.take(range(start, min(start + 16 * micro_batch, len(samples))))
            batches = one_sided(part, loaded, max_length=max_length, micro_batch=micro_batch)
            found += [wide(family.features(loaded.model, batch.to(*place))).cpu() for batch in batches]
    return torch.cat(found)
