"""What real language models are tuned on and scored by: answers in words, an answer as JSON, and a domain by its loss.

>>> task = TASKS["trec"]
>>> task.samples("train")                                 # prompts with completions, or passages
>>> task.score(loaded, task.questions(400), change, 1.0)   # Scored(right=…, loss=…)

An answer in words is right where it is the likeliest of those that the task has. An answer as JSON is written greedily
and is right where it can be read, has both keys, and names the class. A domain has no answers: its score is the loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.quality import causal
from benchmarks.shared import common
from benchmarks.zoo import zoo_data
from taskferry import TaskVector, load_samples
from taskferry.calibration.batch import Batch
from taskferry.calibration.data import Samples
from taskferry.checkpoints import Loaded
from taskferry.evaluation import Pool, evaluate
from taskferry.fitting.objectives import LanguageModel
from taskferry.fitting.scale import moved_by
from taskferry.fitting.teacher import written

LENGTH, BATCH = 96, 20
WRITTEN = 24  # tokens of an answer that is written
GREEDY = 1e-4  # a temperature at which the likeliest token is drawn


@dataclass(frozen=True)
class Scored:
    """Of a model on a task; what has answers is told in per cent."""

    right: float | None
    loss: float
    valid: float | None = None  # answers that are JSON with both keys

    @property
    def score(self) -> float:
        """Higher is better: right answers, or of a domain the loss below zero."""
        return -self.loss if self.right is None else self.right

    def facts(self) -> dict[str, float]:
        """Beside the score."""
        return {"loss": self.loss, **({} if self.valid is None else {"valid": self.valid})}


@dataclass(frozen=True)
class Task:
    """A classification in words: how a sample is asked, and what the classes are called."""

    title: str
    data: str
    prompt: str
    answers: tuple[str, ...]
    most: int = 400  # test questions

    def samples(self, split: str, end: str = "") -> Samples:
        """Prompts and completions; `end` closes an answer, for a model that is to stop there."""
        given = load_samples(str(common.need_shared() / "data" / self.data), split=split)
        rows = [
            {
                "prompt": self.prompt.format(text=row["text"].strip(), text_pair=(row.get("text_pair") or "").strip()),
                "completion": " " + self.answer(row["text"], int(row["label"])) + end,
            }
            for row in given.rows
        ]
        return replace(given, kind="prompt", rows=rows, labels=None, classes=())

    def answer(self, text: str, label: int) -> str:  # noqa: ARG002
        """What is written behind the prompt."""
        return self.answers[label]

    def questions(self, count: int) -> Samples:
        """So many of the test split, at most, evenly spread."""
        test, count = self.samples("test"), min(count, self.most)
        return test.take(range(0, len(test), max(1, len(test) // count))[:count])

    def score(self, loaded: Loaded, test: Samples, added: TaskVector, scale: float) -> Scored:
        """Of a model with a change added."""
        with moved_by(loaded.model, added) as at:
            at(scale)
            return self.of(loaded, test)

    def of(self, loaded: Loaded, test: Samples) -> Scored:
        """Of a model as it is."""
        found = evaluate(loaded.model, batches_of(loaded, test), LanguageModel())
        return Scored(round(float(found.right or 0.0), 2), round(found.loss, 3))


@dataclass(frozen=True)
class InJson(Task):
    """The class and the first word of the question, as a JSON object."""

    most: int = 200

    def answer(self, text: str, label: int) -> str:
        return json.dumps({"type": self.answers[label], "first": first_word(text)})

    def of(self, loaded: Loaded, test: Samples) -> Scored:
        found = evaluate(loaded.model, batches_of(loaded, test), LanguageModel())
        valid = right = 0
        for start in range(0, len(test), BATCH):
            rows = test.rows[start : start + BATCH]
            answers = written(loaded.model, loaded.tokenizer(), [row["prompt"] for row in rows], length=WRITTEN,
                              temperature=GREEDY, keep=LENGTH)  # fmt: skip
            for row, answer in zip(rows, answers, strict=True):
                read, meant = read_json(answer), json.loads(row["completion"])
                valid += read is not None
                right += read == meant
        share = 100 / len(test)
        return Scored(round(share * right, 2), round(found.loss, 3), round(share * valid, 2))


@dataclass(frozen=True)
class Domain(Task):
    """Passages of one kind of text: no answers, every token counts."""

    prompt: str = ""
    answers: tuple[str, ...] = field(default=())
    most: int = 100

    def samples(self, split: str, end: str = "") -> Samples:  # noqa: ARG002
        """Of the first books to train on, and of the last to score."""
        folder = zoo_data.DATA / "language-texts" / self.data
        if not (folder / "test.jsonl").exists():
            rows = [{"text": text} for text in causal.scripture()]
            cut = int(0.9 * len(rows))
            causal.write_lines(folder / "train.jsonl", rows[:cut])
            causal.write_lines(folder / "test.jsonl", rows[cut:])
        return load_samples(str(folder), split=split)

    def of(self, loaded: Loaded, test: Samples) -> Scored:
        return Scored(None, round(evaluate(loaded.model, batches_of(loaded, test), LanguageModel()).loss, 4))


def batches_of(loaded: Loaded, test: Samples) -> Sequence[Batch]:
    """Micro-batches of test samples."""
    return Pool(test, loaded, max_length=LENGTH).batches(range(len(test)), BATCH)


def first_word(text: str) -> str:
    """In letters and digits alone."""
    return next(iter(re.findall(r"\w+", text)), "")


def read_json(answer: str) -> dict[str, Any] | None:
    """The object that an answer begins with, where it has both keys."""
    try:
        found, _ = json.JSONDecoder().raw_decode(answer.strip())
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and set(found) == {"type", "first"} else None


KINDS = ("description", "entity", "abbreviation", "human", "location", "number")
TASKS: dict[str, Task] = {
    "trec": Task("TREC", "trec", "Question: {text}\nAnswer type:", KINDS),
    "emotion": Task("emotion", "emotion", "Message: {text}\nFeeling:",
                    ("sadness", "joy", "love", "anger", "fear", "surprise")),
    "ag_news": Task("AG News", "ag_news", "Article: {text}\nTopic:", ("world", "sports", "business", "technology")),
    "snli": Task("SNLI", "snli", "Premise: {text}\nHypothesis: {text_pair}\nRelation:",
                 ("entailment", "neutral", "contradiction")),
    "json": InJson("TREC as JSON", "trec", "Question: {text}\nAs JSON:", KINDS),
    "scripture": Domain("scripture", "scripture"),
}  # fmt: skip
