"""From plain samples to a calibration set: each model's own tokenizer or image transform.

>>> text_calibration(["A film.", …], tokenizer_A, tokenizer_B, labels=[0, …])
>>> image_calibration(images, transform_A, transform_B, labels=[3, …], key=("pixel_values", "pixel_values"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from taskferry.data.batch import IGNORED, Batch, Calibration
from taskferry.errors import TaskferryError


def text_calibration(
    texts: Sequence[str],
    tokenizer_A: Any,
    tokenizer_B: Any | None = None,
    *,
    pairs: Sequence[str] | None = None,
    labels: Sequence[int] | None = None,
    max_length: int = 128,
    micro_batch: int = 16,
    causal: bool = False,
) -> Calibration:
    """Text (or text pairs) through each model's tokenizer, with character offsets where it gives them.

    `causal` adds next-token labels for a language model: every real token.
    """
    _check_sizes(texts, pairs, labels)

    def batch(tokenizer: Any, chosen: range) -> Batch:
        second = None if pairs is None else [pairs[i] for i in chosen]
        inputs, spans = _encoded(tokenizer, [texts[i] for i in chosen], second, max_length)
        if causal:
            inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)
        return Batch(inputs, _labels(labels, chosen), tuple(chosen), spans)

    return in_micro_batches(len(texts), micro_batch, batch, tokenizer_A, tokenizer_B)


def pair_calibration(
    rows: Sequence[Sequence[str]],
    tokenizer_A: Any,
    tokenizer_B: Any | None = None,
    *,
    max_length: int = 128,
    micro_batch: int = 16,
) -> Calibration:
    """Rows of an anchor, its positive and any negatives, for `Contrastive`; each text is read by itself.

    The rows of a micro-batch are each other's candidates, so all have as many as one another, but for one.
    """
    if micro_batch < 2 or len(rows) < 2:
        raise TaskferryError(
            f"{len(rows)} pairs in micro-batches of {micro_batch}: the positives of a micro-batch are told apart, "
            "so it needs two pairs at least, and better sixteen"
        )

    def batch(tokenizer: Any, chosen: range) -> Batch:
        inputs, spans = _encoded(tokenizer, [text for i in chosen for text in rows[i]], None, max_length)
        return Batch(inputs, None, tuple(chosen), spans, texts=len(rows[0]))

    chunks = evenly(len(rows), micro_batch)
    return _in_chunks(chunks, batch, tokenizer_A, tokenizer_B)


def evenly(n: int, size: int) -> list[range]:
    """Consecutive numbers in parts whose sizes differ by one at most; none is alone, unless all are to be."""
    count = n if size == 1 else max(1, min(-(-n // size), n // 2))
    return [range(i * n // count, (i + 1) * n // count) for i in range(count)]


def image_calibration(
    images: Sequence[Any],
    transform_A: Callable[[Any], Tensor],
    transform_B: Callable[[Any], Tensor] | None = None,
    *,
    key: tuple[str, str] = ("pixel_values", "pixel_values"),
    labels: Sequence[int] | None = None,
    micro_batch: int = 16,
) -> Calibration:
    """Images through each model's transform; `key` is what the models call them (timm "x", OpenCLIP "image")."""
    _check_sizes(images, None, labels)

    def batch(side: tuple[Callable[[Any], Tensor], str], chosen: range) -> Batch:
        transform, name = side
        pixels = torch.stack([transform(images[i]) for i in chosen])
        return Batch({name: pixels}, _labels(labels, chosen), tuple(chosen))

    alone = transform_B is None and key[0] == key[1]
    other = None if alone else (transform_B or transform_A, key[1])
    return in_micro_batches(len(images), micro_batch, batch, (transform_A, key[0]), other)


def in_micro_batches(
    n: int, size: int, batch: Callable[[Any, range], Batch], side_A: Any, side_B: Any | None = None
) -> Calibration:
    """Consecutive micro-batches of n samples, each prepared for both models; one preparation serves both if alone."""
    if size < 1:
        raise TaskferryError(f"micro-batches of {size} samples: one is the least")
    return _in_chunks([range(start, min(start + size, n)) for start in range(0, n, size)], batch, side_A, side_B)


def _in_chunks(
    chunks: Sequence[range], batch: Callable[[Any, range], Batch], side_A: Any, side_B: Any | None
) -> Calibration:
    first = [batch(side_A, c) for c in chunks]
    second = first if side_B is None else [batch(side_B, c) for c in chunks]
    return Calibration(zip(first, second, strict=True))


def fill_padding(tokenizer: Any) -> None:
    """Texts of one batch are padded by something, where a tokenizer has no token for it."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)  # masked, whatever it is


def _encoded(
    tokenizer: Any, first: Sequence[str], second: Sequence[str] | None, max_length: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a model takes, and character offsets where the tokenizer gives them."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    fill_padding(tokenizer)
    encoded = tokenizer(
        list(first),
        second,
        padding=True,
        truncation=True,
        max_length=max_length,
        return_tensors="pt",
        return_offsets_mapping=fast,
    )
    spans = {"tokens": _one_coordinate(encoded, encoded.pop("offset_mapping"), first)} if fast else {}
    return dict(encoded), spans


def _labels(labels: Sequence[int] | None, chosen: range) -> Tensor | None:
    return None if labels is None else torch.tensor([int(labels[i]) for i in chosen])


def _check_sizes(samples: Sequence[Any], pairs: Sequence[Any] | None, labels: Sequence[int] | None) -> None:
    if isinstance(samples, str):
        raise TaskferryError("one text was given: give a list of them, about a hundred")
    for name, other in (("second texts", pairs), ("labels", labels)):
        if other is not None and len(other) != len(samples):
            raise TaskferryError(f"{len(samples)} samples but {len(other)} {name}")


def _one_coordinate(encoded: Any, offsets: Tensor, first: Sequence[str]) -> Tensor:
    """Offsets of the second text of a pair start at 0 again: shift them behind the first text."""
    spans = offsets.clone()
    for i, text in enumerate(first):
        second = torch.tensor([part == 1 for part in encoded.sequence_ids(i)])
        spans[i, second] += len(text) + 1
    return spans
