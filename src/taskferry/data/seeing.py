"""Calibration sets of language models that also see: chats with one picture each, through each model's own processor.

    >>> seeing_calibration(rows, images, processor_A, processor_B)

A processor writes a picture as many tokens. The tokens of the text are found again in what it made and paired by their
characters, as in any chat; those of pictures pair where both models read the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from taskferry.data.batch import IGNORED, Batch, Calibration
from taskferry.data.builders import fill_padding, in_micro_batches
from taskferry.data.language import Place, Segment, check_fast, rendered_chat, spans_of
from taskferry.errors import TaskferryError, first_line

_GRIDS = ("image_grid_thw", "image_sizes")  # what processors call the sizes of pictures that keep their own


def seeing_calibration(
    rows: Sequence[Mapping[str, Any]],
    images: Sequence[Any],
    processor_A: Any,
    processor_B: Any | None = None,
    *,
    max_length: int = 256,
    micro_batch: int = 8,
    alike: bool = False,
) -> Calibration:
    """Rows as `pictured` makes them, with their PIL images; `labels` are the tokens of the last answer.

    `max_length` bounds the tokens of a sample's text; those of its picture are the model's own affair. `alike` splits
    a micro-batch where pictures have another number of tokens than the one before, as a capture needs it: some towers
    lay the tokens of all pictures in one row.
    """
    samples = [_segments(row, number) for number, row in enumerate(rows)]

    def batch(processor: Any, chosen: Sequence[int]) -> Batch:
        tokenizer = processor.tokenizer
        check_fast(tokenizer)
        fill_padding(tokenizer)
        chats = [rendered_chat(processor, samples[i]) for i in chosen]
        try:
            encoded = processor(
                text=[text for text, _ in chats],
                images=[[images[i]] for i in chosen],
                padding=True,
                padding_side="right",
                add_special_tokens=False,  # a chat template writes its own
                return_tensors="pt",
            )
        except Exception as error:  # whatever its files make of it
            raise TaskferryError(
                f"a {type(processor).__name__} does not take these rows: {first_line(error)}; give rows of text"
            ) from error
        inputs = _by_sample(dict(encoded), len(chosen), type(processor).__name__)
        offsets = torch.zeros(*inputs["input_ids"].shape, 2, dtype=torch.long)
        for i, (number, (text, places)) in enumerate(zip(chosen, chats, strict=True)):
            offsets[i] = _offsets(tokenizer, text, places, inputs["input_ids"][i], max_length, number)
        spans, counted = spans_of(offsets, [places for _, places in chats])
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        inputs["labels"] = ids.masked_fill((mask == 0) | ~counted, IGNORED)
        return Batch({"input_ids": ids, **inputs}, None, tuple(chosen), {"tokens": spans})

    made: list[tuple[Batch, Batch]] = list(in_micro_batches(len(rows), micro_batch, batch, processor_A, processor_B))
    if alike:
        split = (_alike(pair) for pair in made)
        sides = processor_A, processor_B or processor_A
        made = [
            (batch(sides[0], run), batch(sides[1], run)) if len(runs) > 1 else pair
            for pair, runs in zip(made, split, strict=True)
            for run in runs
        ]
    tokenizers = processor_A.tokenizer, (processor_B or processor_A).tokenizer
    return Calibration(made, tokenizers)


def _alike(pair: tuple[Batch, Batch]) -> list[list[int]]:
    """Consecutive samples of a micro-batch whose pictures have one grid of patches, in either model."""
    grids = [batch.inputs[name] for batch in pair for name in _GRIDS if name in batch.inputs]
    runs: list[list[int]] = []
    for row, number in enumerate(pair[0].ids):
        if row and all(torch.equal(grid[row], grid[row - 1]) for grid in grids):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _segments(row: Mapping[str, Any], number: int) -> list[Segment]:
    """Messages up to the last answer, which counts."""
    messages = row["messages"]
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if last < 0:
        raise TaskferryError("a chat without an answer of the assistant has nothing to learn from")
    segments = []
    for i, message in enumerate(messages[: last + 1]):
        kinds = [part["type"] for part in message["content"]]
        at = kinds.index("image") if "image" in kinds else None
        if at is not None and 0 < at < len(kinds) - 1:
            raise TaskferryError(f"sample {number}: an image stands within a text: put it in front of it or behind")
        text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        picture = None if at is None else "front" if at == 0 else "behind"
        segments.append(Segment(text, i == last, message["role"], picture))
    if not any(segment.picture for segment in segments):
        raise TaskferryError(f"sample {number}: its image stands behind the last answer: put it in front")
    return segments


def _offsets(tokenizer: Any, text: str, places: Sequence[Place], ids: Tensor, most: int, number: int) -> Tensor:
    """[L, 2] the characters of a chat that each token stands for; (0, 0) for what the processor has written itself."""
    plain = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    alone = plain["input_ids"]
    if len(alone) > most:
        raise TaskferryError(f"sample {number} has {len(alone)} tokens of text, {most} are the most: raise max_length")
    offsets = torch.tensor(plain["offset_mapping"], dtype=torch.long).reshape(-1, 2)
    found = torch.zeros(len(ids), 2, dtype=torch.long)
    there = torch.zeros(len(alone), dtype=torch.bool)
    for a, b, size in SequenceMatcher(None, alone, ids.tolist(), autojunk=False).get_matching_blocks():
        found[b : b + size] = offsets[a : a + size]
        there[a : a + size] = True
    for place in places:
        inside = (offsets[:, 0] < place.stop) & (offsets[:, 1] > place.start)
        if not bool(there[inside].all()):
            raise TaskferryError(
                f"sample {number}: a processor changes the text of a message, so its tokens cannot be paired: give "
                "rows of text"
            )
    return found


def _by_sample(inputs: dict[str, Any], n: int, name: str) -> dict[str, Tensor]:
    """Every tensor with the samples first; patches of pictures of several sizes (Qwen-VL) are padded."""
    grids = inputs.get("image_grid_thw")
    if grids is not None and len(grids) == n:
        parts = torch.split(inputs["pixel_values"], grids.prod(1).tolist())
        inputs["pixel_values"] = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    for key, value in inputs.items():
        if not isinstance(value, Tensor) or len(value) != n:
            raise TaskferryError(f"a {name} makes '{key}' of several rows for one image: give rows of text")
    return inputs
