"""From settings to a calibration set and its objectives: samples, labels, tokenizers and transforms of both models.

>>> prepared = prepare(settings, source, target, load_tuned("path/to/tuned", source))
>>> fit(source.model, target.model, prepared.calibration, prepared.objectives)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from taskferry.config import CalibrationSettings
from taskferry.data.batch import Batch, Calibration
from taskferry.data.builders import image_calibration, pair_calibration, text_calibration
from taskferry.data.forms import Row
from taskferry.data.language import Segment, language_calibration, segments_of, sequence_calibration, with_template
from taskferry.data.samples import Samples, choose, load_samples, picture
from taskferry.data.seeing import seeing_calibration
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.models import Loaded, Tuned
from taskferry.objectives.answers import answers_of, is_blank, written
from taskferry.objectives.heads import has_text_tower, objectives_of, taught
from taskferry.objectives.language import is_language_model, is_sequence_to_sequence, longest_text
from taskferry.objectives.objectives import Contrastive, LanguageModel, Objective
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
    indices: tuple[int, ...]  # of the samples in the data
    labels: str  # where they came from, for people
    longest: int = 0  # text, in tokens: what is longer was cut
    questions: Questions | None = None  # of language models, where samples have prompts

    @property
    def taught(self) -> bool:
        """Whether the tuned source has labelled or answered some of them."""
        return "(teacher)" in self.labels


def prepare(
    settings: CalibrationSettings, source: Loaded, target: Loaded, tuned: Tuned | None, samples: Samples | None = None
) -> Prepared:
    """Choose samples, label them, and prepare them for each model.

    Args:
        settings: Which samples, how many, and where labels come from.
        source: The base model that was tuned.
        target: The base model to move to.
        tuned: The fine-tune, which labels and answers where the data does not; None where it is not in memory.
        samples: Those of `settings.calibration`, where they are loaded already.
    """
    for loaded in (source, target):
        if getattr(loaded.model, "main_input_name", None) in _SOUND:
            raise TaskferryError(
                f"{loaded.given} is a {type(loaded.model).__name__}, which reads sound, and data files hold texts or "
                "images: call taskferry.fit on a Calibration of its features in Python"
            )
    longest = longest_text(settings.max_length, source.model, target.model)
    settings = settings.model_copy(update={"max_length": longest})
    if samples is None:
        samples = load_samples(settings.calibration, label_column=settings.label_column)
    language = language_kind(source, target)
    indices = _chosen(settings, samples)
    if language is not None:
        prepared = _language(settings, samples.take(indices), source, target, tuned, language)
        return replace(prepared, indices=tuple(indices[i] for i in prepared.indices), longest=longest)
    lengths = {"max_length": longest, "micro_batch": settings.micro_batch}
    if samples.kind == "text":  # texts of one length stand together: less padding to compute
        sizes = [sum(len(str(row.get(name, ""))) for name in ("text", "text_pair")) for row in samples.rows]
        indices.sort(key=lambda i: sizes[i])
    chosen = samples.take(indices)
    if samples.kind == "pairs":
        check_pairs(settings.objective, settings.labels)
        both = Contrastive(), Contrastive()
        calibration = encoder_calibration(chosen, source, target, **lengths)
        return Prepared(calibration, both, tuple(indices), "the pairs themselves", longest)
    if samples.labels is None and settings.labels == "data":
        raise TaskferryError(
            f"{samples.source} has no column '{settings.label_column}': name it with --set label_column=NAME, "
            "or let the tuned source give the labels with --labels teacher"
        )
    calibration = encoder_calibration(chosen, source, target, **lengths)
    origin = "from the data"
    if samples.left_out:
        origin += f" ({samples.left_out} rows have none and are left out)"
    if settings.labels == "teacher" or samples.labels is None:
        numbers, classes = taught(settings, calibration, chosen, source, tuned)
        calibration, chosen = calibration.with_labels(numbers), replace(chosen, classes=classes, sorted=True)
        because = ", because the data has none" if samples.labels is None and settings.labels == "auto" else ""
        origin = f"from the tuned source (teacher){because}"
    objectives = objectives_of(settings, chosen, source, target)
    return Prepared(calibration, objectives, tuple(indices), origin, longest)


def _chosen(settings: CalibrationSettings, samples: Samples) -> list[int]:
    total, n, per_class = len(samples), settings.samples, settings.per_class
    return choose(total, n, labels=samples.labels, per_class=per_class, seed=settings.seed)


def check_samples(settings: CalibrationSettings, samples: Samples) -> None:
    """Refuse samples that no causal language model reads, as far as no model is needed for that."""
    check_kind(samples, "causal")
    if samples.kind not in ("prompt", "pictured"):
        for i in _chosen(settings, samples):
            segments_of(samples.rows[i])


def check_kind(samples: Samples, language: str | None) -> None:
    """Refuse samples whose columns are for models of another kind."""
    if language is None and samples.kind in ("prompt", "messages"):
        raise TaskferryError(f"{samples.source} has {samples.kind} rows: an encoder needs a text column")
    if language is not None and samples.kind == "image":
        raise TaskferryError(f"{samples.source} has images: a language model needs text, prompts or messages")
    if language == "sequence" and samples.kind not in ("prompt", "pictured"):
        raise TaskferryError(f"{samples.source}: an encoder-decoder needs the columns prompt and completion")


def check_pairs(objective: str, labels: str = "auto") -> None:
    """Refuse other losses, and classes, for pairs of texts."""
    if objective != "auto":
        raise TaskferryError(
            f"the objective '{objective}' scores classes, the samples are pairs of texts: leave objective out"
        )
    if labels == "teacher":
        raise TaskferryError("pairs of texts have no labels that a teacher could give: leave --labels teacher out")


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
    models = (source, target or source)
    if samples.kind in ("image", "pictured"):
        keys = [_IMAGE_INPUT.get(family_of(loaded.model).name, "pixel_values") for loaded in models]
        images = [picture(row) for row in samples.rows]
        transforms = source.image_transform(), None if target is None else target.image_transform()
        return image_calibration(
            images, *transforms, key=(keys[0], keys[1]), labels=samples.labels, micro_batch=micro_batch
        )
    if samples.kind == "pairs":
        for loaded in models:
            if has_text_tower(loaded):
                raise TaskferryError(
                    f"{samples.source} has pairs of texts, which are for sentence encoders; {loaded.given} is a "
                    f"{type(loaded.model).__name__}: give data with other columns"
                )
    check_kind(samples, None)
    tokenizers = source.tokenizer(), None if target is None else target.tokenizer()
    if samples.kind == "pairs":
        texts = [row["texts"] for row in samples.rows]
        return pair_calibration(texts, *tokenizers, max_length=max_length, micro_batch=micro_batch)
    columns = {name: [row.get(name) for row in samples.rows] for name in ("text", "text_pair")}
    if not all(isinstance(text, str) for text in columns["text"]):
        raise TaskferryError(f"{samples.source} has rows without text: fill them, or leave them out")
    missing = sum(text is None for text in columns["text_pair"])
    if 0 < missing < len(samples):
        raise TaskferryError(
            f"{samples.source}: {missing} of {len(samples)} rows have no text_pair: fill them, or leave it out"
        )
    return text_calibration(
        [str(text) for text in columns["text"]],
        *tokenizers,
        pairs=None if missing else [str(text) for text in columns["text_pair"]],
        labels=samples.labels,
        max_length=max_length,
        micro_batch=micro_batch,
    )


def one_sided(samples: Samples, loaded: Loaded, *, max_length: int, micro_batch: int) -> list[Batch]:
    """Samples as one model takes them: for scoring and training."""
    if not is_language_model(loaded.model):
        return encoder_calibration(samples, loaded, None, max_length=max_length, micro_batch=micro_batch).side(0)
    kind = language_kind(loaded, loaded)
    check_kind(samples, kind)
    if samples.kind == "pictured":
        images = [picture(row) for row in samples.rows]
        return _pictured(samples, images, kind, (loaded,), max_length, micro_batch).side(0)
    segments = [segments_of(row) for row in samples.rows]
    return _texts(segments, kind, (loaded.tokenizer(),), max_length, micro_batch, ends=True).side(0)


def _language(
    settings: CalibrationSettings, samples: Samples, source: Loaded, target: Loaded, tuned: Tuned | None, kind: str
) -> Prepared:
    """The calibration set of two language models; its indices are those of the samples that have an answer."""
    if settings.objective not in ("auto", "language"):
        raise TaskferryError(
            f"the objective '{settings.objective}' is for encoders; language models use their own loss"
        )
    check_kind(samples, kind)
    both, lengths = (LanguageModel(), LanguageModel()), (settings.max_length, settings.micro_batch)
    if samples.kind == "pictured":
        if settings.labels == "teacher":
            raise TaskferryError("the teacher answers prompts of text: leave --labels teacher out for rows with images")
        images = [picture(row) for row in samples.rows]
        order = sorted(range(len(images)), key=lambda i: images[i].size)  # pictures of one size stand together
        ordered = [images[i] for i in order]
        seen = _pictured(samples.take(order), ordered, kind, (source, target), *lengths, alike=True)
        return Prepared(seen, both, tuple(order), "the answers in the data")
    tokenizers = source.tokenizer(), target.tokenizer()
    borrowed = samples.kind == "messages" and with_template(tokenizers[1], tokenizers[0])
    rows, stopped = list(samples.rows), None
    origin = "the answers in the chats" if samples.kind == "messages" else "the text itself"
    if samples.kind == "prompt":
        rows, origin, stopped = _answered(settings, samples, source, tuned)
    elif settings.labels == "teacher":
        raise TaskferryError("the teacher answers prompts: give a prompt column, or leave --labels teacher out")
    read = {i: segments_of(row) for i, row in enumerate(rows) if row}
    order = sorted(read, key=lambda i: sum(len(segment.text) for segment in read[i]))  # less padding to compute
    segments = [read[i] for i in order]
    questions = None
    if samples.kind != "text":
        ends = kind == "sequence" or (_ends(segments, source, tuned) if stopped is None else stopped)
        questions = Questions(tuple(segments), ends, tokenizers[1].chat_template if borrowed else None)
        origin += "" if ends else "; the tuned source does not end its answers, so their ends do not count"
        origin += f"; in the chat template of {source.given}, for the target has none" if borrowed else ""
    calibration = _texts(segments, kind, tokenizers, *lengths, ends=questions is not None and questions.ends)
    return Prepared(calibration, both, tuple(order), origin, questions=questions)


def _answered(
    settings: CalibrationSettings, samples: Samples, source: Loaded, tuned: Tuned | None
) -> tuple[list[Row], str, bool | None]:
    """Prompts with completions, those that miss from the tuned source; {} where it says nothing.

    Also where they came from, and whether the tuned source ends its answers; None where it was not asked.
    """
    rows = [dict(row) for row in samples.rows]
    if any(not isinstance(row["prompt"], str) for row in rows):
        raise TaskferryError(f"{samples.source} has rows without a prompt: fill them, or leave them out")
    asked = [row for row in rows if settings.labels == "teacher" or row.get("completion") is None]
    if not asked:
        return rows, "the completions in the data", None
    if settings.labels == "data":
        raise TaskferryError(f"{samples.source}: {len(asked)} rows have no completion: use --labels teacher")
    prompts = [row["prompt"] for row in asked]
    with teacher_model(source, tuned) as teacher:
        answers = written(teacher.model, source.tokenizer(), prompts, length=ANSWER, batch=settings.micro_batch)
    blank = 0
    for row, answer in zip(asked, answers, strict=True):
        row["completion"] = answer.text
        if is_blank(answer.text):
            row.clear()
            blank += 1
    if blank == len(rows):
        raise TaskferryError("the tuned source answers every prompt with nothing: give completions in the data")
    origin = f"{len(asked) - blank} completions of the tuned source (teacher)"
    origin += f"; {blank} blank ones left out" if blank else ""
    return rows, origin, sum(answer.stopped for answer in answers) >= ENDING * len(answers)


def _ends(samples: Sequence[Sequence[Segment]], source: Loaded, tuned: Tuned | None) -> bool:
    """True where the tuned source ends its answers, as fine-tunes usually do: also where it is not there to try."""
    if not can_answer(tuned):
        return True
    with teacher_model(source, tuned) as teacher:
        score = answers_of(teacher.model, source.tokenizer(), samples[:: -(-len(samples) // LOOKED)])
    return score.stopped >= 100 * ENDING


def _texts(
    segments: Sequence[Sequence[Segment]],
    kind: str | None,
    tokenizers: Sequence[Any],
    max_length: int,
    micro_batch: int,
    *,
    ends: bool,
) -> Calibration:
    """Texts, prompts or chats for language models of a kind; an encoder-decoder always reads the end of an answer."""
    if kind == "sequence":
        return sequence_calibration(segments, *tokenizers, max_length=max_length, micro_batch=micro_batch)
    return language_calibration(segments, *tokenizers, max_length=max_length, micro_batch=micro_batch, ends=ends)


def _pictured(
    samples: Samples,
    images: Sequence[Any],
    kind: str | None,
    models: Sequence[Loaded],
    max_length: int,
    micro_batch: int,
    *,
    alike: bool = False,
) -> Calibration:
    """Chats with an image each, for language models that also see."""
    if kind == "sequence":
        raise TaskferryError(
            f"{samples.source} has images with words: an encoder-decoder needs prompt and completion alone"
        )
    processors = [loaded.processor() for loaded in models]
    return seeing_calibration(
        samples.rows, images, *processors, max_length=max_length, micro_batch=micro_batch, alike=alike
    )
