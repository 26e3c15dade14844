"""Right answers of a language model: what it writes to prompts whose answers are known.

    >>> score = answers_of(model, tokenizer, samples)           # by generating greedily; samples are lists of segments
    >>> score.exact, score.begins, score.stopped, score.valid   # in per cent
    >>> answers = Answers.of(model, batches)                    # by one pass over prompt and answer, without generating

A loss can fall while no answer gets better: at first a model learns the form. And an answer that begins right and
never ends is of no use.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from taskferry.collect.device import device_of, evaluating
from taskferry.data.batch import IGNORED, Batch
from taskferry.data.language import Segment, chat_end, prompt_of
from taskferry.objectives.language import expected, is_sequence_to_sequence, longest_text

MOST = 50  # answers of a set
EACH = 3.0  # samples for each of them, at least
SLACK = 8  # tokens that an answer may have beyond the longest of the samples, before it counts as endless
Z = 1.96  # of a 95 % interval

Sample = Sequence[Segment]


@dataclass(frozen=True)
class Written:
    """Text that a model writes behind a prompt."""

    text: str
    stopped: bool  # by an end of its own, before the bound on the length


@torch.no_grad()
def written(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    length: int,
    temperature: float = 0.0,
    keep: int = sys.maxsize,
    special: bool = True,
    ends: Collection[int] = (),
    batch: int = 16,
) -> list[Written]:
    """Let a language model write behind each prompt: greedily, or drawn from its own distribution.

    Of a long prompt the last `keep` tokens are read; an empty one is the beginning of a text. `special` adds the
    tokenizer's own marks; `ends` are tokens that end an answer beside those that the model knows. What is drawn at a
    temperature depends on the prompts that stand in its batch.
    """
    both, device, most = is_sequence_to_sequence(model), device_of(model), longest_text(sys.maxsize, model)
    length = min(length, max(1, most // 2))
    keep = min(keep, most if both else most - length)  # so that the answer has a place behind it
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    found: dict[int, Written] = {}
    with as_it_is(model, tokenizer, ends) as (generator, stops, pad), evaluating(model):
        read = [_ids(model, tokenizer, prompt, special, stops)[-keep:] for prompt in prompts]
        order = list(range(len(read))) if temperature else sorted(range(len(read)), key=lambda i: len(read[i]))
        for start in range(0, len(read), batch):
            some = order[start : start + batch]
            width = max(len(read[i]) for i in some)
            ids, mask = torch.full((len(some), width), pad), torch.zeros(len(some), width, dtype=torch.long)
            for row, i in enumerate(some):
                where = slice(0, len(read[i])) if both else slice(width - len(read[i]), width)
                ids[row, where], mask[row, where] = torch.tensor(read[i]), 1
            output: Tensor = generator.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=length, **drawn
            )
            for i, row_ids in zip(some, output.tolist(), strict=True):
                found[i] = _read(tokenizer, [] if both else read[i], row_ids[1:] if both else row_ids[width:], stops)
    return [found[i] for i in range(len(read))]


def _read(tokenizer: Any, before: list[int], new: list[int], stops: Collection[int]) -> Written:
    """The new tokens as text, up to the first that ends it."""
    end = next((i for i, token in enumerate(new) if token in stops), len(new))
    # Decoded as a whole: a piece on its own may lose the space before it.
    text = _decoded(tokenizer, before + new[:end])[len(_decoded(tokenizer, before)) :]
    return Written(text, end < len(new))


def is_blank(answer: str) -> bool:
    """True where an answer says nothing: a broken character does not either, and some tokenizers drop it."""
    return not answer.replace("\ufffd", "").strip()


@contextmanager
def as_it_is(
    model: torch.nn.Module, tokenizer: Any, ends: Collection[int] = ()
) -> Iterator[tuple[Any, Collection[int], int]]:
    """The model as one that writes by its own distribution, the tokens that end a text, and one for padding.

    Nothing of a generation_config.json but the tokens that begin and end a text has a say: cut or penalised
    distributions would be another model's.
    """
    generator: Any = model
    own = generator.generation_config
    stops = {*ends, *_numbers(own.eos_token_id), *_numbers(tokenizer.eos_token_id)}
    pad = next((n for n in (tokenizer.pad_token_id, *sorted(stops)) if n is not None), 0)
    places: tuple[Any, ...] = (own, model.config)
    starts = {
        name: next((getattr(each, name) for each in places if getattr(each, name, None) is not None), None)
        for name in ("bos_token_id", "decoder_start_token_id")
    }
    generator.generation_config = type(own)(eos_token_id=sorted(stops) or None, pad_token_id=pad, **starts)
    try:
        yield generator, stops, pad
    finally:
        generator.generation_config = own


def _ids(model: torch.nn.Module, tokenizer: Any, prompt: str, special: bool, stops: Collection[int]) -> list[int]:
    """A prompt in tokens; some tokenizers end every text, which nothing could follow."""
    ids: list[int] = tokenizer(prompt, add_special_tokens=special)["input_ids"]
    if is_sequence_to_sequence(model):
        return ids
    config: Any = model.config
    first = (tokenizer.bos_token_id, getattr(config, "bos_token_id", None), tokenizer.eos_token_id)
    start = next((n for n in first if n is not None), 0)
    while len(ids) > 1 and special and ids[-1] in stops:
        ids = ids[:-1]
    return ids or [start]


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def _numbers(value: int | Sequence[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


@dataclass(frozen=True)
class Score:
    """Answers that a model wrote to prompts, held against the wanted ones."""

    wanted: tuple[str, ...]
    written: tuple[Written, ...]
    choices: frozenset[str] = field(default=frozenset())  # of all samples, where there are few

    @property
    def exact_each(self) -> list[bool]:
        """True where an answer is the wanted one up to white space, or the same JSON value, and ends."""
        parsed = self._json
        return [
            each.stopped and (each.text.strip() == want or (parsed and read_json(each.text) == read_json(want)))
            for each, want in zip(self.written, self.wanted, strict=True)
        ]

    @property
    def begins_each(self) -> list[bool] | None:
        """True where an answer begins with the wanted one of a small set, however it goes on."""
        if not self.choices:
            return None
        longest = sorted(self.choices, key=len, reverse=True)
        begun = (next((c for c in longest if each.text.strip().startswith(c)), None) for each in self.written)
        return [found == want for found, want in zip(begun, self.wanted, strict=True)]

    @property
    def exact(self) -> float:
        """Per cent."""
        return _per_cent(self.exact_each)

    @property
    def begins(self) -> float | None:
        """Per cent; None without a small set of answers."""
        return None if self.begins_each is None else _per_cent(self.begins_each)

    @property
    def stopped(self) -> float:
        """Per cent that ended by themselves within the bound."""
        return _per_cent([each.stopped for each in self.written])

    @property
    def valid(self) -> float | None:
        """Per cent that can be read as JSON; None where the wanted answers are none."""
        return _per_cent([read_json(each.text) is not None for each in self.written]) if self._json else None

    def right_each(self, ends: bool = True) -> list[bool]:
        """True where an answer is the wanted one; of a model that ends none, where it begins right."""
        return self.exact_each if ends or self.begins_each is None else self.begins_each

    def right(self, ends: bool = True) -> float:
        """Per cent."""
        return _per_cent(self.right_each(ends))

    def facts(self) -> dict[str, float]:
        """For machines."""
        found = {"exact": self.exact, "begins": self.begins, "stopped": self.stopped, "valid_json": self.valid}
        return {name: round(value, 2) for name, value in found.items() if value is not None}

    @property
    def _json(self) -> bool:
        return all(isinstance(read_json(want), dict | list) for want in self.wanted)


def answers_of(
    model: nn.Module,
    tokenizer: Any,
    samples: Sequence[Sample],
    *,
    choices: frozenset[str] | None = None,
    length: int | None = None,
    batch: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Let a model answer the prompts of samples, greedily.

    Args:
        model: A language model.
        tokenizer: Its tokenizer.
        samples: Prompts or chats; the last segment of each is the wanted answer.
        choices: The answers that there are; found in the samples where not given.
        length: Most tokens of an answer; by default those of the longest wanted one and a few more.
        batch: Prompts that are written to at once.
        progress: Called with the prompts that are done and all.
    """
    wanted = [sample[-1].text.strip() for sample in samples]
    both = is_sequence_to_sequence(model)
    chat = samples[0][0].role is not None
    prompts = ["".join(s.text for s in sample[:-1]) if both else prompt_of(tokenizer, sample) for sample in samples]
    if length is None:
        sizes = (len(ids) for ids in tokenizer(wanted, add_special_tokens=False)["input_ids"])
        length = math.ceil(1.25 * max(sizes)) + SLACK
    end = None if both else chat_end(tokenizer, samples[0])
    ends = [] if end is None else [tokenizer.convert_tokens_to_ids(end)]
    found: list[Written] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        found += written(model, tokenizer, part, length=length, special=not chat, ends=ends, batch=batch)
        if progress is not None:
            progress(len(found), len(prompts))
    return Score(tuple(wanted), tuple(found), choices_of(wanted) if choices is None else choices)


