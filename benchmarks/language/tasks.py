"""What real language models are tuned on and scored by: answers in words, as JSON, in a chat.

>>> task = TASKS["trec"]
>>> task.samples("train")                                 # prompts with completions, or chats
>>> task.score(loaded, task.questions(400), change)        # {"score": right answers in %, "stopped": …, "loss": …}

A model generates its answer, greedily. It is right where it is the wanted one and the model ended it by itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.shared import common
from taskferry import LanguageModel, Pool, TaskVector, evaluate, load_samples
from taskferry.collect.scale import moved_by
from taskferry.data.forms import Kind
from taskferry.data.language import segments_of
from taskferry.data.samples import Samples
from taskferry.models import Loaded
from taskferry.objectives.answers import answers_of

LENGTH, BATCH = 96, 20


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
        given = load_samples(str(common.need_shared() / "data" / self.data), split=split)
        rows = [
            self.row(self.prompt.format(text=row["text"].strip()), self.answer(row["text"], int(row["label"])))
            for row in given.rows
        ]
        return replace(given, kind=self.kind, rows=rows, labels=None, classes=())

    def row(self, prompt: str, answer: str) -> dict[str, Any]:
        """Return a sample as a file has it."""
        return {"prompt": prompt, "completion": f" {answer}"}

    def answer(self, text: str, label: int) -> str:  # noqa: ARG002
        """Return what is written behind the prompt."""
        return self.answers[label]

    def questions(self, count: int) -> Samples:
        """Return so many of the test split, at most, evenly spread."""
        test, count = self.samples("test"), min(count, self.most)
        return test.take(range(0, len(test), max(1, len(test) // count))[:count])

    def score(self, loaded: Loaded, test: Samples, change: TaskVector) -> dict[str, float]:
        """Score a model with a change added."""
        with moved_by(loaded.model, change) as at:
            at(1.0)
            batches = Pool(test, loaded, max_length=LENGTH).batches(range(len(test)), BATCH)
            loss = evaluate(loaded.model, batches, LanguageModel()).loss
            asked = [segments_of(row) for row in test.rows]
            facts = answers_of(loaded.model, loaded.tokenizer(), asked, length=self.length, batch=BATCH).facts()
        return {"score": facts.pop("exact"), **facts, "loss": round(loss, 3)}


@dataclass(frozen=True)
class InJson(Task):
    """The class and the first word of the question, as a JSON object."""

    most: int = 200
    length: int = 48

    def answer(self, text: str, label: int) -> str:
        first = next(iter(re.findall(r"\w+", text)), "")
        return json.dumps({"type": self.answers[label], "first": first})


@dataclass(frozen=True)
class Chat(Task):
    """The question asked by a user, the class answered by the assistant."""

    kind: Kind = "messages"

    def row(self, prompt: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


KINDS = ("description", "entity", "abbreviation", "human", "location", "number")
TASKS: dict[str, Task] = {
    "trec": Task("TREC", "trec", "Question: {text}\nAnswer type:", KINDS),
    "emotion": Task("emotion", "emotion", "Message: {text}\nFeeling:",
                    ("sadness", "joy", "love", "anger", "fear", "surprise")),
    "ag_news": Task("AG News", "ag_news", "Article: {text}\nTopic:", ("world", "sports", "business", "technology")),
    "json": InJson("TREC as JSON", "trec", "Question: {text}\nAs JSON:", KINDS),
    "chat": Chat("TREC as a chat", "trec", "Which type has the answer to this question? {text}", KINDS),
}  # fmt: skip
