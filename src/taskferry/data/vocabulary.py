"""Tokens of one vocabulary in another: those that write the same characters.

>>> table = translation((tokenizer_A, tokenizer_B))        # [words of A], −1 where B has no such token
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from taskferry.errors import TaskferryError

_MARKS = {"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"}  # how tokenizers write white space


def translation(tokenizers: tuple[Any, Any] | None, ends: tuple[int, int] | None = None) -> Tensor:
    """The token of B for each token of A; the end of a text is the end of a text, whatever it is called.

    `ends` are the tokens that end an answer, where they are others: an end of turn, say.
    """
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
    last = [tokenizer.eos_token_id for tokenizer in tokenizers]
    if None not in last:
        table[last[0]] = last[1]
    if ends is not None:
        table[ends[0]] = ends[1]
    return table


def _written(tokenizer: Any) -> dict[str | bytes, list[int]]:
    """What each token writes, with the tokens that write it; bytes, where those alone are no characters."""
    table = _BYTES if _is_byte_level(tokenizer) else {}
    found: dict[str | bytes, list[int]] = {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        found.setdefault(_characters(token, table), []).append(number)
    return found


def _characters(token: str, table: Mapping[str, int]) -> str | bytes:
    if table and all(c in table for c in token):
        written = bytes(table[c] for c in token)
    elif single := _SINGLE.fullmatch(token):  # SentencePiece's own bytes
        written = bytes([int(single[1], 16)])
    else:
        return "".join(_MARKS.get(c, c) for c in token)
    try:
        return written.decode()
    except UnicodeDecodeError:
        return written


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether its vocabulary writes bytes, each as a letter of an alphabet of 256."""
    return "ByteLevel" in repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))


def _alphabet() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for the letters behind the first 256 characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()
_SINGLE = re.compile(r"<0x([0-9A-F]{2})>")
