"""A transfer between models larger than memory, file to file: `taskferry transfer --engine blockwise`.

Nothing but one block of each model, its statistics and its maps is in memory at a time. The scale is given, not
searched: each look at a loss reads the whole target from disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from taskferry.alignment import NO_CHANGE, Alignment
from taskferry.card import site_table
from taskferry.checkpoints import Adapter, Skeleton, is_adapter, read_adapter, write_adapter
from taskferry.checkpoints.huggingface import copy_side_files, owns
from taskferry.checkpoints.models import resolve
from taskferry.checkpoints.output import check_free, staged_folder
from taskferry.coverage import Coverage, Row
from taskferry.engines.blockwise import align_blocks
from taskferry.engines.estimate import plan_blocks
from taskferry.engines.lazy import INDEX, LazyModel
from taskferry.engines.walk import Walk
from taskferry.errors import TaskferryError
from taskferry.files import write_plain_safetensors, writing
from taskferry.fitting import Steps, changed_pairs, parameter_reasons
from taskferry.forms import FORMS, output_kind
from taskferry.inputs import Inputs
from taskferry.outcome import Outcome, Reporter, finish, verdict, with_coverage
from taskferry.pairing import Pair, pair_sites
from taskferry.preparing import Prepared, prepare
from taskferry.scale import ScaleCurve
from taskferry.settings import TransferSettings, dump_settings
from taskferry.solving import MapOptions
from taskferry.stages import Stages
from taskferry.taskvector import Delta, TaskVector, as_dense
from taskferry.temporary import sweep, temporary_folder
from taskferry.version import __version__


def transfer_blockwise(
    settings: TransferSettings, *, command: str, reporter: Stages, dry_run: bool = False
) -> Outcome | None:
    """Walk both models, move block by block, write each block as it is done, look at the loss once more."""
    scale = _check(settings)
    check_free(settings.out)
    inputs = Inputs(
        source_base=resolve(settings.source_base),
        source_tuned=resolve(settings.source_tuned),
        target_base=resolve(settings.target_base),
        calibration=settings.calibration,
    )
    source, target = (_lazy(given) for given in (settings.source_base, settings.target_base))
    tuned = _Tuned.open(settings.source_tuned, source)
    kind = output_kind(settings, tuned.adapter)
    if kind == "task-vector" or (kind == "lora" and tuned.adapter is None):
        raise TaskferryError("block by block writes a LoRA for a LoRA, and a full model for a full fine-tune")
    prepared = prepare(settings, source.loaded(), target.loaded(), None)
    with writing(settings.out), _scratch(settings.out) as scratch:
        walks = []
        for side, lazy in enumerate((source, target)):
            folder = scratch / str(side)
            folder.mkdir()
            walks.append(Walk(lazy, prepared.calibration.side(side), prepared.objectives[side], folder))
        pairs, reasons = pair_sites(walks[0].sites, walks[1].sites)
        if tuned.adapter is not None:
            pairs, left_out = changed_pairs(pairs, tuned.adapter.tau.deltas.keys())
            reasons |= dict.fromkeys(left_out, NO_CHANGE)
        if not pairs:
            raise TaskferryError("no linear layer of the target has a partner in the source that the fine-tune changes")
        if dry_run or reporter.wants_plan:
            plan = plan_blocks(walks[0], walks[1], pairs, prepared.calibration)
            reporter.plan(plan, _lines(settings, prepared, kind))
        if dry_run:
            return None
        with staged_folder(settings.out) as folder:
            reporter.ends("prepare")
            job = _Job(settings, scale, walks[0], walks[1], tuned, kind, folder, reporter)
            job.move(pairs, prepared)
            made = job.record(command, prepared, reasons, inputs.hashes())
            record = {**made, "work": reporter.work()}
            finish(folder, record, dump_settings(settings), adapter=kind == "lora")
            inputs.check()
    return Outcome(record, settings.out)


@dataclass
class _Tuned:
    """What the fine-tune changed: an adapter in memory, or a second model on disk."""

    adapter: Adapter | None = None
    model: LazyModel | None = None

    @classmethod
    def open(cls, given: str, base: LazyModel) -> _Tuned:
        if is_adapter(Path(given)):
            return cls(adapter=read_adapter(Path(given), Skeleton.of(base.model)))
        model = _lazy(given)
        if model.shapes != base.shapes:
            strange = sorted(
                n for n in model.shapes.keys() | base.shapes.keys() if model.shapes.get(n) != base.shapes.get(n)
            )
            raise TaskferryError(f"{given} and {base.given} differ in {strange[0]}: give the base model that was tuned")
        return cls(model=model)

    def changes(self, base: LazyModel, names: list[str]) -> TaskVector:
        """τ of these parameters."""
        if self.adapter is not None:
            return TaskVector({n: d for n, d in self.adapter.tau.deltas.items() if n in set(names)})
        if self.model is None:
            raise ValueError("a fine-tune is an adapter or a model")
        deltas: dict[str, Delta] = dict(self.model.read(names))
        for name, before in base.read(names):
            change = deltas[name]
            if isinstance(change, Tensor):
                change -= before
                if not bool(change.any()):
                    del deltas[name]
        return TaskVector(deltas)


@dataclass
class _Job:
    """One transfer on its way."""

    settings: TransferSettings
    scale: float
    source: Walk
    target: Walk
    tuned: _Tuned
    kind: str
    folder: Path
    reporter: Reporter
    deltas: dict[str, Delta] = field(default_factory=dict)  # of a LoRA
    rows: dict[str, Row] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)  # parameters of the source that were looked at
    reasons: dict[str, str] = field(default_factory=dict)
    sites: list[dict[str, Any]] = field(default_factory=list)
    shards: dict[str, str] = field(default_factory=dict)  # name in the checkpoint -> file
    bytes: int = 0
    losses: tuple[float, float] = (0.0, 0.0)

    def move(self, pairs: list[Pair], prepared: Prepared) -> None:
        walking = Steps(self.reporter.step, "walk", len(self.source.blocks) + len(self.target.blocks))
        self.source.forward(on_block=walking.step)
        self.target.forward(on_block=walking.step)
        s = self.settings
        options = MapOptions(s.map_rank, s.tolerance, self.kind == "lora", s.tokens_per_width)
        moving = Steps(self.reporter.step, "blocks", len(self.target.blocks))
        parts = align_blocks(self.source, self.target, prepared.calibration, pairs, options, moving.step)
        for part in parts:
            self._take(part)
        for name in self.source.lazy.shapes:
            if name not in self.seen and len(self.tuned.changes(self.source.lazy, [name])):
                self.unused[name] = "no site of the target takes it"
        before = self.target.loss
        if self.kind == "lora":
            tau = TaskVector(self.deltas) * self.scale
            if not self.deltas:
                raise TaskferryError(f"nothing of {s.source_tuned} moved")
            skeleton = Skeleton.of(self.target.model)
            write_adapter(self.folder, tau, skeleton, base_name=s.target_base, like=self.tuned.adapter)
            moved = LazyModel(s.target_base, self.target.lazy.folder, tau)
        else:
            self._write_rest()
            moved = LazyModel(str(s.out), self.folder)
        self.losses = (before, self._loss_of(moved, prepared))

    def _take(self, part: Alignment) -> None:
        names = list(part.source_parameters)
        self.seen |= set(names)
        moved = part.apply(self.tuned.changes(self.source.lazy, names))
        self.sites += site_table(part)
        self.reasons |= part.reasons
        if moved.coverage is not None:
            self.rows |= {row.parameter: row for row in moved.coverage.rows}
            self.unused |= moved.coverage.unused
        if self.kind == "lora":
            self.deltas |= moved.deltas
        else:
            self._write_shard(list(part.target_parameters), moved)

    def _write_rest(self) -> None:
        """Parameters of blocks that take nothing, and what stands outside the blocks."""
        lazy = self.target.lazy
        for j in range(len(self.target.blocks)):
            names = self.target.parameters(j)
            if lazy.stored[names[0]] not in self.shards:
                self._write_shard(names, TaskVector({}))
        if any(lazy.stored[name] not in self.shards for name in self.target.outer):
            self._write_shard(self.target.outer, TaskVector({}))
        index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(self.shards.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        copy_side_files(lazy.folder, self.folder)

    def _write_shard(self, names: list[str], moved: TaskVector) -> None:
        lazy = self.target.lazy
        file = f"model-{len(set(self.shards.values())) + 1:05d}-of-{len(self.target.blocks) + 1:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name, stored in lazy.read(names, dtype=None):
            value = stored
            if name in moved.deltas:
                value = (stored.float() + self.scale * as_dense(moved.deltas[name])).to(stored.dtype)
            tensors[lazy.stored[name]] = value
            self.bytes += value.nbytes
        write_plain_safetensors(self.folder / file, tensors)
        self.shards |= dict.fromkeys(tensors, file)

    def _loss_of(self, lazy: LazyModel, prepared: Prepared) -> float:
        """The calibration loss of what was written, read again from its files."""
        with _scratch(self.settings.out) as scratch:
            walk = Walk(lazy, prepared.calibration.side(1), prepared.objectives[1], scratch)
            walk.forward(backward=False, on_block=Steps(self.reporter.step, "check", len(walk.blocks)).step)
        return walk.loss

    def record(
        self, command: str, prepared: Prepared, reasons: dict[str, str], inputs: dict[str, dict[str, str]]
    ) -> dict[str, Any]:
        settings, samples = self.settings, prepared.calibration.samples
        why = parameter_reasons(self.target.model, self.target.sites, reasons | self.reasons)
        rows = []
        for name, shape in self.target.lazy.shapes.items():
            row = self.rows.get(name)
            if row is None or row.status == "kept":
                row = Row(name, shape, "kept", why.get(name, row.reason if row else "no site uses it"))
            rows.append(row)
        coverage = Coverage(tuple(rows), dict(sorted(self.unused.items())))
        before, after = (value / samples for value in self.losses)
        curve = ScaleCurve(((0.0, before), (self.scale, after)), self.scale)
        moved = TaskVector(self.deltas, coverage)
        return with_coverage(
            {
                "command": command,
                "settings": settings.model_dump(mode="json"),
                "inputs": inputs,
                "calibration": {"indices": prepared.indices, "labels": prepared.labels, "samples": samples},
                "provenance": {
                    "method": "bico",
                    "engine": "blockwise",
                    "objective": [objective.describe() for objective in prepared.objectives],
                    "versions": {"taskferry": __version__},
                },
                "verdict": verdict(curve, moved),
                "scale_curve": curve.points,
                "sites": list(reversed(self.sites)),
                "ignored": dict(self.tuned.adapter.ignored) if self.tuned.adapter else {},
            },
            moved,
        )


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder beside the output for what the walks keep on disk."""
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep(out.parent, out.name[:80])
    with temporary_folder(out.parent, f"{out.name[:80]}.walk") as scratch:
        yield scratch


