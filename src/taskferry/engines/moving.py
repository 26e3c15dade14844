"""Adapters through one alignment, whatever they are: done, or failed with a reason. Nothing is raised."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taskferry.alignment import Alignment
from taskferry.checkpoints.adapters import CONFIG, WEIGHTS, Adapter, Skeleton, read_adapter, write_adapter
from taskferry.engines.store import Store
from taskferry.errors import TaskferryError
from taskferry.inputs import Stamp, hash_file, stamp
from taskferry.taskvector import TaskVector

RECORD = "taskferry.json"


@dataclass(frozen=True)
class Moved:
    """What became of one adapter."""

    adapter: str
    move: str
    status: Literal["done", "failed"]
    reason: str = ""
    seconds: float = 0.0
    again: bool = False  # whether the output was there already, made from the same input


@dataclass(frozen=True)
class Way:
    """An alignment with what every adapter on its way must fit, at both ends."""

    alignment: Alignment
    source: Skeleton
    target: Skeleton

    @classmethod
    def of(cls, alignment: Alignment) -> Way:
        """Made once for all adapters."""
        source = Skeleton.from_sites(alignment.source_parameters, [p.source for p in alignment.pairs], "")
        target = Skeleton.from_sites(alignment.target_parameters, [p.target for p in alignment.pairs], "")
        return cls(alignment, source, target)


@dataclass(frozen=True)
class Read:
    """An adapter in memory, with the hash of the files that it was read from."""

    name: str
    adapter: Adapter
    made_from: str
    seconds: float


def move_batch(
    way: Way, move: str, base: str, names: list[str], inputs: Store, outputs: Store, scale: float
) -> list[Moved]:
    """Some adapters, each on its own; told of when all of them are safe on disk.

    They are read together and meet every map together: fetching maps from memory is most of an adapter's work.
    """
    ended = {name: _read(way, move, name, inputs, outputs) for name in names}
    read = [found for found in ended.values() if isinstance(found, Read)]
    started = time.perf_counter()
    try:
        taus = way.alignment.apply_all([found.adapter.tau for found in read])
    except Exception:  # one of them cannot be moved: each for itself, then
        taus = []
    share = (time.perf_counter() - started) / max(1, len(read))
    for i, found in enumerate(read):
        tau = taus[i] if taus else None
        ended[found.name] = _write(way, move, base, found, tau, outputs, scale, found.seconds + share)
    moved = [found for found in ended.values() if isinstance(found, Moved)]
    outputs.settle(_place(move, each.adapter) for each in moved if each.status == "done" and not each.again)
    return moved


def _read(way: Way, move: str, name: str, inputs: Store, outputs: Store) -> Read | Moved:
    """An output made from the same bytes is not made again."""
    started = time.perf_counter()
    try:
        with inputs.local(name) as folder:
            before = _stamps(folder)
            made_from = _hash(folder)
            if _is_made_from(outputs, _place(move, name), made_from):
                return Moved(name, move, "done", seconds=time.perf_counter() - started, again=True)
            adapter = read_adapter(folder, way.source)
            if _stamps(folder) != before:
                raise TaskferryError("it changed while it was read: run the fleet again")
    except Exception as error:  # one strange adapter must stop nobody
        return _failed(name, move, error, time.perf_counter() - started)
    return Read(name, adapter, made_from, time.perf_counter() - started)


def _write(
    way: Way, move: str, base: str, read: Read, tau: TaskVector | None, outputs: Store, scale: float, before: float
) -> Moved:
    started = time.perf_counter() - before
    try:
        moved = way.alignment.apply(read.adapter.tau) if tau is None else tau
        moved = moved if scale == 1 else moved * scale
        with outputs.staged(_place(move, read.name)) as stage:
            write_adapter(stage, moved, way.target, base_name=base, like=read.adapter)
            coverage = {} if moved.coverage is None else {"coverage_summary": moved.coverage.summary()}
            record = {"made_from": read.made_from, "holds": _hash(stage), "move": move, "scale": scale, **coverage}
            (stage / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except Exception as error:
        return _failed(read.name, move, error, time.perf_counter() - started)
    return Moved(read.name, move, "done", seconds=time.perf_counter() - started)


def _failed(name: str, move: str, error: Exception, seconds: float) -> Moved:
    reason = str(error) if isinstance(error, TaskferryError) else f"{type(error).__name__}: {error}"
    return Moved(name, move, "failed", " ".join(reason.split())[:500], seconds)


def _hash(folder: Path) -> str:
    """Of what is moved alone: whatever else lies in a stranger's folder is not read."""
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(f"{path.name}{hash_file(path)}".encode())
    return digest.hexdigest()


def _stamps(folder: Path) -> list[Stamp]:
    return [stamp(path) for path in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return [path for name in (CONFIG, WEIGHTS, "adapter_model.bin") if (path := folder / name).is_file()]


def _is_made_from(outputs: Store, place: str, made_from: str) -> bool:
    """Whether an output was made from these bytes, and still holds what was written."""
    text = outputs.read_text(f"{place}/{RECORD}")
    try:
        record = json.loads(text) if text else {}
        if record.get("made_from") != made_from:
            return False
    except (ValueError, AttributeError):
        return False
    with outputs.local(place) as folder:
        return record.get("holds") == _hash(folder)


def _place(move: str, name: str) -> str:
    return f"{move}--{name}"
