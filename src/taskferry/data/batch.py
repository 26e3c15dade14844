"""A micro-batch, and the calibration set: the same samples, in the same order, prepared for each of the models.

>>> pair = (Batch({"x": images_224}, labels), Batch({"x": images_240}, labels))
>>> calibration = Calibration([pair, ...])
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from taskferry.disk.files import hash_tensor
from taskferry.errors import TaskferryError

TEXTS = ("input_ids", "labels", "decoder_input_ids")  # a row of a layer for each of their numbers
BESIDE = ("attention_mask", "token_type_ids", "position_ids", "decoder_attention_mask")
IGNORED = -100  # a label position that no loss counts, in torch and transformers alike


@dataclass(frozen=True)
class Batch:
    """n samples as one model takes them."""

    inputs: Mapping[str, Tensor]  # keyword arguments of the model; the first dimension is the sample
    labels: Tensor | None = None  # [n], a class each
    ids: tuple[int, ...] = ()  # which samples, to check that both models see the same
    spans: Mapping[str, Tensor] = field(default_factory=dict)  # stream -> [n, L, 2] character offsets
    number: int | None = None  # its place in a calibration set
    texts: int = 1  # rows of the inputs that make one sample, one behind the other: an anchor and its positive

    def __len__(self) -> int:
        return self.rows // self.texts

    @property
    def rows(self) -> int:
        """Of the inputs: what the model takes for samples."""
        return int(next(iter(self.inputs.values())).shape[0])

    @property
    def tokens(self) -> int | None:
        """The most that maps see of a layer: of a text without padding, or of a second stack; None for other inputs."""
        texts = {name: tensor.numel() for name, tensor in self.inputs.items() if name in TEXTS}
        if not texts or not set(self.inputs) <= {*TEXTS, *BESIDE}:
            return None
        mask = self.inputs.get("attention_mask")
        if mask is not None and "input_ids" in texts:
            texts["input_ids"] = int(mask.count_nonzero())
            if self._one_text:
                del texts["labels"]
        return max(texts.values())

    @property
    def _one_text(self) -> bool:
        """Whether its labels are the text itself, as a causal model takes them, and no text of a decoder's own."""
        ids, labels = self.inputs.get("input_ids"), self.inputs.get("labels")
        if ids is None or labels is None or ids.shape != labels.shape:
            return False
        counted = labels != IGNORED
        return torch.equal(labels[counted], ids[counted])

    @property
    def following(self) -> Tensor:
        """[n, L] the label that each token of a causal model's text is to predict; padding in front predicts none."""
        labels, mask = self.inputs["labels"], self.inputs.get("attention_mask")
        following = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
        return following if mask is None else following.masked_fill(mask.to(labels.device) == 0, IGNORED)

    def filled(self, length: int) -> Tensor:
        """[n] the samples of which a text has exactly so many tokens."""
        mask, answer = self.inputs.get("attention_mask"), self.inputs.get("labels")
        counted = [] if mask is None else [mask != 0]
        counted += [] if answer is None or answer.dim() < 2 else [answer != IGNORED]  # of a decoder
        rows = [(tokens.sum(1) == length).view(len(self), -1).any(1).cpu() for tokens in counted]
        return torch.stack(rows).any(0) if rows else torch.zeros(len(self), dtype=torch.bool)

    def take(self, indices: Sequence[int]) -> Batch:
        """Some of the samples, in the order given."""
        chosen = torch.tensor(list(indices))
        inputs = (chosen[:, None] * self.texts + torch.arange(self.texts)).flatten()

        def shown(tensor: Tensor) -> Tensor:
            return tensor[inputs.to(tensor.device)]

        def rows(tensor: Tensor) -> Tensor:
            return tensor[chosen.to(tensor.device)]

        return replace(
            self,
            inputs={name: shown(tensor) for name, tensor in self.inputs.items()},
            labels=None if self.labels is None else rows(self.labels),
            ids=tuple(self.ids[i] for i in indices) if self.ids else (),
            spans={stream: shown(spans) for stream, spans in self.spans.items()},
            number=None,
        )

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """The same on another device; pixels and other numbers that are not whole in another precision too."""
        inputs = {
            name: tensor.to(device, dtype) if dtype is not None and tensor.is_floating_point() else tensor.to(device)
            for name, tensor in self.inputs.items()
        }
        return replace(self, inputs=inputs, labels=None if self.labels is None else self.labels.to(device))


