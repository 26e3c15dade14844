"""Adapters through one alignment, whatever they are: done, or failed with a reason. Nothing is raised."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from taskferry.alignment import Alignment
from taskferry.disk.inputs import Stamp, hash_file, stamp
from taskferry.errors import TaskferryError
from taskferry.fleet.store import Store
from taskferry.jobs.apply import apply_record, source_skeleton, target_skeleton
from taskferry.jobs.output import write_form
from taskferry.jobs.record import RECORD, finish
from taskferry.models.peft import CONFIG, WEIGHTS, Adapter, Skeleton, read_adapter
from taskferry.settings import ApplySettings, Move
from taskferry.taskvector import TaskVector

FILES = (CONFIG, WEIGHTS, "adapter_model.bin")  # of an adapter; whatever else lies in a stranger's folder is not read


@dataclass(frozen=True)
class Moved:
    """What became of one adapter."""

    adapter: str
    move: str
    status: Literal["done", "failed"]
    reason: str = ""
    seconds: float = 0.0  # its share of its batch
    again: bool = False  # whether the output was there already, made from the same input
    base: str = ""  # what it calls the base that it was made on
    stamp: str = ""  # of the alignment, the scale and the adapter's files: done once for these


@dataclass(frozen=True)
class OpenAlignment:
    """An alignment with the skeletons of both ends: what an adapter must fit before and after."""

    alignment: Alignment
    source: Skeleton
    target: Skeleton
    table: list[dict[str, Any]]

    @classmethod
    def of(cls, alignment: Alignment) -> OpenAlignment:
        """Made once for all adapters."""
        return cls(alignment, source_skeleton(alignment), target_skeleton(alignment), alignment.table())


@dataclass(frozen=True)
class Read:
    """An adapter in memory, with the hash of the files that it was read from."""

    name: str
    adapter: Adapter
    hashes: dict[str, str]  # file -> sha256
    made_from: str


def move_batch(
    opened: OpenAlignment, move: Move, names: list[str], inputs: Store, outputs: Store, scale: float
) -> list[Moved]:
    """Some adapters, each on its own; told of when all of them are safe on disk.

    They are read together and meet every map together: fetching maps from memory is most of an adapter's work.
    """
    started = time.perf_counter()
    recipe = f"{opened.alignment.identity()} {move.target_base} {scale}"
    ended = {name: _read(opened, move.name, name, inputs, outputs, recipe) for name in names}
    read = [found for found in ended.values() if isinstance(found, Read)]
    try:
        taus: list[TaskVector | None] = [*opened.alignment.apply_all([found.adapter.tau for found in read])]
    except Exception:  # one of them cannot be moved: each for itself, then
        taus = [None] * len(read)
    for found, tau in zip(read, taus, strict=True):
        ended[found.name] = _write(opened, move, found, tau, inputs, outputs, scale)
    moved = [found for found in ended.values() if isinstance(found, Moved)]
    outputs.settle(place_of(move.name, each.adapter) for each in moved if each.status == "done" and not each.again)
    seconds = (time.perf_counter() - started) / max(1, len(moved))
    return [replace(each, seconds=seconds) for each in moved]


def _read(opened: OpenAlignment, move: str, name: str, inputs: Store, outputs: Store, recipe: str) -> Read | Moved:
    """An output made from the same bytes, by the same maps and at the same scale, is not made again."""
    place = ""
    try:
        with inputs.local(name, FILES) as folder:
            place = str(folder)
            before = _stamps(folder)
            hashes = _hashes(folder)
            made_from = _digest(hashes, recipe)
            if _is_made_from(outputs, place_of(move, name), made_from):
                return Moved(name, move, "done", again=True)
            adapter = read_adapter(folder, opened.source)
            if _stamps(folder) != before:
                raise TaskferryError("it changed while it was read: run the fleet again")
    except Exception as error:  # one strange adapter must stop nobody
        return failed(name, move, error, place)
    return Read(name, adapter, hashes, made_from)


def _write(
    opened: OpenAlignment, move: Move, read: Read, tau: TaskVector | None, inputs: Store, outputs: Store, scale: float
) -> Moved:
    """What `taskferry apply` would write."""
    place = place_of(move.name, read.name)
    came = f"{inputs.address}/{read.name}"
    given = {"alignment": move.alignment, "source_tuned": came, "target_base": move.target_base}
    settings = ApplySettings(**given, scale=scale, out=Path(place))
    words = ["taskferry", "apply", move.alignment, came, "--target-base", move.target_base, "--scale", scale]
    try:
        moved = opened.alignment.apply(read.adapter.tau) if tau is None else tau
        with outputs.staged(place, last=RECORD) as stage:
            base, like = move.target_base, read.adapter
            write_form("lora", scale * moved, stage, target=opened.target, adapter=like, base=base)
            record = apply_record(
                shlex.join([*map(str, words), "--out", place]),
                settings,
                {"source_tuned": read.hashes},
                opened.alignment,
                opened.table,
                moved,
                like,
                made_from=read.made_from,
                holds=_digest(_hashes(stage)),
            )
            finish(stage, record, settings, adapter=True)
    except Exception as error:
        return failed(read.name, move.name, error)
    return Moved(read.name, move.name, "done", base=str(read.adapter.config.get("base_model_name_or_path") or ""))


def failed(name: str, move: str, error: Exception, place: str = "") -> Moved:
    """With the error as its reason; the folder that it was read from has another name in every run."""
    reason = str(error) if isinstance(error, TaskferryError) else f"{type(error).__name__}: {error}"
    reason = reason.replace(place, "the adapter") if place else reason
    return Moved(name, move, "failed", " ".join(reason.split())[:500])


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in _files(folder)}


def _digest(hashes: Mapping[str, str], recipe: str = "") -> str:
    return hashlib.sha256(json.dumps([hashes, recipe], sort_keys=True).encode()).hexdigest()


def _stamps(folder: Path) -> list[Stamp]:
    return [stamp(path) for path in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return [path for name in FILES if (path := folder / name).is_file()]


def _is_made_from(outputs: Store, place: str, made_from: str) -> bool:
    """Whether an output was made from these bytes, and still holds what was written."""
    text = outputs.read_text(f"{place}/{RECORD}")
    try:
        record = json.loads(text) if text else {}
        if record.get("made_from") != made_from:
            return False
    except (ValueError, AttributeError):
        return False
    with outputs.local(place, FILES) as folder:
        return record.get("holds") == _digest(_hashes(folder))


def place_of(move: str, name: str) -> str:
    """The folder of an output."""
    return f"{move}--{name}"
