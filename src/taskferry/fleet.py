"""A fleet: thousands of adapters of one base to one or more new bases, mapped by Ray.

    >>> summary = run_fleet(FleetSettings(adapters="adapters", out="moved", moves=[...]), progress)

Alignments are fitted once and shared through Ray's object store; adapters are moved in small batches wherever there is
a free core. An output appears whole or not at all, and says which input it was made from, so a batch that ran twice (a
node died before it could tell) is recognised and not made again. The manifest says of every adapter: done, failed with
the reason, or pending; a fleet that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from taskferry.alignment import Alignment
from taskferry.config import ApplySettings, FleetSettings, Move
from taskferry.disk.inputs import hash_file, stamp
from taskferry.disk.store import Store
from taskferry.errors import TaskferryError, first_line
from taskferry.jobs import applied, check_fits, source_skeleton, target_skeleton
from taskferry.models.peft import CONFIG, WEIGHTS, Adapter, Skeleton, read_adapter
from taskferry.output.record import RECORD, make_record, write_record
from taskferry.output.report import fleet_page
from taskferry.output.write import rank_of, remarks, write_form
from taskferry.taskvector import TaskVector

MANIFEST = "manifest"
FILES = (CONFIG, WEIGHTS, "adapter_model.bin")  # of an adapter; whatever else lies in a stranger's folder is not read
Progress = Callable[[Mapping[str, int], int, float], None]  # counts, adapters in all, adapters a second


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


def run_fleet(settings: FleetSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Move every adapter by every move; returns the summary that is also written beside the outputs."""
    ray, started = _ray(), time.time()
    inputs, outputs = Store(settings.adapters), Store(settings.out)
    names = inputs.adapters()
    if not names:
        raise TaskferryError(f"{settings.adapters} holds no adapters: folders with adapter_config.json are needed")
    for move in settings.moves:
        if not move.alignment.is_file():
            raise TaskferryError(f"{move.alignment} does not exist: `taskferry fit` writes an alignment")
        check_fits(move.alignment, move.target_base)
    stamps = inputs.stamps(FILES)
    recipes = {move.name: f"{stamp(move.alignment)} {move.target_base} {settings.scale}" for move in settings.moves}
    wanted = {(move, name): f"{recipe} {stamps.get(name)}" for move, recipe in recipes.items() for name in names}
    manifest = Manifest.open(outputs, wanted)
    before, total = len(manifest.states), len(wanted)
    work = [(move, [name for name in names if (move.name, name) not in manifest.states]) for move in settings.moves]
    counts = {"done": before, "failed": 0}
    if any(missing for _, missing in work):  # a fleet that is done starts nothing
        if not ray.is_initialized():
            _connect(ray, settings.address)
        for batch in _batches_as_they_end(ray, settings, work, inputs.address, outputs.address):
            manifest.add(batch)
            for moved in batch:
                counts[moved.status] += 1
            if progress is not None:
                progress(counts, total, (len(manifest.states) - before) / max(1e-9, time.time() - started))
    seconds, states = max(1e-9, time.time() - started), list(manifest.states.values())
    summary = {
        **counts,
        "pending": total - sum(counts.values()),
        "of": total,
        "seconds": round(seconds, 2),
        "adapters_a_second": round((sum(counts.values()) - before) / seconds, 2),
        "reasons": dict(Counter(state.reason[:240] for state in states if state.status == "failed").most_common()),
        "bases": dict(Counter(state.base for state in states if state.base).most_common()),
        "manifest": f"{outputs.address}/{MANIFEST}",
    }
    failures = [(state.adapter, state.move, state.reason) for state in states if state.status == "failed"]
    outputs.write_text("summary.json", json.dumps(summary, indent=1) + "\n")
    outputs.write_text("summary.html", fleet_page(summary, failures))
    return summary


def _run_name() -> str:
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}-{secrets.token_hex(2)}"


