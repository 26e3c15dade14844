"""Prompts with answers one behind the other, so that a base model knows the form of an answer before it gives one.

    >>> shown = in_context(calibration, 5, longest=1024)    # for maps alone; losses stay those of single samples

Alone, the gradient of a base model says "answer in this form", and hardly which answer. Behind a few others that are
answered, the form is known, and the gradient says which. The tokens are the same, a separator aside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taskferry.calibration.batch import IGNORED, Batch, Calibration
from taskferry.calibration.builders import fill_padding

SEPARATOR = "\n\n"
READ = {"input_ids", "attention_mask", "labels"}


@dataclass(frozen=True)
class Sample:
    """The tokens of one sample as one model reads it, without padding."""

    ids: Tensor  # [L]
    labels: Tensor  # [L]
    spans: Tensor  # [L, 2]


@dataclass(frozen=True)
class Marks:
    """What a tokenizer writes in front of a text and behind it, and what keeps two texts apart."""

    begin: list[int]
    end: list[int]
    between: list[int]
    padding: int

    @classmethod
    def of(cls, tokenizer: Any) -> Marks:
        """Seen on a text of one letter."""
        fill_padding(tokenizer)
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer("a")["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        between = tokenizer(SEPARATOR, add_special_tokens=False)["input_ids"]
        return cls(whole[:at], whole[at + len(bare) :], between, int(tokenizer.pad_token_id))

    def inner(self, sample: Sample, first: bool, last: bool) -> Sample:
        """Between others a sample has no marks of its own."""
        ids = sample.ids.tolist()
        start = 0 if first or not self.begin or ids[: len(self.begin)] != self.begin else len(self.begin)
        stop = len(ids) if last or not self.end or ids[-len(self.end) :] != self.end else len(ids) - len(self.end)
        return Sample(sample.ids[start:stop], sample.labels[start:stop], sample.spans[start:stop])

    def apart(self, sample: Sample) -> list[int]:
        """In front of a further sample; a chat has marks of its template there, which stand for no character."""
        return [] if len(sample.spans) and not bool(sample.spans[0].any()) else self.between


def in_context(calibration: Calibration, count: int, longest: int) -> Calibration:
    """So many samples of a fold behind each other, in at most `longest` tokens; as given where they are no prompts.

    Which stand together does not depend on their length, by which micro-batches are sorted.
    """
    if count < 2 or calibration.tokenizers is None or not _readable(calibration):
        return calibration
    marks = Marks.of(calibration.tokenizers[0]), Marks.of(calibration.tokenizers[1])
    size = max(1, max(len(A) for A, _ in calibration) // count)
    made = []
    for fold in range(calibration.folds):
        mine = [(A, B) for A, B in calibration if A.fold == fold]
        samples = [pair for A, B in mine for pair in zip(_samples(A), _samples(B), strict=True)]
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
        groups = list(_groups([samples[i] for i in order], count, longest))
        for start in range(0, len(groups), size):
            some = groups[start : start + size]
            A, B = (_batch([_joined(group, side, marks[side]) for group in some], marks[side], mine[0][side])
                    for side in (0, 1))  # fmt: skip
            made.append((A, B))
    return Calibration(made, calibration.tokenizers)


def _readable(calibration: Calibration) -> bool:
    """Whether all of it is prompts with answers, and nothing else."""
    return all(batch.prompted and set(batch.inputs) <= READ and batch.texts == 1 and "tokens" in batch.spans
               for pair in calibration for batch in pair)  # fmt: skip


def _samples(batch: Batch) -> Iterator[Sample]:
    ids, labels, spans = batch.inputs["input_ids"], batch.inputs["labels"], batch.spans["tokens"]
    mask = batch.inputs.get("attention_mask")
    for row in range(batch.rows):
        real = torch.ones_like(ids[row], dtype=torch.bool) if mask is None else mask[row] != 0
        yield Sample(ids[row][real], labels[row][real], spans[row][real])


def _groups(
    samples: Sequence[tuple[Sample, Sample]], count: int, longest: int
) -> Iterator[list[tuple[Sample, Sample]]]:
    """As many as fit; one that is too long stands alone, as it was given."""
    group: list[tuple[Sample, Sample]] = []
    lengths = (0, 0)
    for pair in samples:
        more = tuple(length + len(sample.ids) + 2 for length, sample in zip(lengths, pair, strict=True))
        if group and (len(group) == count or max(more) > longest):
            yield group
            group, more = [], tuple(len(sample.ids) for sample in pair)
        group.append(pair)
        lengths = (more[0], more[1])
    yield group


def _joined(group: Sequence[tuple[Sample, Sample]], side: int, marks: Marks) -> Sample:
    """As one text; characters go on where those of the sample before end, by either model."""
    ids, labels, spans, at = [], [], [], 0
    for number, pair in enumerate(group):
        sample = marks.inner(pair[side], number == 0, number == len(group) - 1)
        between = torch.tensor(marks.apart(sample) if number else [], dtype=sample.ids.dtype)
        ids += [between, sample.ids]
        labels += [torch.full_like(between, IGNORED), sample.labels]
        stands = sample.spans.any(-1, keepdim=True)  # a mark stands for no character
        spans += [sample.spans.new_zeros(len(between), 2), torch.where(stands, sample.spans + at, sample.spans)]
        at += max(int(each.spans.max()) if len(each.spans) else 0 for each in pair)
    return Sample(torch.cat(ids), torch.cat(labels), torch.cat(spans))


def _batch(samples: Sequence[Sample], marks: Marks, like: Batch) -> Batch:
    """Padded behind; it makes maps for the fold of the samples that it is made of, and counts as they do."""
    length = max(len(sample.ids) for sample in samples)

    def padded(rows: Sequence[Tensor], fill: int) -> Tensor:
        out = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), fill)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out

    inputs = {
        "input_ids": padded([sample.ids for sample in samples], marks.padding),
        "attention_mask": padded([torch.ones_like(sample.ids) for sample in samples], 0),
        "labels": padded([sample.labels for sample in samples], IGNORED),
    }
    spans = {"tokens": padded([sample.spans for sample in samples], 0)}
    return Batch(inputs, spans=spans, fold=like.fold, judges=like.judges)
