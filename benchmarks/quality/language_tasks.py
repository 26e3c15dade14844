"""What real language models are tuned on and scored by: answers in words, as JSON, in a chat, and a domain by its loss.

>>> task = TASKS["trec"]
>>> task.samples("train")                                 # prompts with completions, chats, or passages
>>> task.score(loaded, task.questions(400), change, 1.0)   # Scored(right=…, loss=…)

A model generates its answer, greedily. It is right where it is the wanted one and the model ended it by itself. A
domain has no answers: its score is the loss.
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
from taskferry.collect.scale import moved_by
from taskferry.data.batch import Batch
from taskferry.data.data import Samples
from taskferry.data.forms import Kind
from taskferry.data.language import segments_of
from taskferry.evaluation import Pool, evaluate
from taskferry.models import Loaded
from taskferry.objectives.answers import answers_of
from taskferry.objectives.objectives import LanguageModel

LENGTH, BATCH = 96, 20


@dataclass(frozen=True)
class Scored:
    """Of a model on a task; what has answers is told in per cent."""

    right: float | None  # generated, the wanted answer and no more
    loss: float
    answers: dict[str, float] = field(default_factory=dict)  # begun right, stopped, valid JSON

    @property
    def score(self) -> float:
        """Higher is better: right answers, or of a domain the loss below zero."""
        return -self.loss if self.right is None else self.right

    def facts(self) -> dict[str, float]:
        """Beside the score."""
        return {"loss": self.loss, **self.answers}


@dataclass(frozen=True)
class Task:
    """A classification in words: how a sample is asked, and what the classes are called."""

    title: str
    data: str
    prompt: str
    answers: tuple[str, ...]
    most: int = 400  # test questions
    length: int = 16  # tokens of an answer, at most
    kind: Kind = "prompt"

    def samples(self, split: str) -> Samples:
        """Prompts and completions."""
        given = load_samples(str(common.need_shared() / "data" / self.data), split=split)
        rows = [
            self.row(
                self.prompt.format(text=row["text"].strip(), text_pair=(row.get("text_pair") or "").strip()),
                self.answer(row["text"], int(row["label"])),
            )
            for row in given.rows
        ]
        return replace(given, kind=self.kind, rows=rows, labels=None, classes=())

    def row(self, prompt: str, answer: str) -> dict[str, Any]:
        """A sample as a file has it."""
        return {"prompt": prompt, "completion": f" {answer}"}

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
        loss = evaluate(loaded.model, batches_of(loaded, test), LanguageModel()).loss
        asked = [segments_of(row) for row in test.rows]
        facts = answers_of(loaded.model, loaded.tokenizer(), asked, length=self.length, batch=BATCH).facts()
        return Scored(facts.pop("exact"), round(loss, 3), facts)


@dataclass(frozen=True)
class InJson(Task):
    """The class and the first word of the question, as a JSON object."""

    most: int = 200
    length: int = 48

    def answer(self, text: str, label: int) -> str:
        return json.dumps({"type": self.answers[label], "first": first_word(text)})


@dataclass(frozen=True)
class Chat(Task):
    """The question asked by a user, the class answered by the assistant."""

    kind: Kind = "messages"

    def row(self, prompt: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


@dataclass(frozen=True)
class Domain(Task):
    """Passages of one kind of text: no answers, every token counts."""

    prompt: str = ""
    answers: tuple[str, ...] = field(default=())
    most: int = 100

    def samples(self, split: str) -> Samples:
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


KINDS = ("description", "entity", "abbreviation", "human", "location", "number")
TASKS: dict[str, Task] = {
    "trec": Task("TREC", "trec", "Question: {text}\nAnswer type:", KINDS),
    "emotion": Task("emotion", "emotion", "Message: {text}\nFeeling:",
                    ("sadness", "joy", "love", "anger", "fear", "surprise")),
    "ag_news": Task("AG News", "ag_news", "Article: {text}\nTopic:", ("world", "sports", "business", "technology")),
    "snli": Task("SNLI", "snli", "Premise: {text}\nHypothesis: {text_pair}\nRelation:",
                 ("entailment", "neutral", "contradiction")),
    "json": InJson("TREC as JSON", "trec", "Question: {text}\nAs JSON:", KINDS),
    "chat": Chat("TREC as a chat", "trec", "Which type has the answer to this question? {text}", KINDS),
    "scripture": Domain("scripture", "scripture"),
}  # fmt: skip
