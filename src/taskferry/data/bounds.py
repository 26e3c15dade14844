"""How much a data file may hold, checked before a library decodes it: files come from strangers.

A line of a hundred megabytes, a Parquet file of a few kilobytes that decodes to terabytes, or a picture of a million
by a million pixels is refused with its size.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from taskferry.errors import TaskferryError

MOST_BYTES = 4 * 2**30  # of all samples together, which are kept in memory
MOST_LINE = 16 * 2**20
MOST_LIST = 256 * 2**20  # a .json file may be one line
MOST_NESTED = 64  # lists in lists, which parsers follow on the stack
MOST_PIXELS = 2**26
PICTURES = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no format that starts another program
_BRACKETS = re.compile(rb'\\.|["\[\]{}]', re.DOTALL)


def check_data_file(path: Path) -> None:
    """Refuse a file that no honest data set is."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise TaskferryError(f"{path} has {_gib(size)}, {_gib(MOST_BYTES)} are the most: give a part of it")
    if path.suffix == ".parquet":
        _check_parquet(path)
    else:
        _check_lines(path, MOST_LIST if path.suffix == ".json" else MOST_LINE)


def open_picture(source: Any) -> Any:
    """A PIL image in RGB, from a file or a stream; its size is looked at before its pixels are."""
    import warnings

    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large and of damaged pictures: ours are the words about them
            image = Image.open(source, formats=PICTURES)
            width, height = image.size
            if width * height <= MOST_PIXELS:
                return image.convert("RGB")
    except Exception as error:  # a damaged picture fails in as many ways as there are decoders
        raise TaskferryError(f"an image cannot be read: {error}") from error
    raise TaskferryError(f"an image of {width} x {height} pixels: {MOST_PIXELS:,} are the most, make it smaller")


def _check_lines(path: Path, longest: int) -> None:
    """No line that is too long, and no brackets too deep in each other."""
    nested = path.suffix in (".json", ".jsonl")
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(longest + 1):
            number += 1
            if len(line) > longest:
                raise TaskferryError(
                    f"{path}: line {number} is longer than {longest / 2**20:.0f} MiB: a sample has a few kilobytes"
                )
            if nested and line.count(b"[") + line.count(b"{") > MOST_NESTED and _depth(line) > MOST_NESTED:
                raise TaskferryError(f"{path}: line {number} nests more than {MOST_NESTED} lists: a sample has a few")


def _depth(line: bytes) -> int:
    """How deep brackets stand in each other, those within texts left out."""
    depth = deepest = 0
    inside = False
    for found in _BRACKETS.finditer(line):
        mark = found[0]
        if mark == b'"':
            inside = not inside
        elif not inside and mark in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif not inside and mark in (b"]", b"}"):
            depth -= 1
    return deepest


def _check_parquet(path: Path) -> None:
    """Decode it a few rows at a time and add up: what its own metadata say may be a lie."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TaskferryError("pyarrow is needed to read Parquet: pip install 'taskferry[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            total = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            batches = file.iter_batches(batch_size=64, use_threads=False)
            decoded = 0
            while total <= MOST_BYTES and decoded <= MOST_BYTES and (batch := next(batches, None)) is not None:
                decoded += batch.nbytes
    except Exception as error:  # the library raises many kinds; all mean that the data cannot be read
        raise TaskferryError(f"{path} cannot be read: {(str(error).splitlines() or [repr(error)])[0]}") from error
    if max(total, decoded) > MOST_BYTES:
        raise TaskferryError(f"{path} decodes to more than {_gib(MOST_BYTES)}: give a part of it")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
