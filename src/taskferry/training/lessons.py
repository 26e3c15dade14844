"""What the tuned source teaches a target on the calibration samples, as a loss; no label is needed.

    >>> lesson = lesson_of(pair, tau)
    >>> lesson.loss(lesson.batch([0, 3, 7]))        # summed over the samples

Classes: its probabilities, on augmented views of images as well. Tokens: its distributions over the next token, between
two vocabularies where tokens of both begin at the same character. Features of encoders without a head: how alike any
two samples are, which needs no space in common. The teacher answers once, before the first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry.collect.capture import Loss
from taskferry.collect.device import device_of, evaluating
from taskferry.collect.scale import moved_by
from taskferry.data.augmentation import Views
from taskferry.data.batch import IGNORED, Batch, Calibration
from taskferry.data.vocabulary import translation
from taskferry.disk.files import hash_tensor
from taskferry.engines.pair import ModelPair
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.objectives.language import expected, is_sequence_to_sequence, logits_at, words_of
from taskferry.objectives.objectives import Classifier, Head, LanguageModel, Logits, Objective
from taskferry.taskvector import TaskVector

WORDS = 64  # of the teacher's distribution over the next token: the most likely
ENOUGH = 0.5  # of its probability that must lie on tokens that the target has too
VIEWS = 15  # augmented views of each image, at most


class Lesson(Objective):
    """Inputs of the target by number, and the loss that brings its answers to the teacher's."""

    unit = "per sample"

    def __init__(self, views: Views) -> None:
        self.views = views
        self.samples = views.samples  # behind them: augmented views of sample i mod samples
        self.begins: Tensor | None = None  # the loss of what learns them, where a run is judged by it

    def __len__(self) -> int:
        return len(self.views)

    def batch(self, indices: Sequence[int]) -> Batch:
        """These inputs as the target takes them."""
        return trimmed(self.views.side(1, indices))

    def loss(self, batch: Batch) -> Tensor:  # noqa: ARG002
        """Summed over the samples."""
        raise TypeError(f"{type(self).__name__} does not say what it teaches")

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:  # noqa: ARG002
        """The model is known already."""
        return self.loss

    def describe(self) -> str:
        """With a hash of the inputs and of what is taught of them: another lesson is another training."""
        digest = hashlib.sha256()
        for name, value in sorted({**vars(self), **self.views.sides[1]}.items()):
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, Tensor):
                    hash_tensor(digest, name, tensor)
        return f"{super().describe()[:-1]}, {digest.hexdigest()[:16]})"


def lesson_of(
    pair: ModelPair,
    tau: TaskVector,
    calibration: Calibration | None = None,
    *,
    labels: float = 0.0,
    views: int = VIEWS,
    seed: int = 0,
) -> Lesson:
    """What a source with its task vector teaches; `labels` is the share of the loss that the data's own labels get."""
    models, calibration, heads = (pair.source, pair.target), calibration or pair.calibration, pair.objectives
    kind, classes = kind_of(heads, labels), class_heads(heads)
    with moved_by(pair.source, tau) as set_scale, evaluating(pair.source), torch.no_grad():
        set_scale(1.0)
        if classes is not None:
            return Classes(models, calibration, classes, labels, views, seed)
        return Tokens(models, calibration, labels) if kind is Tokens else Likeness(models, calibration)


def kind_of(heads: tuple[Objective, Objective], labels: float = 0.0) -> type[Lesson]:
    """What the tuned source teaches by these losses; an error where it can teach nothing."""
    if class_heads(heads) is not None:
        return Classes
    if all(isinstance(head, LanguageModel) for head in heads):
        return Tokens
    if all(isinstance(head, Classifier) for head in heads):
        if labels:
            raise TaskferryError("the head of these encoders is made from samples: labels cannot be mixed in")
        return Likeness
    raise TaskferryError(
        f"the tuned source cannot teach by {heads[0].describe()}: a refinement needs models that score classes, "
        "language models, or encoders with a head made from labels; leave --refine out"
    )


