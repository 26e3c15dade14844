"""How much a data file may hold, checked before a library decodes it: files come from strangers.

A Parquet file of a few kilobytes that decodes to terabytes, or a picture of a million by a million pixels, is refused
with its size.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from taskferry.errors import TaskferryError, first_line

MOST_BYTES = 4 * 2**30  # of all samples together, which are kept in memory
MOST_PIXELS = 2**26
PICTURES = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no format that starts another program


def check_size(path: Path) -> None:
    """Refuse a file that no honest data set is; Parquet is decoded a few rows at a time, for its metadata may lie."""
    total = path.stat().st_size
    if path.suffix == ".parquet" and total <= MOST_BYTES:
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise TaskferryError("pyarrow is needed to read Parquet: pip install 'taskferry[data]'") from error
        try:
            with parquet.ParquetFile(path) as file:
                total = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
                batches = file.iter_batches(batch_size=64, use_threads=False)
                decoded = 0
                while max(total, decoded) <= MOST_BYTES and (batch := next(batches, None)) is not None:
                    decoded += batch.nbytes
        except Exception as error:  # the library raises many kinds; all mean that the data cannot be read
            raise TaskferryError(f"{path} cannot be read: {first_line(error)}") from error
        total = max(total, decoded)
    if total > MOST_BYTES:
        raise TaskferryError(f"{path} decodes to more than {MOST_BYTES / 2**30:.0f} GiB: give a part of it")


def open_picture(source: Any) -> Any:
    """A PIL image in RGB, from a file or a stream; its size is looked at before its pixels are."""
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