@dataclass
class Manifest:
    """What became of every (move, adapter): in memory, and in parts that are written once, one for each batch."""

    store: Store
    states: dict[tuple[str, str], Moved]
    wanted: Mapping[tuple[str, str], str]  # with the stamp of what each is made from
    run: str = field(default_factory=_run_name)  # parts of a later run, and later parts of a run, sort behind
    parts: int = 0

    @classmethod
    def open(cls, store: Store, wanted: Mapping[tuple[str, str], str]) -> Manifest:
        """What earlier runs have done of it and still lies there; what failed may have been mended, and is tried again.

        So is what is to be made from something else now: another alignment, scale or adapter.
        """
        store.make(MANIFEST)
        states: dict[tuple[str, str], Moved] = {}
        for line in store.read_lines(MANIFEST):
            try:
                moved = Moved(**json.loads(line))
                states[moved.move, moved.adapter] = moved
            except (ValueError, TypeError):
                continue  # the last line of a driver that was killed
        there = store.holding([RECORD, WEIGHTS])
        done = {
            key: state
            for key, stamp in wanted.items()
            if (state := states.get(key)) is not None
            and (state.status, state.stamp) == ("done", stamp)
            and place_of(*key) in there
        }
        return cls(store, done, wanted)

    def add(self, moved: Sequence[Moved]) -> None:
        """Write down what a batch came to."""
        moved = [replace(each, stamp=self.wanted.get((each.move, each.adapter), "")) for each in moved]
        self.states |= {(each.move, each.adapter): each for each in moved}
        lines = "".join(json.dumps(asdict(each)) + "\n" for each in moved)
        self.store.write_text(f"{MANIFEST}/part-{self.run}-{self.parts:08d}.jsonl", lines)
        self.parts += 1


def place_of(move: str, name: str) -> str:
    """The folder of an output."""
    return f"{move}--{name}"