def _lazy(given: str) -> LazyModel:
    folder = resolve(given)
    if not owns(folder):
        raise TaskferryError(f"{given} is no Hugging Face folder: block by block needs one; use the engine 'whole'")
    return LazyModel(given, Path(folder))


def _check(settings: TransferSettings) -> float:
    """What block by block does not do, said at once."""
    wrong = []
    if settings.method != "bico" or settings.method_settings:
        wrong.append("the method is bico, without settings of its own")
    if settings.scale == "auto":
        wrong.append("the scale must be given (--scale 1 is the paper), each look would read the whole target again")
    if settings.labels == "teacher":
        wrong.append("the tuned source cannot label the samples: give labels or completions")
    if settings.device not in ("auto", "cpu"):
        wrong.append("it runs on the CPU")
    if wrong:
        raise TaskferryError("engine blockwise: " + "; ".join(wrong))
    return float(settings.scale)


def _lines(settings: TransferSettings, prepared: Prepared, kind: str) -> dict[str, str]:
    return {
        "from": f"{settings.source_tuned} on {settings.source_base}",
        "to": settings.target_base,
        "samples": f"{prepared.calibration.samples} of {settings.calibration}",
        "labels": prepared.labels,
        "engine": "blockwise: one block of each model in memory",
        "scale": str(settings.scale),
        "output": f"{FORMS[kind]} in {settings.out}",
    }
