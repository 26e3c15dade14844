"""Samples from files, folders of images, the hub, or memory, and the choice of some of them.

    >>> samples = load_samples("train.jsonl")               # or .json, .csv, .parquet, a folder, a hub id
    >>> samples = load_samples([{"text": "A film.", "label": "good"}, …])   # or a datasets.Dataset, or plain texts
    >>> samples.kind, samples.labels, samples.classes
    >>> samples.take(choose(len(samples), 100, seed=0))

Columns say what the samples are: `image`; `messages`; `prompt` with `completion`, also beside an image; `anchor` with
`positive`; `text` with `text_pair`; and `label`. Other forms of chats, prompts and pairs are brought to these: see
`forms`.
"""

from __future__ import annotations

import csv
import difflib
import importlib
import io
import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from taskferry.choices import GENERATE
from taskferry.data.bounds import check_size, open_picture
from taskferry.data.forms import Kind, Row, renaming, unified
from taskferry.disk.files import MOST_JSON, nearest, writing
from taskferry.disk.temporary import sweep, temporary_folder
from taskferry.errors import TaskferryError, first_line

CACHE = "taskferry-data"  # where the datasets library keeps what it makes of a file, while it is read
MOST_CLASSES = 100_000  # a head has a row for each
HELD_OUT = ("test", "validation")  # splits of a hub dataset, the better first
_ENDS = (".jsonl", ".json", ".csv", ".parquet")
_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]*)?", re.ASCII)
_TEXTS = ("text", "text_pair", "prompt", "completion")


@dataclass(frozen=True)
class Samples:
    """Rows of one kind, with a class number each where the data has labels."""

    kind: Kind
    rows: Sequence[Row]
    labels: tuple[int, ...] | None
    classes: tuple[str, ...]  # names, where the data has them
    source: str
    left_out: int = 0  # rows without a label, where the others have one
    sorted: bool = False  # whether the classes are numbered by their names' order, for want of another

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int]) -> Samples:
        """Some of them, in the order given."""
        labels = None if self.labels is None else tuple(self.labels[i] for i in indices)
        return replace(self, rows=[self.rows[i] for i in indices], labels=labels)


def choose(
    total: int, n: int, *, labels: Sequence[int] | None = None, per_class: int | None = None, seed: int = 0
) -> list[int]:
    """Draw samples, the same for the same seed.

    Args:
        total: How many there are.
        n: How many to take; all, where there are no more.
        labels: Their class numbers.
        per_class: So many of each class, in place of `n`.
        seed: Of the draw.
    """
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    if per_class is None:
        return order[:n]
    if labels is None:
        raise TaskferryError("samples of each class need labels: give a number of samples, and no per_class")
    by_class: dict[int, list[int]] = {label: [] for label in sorted(set(labels))}
    for i in order:
        by_class[labels[i]].append(i)
    for label, members in by_class.items():
        if len(members) < per_class:
            raise TaskferryError(f"class {label} has {len(members)} samples, {per_class} are asked for")
    return [members[turn] for turn in range(per_class) for members in by_class.values()]


