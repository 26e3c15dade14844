"""Samples from files: JSONL, CSV, Parquet, image folders, hub datasets, through the `datasets` library.

    >>> samples = load_samples("train.jsonl")
    >>> samples.kind, samples.labels, samples.classes

Columns say what the samples are: `image`; `messages`; `prompt` with `completion`, also beside an image; `anchor` with
`positive`; `text` with `text_pair`; and `label`.
Other forms of chats, prompts and pairs are brought to these: see `forms`.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import importlib
import io
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from taskferry.choices import GENERATE
from taskferry.data.bounds import check_data_file, open_picture
from taskferry.data.forms import Kind, renaming, unified
from taskferry.data.pictured import evened
from taskferry.disk.files import MOST_JSON, nearest, writing
from taskferry.disk.temporary import sweep, temporary_folder
from taskferry.errors import TaskferryError

CACHE = "taskferry-data"  # where the datasets library keeps what it makes of a file, while it is read
MOST_CLASSES = 100_000  # a head has a row for each
_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
HELD_OUT = ("test", "validation")  # splits of a hub dataset, the better first
_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]*)?", re.ASCII)
_TEXTS = ("text", "text_pair", "prompt", "completion")


@dataclass(frozen=True)
class Samples:
    """Rows of one kind, with a class number each where the data has labels."""

    kind: Kind
    rows: Sequence[dict[str, Any]]
    labels: tuple[int, ...] | None
    classes: tuple[str, ...]  # names, where the data has them
    source: str
    left_out: int = 0  # rows without a label, where the others have one
    sorted: bool = False  # whether the classes are numbered by their names' order, for want of another

    def __len__(self) -> int:
        return len(self.rows)

    def identity(self) -> str:
        """A hash of the rows' texts or encoded pictures, and their labels."""
        digest = hashlib.sha256(repr((self.kind, self.labels, self.classes)).encode())
        for row in self.rows:
            for name, value in sorted(row.items()):
                content = (value.get("bytes") or value.get("path")) if isinstance(value, dict) else value
                digest.update(name.encode())
                digest.update(content if isinstance(content, bytes) else repr(content).encode())
        return digest.hexdigest()

    def take(self, indices: Sequence[int]) -> Samples:
        """Some of them, in the order given."""
        labels = None if self.labels is None else tuple(self.labels[i] for i in indices)
        return replace(self, rows=[self.rows[i] for i in indices], labels=labels)


