"""The tuned source as a teacher: itself as a model, and its answers on the samples as soft targets; no label is needed.

    >>> with teacher_model(source, tuned) as teacher:
    ...     written(teacher.model, tokenizer, ["2 + 2 = "], length=8)
    >>> lesson = lesson_of((source, target), tau, calibration, objectives)
    >>> batch = lesson.batch([0, 3, 7]).to(device)
    >>> logits, targets = lesson.scores(batch)         # with a gradient
    >>> lesson.loss_of(logits, targets)                # summed over the samples
    >>> lesson.probe(logits, generator)                # a random direction of the loss's curvature

Three kinds of answers: probabilities of classes; distributions over the next token wherever one counts, the end of an
answer included; and, for encoders without a head of their own, how alike any two samples are. They are asked for once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry.collect.device import device_of, evaluating, place_of, wide
from taskferry.collect.scale import moved_by
from taskferry.data.batch import IGNORED, Batch, Calibration, joined, trimmed
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.linalg.natural import fisher_root
from taskferry.models import Loaded, Tuned, load_model
from taskferry.models.models import resolve
from taskferry.models.peft import in_body
from taskferry.objectives.language import expected, is_sequence_to_sequence, logits_at, words_of
from taskferry.objectives.objectives import Classifier, Contrastive, Head, LanguageModel, Objective
from taskferry.taskvector import TaskVector

WORDS = 64  # most likely next tokens that are kept of a distribution
ENOUGH = 0.5  # of a distribution must arrive in the target's vocabulary; else the text's own token is the answer

Models = tuple[nn.Module, nn.Module]
Objectives = tuple[Objective, Objective]
Targets = Tensor | tuple[Tensor, Tensor]  # [P, C] dense, or [P, k] indices (which may repeat) with probabilities


@contextmanager
def teacher_model(source: Loaded, tuned: Tuned | None) -> Iterator[Loaded]:
    """The tuned source: base + τ where that is all of it, or as it was saved, with its head."""
    if tuned is None:
        raise TaskferryError(
            "labels from the teacher need the tuned source in memory, and it is not there: give labels, or give "
            "--source-tuned and whole models (no --engine blockwise)"
        )
    whole = tuned.adapter is None and Path(resolve(tuned.given)).is_dir()
    if not whole:
        check_whole(tuned, "give labels")
    if whole and (tuned.ignored or source.absent):
        loaded = load_model(tuned.given, dtype=source.precision)
        loaded.model.to(device_of(source.model))
        yield loaded
    else:
        with moved_by(source.model, tuned.tau) as set_scale:
            set_scale(1.0)
            yield source


def can_answer(tuned: Tuned | None) -> bool:
    """True where the tuned source can be had as a model: saved whole, or its base with its change and no more."""
    if tuned is None:
        return False
    return not tuned.beside or (tuned.adapter is None and Path(resolve(tuned.given)).is_dir())


def check_whole(tuned: Tuned, otherwise: str, *, heads: bool = True) -> None:
    """Refuses a tuned source that is more than base + τ; without `heads` those may differ: nothing is asked of them."""
    for name, reason in tuned.beside.items():
        if heads or in_body(name):
            merge = "" if tuned.adapter is None else ", or merge the adapter and give the full model"
            raise TaskferryError(
                f"{tuned.given} has also trained {name}, which is not in its change ({reason}), so that base and "
                f"change are not the tuned source: {otherwise}{merge}"
            )


class Lesson:
    """Samples of the target by number, and the cross-entropy of its scores to the tuned source's answers."""

    unit: ClassVar[str] = "per sample"  # of the loss of all samples divided by their number

    def __init__(self, target: nn.Module, batches: Sequence[Batch]) -> None:
        self.target, self.samples = target, joined(batches)
        self.weight = 1.0  # of each row of the scores in the loss

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Sequence[int]) -> Batch:
        """These samples as the target takes them; their numbers are its ids."""
        return trimmed(replace(self.samples.take(indices), ids=tuple(indices)))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, so that samples of one length can stand together; 0 where they are no texts."""
        mask = self.samples.inputs.get("attention_mask")
        return [0] * len(self) if mask is None else mask.reshape(len(self), -1).sum(1).tolist()

    def scores(self, batch: Batch) -> tuple[Tensor, Targets]:
        """The target's logits [P, C] wherever an answer is asked for, with a gradient, and the answers."""
        raise NotImplementedError(type(self).__name__)

    def loss_of(self, logits: Tensor, targets: Targets) -> Tensor:
        """Cross-entropy to soft targets, summed over the samples."""
        logs = logits.log_softmax(-1)
        if isinstance(targets, tuple):
            words, chances = targets
            return -self.weight * (chances * logs.gather(1, words)).sum()
        return -self.weight * (targets * logs).sum()

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a micro-batch, summed over its samples."""
        return self.loss_of(*self.scores(batch))

    @property
    def floor(self) -> float:
        """The lowest loss by sample that any target could have: the entropy of the answers."""
        return 0.0

    def probe(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """⟨logits, v⟩ for a random v with E[v vᵀ] = the second derivative of the loss by the logits.

        In each row, p the softmax and u random signs: v = √weight (√p ∘ u − p ⟨√p, u⟩), so that E[v vᵀ] =
        weight (diag p − p pᵀ).
        """
        v = fisher_root(logits, _signs(logits, generator))
        return math.sqrt(self.weight) * (logits * v).sum()


def lesson_of(models: Models, tau: TaskVector, calibration: Calibration, objectives: Objectives) -> Lesson:
    """Ask the source with its change `tau`, once, on all samples.

    Args:
        models: The base models, source and target.
        tau: What fine-tuning changed in the source.
        calibration: The samples, prepared for both models.
        objectives: Those of the two models: they decide which kind of answer is asked for.

    Raises:
        TaskferryError: The tuned source has no answer that the target could give too.
    """
    kind = kind_of(objectives)
    with moved_by(models[0], tau) as set_scale, evaluating(models[0]), torch.no_grad():
        set_scale(1.0)
        return kind(models, calibration, objectives)


def kind_of(objectives: Objectives) -> type[Classes | Tokens | Likeness]:
    """What the tuned source can answer where models have these objectives."""
    if all(isinstance(each, LanguageModel) for each in objectives):
        return Tokens
    if all(isinstance(each, Classifier) and not each.fitted for each in objectives):
        return Classes
    if all(isinstance(each, Classifier | Contrastive) for each in objectives):
        return Likeness
    raise TaskferryError(
        f"the tuned source cannot teach by {objectives[0].describe()}: give models that score classes, language "
        "models, or encoders"
    )


class Classes(Lesson):
    """Probabilities of the classes, by a head of each model's own."""

    def __init__(self, models: Models, calibration: Calibration, objectives: Objectives) -> None:
        super().__init__(models[1], calibration.side(1))
        source, target = (each for each in objectives if isinstance(each, Classifier))
        names = [head.names for head in (source, target) if isinstance(head, Head) and head.names]
        if len(names) == 2 and names[0] != names[1]:
            raise _other_classes(f"the classes {', '.join(names[0][:6])}", ", ".join(names[1][:6]))
        logits, place = source.logits(models[0], calibration.side(0)), place_of(models[0])
        self.answers = torch.cat([wide(logits(batch.to(*place))).softmax(-1).cpu() for batch in calibration.side(0)])
        self.logits = target.logits(models[1], calibration.side(1))

    def scores(self, batch: Batch) -> tuple[Tensor, Targets]:
        """Logits and probabilities [n, classes]."""
        logits = wide(self.logits(batch))
        if logits.shape[1] != self.answers.shape[1]:
            raise _other_classes(f"{self.answers.shape[1]} classes", str(logits.shape[1]))
        return logits, self.answers[list(batch.ids)].to(logits)

    @property
    def floor(self) -> float:
        """Mean entropy of the classes."""
        return float(torch.special.entr(self.answers).sum()) / len(self)


