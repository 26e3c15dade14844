"""Tokens of one vocabulary in another: those that write the same characters.

>>> table = translation((tokenizer_A, tokenizer_B))        # [words of A], −1 where B has no such token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taskferry.errors import TaskferryError

_MARKS = {"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"}  # how tokenizers write white space


def translation(tokenizers: tuple[Any, Any] | None) -> Tensor:
    """The token of B for each token of A; the end of a text is the end of a text, whatever it is called."""
    if tokenizers is None:
        raise TaskferryError(
            "two vocabularies: token distributions are carried over by the tokenizers, which this calibration set "
            "does not know; build it with language_calibration, or give models with one tokenizer"
        )
    A, B = (_written(tokenizer) for tokenizer in tokenizers)
    table = torch.full((max(max(numbers) for numbers in A.values()) + 1,), -1)
    for text, numbers in A.items():
        if text in B:
            table[list(numbers)] = B[text][0]
    ends = [tokenizer.eos_token_id for tokenizer in tokenizers]
    if None not in ends:
        table[ends[0]] = ends[1]
    return table


def _written(tokenizer: Any) -> dict[str, list[int]]:
    """What each token writes, with the tokens that write it."""
    found: dict[str, list[int]] = {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        found.setdefault("".join(_MARKS.get(c, c) for c in token), []).append(number)
    return found