def class_heads(heads: tuple[Objective, Objective]) -> tuple[Classifier, Classifier] | None:
    """Both, where they score classes by a head of their own."""
    A, B = heads
    if isinstance(A, Classifier) and isinstance(B, Classifier) and not A.fitted and not B.fitted:
        return A, B
    return None


class Classes(Lesson):
    """Cross-entropy against the probabilities that the teacher gives to the classes."""

    def __init__(
        self,
        models: tuple[nn.Module, nn.Module],
        calibration: Calibration,
        heads: tuple[Classifier, Classifier],
        labels: float,
        views: int,
        seed: int,
    ) -> None:
        super().__init__(Views(calibration, views, seed))
        names = [head.names for head in heads if isinstance(head, Head) and head.names]
        if len(names) == 2 and names[0] != names[1]:
            raise _other_classes(f"the classes {', '.join(names[0][:6])}", ", ".join(names[1][:6]))
        teacher, device = heads[0].logits(models[0], calibration.side(0)), device_of(models[0])
        size = max(map(len, calibration.side(0)))
        starts = range(0, len(self), size)
        asked = (self.views.side(0, range(i, min(i + size, len(self)))) for i in starts)
        self.answers = torch.cat([teacher(batch.to(device)).softmax(-1).cpu() for batch in asked])
        if labels:
            if calibration.labels is None:
                raise TaskferryError("labels cannot be mixed in: the samples have none")
            true = F.one_hot(calibration.labels, self.answers.shape[1]).to(self.answers)
            self.answers = (1 - labels) * self.answers + labels * self.views.blend(true, range(len(self)))
        self.logits: Logits = heads[1].logits(models[1], calibration.side(1))

    def loss(self, batch: Batch) -> Tensor:
        """Σ over samples of −Σ p log q."""
        scores = self.logits(batch)
        if scores.shape[1] != self.answers.shape[1]:
            raise _other_classes(f"{self.answers.shape[1]} classes", str(scores.shape[1]))
        return F.cross_entropy(scores, self.answers[list(batch.ids)].to(scores), reduction="sum")


def _other_classes(source: str, target: str) -> TaskferryError:
    return TaskferryError(
        f"the tuned source scores {source}, the target {target}: it cannot teach them; give a target with a head of "
        "the same classes, or leave --refine out"
    )


class Tokens(Lesson):
    """Cross-entropy against the teacher's distribution over the next token, wherever a token counts.

    Where most of it lies on tokens that the target lacks, the token of the text itself is the answer.
    """

    unit = "per token"

    def __init__(self, models: tuple[nn.Module, nn.Module], calibration: Calibration, labels: float) -> None:
        super().__init__(Views(calibration, 0))
        self.model = models[1]
        same = all(torch.equal(A.inputs["input_ids"], B.inputs["input_ids"]) for A, B in calibration)
        table = None if same else translation(calibration.tokenizers, calibration.ends)
        self.at: list[Tensor] = []  # of each sample: positions [P], their likely tokens [P, k] and probabilities
        self.likely: list[Tensor] = []
        self.chances: list[Tensor] = []
        self.carried = 0  # positions that have the teacher's own distribution
        for A, B in calibration:
            self._answers(models, A, B, table, labels)

    def _answers(
        self, models: tuple[nn.Module, nn.Module], A: Batch, B: Batch, table: Tensor | None, labels: float
    ) -> None:
        wanted = [expected(model, batch).cpu() for model, batch in zip(models, (A, B), strict=True)]
        counted = wanted[0] != IGNORED
        scores = logits_at(models[0], A.to(device_of(models[0])), counted.to(device_of(models[0]))).float().cpu()
        chance, word = scores.softmax(-1).topk(min(WORDS, scores.shape[1]))
        if table is not None:
            # Models often have rows for more words than their tokenizer knows.
            word = F.pad(table, (0, max(0, scores.shape[1] - len(table))), value=-1)[word]
        word = word.masked_fill(word >= words_of(models[1]), -1)  # of one tokenizer either may have more rows
        chance = chance.masked_fill(word < 0, 0.0)
        known = chance.sum(1)
        place = torch.full(counted.shape, -1)
        place[counted] = torch.arange(len(word))
        for i in range(len(B)):
            at = (wanted[1][i] != IGNORED).nonzero()[:, 0]
            true = wanted[1][i][at]
            teacher = place[i][at] if table is None else _same_start(models, A, B, i, at, place[i])
            words, chances = word[teacher].clamp_min(0), chance[teacher] / known[teacher].clamp_min(1e-9)[:, None]
            alone = (teacher < 0) | (known[teacher] < ENOUGH)
            self.carried += int((~alone).sum())
            chances = chances.masked_fill(alone[:, None], 0.0)
            own = torch.where(alone, 1.0, labels)
            self.at.append(at)
            self.likely.append(torch.cat([words, true[:, None]], 1))
            self.chances.append(torch.cat([(1 - own)[:, None] * chances, own[:, None]], 1))

    def loss(self, batch: Batch) -> Tensor:
        """Samples times the mean over all tokens that count."""
        of = [i % self.samples for i in batch.ids]
        where = torch.zeros(expected(self.model, batch).shape, dtype=torch.bool)
        for row, i in enumerate(of):
            where[row, self.at[i]] = True
        scores = logits_at(self.model, batch, where.to(device_of(self.model))).float().log_softmax(-1)
        words, chances = (torch.cat([each[i] for i in of]).to(scores.device) for each in (self.likely, self.chances))
        return -(chances * scores.gather(1, words)).sum(1).mean() * len(batch)


