"""Right answers of a language model: what it writes to prompts whose answers are known.

    >>> score = answers_of(model, tokenizer, samples)           # by generating greedily; samples are lists of segments
    >>> score.exact, score.begins, score.stopped, score.valid   # in per cent

A loss can fall while no answer gets better: at first a model learns the form. And an answer that begins right and
never ends is of no use.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from taskferry.collect.device import device_of, evaluating
from taskferry.data.language import Segment, chat_end, prompt_of
from taskferry.objectives.language import is_sequence_to_sequence, longest_text

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
    model: nn.Module,
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
    """Let a language model write behind each prompt, by its own distribution.

    Nothing of a generation_config.json but the tokens that begin and end a text has a say: cut or penalised
    distributions would be another model's.

    Args:
        model: A language model.
        tokenizer: Its tokenizer.
        prompts: Texts; an empty one is the beginning of a text.
        length: Most tokens to write.
        temperature: 0 writes greedily. What is drawn at another depends on the prompts that stand in its batch.
        keep: Of a longer prompt so many tokens are read, the last ones.
        special: Whether the tokenizer adds its marks to a prompt.
        ends: Tokens that end an answer beside those that the model knows.
        batch: Prompts that are written to at once.
    """
    generator: Any = model
    own, config, both = generator.generation_config, generator.config, is_sequence_to_sequence(model)
    stops = {*ends, *_numbers(own.eos_token_id), *_numbers(tokenizer.eos_token_id)}
    pad = next((n for n in (tokenizer.pad_token_id, *sorted(stops)) if n is not None), 0)
    settings = {"eos_token_id": sorted(stops) or None, "pad_token_id": pad}
    for name in ("bos_token_id", "decoder_start_token_id"):
        value = getattr(own, name, None)
        settings[name] = getattr(config, name, None) if value is None else value
    if temperature:
        settings |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    first = (tokenizer.bos_token_id, getattr(config, "bos_token_id", None), tokenizer.eos_token_id, 0)
    begin = next(n for n in first if n is not None)
    most = longest_text(sys.maxsize, model)
    length = min(length, max(1, most // 2))
    keep = min(keep, most if both else most - length)  # so that the answer has a place behind it
    read = []
    for prompt in prompts:
        ids = tokenizer(prompt, add_special_tokens=special)["input_ids"]
        while not both and special and len(ids) > 1 and ids[-1] in stops:
            ids = ids[:-1]  # some tokenizers end every text, which nothing could follow
        read.append((ids or [begin])[-keep:] if not both else ids[-keep:])
    order = list(range(len(read)))
    if not temperature:  # less padding to compute
        order.sort(key=lambda i: len(read[i]))
    found: dict[int, Written] = {}
    device = device_of(model)
    generator.generation_config = type(own)(**settings)
    try:
        with evaluating(model):
            for start in range(0, len(read), batch):
                some = order[start : start + batch]
                width = max(len(read[i]) for i in some)
                ids, mask = torch.full((len(some), width), pad), torch.zeros(len(some), width, dtype=torch.long)
                for row, i in enumerate(some):  # padded in front, so that what is written stands behind the prompt
                    where = slice(0, len(read[i])) if both else slice(width - len(read[i]), width)
                    ids[row, where], mask[row, where] = torch.tensor(read[i]), 1
                output = generator.generate(
                    input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=length
                )
                for i, tokens in zip(some, output.tolist(), strict=True):
                    before, new = ([], tokens[1:]) if both else (read[i], tokens[width:])
                    end = next((k for k, token in enumerate(new) if token in stops), len(new))
                    # Decoded with what stands before: a piece on its own may lose the space in front.
                    texts = [tokenizer.decode(t, skip_special_tokens=True) for t in (before, before + new[:end])]
                    found[i] = Written(texts[1][len(texts[0]) :], end < len(new))
    finally:
        generator.generation_config = own
    return [found[i] for i in range(len(read))]


def is_blank(answer: str) -> bool:
    """True where an answer says nothing: a broken character does not either, and some tokenizers drop it."""
    return not answer.replace("\ufffd", "").strip()


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
