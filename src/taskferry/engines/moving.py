"""One adapter through one alignment, whatever it is: done, or failed with its reason. Nothing is raised."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taskferry.alignment import Alignment
from taskferry.checkpoints.adapters import CONFIG, WEIGHTS, Skeleton, read_adapter, write_adapter
from taskferry.engines.store import Store
from taskferry.errors import TaskferryError
from taskferry.inputs import hash_file

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


def move_one(way: Way, move: str, base: str, name: str, inputs: Store, outputs: Store, scale: float) -> Moved:
    """Read, apply, write; an output made from the same bytes is not made again."""
    started = time.perf_counter()

    def failed(reason: str) -> Moved:
        return Moved(name, move, "failed", " ".join(reason.split())[:500], time.perf_counter() - started)

    try:
        with inputs.local(name) as folder:
            made_from = _hash(folder)
            place = _place(move, name)
            if _is_made_from(outputs, place, made_from):
                return Moved(name, move, "done", seconds=time.perf_counter() - started, again=True)
            adapter = read_adapter(folder, way.source)
            moved = way.alignment.apply(adapter.tau)
            moved = moved if scale == 1 else moved * scale
            with outputs.staged(place) as stage:
                write_adapter(stage, moved, way.target, base_name=base, like=adapter)
                coverage = {} if moved.coverage is None else {"coverage_summary": moved.coverage.summary()}
                record = {"made_from": made_from, "holds": _hash(stage), "move": move, "scale": scale, **coverage}
                (stage / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                if _hash(folder) != made_from:
                    raise TaskferryError("it changed while it was read: run the fleet again")
    except TaskferryError as error:
        return failed(str(error))
    except Exception as error:  # one strange adapter must stop nobody
        return failed(f"{type(error).__name__}: {error}")
    return Moved(name, move, "done", seconds=time.perf_counter() - started)


def _hash(folder: Path) -> str:
    """Of what is moved alone: whatever else lies in a stranger's folder is not read."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS, "adapter_model.bin"):
        path = folder / name
        if path.is_file():
            digest.update(f"{name}{hash_file(path)}".encode())
    return digest.hexdigest()


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


def move_batch(
    way: Way, move: str, base: str, names: list[str], inputs: Store, outputs: Store, scale: float
) -> list[Moved]:
    """Some adapters, each on its own; told of when all of them are safe on disk."""
    moved = [move_one(way, move, base, name, inputs, outputs, scale) for name in names]
    outputs.settle(_place(move, each.adapter) for each in moved if each.status == "done" and not each.again)
    return moved


def _place(move: str, name: str) -> str:
    return f"{move}--{name}"