class Likeness(Lesson):
    """The squared difference between how alike two samples are to the teacher and to the target, by their features."""

    def __init__(self, models: tuple[nn.Module, nn.Module], calibration: Calibration) -> None:
        super().__init__(Views(calibration, 0))
        self.model = models[1]
        found = []
        for model, side in zip(models, (0, 1), strict=True):
            with evaluating(model):
                batches = [batch.to(device_of(model)) for batch in calibration.side(side)]
                found.append(torch.cat([family_of(model).features(model, batch) for batch in batches]))
        self.teacher = F.normalize(found[0] - found[0].mean(0), dim=-1).cpu()
        self.centre = found[1].mean(0)

    def loss(self, batch: Batch) -> Tensor:
        """Samples times the mean over all pairs of them."""
        features = F.normalize(family_of(self.model).features(self.model, batch) - self.centre, dim=-1)
        teacher = self.teacher[list(batch.ids)].to(features)
        return len(batch) * (features @ features.T - teacher @ teacher.T).square().mean()


def trimmed(batch: Batch) -> Batch:
    """Without the columns at the end that are padding in every row."""
    mask = batch.inputs.get("attention_mask")
    if mask is None:
        return batch
    last = int(mask.any(0).nonzero().max()) + 1

    def cut(name: str, x: Tensor) -> Tensor:
        answers = name == "labels" and bool((x[:, last:] != IGNORED).any())  # of a decoder: as long as they are
        return x if x.shape[:2] != mask.shape or answers else x[:, :last]

    return replace(batch, inputs={name: cut(name, x) for name, x in batch.inputs.items()})


def _same_start(models: tuple[nn.Module, nn.Module], A: Batch, B: Batch, row: int, at: Tensor, place: Tensor) -> Tensor:
    """[P] which of the teacher's answers begins where the target's token at each position does; −1 for none."""
    starts = []
    for model, batch in zip(models, (A, B), strict=True):
        sequence = is_sequence_to_sequence(model)
        spans = batch.spans["decoder" if sequence else "tokens"][row]
        begin = torch.where(spans[:, 1] > spans[:, 0], spans[:, 0], -1)
        starts.append(begin if sequence else torch.cat([begin[1:], torch.tensor([-1])]))
    known = {int(start): int(place[u]) for u, start in enumerate(starts[0]) if start >= 0 and place[u] >= 0}
    return torch.tensor([known.get(int(starts[1][t]), -1) for t in at])