def _connect(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise TaskferryError(
                f"no Ray cluster answers at {address}: start one there (`ray start --head`), or set "
                "RAY_AUTH_MODE=token where it asks for a token"
            ) from error
        return
    for last in (False, True):  # Ray gives itself half a minute to start, too little where a machine is busy
        try:
            ray.init(address="local", include_dashboard=False, **quiet)  # never one that somebody else runs here
            return
        except Exception as error:
            ray.shutdown()
            if last:
                raise TaskferryError(
                    f"Ray does not start here ({first_line(error)}): try again when less is running, or give the "
                    "address of a cluster that runs"
                ) from error


def _batches_as_they_end(
    ray: Any, settings: FleetSettings, work: Iterable[tuple[Move, list[str]]], adapters: str, out: str
) -> Iterator[list[Moved]]:
    """Never more of them at once than the cluster can take.

    Ray tries a batch again when its worker or node is lost; what it finished before is found by its outputs.
    """
    task = ray.remote(num_cpus=1, max_retries=settings.retries, retry_exceptions=True)(_in_worker)
    waiting = _batches(ray, work, settings.batch)
    running: dict[Any, tuple[str, list[str]]] = {}
    while True:
        room = 2 * max(1, int(ray.cluster_resources().get("CPU", 1))) - len(running)
        for alignment, move, names in islice(waiting, max(0, room)):
            running[task.remote(alignment, move, names, adapters, out, settings.scale)] = move.name, names
        if not running:
            return
        for reference in ray.wait(list(running))[0]:
            of, names = running.pop(reference)
            try:
                moved = ray.get(reference)
            except ray.exceptions.RayError as error:  # given up
                moved = [_failed(name, of, getattr(error, "cause", error)) for name in names]
            yield moved


def _batches(
    ray: Any, work: Iterable[tuple[Move, list[str]]], size: int
) -> Iterator[tuple[list[Any], Move, list[str]]]:
    for move, names in work:
        # Inside a list it is not fetched for every batch: a worker asks for it once.
        alignment = [ray.put(_portable(Alignment.load(move.alignment)))] if names else []
        for i in range(0, len(names), size):
            yield alignment, move, names[i : i + size]


def _in_worker(
    alignment: list[Any], move: Move, names: list[str], adapters: str, out: str, scale: float
) -> list[Moved]:
    torch.set_num_threads(1)
    return move_batch(_opened(alignment[0]), move, names, Store(adapters), Store(out), scale)


@cache
def _opened(reference: Any) -> OpenAlignment:
    return OpenAlignment.of(_from_portable(_ray().get(reference)))


def _portable(alignment: Alignment) -> dict[str, Any]:
    """As numpy arrays, which workers of a node read from shared memory without a copy."""
    tensors, header = alignment.tensors()
    return {"header": json.dumps(header), "tensors": {name: t.float().numpy() for name, t in tensors.items()}}


def _from_portable(portable: Mapping[str, Any]) -> Alignment:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only memory, which nobody writes
        tensors = {name: torch.from_numpy(array) for name, array in portable["tensors"].items()}
    return Alignment.from_tensors(tensors, json.loads(portable["header"]), "an alignment of the fleet")


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise TaskferryError("a fleet needs Ray: pip install 'taskferry[fleet]'") from error
    return ray


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
    """An adapter in memory, with the hashes of the files that it was read from."""

    name: str
    adapter: Adapter
    hashes: dict[str, str]  # file -> sha256
    made_from: str


def move_batch(
    opened: OpenAlignment, move: Move, names: list[str], inputs: Store, outputs: Store, scale: float
) -> list[Moved]:
    """Some adapters, each on its own, done or failed with a reason; told of when all of them are safe on disk.

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
            before = [stamp(path) for path in _files(folder)]
            hashes = _hashes(folder)
            made_from = _digest(hashes, recipe)
            if _is_made_from(outputs, place_of(move, name), made_from):
                return Moved(name, move, "done", again=True)
            adapter = read_adapter(folder, opened.source)
            if [stamp(path) for path in _files(folder)] != before:
                raise TaskferryError("it changed while it was read: run the fleet again")
    except Exception as error:  # one strange adapter must stop nobody
        return _failed(name, move, error, place)
    return Read(name, adapter, hashes, made_from)


def _write(
    opened: OpenAlignment, move: Move, read: Read, tau: TaskVector | None, inputs: Store, outputs: Store, scale: float
) -> Moved:
    """What `taskferry apply` would write."""
    place, like = place_of(move.name, read.name), read.adapter
    came = f"{inputs.address}/{read.name}"
    settings = ApplySettings(
        alignment=move.alignment, source_tuned=came, target_base=move.target_base, scale=scale, out=Path(place)
    )
    words = ["taskferry", "apply", move.alignment, came, "--target-base", move.target_base, "--scale", scale]
    command = shlex.join([*map(str, words), "--out", place])
    try:
        change = scale * (opened.alignment.apply(like.tau) if tau is None else tau)
        verdict = applied(scale, like.tau, change, like.ignored)
        verdict = replace(verdict, notes=(*verdict.notes, *remarks("lora", change, opened.target, like)))
        with outputs.staged(place, last=RECORD) as stage:
            write_form(stage, "lora", change, opened.target, base=move.target_base, like=like)
            record = make_record(
                command, settings, {"source_tuned": read.hashes}, change, verdict,
                provenance=opened.alignment.provenance, sites=opened.table, ignored=like.ignored, form="lora",
                rank=rank_of(change), made_from=read.made_from, holds=_digest(_hashes(stage)),
            )  # fmt: skip
            write_record(stage, record, settings, adapter=True)
    except Exception as error:
        return _failed(read.name, move.name, error)
    return Moved(read.name, move.name, "done", base=str(like.config.get("base_model_name_or_path") or ""))


def _failed(name: str, move: str, error: Exception, place: str = "") -> Moved:
    """With the error as its reason; the folder that it was read from has another name in every run."""
    reason = str(error) if isinstance(error, TaskferryError) else f"{type(error).__name__}: {error}"
    reason = reason.replace(place, "the adapter") if place else reason
    return Moved(name, move, "failed", " ".join(reason.split())[:500])


def _files(folder: Path) -> list[Path]:
    return [path for name in FILES if (path := folder / name).is_file()]


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in _files(folder)}


def _digest(hashes: Mapping[str, str], recipe: str = "") -> str:
    return hashlib.sha256(json.dumps([hashes, recipe], sort_keys=True).encode()).hexdigest()


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
        return bool(record.get("holds") == _digest(_hashes(folder)))