def load_samples(
    given: str,
    *,
    label_column: str = "label",
    classes: Sequence[str] = (),
    split: str = "train",
    config: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Samples:
    """All rows of a file, or of one split of a folder or of a hub dataset (`config` names a part of it there).

    `classes` gives names their numbers, where another file (the calibration data) has numbered them already.
    `columns` renames: {"sentence1": "text"}.
    """
    scratch = Path(tempfile.gettempdir())
    sweep(scratch, CACHE)
    with writing(scratch), temporary_folder(scratch, CACHE) as cache:
        dataset = _load(given, str(cache), split, config)
    dataset = dataset.rename_columns({old: new for old, new in (columns or {}).items() if old in dataset.column_names})
    present = list(dataset.column_names)
    if label_column != "label" and label_column not in present:
        raise TaskferryError(f"{given} has no column '{label_column}', it has {', '.join(present)}")
    if "image" in present and type(dataset.features["image"]).__name__ == "Image":
        # Decoded pictures of a whole data set would fill the memory: each is decoded when it is used.
        dataset = dataset.cast_column("image", type(dataset.features["image"])(decode=False))
    try:
        rows = [dict(row) for row in dataset]
    except Exception as error:  # texts that are no text are found when they are looked at
        raise TaskferryError(f"{given} cannot be read: {_line(error)}") from error
    if not rows:
        raise TaskferryError(f"{given} is empty: give a file with about a hundred samples, one on each line")
    if "prompt" in present and "completion" not in present:
        for name in difflib.get_close_matches("completion", present, 1, 0.8):  # the tuned source would answer instead
            raise TaskferryError(f"{given} has a column {name}, which is not read: did you mean completion?")
    kind, rows = unified(rows, given)
    if len(rows) < 2:
        raise TaskferryError(f"{given} has {len(rows)} sample(s): about a hundred are needed, two at the very least")
    if kind is None:
        raise TaskferryError(f"{given} has the columns {', '.join(present)}: {renaming(present)}")
    graded = next((name for name in (label_column, "score") if kind == "pairs" and name in present), None)
    if graded is not None:
        raise TaskferryError(
            f"{given} has pairs with a column {graded}: for a classifier rename the texts to text and text_pair, the "
            f"class to label; for a sentence encoder keep the pairs that belong together, without {graded}"
        )
    if kind in ("image", "pictured") and Path(given).exists():
        rows = _beside(given, rows)
    beside = _classes_beside(Path(given))
    left_out = 0
    if label_column in present and getattr(dataset.features[label_column], "names", None):
        kept = [row for row in rows if row[label_column] != -1]  # the datasets library's way to say "no label"
        rows, left_out = kept, len(rows) - len(kept)
    if label_column in present and (kind not in ("prompt", "messages") or label_column != "label"):
        values, own = _labels(dataset, rows, label_column, given)
        labels, names = _numbered(values, own, beside or tuple(classes), given, "classes.json" if beside else None)
        own = () if getattr(dataset, "builder_name", None) == "imagefolder" else own  # which sorts them as well
        return Samples(kind, rows, labels, names, given, left_out, bool(names) and not (beside or classes or own))
    return Samples(kind, rows, None, beside, given, left_out)


def held_out(given: str) -> str:
    """The split of a folder or a hub dataset that nothing is made from; a file is one as it is."""
    path = Path(given)
    if path.is_dir():
        has_test = (path / "test").is_dir() or any((path / f"test{end}").is_file() for end in _READERS)
        return "test" if has_test else "train"
    if path.exists() or not _on_hub(given):
        return "train"
    name, _, revision = given.partition("@")
    try:
        found = importlib.import_module("datasets").get_dataset_split_names(name, revision=revision or None)
    except Exception as error:  # as below
        raise TaskferryError(f"{given} cannot be read: {_line(error)}") from error
    split = next((split for split in HELD_OUT if split in found), None)
    if split is None:
        raise TaskferryError(
            f"{given} has no {' or '.join(HELD_OUT)} split (it has {', '.join(found)}): a score on what samples are "
            "drawn from says nothing; give a file with held-out samples"
        )
    return split


def _on_hub(given: str) -> bool:
    return given.count("/") == 1 and not given.startswith((".", "/"))


def picture(row: dict[str, Any]) -> Any:
    """The PIL image of a row: decoded already, or as encoded bytes."""
    value = row["image"]
    if isinstance(value, dict):  # not decoded by the datasets library: bytes, or a file of an image folder
        value = value.get("bytes") or Path(str(value.get("path")))
    if isinstance(value, bytes | Path):
        return open_picture(io.BytesIO(value) if isinstance(value, bytes) else value)
    if isinstance(value, str):
        raise TaskferryError(f"a row names the image file {value}: give an image folder, or images as bytes")
    return value


def _beside(given: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pictures that are named and not contained: they must lie in the folder that was given, or that the file is in."""
    folder = Path(given).resolve()
    folder = folder if folder.is_dir() else folder.parent
    found = []
    for row in rows:
        value = row["image"]
        value = {"path": value} if isinstance(value, str) else value
        path = value.get("path") if isinstance(value, dict) and not value.get("bytes") else None
        if path is not None:
            place = (folder / str(path)).resolve()
            if not place.is_relative_to(folder):
                raise TaskferryError(f"{given} names the picture {path}, which is not in its folder: copy it there")
            if not place.is_file():
                raise TaskferryError(
                    f"{given} names the picture {path}, which does not exist in its folder: copy it there"
                )
            value = {**value, "path": str(place)}
        found.append({**row, "image": value})
    return found


def _load(given: str, cache: str, split: str, config: str | None) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise TaskferryError("datasets is needed to read calibration data: pip install 'taskferry[data]'") from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would print what stands in a file
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # versions that still know loading scripts must not run them
    path = Path(given)
    settings: dict[str, Any] = {"split": "train", "cache_dir": cache, "keep_in_memory": True}
    try:
        if path.is_dir():
            table = next((path / f"{split}{end}" for end in _READERS if (path / f"{split}{end}").is_file()), None)
            if table is None:
                if split != "train":
                    if not (path / split).is_dir():
                        raise TaskferryError(f"{given} has no folder {split}, nor {split}{', '.join(_READERS)}")
                    path = path / split
                return datasets.load_dataset("imagefolder", data_dir=str(path), **settings)
            path = table
        if path.is_file():
            if path.suffix not in _READERS:
                raise TaskferryError(f"{given} is no {', '.join(_READERS)} file")
            check_data_file(path)
            if _READERS[path.suffix] in _ROWS:
                return datasets.Dataset.from_dict(_columns(path, _ROWS[_READERS[path.suffix]](path)))
            return datasets.load_dataset(_READERS[path.suffix], data_files=str(path), **settings)
        if _on_hub(given):
            name, _, revision = given.partition("@")
            return datasets.load_dataset(name, config, split=split, revision=revision or None)
    except TaskferryError:
        raise
    except Exception as error:  # the library raises many kinds; all mean that the data cannot be read
        raise TaskferryError(f"{given} cannot be read: {_line(error)}") from error
    if given == GENERATE:
        raise TaskferryError(f"only transfer and fit {GENERATE} samples: give a file in its place")
    raise TaskferryError(f"{given} does not exist{nearest(given)}")


def _columns(path: Path, rows: list[Any]) -> dict[str, list[Any]]:
    """The columns of rows; numbers in a column of texts are texts, as they are written."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise TaskferryError(f'{path}: entry {number} is no object with columns, such as {{"text": …}}')
    rows = evened(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_text(row.get(name)) if name in _TEXTS else row.get(name) for row in rows] for name in names}


def _text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _json_rows(path: Path) -> list[Any]:
    """JSON objects, one on each line, or a list of them.

    By Python's own parser: the one of pyarrow ends the process on some damaged files.
    """
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [_parsed(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _csv_rows(path: Path) -> list[Any]:
    """Every cell is text as it stands there: an answer may be 007, 1.50, NA or true. An empty one is missing."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        rows: list[Any] = []
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise TaskferryError(f"{path}, line {reader.line_num}: not as many cells as the header has names")
                rows.append({name: value or None for name, value in row.items()})
        except csv.Error as error:
            raise TaskferryError(f"{path}, line {reader.line_num}: no CSV ({error})") from error
    return rows


_ROWS: dict[str, Callable[[Path], list[Any]]] = {"json": _json_rows, "csv": _csv_rows}


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskferryError(f"{path}, line {number}: no JSON ({error.msg}, column {error.colno})") from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def _labels(
    dataset: Any, rows: Sequence[dict[str, Any]], column: str, given: str
) -> tuple[list[int] | list[str], tuple[str, ...]]:
    """Class numbers 0, 1, … with the names that the data itself gives them; or a name for each row."""
    values = [row[column] for row in rows]
    if any(value is None for value in values):
        missing = sum(value is None for value in values)
        raise TaskferryError(f"{given}: {missing} rows have no {column}: fill them, or leave the column out")
    if all(isinstance(value, str) and _NUMBER.fullmatch(value) for value in values):
        values = [float(value) for value in values]
    if all(isinstance(value, float) for value in values):
        if any(not math.isfinite(value) or value != int(value) for value in values):
            raise TaskferryError(
                f"{given}: {column} holds fractions such as {values[0]}: classes are whole numbers or names"
            )
        values = [int(value) for value in values]
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        if min(values) < 0:
            raise TaskferryError(f"{given}: a {column} of {min(values)}: classes are counted from 0")
        if max(values) >= MOST_CLASSES:
            raise TaskferryError(f"{given}: a {column} of {max(values)}: classes are counted 0, 1, 2 …")
        return values, tuple(getattr(dataset.features[column], "names", None) or ())
    return [str(value) for value in values], ()


def _numbered(
    values: Sequence[int] | Sequence[str], own: Sequence[str], known: Sequence[str], given: str, file: str | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class numbers by `known` names where there are some, else as the data counts, else by its names in their order.

    Names with nothing in common with those of a `file` beside the data (folders 000, 001 …) get its names instead.
    """
    counted = [int(value) for value in values if not isinstance(value, str)]
    if counted and (not known or not own or (file and len(own) == len(known) and not set(own) & set(known))):
        if known and max(counted) >= len(known):
            raise TaskferryError(
                f"{given} has the class {max(counted)}, {file or 'the calibration data'} the names of {len(known)}: "
                "classes are counted from 0"
            )
        return tuple(counted), tuple(known or own)
    named = [own[number] for number in counted] or [str(value) for value in values]
    classes = tuple(known) or tuple(sorted(set(named)))
    strange = sorted(set(named) - set(classes))
    if strange:
        whose = file or "the calibration data"
        raise TaskferryError(f"{given} has the class '{strange[0]}', which {whose} does not have")
    numbers = {name: i for i, name in enumerate(classes)}
    return tuple(numbers[name] for name in named), classes


def _classes_beside(path: Path) -> tuple[str, ...]:
    """classes.json in the folder of the file: a list of names."""
    file = (path if path.is_dir() else path.parent) / "classes.json"
    if not file.is_file():
        return ()
    try:
        names = json.loads(file.read_text(encoding="utf-8")) if file.stat().st_size <= MOST_JSON else None
    except (OSError, ValueError, RecursionError) as error:
        raise TaskferryError(f"{file} is no JSON: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
        raise TaskferryError(f"{file} is not a list of class names: fix it, or remove it")
    return tuple(map(str, names))