def load_samples(
    given: str | Path | Iterable[Any],
    *,
    label_column: str = "label",
    classes: Sequence[str] = (),
    split: str = "train",
    config: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Samples:
    """Load all samples.

    Args:
        given: A file, a folder, a hub id (`org/name@revision`), a `datasets.Dataset`, or a list of rows or of texts.
        label_column: The column with the class.
        classes: Names that have numbers already, because other data (the calibration samples) has them.
        split: Of a folder or a hub dataset.
        config: A part of a hub dataset.
        columns: Renames columns: {"sentence1": "text"}.

    Raises:
        TaskferryError: The data cannot be read, or does not say what it is.
    """
    where = str(given) if isinstance(given, str | Path) else "the data"
    rows, class_names, is_folder = _read(given, where, split, config)
    renamed = columns or {}
    rows = [{renamed.get(name, name): value for name, value in row.items()} for row in rows]
    class_names = {renamed.get(name, name): names for name, names in class_names.items()}
    present = list(rows[0]) if rows else []
    if not rows:
        raise TaskferryError(f"{where} is empty: give about a hundred samples")
    if label_column != "label" and label_column not in present:
        raise TaskferryError(f"{where} has no column '{label_column}', it has {', '.join(present)}")
    if "prompt" in present and "completion" not in present:
        for name in difflib.get_close_matches("completion", present, 1, 0.8):  # the tuned source would answer instead
            raise TaskferryError(f"{where} has a column {name}, which is not read: did you mean completion?")
    kind, rows = unified(rows, where)
    if len(rows) < 2:
        raise TaskferryError(f"{where} has {len(rows)} sample(s): about a hundred are needed, two at the very least")
    if kind is None:
        raise TaskferryError(f"{where} has the columns {', '.join(present)}: {renaming(present)}")
    graded = next((name for name in (label_column, "score") if kind == "pairs" and name in present), None)
    if graded is not None:
        raise TaskferryError(
            f"{where} has pairs with a column {graded}: for a classifier rename the texts to text and text_pair, the "
            f"class to label; for a sentence encoder keep the pairs that belong together, without {graded}"
        )
    path = Path(given) if isinstance(given, str | Path) and Path(given).exists() else None
    if kind in ("image", "pictured") and path is not None:
        rows = _with_files(path, rows)
    beside = () if path is None else _classes_beside(path)
    prompted = kind in ("prompt", "messages") and label_column == "label"  # a score beside prompts is no class
    if label_column not in present or prompted:
        return Samples(kind, rows, None, beside, where)
    own = class_names.get(label_column, ())
    kept = [row for row in rows if not own or row[label_column] != -1]  # the datasets library's way to say "no label"
    labels, names = _numbered([row[label_column] for row in kept], own, beside, tuple(classes), label_column, where)
    by_order = bool(names) and not (beside or classes or (own and not is_folder))  # folders are sorted by their names
    return Samples(kind, kept, labels, names, where, len(rows) - len(kept), by_order)


def held_out_split(given: str | Path | Iterable[Any]) -> str:
    """The split of a folder or a hub dataset that nothing is made from; anything else is one as it is."""
    if not isinstance(given, str | Path):
        return "train"
    path, name = Path(given), str(given)
    if path.is_dir():
        has_test = (path / "test").is_dir() or any((path / f"test{end}").is_file() for end in _ENDS)
        return "test" if has_test else "train"
    if path.exists() or not _on_hub(name):
        return "train"
    repository, _, revision = name.partition("@")
    try:
        found = importlib.import_module("datasets").get_dataset_split_names(repository, revision=revision or None)
    except Exception as error:  # the library raises many kinds; all mean that the data cannot be read
        raise TaskferryError(f"{name} cannot be read: {first_line(error)}") from error
    split = next((split for split in HELD_OUT if split in found), None)
    if split is None:
        raise TaskferryError(
            f"{name} has no {' or '.join(HELD_OUT)} split (it has {', '.join(found)}): a score on what samples are "
            "drawn from says nothing; give a file with held-out samples"
        )
    return split


def picture(row: Row) -> Any:
    """The PIL image of a row: decoded already, or as encoded bytes."""
    value = row["image"]
    if isinstance(value, dict):  # not decoded by the datasets library: bytes, or a file of an image folder
        value = value.get("bytes") or Path(str(value.get("path")))
    if isinstance(value, bytes | Path):
        return open_picture(io.BytesIO(value) if isinstance(value, bytes) else value)
    if not hasattr(value, "convert"):
        raise TaskferryError(f"a row has the image {str(value)[:60]}: give an image folder, or images as bytes")
    return value


def _on_hub(given: str) -> bool:
    return given.count("/") == 1 and not given.startswith((".", "/"))


def _read(
    given: str | Path | Iterable[Any], where: str, split: str, config: str | None
) -> tuple[list[Row], dict[str, tuple[str, ...]], bool]:
    """Rows with the same columns each, class names by column, and whether those are names of folders."""
    if isinstance(given, str | Path):
        path = Path(given)
        file = path
        if path.is_dir():
            file = next((path / f"{split}{end}" for end in _ENDS if (path / f"{split}{end}").is_file()), path)
        if not file.is_file() or file.suffix == ".parquet":
            return _from_datasets(file, where, split, config)
        if file.suffix not in _ENDS:
            raise TaskferryError(f"{where} is no {', '.join(_ENDS)} file")
        check_size(file)
        rows = _csv_rows(file) if file.suffix == ".csv" else _json_rows(file)
        where = str(file)
    elif hasattr(given, "column_names") and hasattr(given, "features"):
        return _rows_of(given, where)
    elif isinstance(given, Mapping):
        raise TaskferryError(f"{where} has the parts {', '.join(map(str, given))}: give one of them, data['train']")
    else:
        rows = [{"text": row} if isinstance(row, str) else row for row in given]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise TaskferryError(f'{where}: entry {number} is no object with columns, such as {{"text": …}}')
    names = dict.fromkeys(name for row in rows for name in row)
    return (
        [{name: _text(row.get(name)) if name in _TEXTS else row.get(name) for name in names} for row in rows],
        {},
        False,
    )


def _text(value: Any) -> Any:
    """A number in a column of texts as it is written; half a character, which no tokenizer takes, as a broken one."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _json_rows(path: Path) -> list[Any]:
    """JSON objects, one on each line, or a list of them."""
    found: list[Any] = []
    at = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        for number, line in enumerate(text.split("\n"), 1):
            at = f"{path}, line {number}"
            if line.strip():
                found.append(json.loads(line))
    except RecursionError as error:
        raise TaskferryError(f"{at}: it nests too many lists: a sample has a few") from error
    except ValueError as error:
        raise TaskferryError(f"{at}: no JSON ({first_line(error)})") from error
    return found


def _csv_rows(path: Path) -> list[Any]:
    """Every cell is text as it stands there: an answer may be 007, 1.50, NA or true. An empty one is missing."""
    rows: list[Any] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise TaskferryError(f"{path}, line {reader.line_num}: not as many cells as the header has names")
                rows.append({name: value or None for name, value in row.items()})
        except (csv.Error, UnicodeDecodeError) as error:
            raise TaskferryError(f"{path}, line {reader.line_num}: no CSV ({error})") from error
    return rows


def _from_datasets(path: Path, given: str, split: str, config: str | None) -> tuple[list[Row], Any, bool]:
    """Parquet, folders of images and the hub, through the datasets library."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise TaskferryError("datasets is needed to read this data: pip install 'taskferry[data]'") from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would print what stands in a file
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # versions that still know loading scripts must not run them
    scratch = Path(tempfile.gettempdir())
    sweep(scratch, CACHE)
    with writing(scratch), temporary_folder(scratch, CACHE) as cache:
        settings: dict[str, Any] = {"split": "train", "cache_dir": str(cache), "keep_in_memory": True}
        try:
            if path.is_dir():
                if split != "train" and not (path / split).is_dir():
                    raise TaskferryError(f"{given} has no folder {split}, nor {split}{', '.join(_ENDS)}")
                folder = path if split == "train" else path / split
                return _rows_of(datasets.load_dataset("imagefolder", data_dir=str(folder), **settings), given)
            if path.is_file():
                check_size(path)
                return _rows_of(datasets.load_dataset("parquet", data_files=str(path), **settings), given)
            if _on_hub(given):
                name, _, revision = given.partition("@")
                return _rows_of(datasets.load_dataset(name, config, split=split, revision=revision or None), given)
        except TaskferryError:
            raise
        except Exception as error:  # the library raises many kinds; all mean that the data cannot be read
            raise TaskferryError(f"{given} cannot be read: {first_line(error)}") from error
    if given == GENERATE:
        raise TaskferryError(f"only transfer and fit {GENERATE} samples: give a file in its place")
    raise TaskferryError(f"{given} does not exist{nearest(given)}")


def _rows_of(dataset: Any, where: str) -> tuple[list[Row], dict[str, tuple[str, ...]], bool]:
    """The rows of a `datasets.Dataset`, with its class names; pictures stay encoded until they are used."""
    for name, feature in dataset.features.items():
        if type(feature).__name__ == "Image":
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    try:
        rows = [dict(row) for row in dataset]
    except Exception as error:  # texts that are no text are found when they are looked at
        raise TaskferryError(f"{where} cannot be read: {first_line(error)}") from error
    named = {name: tuple(getattr(feature, "names", None) or ()) for name, feature in dataset.features.items()}
    return rows, named, getattr(dataset, "builder_name", None) == "imagefolder"


def _with_files(given: Path, rows: Sequence[Row]) -> list[Row]:
    """Pictures that are named and not contained: they must lie in the folder that was given, or that the file is in."""
    folder = given.resolve() if given.is_dir() else given.resolve().parent
    found = []
    for row in rows:
        value = {"path": row["image"]} if isinstance(row["image"], str) else row["image"]
        path = value.get("path") if isinstance(value, dict) and not value.get("bytes") else None
        if path is not None:
            place = (folder / str(path)).resolve()
            if not place.is_relative_to(folder) or not place.is_file():
                there = "does not exist" if place.is_relative_to(folder) else "is not"
                raise TaskferryError(f"{given} names the picture {path}, which {there} in its folder: copy it there")
            value = {**value, "path": str(place)}
        found.append({**row, "image": value})
    return found


def _numbered(
    values: Sequence[Any],
    own: tuple[str, ...],
    beside: tuple[str, ...],
    given: tuple[str, ...],
    column: str,
    where: str,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class numbers, and the names of the classes.

    Numbers count as they are. Names are numbered by those that are known (`beside` the data, else `given`), else in
    their own order. Numbers with names of the data's `own` are names, unless those have nothing in common with as many
    beside it (folders 000, 001 …): these then take their place.
    """
    missing = sum(value is None for value in values)
    if missing:
        raise TaskferryError(f"{where}: {missing} rows have no {column}: fill them, or leave the column out")
    if not all(isinstance(value, str | int | float) for value in values):
        raise TaskferryError(f"{where}: {column} holds lists or objects: classes are whole numbers or names")
    known = beside or given
    if all(isinstance(value, str) and _NUMBER.fullmatch(value) for value in values):
        values = [float(value) for value in values]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        if any(not math.isfinite(value) or value != int(value) for value in values):
            raise TaskferryError(f"{where}: {column} holds fractions such as {values[0]}: classes are whole numbers")
        numbers = [int(value) for value in values]
        if min(numbers) < 0:
            raise TaskferryError(f"{where}: a {column} of {min(numbers)}: classes are counted from 0")
        if max(numbers) >= MOST_CLASSES:
            raise TaskferryError(f"{where}: a {column} of {max(numbers)}: classes are counted 0, 1, 2 …")
        if not known or not own or (beside and len(own) == len(beside) and not set(own) & set(beside)):
            if known and max(numbers) >= len(known):
                whose = "classes.json" if beside else "the calibration data"
                raise TaskferryError(
                    f"{where} has the class {max(numbers)}, {whose} the names of {len(known)}: classes are counted "
                    "from 0"
                )
            return tuple(numbers), known or own
        values = [own[number] for number in numbers]
    names = [str(value) for value in values]
    classes = known or tuple(sorted(set(names)))
    strange = sorted(set(names) - set(classes))
    if strange:
        whose = "classes.json" if beside else "the calibration data"
        raise TaskferryError(f"{where} has the class '{strange[0]}', which {whose} does not have")
    place = {name: i for i, name in enumerate(classes)}
    return tuple(place[name] for name in names), classes


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
