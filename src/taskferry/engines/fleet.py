"""A fleet: thousands of adapters of one base to one or more new bases, mapped by Ray.

    >>> summary = run_fleet(FleetSettings(adapters="adapters", out="moved", moves=[...]), reporter)

Alignments are fitted once and shared through Ray's object store; adapters are moved in small batches wherever there is
a free core. An output appears whole or not at all, and says which input it was made from, so a batch that ran twice (a
node died before it could tell) is recognised and not made again. The manifest says of every adapter: done, failed with
the reason, or pending; a fleet that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from taskferry.alignment import Alignment
from taskferry.engines.moving import Moved, Way, move_batch
from taskferry.engines.store import Store
from taskferry.engines.summary import summary_page
from taskferry.errors import TaskferryError
from taskferry.settings import FleetSettings, Move

MANIFEST = "manifest.jsonl"


@dataclass
class Manifest:
    """The state of every (adapter, move), in memory and as lines that are only ever added."""

    store: Store
    states: dict[tuple[str, str], Moved] = field(default_factory=dict)

    @classmethod
    def open(cls, store: Store) -> Manifest:
        """What earlier runs have written down."""
        manifest = cls(store)
        text = store.read_text(MANIFEST)
        if text and not text.endswith("\n"):
            store.append_text(MANIFEST, "\n")  # the next line must not be joined to half of one
        for line in text.splitlines():
            try:
                moved = Moved(**json.loads(line))
            except (ValueError, TypeError):
                continue  # the last line of a driver that was killed
            manifest.states[moved.move, moved.adapter] = moved
        return manifest

    def add(self, moved: Sequence[Moved]) -> None:
        """Write down what a batch came to."""
        for each in moved:
            self.states[each.move, each.adapter] = each
        self.store.append_text(MANIFEST, "".join(json.dumps(asdict(each)) + "\n" for each in moved))

    def done(self, move: str, adapter: str) -> bool:
        """Whether it is there; what failed in an earlier run is tried again, it may have been mended."""
        state = self.states.get((move, adapter))
        return state is not None and state.status == "done"

    def counts(self) -> dict[str, int]:
        """How many of each state."""
        found = {"done": 0, "failed": 0}
        for state in self.states.values():
            found[state.status] += 1
        return found


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
    outputs.make()
    manifest = Manifest.open(outputs)
    names = inputs.adapters()
    if not names:
        raise TaskferryError(f"{settings.adapters} holds no adapters: folders with adapter_config.json are needed")
    work = [(move, name) for move in settings.moves for name in names if not manifest.done(move.name, name)]
    total = len(names) * len(settings.moves)
    if not ray.is_initialized():
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if settings.address is None:
            ray.init(address="local", include_dashboard=False, **quiet)  # never one that somebody else runs here
        else:
            _connect(ray, settings.address, quiet)
    queue = _Queue(ray, settings, inputs, outputs)
    done = 0
    for batch in queue.run(work):
        manifest.add(batch)
        done += len(batch)
        reporter.progress(manifest.counts(), total, done / max(1e-9, time.time() - started))
    summary = _summary(manifest, total, time.time() - started, done)
    outputs.write_text("summary.json", json.dumps(summary, indent=1) + "\n")
    outputs.write_text("summary.html", summary_page(summary, manifest.states.values()))
    return summary


def _connect(ray: Any, address: str, quiet: Mapping[str, Any]) -> None:
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise TaskferryError(
            f"no Ray cluster answers at {address}: start one there (`ray start --head`), or set RAY_AUTH_MODE=token "
            "where it asks for a token"
        ) from error


class _Queue:
    """Batches in flight: never more than the cluster can take, tried again with back-off when a node is lost."""

    def __init__(self, ray: Any, settings: FleetSettings, inputs: Store, outputs: Store) -> None:
        self.ray, self.settings = ray, settings
        self.addresses = (inputs.address, outputs.address)
        self.alignments: dict[str, Any] = {}
        self.task = ray.remote(num_cpus=1, max_retries=0)(_move_batch)

    def run(self, work: Sequence[tuple[Move, str]]) -> Iterator[list[Moved]]:
        size = self.settings.batch
        waiting = [part for i in range(0, len(work), size) for part in _by_move(work[i : i + size])]
        tries: dict[int, int] = {}
        flying: dict[Any, list[tuple[Move, str]]] = {}
        later: list[tuple[float, list[tuple[Move, str]]]] = []
        while waiting or flying or later:
            now = time.time()
            waiting += [batch for due, batch in later if due <= now]
            later = [(due, batch) for due, batch in later if due > now]
            while waiting and len(flying) < 2 * max(1, int(self.ray.cluster_resources().get("CPU", 1))):
                batch = waiting.pop(0)
                flying[self._start(batch)] = batch
            if not flying:
                time.sleep(0.05)
                continue
            ready, _ = self.ray.wait(list(flying), num_returns=1, timeout=0.5)
            for reference in ready:
                batch = flying.pop(reference)
                try:
                    yield [Moved(**each) for each in self.ray.get(reference)]
                except self.ray.exceptions.RayError as error:
                    # A worker or a node is gone. What it finished is found again by its output.
                    count = tries[id(batch)] = tries.get(id(batch), 0) + 1
                    if count > self.settings.retries:
                        reason = f"given up after {count} tries: {str(error).splitlines()[0][:200]}"
                        yield [Moved(name, move.name, "failed", reason) for move, name in batch]
                    else:
                        later.append((time.time() + min(30.0, 0.5 * 2**count), batch))

    def _start(self, batch: list[tuple[Move, str]]) -> Any:
        move = batch[0][0]
        if move.name not in self.alignments:
            self.alignments[move.name] = self.ray.put(_portable(Alignment.load(move.alignment)))
        names = [name for _, name in batch]
        # Inside a list it is not fetched for every batch: a worker asks for it once.
        return self.task.remote(
            [self.alignments[move.name]], move.name, move.target_base, names, *self.addresses, self.settings.scale
        )


def _by_move(batch: Sequence[tuple[Move, str]]) -> list[list[tuple[Move, str]]]:
    parts: dict[str, list[tuple[Move, str]]] = {}
    for move, name in batch:
        parts.setdefault(move.name, []).append((move, name))
    return list(parts.values())


_OPENED: dict[str, Way] = {}  # in a worker: alignments that are open already


def _move_batch(
    kept: list[Any], move: str, base: str, names: list[str], adapters: str, out: str, scale: float
) -> list[dict[str, Any]]:
    """In a worker: some adapters, each on its own."""
    import torch

    torch.set_num_threads(1)
    if move not in _OPENED:
        _OPENED[move] = Way.of(_from_portable(_ray().get(kept[0])))
    inputs, outputs = Store(adapters), Store(out)
    return [asdict(moved) for moved in move_batch(_OPENED[move], move, base, names, inputs, outputs, scale)]


def _portable(alignment: Alignment) -> dict[str, Any]:
    """As numpy arrays, which workers of a node read from shared memory without a copy."""
    tensors, header = alignment.tensors()
    return {"header": json.dumps(header), "tensors": {name: t.float().numpy() for name, t in tensors.items()}}


def _from_portable(portable: Mapping[str, Any]) -> Alignment:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only memory, which nobody writes
        tensors = {name: torch.from_numpy(array) for name, array in portable["tensors"].items()}
    return Alignment.from_tensors(tensors, json.loads(portable["header"]), "an alignment of the fleet")


def _summary(manifest: Manifest, total: int, seconds: float, moved: int) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    for state in manifest.states.values():
        if state.status == "failed":
            kind = state.reason.split(":")[-1].strip()[:120]
            reasons[kind] = reasons.get(kind, 0) + 1
    return {
        **manifest.counts(),
        "pending": total - len(manifest.states),
        "of": total,
        "seconds": round(seconds, 2),
        "adapters_a_second": round(moved / seconds, 2) if seconds else 0.0,
        "reasons": dict(sorted(reasons.items(), key=lambda item: -item[1])),
    }


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise TaskferryError("a fleet needs Ray: pip install 'taskferry[fleet]'") from error
    return ray