class Calibration:
    """Pairs of micro-batches (source, target), checked: same number, same samples where ids tell, same labels.

    Kept as a sequence, because the models may be walked several times (groups of sites, scale search).
    """

    def __init__(self, pairs: Iterable[tuple[Batch, Batch]], tokenizers: tuple[Any, Any] | None = None) -> None:
        numbered = enumerate(pairs)
        self.tokenizers = tokenizers  # that made its texts, where they are known
        self.pairs: Sequence[tuple[Batch, Batch]] = [
            (replace(A, number=i), replace(B, number=i)) for i, (A, B) in numbered
        ]
        if not self.pairs:
            raise TaskferryError("the calibration set is empty: about a hundred samples are needed")
        for i, (A, B) in enumerate(self.pairs):
            if len(A) != len(B):
                raise TaskferryError(f"micro-batch {i}: {len(A)} samples for the source, {len(B)} for the target")
            if A.ids != B.ids:
                raise TaskferryError(f"micro-batch {i}: the two models would see different samples, or another order")
            if (A.labels is None) != (B.labels is None) or (
                A.labels is not None and B.labels is not None and not torch.equal(A.labels.cpu(), B.labels.cpu())
            ):
                raise TaskferryError(f"micro-batch {i}: the labels of source and target differ")

    def __iter__(self) -> Iterator[tuple[Batch, Batch]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(len(A) for A, _ in self.pairs)

    def tokens(self) -> int | None:
        """The most rows that a layer sees of all samples; None where inputs do not tell."""
        rows = [max(A.tokens, B.tokens) for A, B in self.pairs if A.tokens is not None and B.tokens is not None]
        return sum(rows) if len(rows) == len(self.pairs) else None

    @property
    def ends(self) -> tuple[int, int] | None:
        """The special tokens that end an answer in either model; None where answers have no end of their own."""
        if self.tokenizers is None:
            return None
        last = []
        for batch, tokenizer in zip(self.pairs[0], self.tokenizers, strict=True):
            counted = batch.inputs["labels"][0]
            token = int(counted[counted != IGNORED][-1])
            known = tokenizer.added_tokens_decoder.get(token)
            if known is None or not known.special:
                return None
            last.append(token)
        return last[0], last[1]

    def filled(self, length: int) -> int:
        """Samples of which some model reads exactly so many tokens: what was longer than `length` has been cut."""
        return sum(int((A.filled(length) | B.filled(length)).sum()) for A, B in self.pairs)

    @property
    def labels(self) -> Tensor | None:
        """[N] all labels, or None."""
        labels = [A.labels.cpu() for A, _ in self.pairs if A.labels is not None]
        return torch.cat(labels) if len(labels) == len(self.pairs) else None

    def side(self, which: int) -> list[Batch]:
        """The micro-batches of one model: 0 the source, 1 the target."""
        return [pair[which] for pair in self.pairs]

    def split(self, seed: int = 0, share: float = 0.2) -> tuple[Calibration, Calibration]:
        """Samples to fit on, and a share held out to judge on, drawn by the seed and spread over the classes.

        No class is held out whole. Where samples are each other's candidates, micro-batches stay together as far as
        they can. Fewer than five samples are too few to split: both parts are all of them.
        """
        count = round(share * self.samples)
        if self.samples < 5 or not count:
            return self, self
        if any(A.texts > 1 for A, _ in self.pairs):
            held_out = set(range(self.samples - count, self.samples))
        else:
            labels = self.labels
            classes = [0] * self.samples if labels is None or labels.ndim > 1 else labels.tolist()
            sizes = Counter(classes)
            shuffled = torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed)).tolist()
            spread = sorted((i for i in shuffled if sizes[classes[i]] > 1), key=lambda i: classes[i])
            every = max(2, round(1 / share))
            held_out = set(spread[every // 2 :: every])
        if not held_out:
            return self, self
        return self._part(set(range(self.samples)) - held_out), self._part(held_out)

    def _part(self, chosen: Collection[int]) -> Calibration:
        """Some of the samples, in micro-batches no larger than before."""
        pairs, start = [], 0
        for A, B in self.pairs:
            mine = [i for i in range(len(A)) if start + i in chosen]
            start += len(A)
            if mine:
                pairs.append((A.take(mine), B.take(mine)))
        return Calibration(pairs, self.tokenizers)

    def with_labels(self, labels: Tensor) -> Calibration:
        """The same samples under other labels [N], such as the teacher's."""
        if labels.shape != (self.samples,):
            raise TaskferryError(f"{self.samples} samples need as many labels, got shape {tuple(labels.shape)}")
        pairs, start = [], 0
        for A, B in self.pairs:
            part = labels[start : start + len(A)]
            pairs.append((replace(A, labels=part), replace(B, labels=part)))
            start += len(A)
        return Calibration(pairs, self.tokenizers)

    def identity(self) -> str:
        """A hash of everything that both models are shown."""
        digest = hashlib.sha256()
        for batch in (batch for pair in self.pairs for batch in pair):
            tensors = dict(batch.inputs)
            if batch.labels is not None:
                tensors["labels of the batch"] = batch.labels
            for name in sorted(tensors):
                hash_tensor(digest, name, tensors[name])
        return digest.hexdigest()


def joined(batches: Sequence[Batch]) -> Batch:
    """All samples in one micro-batch; shorter texts, and patches of smaller pictures, are padded behind."""
    inputs = {}
    for name in batches[0].inputs:
        parts = [batch.inputs[name] for batch in batches]
        most = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        value = IGNORED if name == "labels" else 0
        padded = []
        for part in parts:
            missing = [n - size for n, size in zip(most, part.shape[1:], strict=True)]
            behind = [amount for n in reversed(missing) for amount in (0, n)]  # of the last dimension first
            padded.append(F.pad(part, behind, value=value) if any(behind) else part)
        inputs[name] = torch.cat(padded)
    labels = [batch.labels for batch in batches if batch.labels is not None]
    return Batch(inputs, torch.cat(labels) if labels else None, texts=batches[0].texts)


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