def _other_classes(source: str, target: str) -> TaskferryError:
    return TaskferryError(
        f"the tuned source scores {source}, the target {target}: it cannot teach them; give a target with a head of "
        "the same classes"
    )


class Likeness(Lesson):
    """Cosines between the centred features of any two texts or images: they need no space in common.

    The loss is the squared difference of the cosines, samples times the mean over all pairs of them.
    """

    def __init__(self, models: Models, calibration: Calibration, objectives: Objectives) -> None:  # noqa: ARG002
        super().__init__(models[1], calibration.side(1))
        features = []
        for side, model in enumerate(models):
            with evaluating(model):
                batches = [batch.to(*place_of(model)) for batch in calibration.side(side)]
                features.append(torch.cat([wide(family_of(model).features(model, batch)) for batch in batches]))
        self.teacher = F.normalize(features[0] - features[0].mean(0), dim=-1).cpu()
        self.centre = features[1].mean(0)

    def scores(self, batch: Batch) -> tuple[Tensor, Targets]:
        """Cosines [m, m] of the target and of the tuned source."""
        of_target = F.normalize(wide(family_of(self.target).features(self.target, batch)) - self.centre, dim=-1)
        rows = torch.tensor(batch.ids)[:, None] * batch.texts + torch.arange(batch.texts)
        of_source = self.teacher[rows.flatten()].to(of_target)
        return of_target @ of_target.T, of_source @ of_source.T

    def loss_of(self, logits: Tensor, targets: Targets) -> Tensor:
        """Samples times the mean squared difference."""
        if isinstance(targets, tuple):
            raise TypeError("cosines are dense")
        return (logits - targets).square().mean() * len(logits)

    def probe(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """⟨logits, v⟩ with random signs v: the second derivative of a square is 2 everywhere."""
        return math.sqrt(2 / len(logits)) * (logits * _signs(logits, generator)).sum()


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random signs, drawn on the CPU so that every device has the same."""
    return (2.0 * torch.randint(0, 2, like.shape, generator=generator) - 1).to(like)


class Tokens(Lesson):
    """Distributions over the next token, wherever a token of the target's text counts.

    Each token weighs samples / tokens, counted over the whole lesson: the loss of all samples is their number times the
    mean over all tokens, and how samples are batched does not matter.
    """

    unit: ClassVar[str] = "per token"

    def __init__(self, models: Models, calibration: Calibration, objectives: Objectives) -> None:  # noqa: ARG002
        super().__init__(models[1], calibration.side(1))
        same = all(torch.equal(A.inputs["input_ids"], B.inputs["input_ids"]) for A, B in calibration)
        vocabulary = None if same else Vocabulary(calibration)
        most = words_of(models[1])  # either model may have rows for more words than their tokenizer
        self.carried = 0  # tokens whose answer is the tuned source's distribution, not the text alone
        self.at: list[Tensor] = []  # of each sample: positions [P] that predict a token which counts,
        self.words: list[Tensor] = []  # [P, k] likely tokens there
        self.chances: list[Tensor] = []  # [P, k] and their probabilities
        for A, B in calibration:
            for said, text in zip(_said(models[0], A), _counted(models[1], B), strict=True):
                if vocabulary is None:
                    words, chances, own = said.words, said.chances, torch.zeros(len(text.at))
                else:
                    words, chances, own = vocabulary.carry(said, text)
                chances = chances.masked_fill(words >= most, 0.0)
                total = chances.sum(1) + own
                alone = total < ENOUGH
                found = torch.cat([chances, own[:, None]], 1) / total.clamp_min(1e-9)[:, None]
                found[alone] = F.one_hot(torch.tensor(found.shape[1] - 1), found.shape[1]).to(found)
                self.at.append(text.at)
                self.words.append(torch.cat([words.clamp(0, most - 1), text.tokens[:, None]], 1))
                self.chances.append(found)
                self.carried += int((~alone).sum())
        self.weight = len(self) / max(1, sum(map(len, self.at)))

    def scores(self, batch: Batch) -> tuple[Tensor, Targets]:
        """Logits [P, words] where a token counts, sample by sample; likely tokens [P, k] and their probabilities."""
        where = torch.zeros(expected(self.target, batch).shape, dtype=torch.bool)
        for row, i in enumerate(batch.ids):
            where[row, self.at[i]] = True
        logits = wide(logits_at(self.target, batch, where.to(device_of(self.target))))
        words, chances = (torch.cat([each[i] for i in batch.ids]) for each in (self.words, self.chances))
        return logits, (words.to(logits.device), chances.to(logits))

    @property
    def floor(self) -> float:
        """Mean entropy of the tokens; a token that stands twice in a distribution has both of its probabilities."""
        total = 0.0
        for words, chances in zip(self.words, self.chances, strict=True):
            merged = ((words[:, :, None] == words[:, None]) * chances[:, None]).sum(2)
            total -= float(torch.xlogy(chances, merged).sum())
        return self.weight * total / len(self)


@dataclass(frozen=True)
class Counted:
    """Tokens of one text that count."""

    at: Tensor  # [P] positions that predict them
    tokens: Tensor  # [P]
    spans: list[tuple[int, int]]  # characters that they stand for; (0, 0) for none


@dataclass(frozen=True)
class Said(Counted):
    """What a model says there."""

    own: Tensor  # [P] probability of the text's own token
    words: Tensor  # [P, k] likeliest tokens
    chances: Tensor  # [P, k] and their probabilities


def _counted(model: nn.Module, batch: Batch) -> list[Counted]:
    """The tokens of each sample that count."""
    wanted, sequence = expected(model, batch).cpu(), is_sequence_to_sequence(model)
    spans = batch.spans.get("decoder" if sequence else "tokens")
    found = []
    for row, labels in enumerate(wanted):
        at = (labels != IGNORED).nonzero()[:, 0]
        written = torch.zeros(len(at), 2) if spans is None else spans[row][at if sequence else at + 1]
        found.append(Counted(at, labels[at], [(int(start), int(end)) for start, end in written]))
    return found


def _said(model: nn.Module, batch: Batch) -> list[Said]:
    """The distributions of each sample, by one forward pass."""
    counted, place = _counted(model, batch), place_of(model)
    where = (expected(model, batch) != IGNORED).to(place[0])
    p = logits_at(model, batch.to(*place), where).float().softmax(-1)
    chances, words = (x.cpu() for x in p.topk(min(WORDS, p.shape[1])))
    own = p.gather(1, torch.cat([each.tokens for each in counted])[:, None].to(p.device))[:, 0].cpu()
    parts = [torch.split(x, [len(each.at) for each in counted]) for x in (own, words, chances)]
    return [Said(each.at, each.tokens, each.spans, *x) for each, *x in zip(counted, *parts, strict=True)]


class Vocabulary:
    """Carries distributions over the source's next token to the target's vocabulary, by the text that tokens write."""

    def __init__(self, calibration: Calibration) -> None:
        if calibration.tokenizers is None:
            raise TaskferryError(
                "two vocabularies: token distributions are carried over by the tokenizers, which this calibration set "
                "does not know; build it with language_calibration, or give models with one tokenizer"
            )
        self.source, self.target = calibration.tokenizers
        self.same = self.source.get_vocab() == self.target.get_vocab()
        self.texts: dict[int, str] = {}  # of the source's tokens that were met
        self.first: dict[int, int] = {}  # the target's first token of that text; -1 where there is none
        if not self.same:
            self.first = {i: -1 for i, token in self.source.added_tokens_decoder.items() if token.special}
        ends = self.source.eos_token_id, self.target.eos_token_id
        for last in (ends, calibration.ends):  # an end is an end, whatever it is called
            if last is not None and None not in last:
                self.first[last[0]] = last[1]

    def carry(self, said: Said, text: Counted) -> tuple[Tensor, Tensor, Tensor]:
        """The answers at the target's tokens: likely tokens [P, k], their probabilities, and those of the text's own.

        Where tokens of both begin at the same character, the target's own token has the probability of all source
        tokens that spell it, Π p(token | text before), and every other likely source token gives its probability to the
        first token by which the target writes that text. Where the own token takes several source tokens, others that
        only begin as it does are left out: they may be the way to it, and would take from it. Elsewhere the text's
        own token is certain.
        """
        begins: dict[int, int] = {}
        for place, (start, end) in enumerate(said.spans):
            if end > start:
                begins.setdefault(start, place)
        own, index = torch.ones(len(text.at)), torch.full((len(text.at),), -1)
        left_out = torch.zeros(len(text.at), said.words.shape[1], dtype=torch.bool)
        self._learn(said.words)
        for t, (start, end) in enumerate(text.spans):
            j = begins.pop(start, None) if end > start else None  # once: bytes of one character begin at the same place
            if j is None:
                continue
            k = j + 1
            while k < len(said.spans) and said.spans[k][1] > said.spans[k][0] < end:
                k += 1
            index[t], own[t] = j, said.own[j:k].prod()
            if k > j + 1:
                self._learn(said.tokens[j:k])
                written = "".join(self.texts.get(i, "") for i in said.tokens[j:k].tolist()).lstrip()
                prefixes = [written.startswith(self.texts.get(i, "\0").lstrip()) for i in said.words[j].tolist()]
                left_out[t] = torch.tensor(prefixes)
        words = torch.tensor([[self.first.get(i, -1) for i in row] for row in said.words.tolist()]).view_as(said.words)
        taken = words[index]
        dropped = left_out | (taken < 0) | (said.words == said.tokens[:, None])[index] | (index < 0)[:, None]
        return taken, said.chances[index].masked_fill(dropped, 0.0), own

    def _learn(self, tokens: Tensor) -> None:
        """Find the texts of some tokens, and the target's first token of each."""
        new = [i for i in sorted(set(tokens.flatten().tolist())) if i not in self.texts]
        if not new:
            return
        texts = dict(zip(new, _texts(self.source, new), strict=True))
        self.texts |= texts
        if self.same:
            self.first |= {i: self.first.get(i, i) for i in new}
            return
        asked = [i for i in new if texts[i] and i not in self.first]
        # Behind a letter or the end of a line: alone, some tokenizers would write a space in front.
        before = ["a" if texts[i][0].isspace() else "\n" for i in asked]
        ids = self._ids([*before, *(lead + texts[i] for lead, i in zip(before, asked, strict=True))])
        for i, lead, both in zip(asked, ids, ids[len(asked) :], strict=False):
            found = len(both) > len(lead) and both[: len(lead)] == lead
            self.first[i] = both[len(lead)] if found else -1

    def _ids(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self.target(texts, add_special_tokens=False)["input_ids"] if texts else []
        return found


def _texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The characters that each token writes behind others, with its space; "" where it has no whole character."""
    inner = tokenizer.backend_tokenizer  # decoders drop the space in front of a text, so each is written twice
    once, twice = (inner.decode_batch([[i] * n for i in tokens], skip_special_tokens=False) for n in (1, 2))
    found = [both[len(one) :] for one, both in zip(once, twice, strict=True)]
    return ["" if "\ufffd" in text else text for text in found]
