"""A fleet: thousands of adapters of one base to one or more new bases, mapped by Ray.

    >>> summary = run_fleet(FleetSettings(adapters="adapters", out="moved", moves=[...]), reporter)

Alignments are fitted once and shared through Ray's object store; adapters are moved in small batches wherever there is
a free core. An output appears whole or not at all, and says which input it was made from, so a batch that ran twice (a
node died before it could tell) is recognised and not made again. The manifest says of every adapter: done, failed with
the reason, or pending; a fleet that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from taskferry.alignment import Alignment
from taskferry.disk.inputs import stamp
from taskferry.errors import TaskferryError, first_line
from taskferry.fleet.move import FILES, Moved, OpenAlignment, failed, move_batch, place_of
from taskferry.fleet.store import Store
from taskferry.fleet.summary import summary_page
from taskferry.jobs.apply import check_fits
from taskferry.jobs.record import RECORD
from taskferry.models.peft import WEIGHTS
from taskferry.settings import FleetSettings, Move

MANIFEST = "manifest"


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


class FleetReporter:
    """Told how far a fleet is; the silent one does nothing."""

    def progress(self, counts: Mapping[str, int], total: int, rate: float) -> None:
        """After every batch."""


def run_fleet(settings: FleetSettings, reporter: FleetReporter | None = None) -> dict[str, Any]:
    """Move every adapter by every move; returns the summary that is also written beside the outputs."""
    ray = _ray()
    reporter = reporter or FleetReporter()
    started = time.time()
    inputs, outputs = Store(settings.adapters), Store(settings.out)
    names = inputs.adapters()
    if not names:
        raise TaskferryError(f"{settings.adapters} holds no adapters: folders with adapter_config.json are needed")
    lost = [str(move.alignment) for move in settings.moves if not Path(move.alignment).is_file()]
    if lost:
        raise TaskferryError(f"{lost[0]} does not exist: `taskferry fit` writes an alignment")
    for move in settings.moves:
        check_fits(move.alignment, move.target_base)
    stamps = inputs.stamps(FILES)
    recipes = {
        move.name: f"{stamp(Path(move.alignment))} {move.target_base} {settings.scale}" for move in settings.moves
    }
    manifest = Manifest.open(
        outputs, {(move, name): f"{recipe} {stamps.get(name)}" for move, recipe in recipes.items() for name in names}
    )
    before, total = len(manifest.states), len(names) * len(settings.moves)
    work = [(move, [name for name in names if (move.name, name) not in manifest.states]) for move in settings.moves]
    counts = {"done": before, "failed": 0}
    waiting = any(missing for _, missing in work)
    if waiting and not ray.is_initialized():  # a fleet that is done starts nothing
        _connect(ray, settings.address)
    for batch in _move_all(ray, settings, work, inputs.address, outputs.address) if waiting else ():
        manifest.add(batch)
        for moved in batch:
            counts[moved.status] += 1
        reporter.progress(counts, total, (len(manifest.states) - before) / max(1e-9, time.time() - started))
    seconds = max(1e-9, time.time() - started)
    summary = {
        **counts,
        "pending": total - sum(counts.values()),
        "of": total,
        "seconds": round(seconds, 2),
        "adapters_a_second": round((sum(counts.values()) - before) / seconds, 2),
        "reasons": _reasons(manifest.states.values()),
        "bases": _bases(manifest.states.values()),
        "manifest": f"{outputs.address}/{MANIFEST}",
    }
    outputs.write_text("summary.json", json.dumps(summary, indent=1) + "\n")
    outputs.write_text("summary.html", summary_page(summary, manifest.states.values()))
    return summary


def _connect(ray: Any, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        _start(ray, quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise TaskferryError(
            f"no Ray cluster answers at {address}: start one there (`ray start --head`), or set RAY_AUTH_MODE=token "
            "where it asks for a token"
        ) from error


def _start(ray: Any, quiet: dict[str, Any], again: bool = True) -> None:
    try:
        ray.init(address="local", include_dashboard=False, **quiet)  # never one that somebody else runs here
    except Exception as error:  # Ray's own: it gives itself half a minute, too little where a machine is busy
        ray.shutdown()
        if not again:
            raise TaskferryError(
                f"Ray does not start here ({first_line(error)}): try again when less is running, or give the address "
                "of a cluster that runs"
            ) from error
        _start(ray, quiet, again=False)


def _move_all(
    ray: Any, settings: FleetSettings, work: Iterable[tuple[Move, list[str]]], adapters: str, out: str
) -> Iterator[list[Moved]]:
    """Batches as they end, never more of them at once than the cluster can take.

    Ray tries a batch again when its worker or node is lost; what it finished before is found by its outputs.
    """
    task = ray.remote(num_cpus=1, max_retries=settings.retries, retry_exceptions=True)(_move_batch)
    waiting = _batches(ray, work, settings.batch)
    running: dict[Any, tuple[str, list[str]]] = {}
    while True:
        room = 2 * max(1, int(ray.cluster_resources().get("CPU", 1))) - len(running)
        for alignment, move, names in islice(waiting, max(0, room)):
            reference = task.remote(alignment, move, names, adapters, out, settings.scale)
            running[reference] = move.name, names
        if not running:
            return
        for reference in ray.wait(list(running))[0]:
            of, names = running.pop(reference)
            try:
                moved = ray.get(reference)
            except ray.exceptions.RayError as error:  # given up
                moved = [failed(name, of, getattr(error, "cause", error)) for name in names]
            yield moved


def _batches(
    ray: Any, work: Iterable[tuple[Move, list[str]]], size: int
) -> Iterator[tuple[list[Any], Move, list[str]]]:
    for move, names in work:
        # Inside a list it is not fetched for every batch: a worker asks for it once.
        alignment = [ray.put(_portable(Alignment.load(move.alignment)))] if names else []
        for i in range(0, len(names), size):
            yield alignment, move, names[i : i + size]


def _move_batch(
    alignment: list[Any], move: Move, names: list[str], adapters: str, out: str, scale: float
) -> list[Moved]:
    """In a worker: some adapters, each on its own."""
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


def _reasons(states: Iterable[Moved]) -> dict[str, int]:
    """How often each kind of failure, the most frequent first."""
    kinds = Counter(state.reason[:240] for state in states if state.status == "failed")
    return dict(kinds.most_common())


def _bases(states: Iterable[Moved]) -> dict[str, int]:
    """What the adapters call the base that they were made on: one, where nothing got in by mistake."""
    return dict(Counter(state.base for state in states if state.base).most_common())


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise TaskferryError("a fleet needs Ray: pip install 'taskferry[fleet]'") from error
    return ray