def choices_of(answers: Sequence[str]) -> frozenset[str]:
    """The answers that there are, where they are few and come again and again; none otherwise."""
    found = {answer.strip() for answer in answers}
    few = 1 < len(found) <= MOST and len(answers) >= EACH * len(found)
    return frozenset(found) if few else frozenset()


def gain(before: Sequence[bool], after: Sequence[bool]) -> tuple[float, float, float]:
    """Points of right answers that a change gains on the same samples, with the ends of a 95 % interval.

    By the difference of paired proportions with half a sample added to each cell (Agresti and Min, 2005).
    """
    n = len(before)
    won = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    mean = (won - lost) / (n + 2)
    spread = Z * math.sqrt((won + lost + 1) / (n + 2) - mean**2) / math.sqrt(n + 2)
    return 100 * (won - lost) / n, 100 * max(-1.0, mean - spread), 100 * min(1.0, mean + spread)


def read_json(text: str) -> Any:
    """The value; None where there is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _per_cent(each: Sequence[bool]) -> float:
    return 100.0 * sum(each) / max(1, len(each))


@dataclass
class Answers:
    """Counts samples whose answer is right; `choices` are the first tokens of the few answers that there are."""

    choices: Tensor | None
    samples: int = 0
    by_word: int = 0
    by_choice: int = 0

    @classmethod
    def of(cls, model: nn.Module, batches: Sequence[Batch]) -> Answers | None:
        """None where some sample is all text, with nothing to answer. The set of answers is found in the samples."""
        found: Counter[tuple[int, ...]] = Counter()
        for batch in batches:
            if "labels" not in batch.inputs:
                return None
            wanted = expected(model, batch)
            for row in wanted:
                counted = (row != IGNORED).nonzero()[:, 0]
                if not len(counted) or (int(counted[0]) == 0 and not _reads_apart(batch)):
                    return None
                found[tuple(row[counted].tolist())] += 1
        first = {answer[0] for answer in found}
        few = len(found) <= MOST and sum(found.values()) >= EACH * len(found) and len(first) == len(found) > 1
        return cls(torch.tensor(sorted(first)) if few else None)

    def count(self, scores: Tensor, labels: Tensor, rows: Tensor) -> None:
        """The samples of a micro-batch."""
        wrong = torch.zeros(int(rows.max()) + 1, device=rows.device).index_add_(
            0, rows, (scores.argmax(-1) != labels).float()
        )
        self.samples += len(wrong)
        self.by_word += int((wrong == 0).sum())
        if self.choices is not None:
            first = torch.ones_like(rows, dtype=torch.bool)
            first[1:] = rows[1:] != rows[:-1]
            choices = self.choices.to(scores.device)
            chosen = choices[scores[first][:, choices].argmax(-1)]
            self.by_choice += int((chosen == labels[first]).sum())

    @property
    def exact(self) -> float:
        """Per cent of the samples whose answer would be written word for word."""
        return 100.0 * self.by_word / max(1, self.samples)

    @property
    def right(self) -> float | None:
        """Per cent of the samples whose own answer is the likeliest of all that there are."""
        return None if self.choices is None else 100.0 * self.by_choice / max(1, self.samples)


def _reads_apart(batch: Batch) -> bool:
    """Whether the answer stands in a decoder, so that its first position has read the prompt."""
    ids = batch.inputs.get("input_ids")
    return ids is None or ids.shape != batch.inputs["labels"].shape
