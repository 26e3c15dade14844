"""The ways to bring a fine-tune to another base that benchmarks compare, and how one is run: alone, with its cost.

    for _ in run_ways(job, count, wanted, score, known): ...

A way is a method with settings. Its CPU-seconds are those of its own process time, its passes are counted where the
towers run: a forward with a backward is one, a forward alone a third, over the calibration samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from taskferry import TaskVector
from taskferry.bench.rows import Mover, RowKind
from taskferry.methods import CannotMove, Job, TableRow, find
from taskferry.training.refinement import Refinement, refine

STEPS = (10, 30, 100, 300)
STARTS = {
    "refined, no move": "cold",
    "refined from BiCo": "bico",
    "refined from the default": "twofold",
}
SCRATCH = "trained in its form, labels"  # a LoRA of the same rank, or the weights that would have moved
STANDARD, BESIDE = "+ a second capture: effort standard", "BiCo, automatic scale"


@dataclass(frozen=True)
class Way:
    """A method with settings; `line` joins what one curve goes through."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    auto: bool = False  # its scale is chosen on the samples
    teacher: bool = False
    line: str = ""

    @property
    def kind(self) -> str:
        if not self.row.method.needs.training:
            return "moved"
        return "refined" if self.method == "distil" else "few-shot"

    def known(self, name: str, ways: dict[str, Any]) -> bool:
        """Whether it was run with today's code."""
        return name in ways and bool(ways[name]["code"] == self.row.code)

    @property
    def row(self) -> RowKind:
        """As tables know it, though most are in none."""
        row = TableRow(self.method, self.settings, auto_scale=self.auto, teacher=self.teacher)
        return RowKind(find(self.method), row)


FAST, THOROUGH = (find("twofold").at(effort) for effort in ("fast", "thorough"))
PARTS = "the default, part by part"
WAYS: dict[str, Way] = {
    "THESEUS": Way("theseus"),
    "BiCo at scale 1": Way("bico", line=PARTS),
    BESIDE: Way("bico", auto=True, line=PARTS),
    "+ gradients of one length": Way("twofold", {**FAST, "whiten": False}, auto=True),
    "+ whitened: effort fast": Way("twofold", FAST, auto=True, line=PARTS),
    STANDARD: Way("twofold", auto=True, line=PARTS),
    "+ augmented views: effort thorough": Way("twofold", THOROUGH, auto=True, line=PARTS),
    "effort fast, no labels": Way("twofold", FAST, auto=True, teacher=True),
    "effort standard, no labels": Way("twofold", auto=True, teacher=True),
    "effort thorough, no labels": Way("twofold", THOROUGH, auto=True, teacher=True),
    **{f"few-shot, {n} steps": Way("few-shot", {"steps": n}, line="few-shot tuning, labels") for n in (1, *STEPS)},
    **{
        f"few-shot from BiCo, {n} steps": Way(
            "few-shot", {"steps": n, "start": "bico"}, line="few-shot tuning from BiCo, labels"
        )
        for n in (1, *STEPS)
    },
    **{
        f"{line}, {n} steps": Way("distil", {"steps": n, "start": start}, line=line)
        for line, start in STARTS.items()
        for n in STEPS
    },
    **{
        f"{SCRATCH}, {n} steps": Way("distil", {"steps": n, "start": "cold", "labels": 1.0, "views": 0}, line=SCRATCH)
        for n in STEPS
    },
}

# Every effort, and the default with the tuned source's labels: never below the target by more than a point.
JUDGED = ("+ whitened: effort fast", STANDARD, "+ augmented views: effort thorough", "effort standard, no labels")


@contextmanager
def counted(model: nn.Module, samples: int) -> Iterator[list[float]]:
    """Passes of a model over the samples, in its first element: where its blocks begin."""
    passes = [0.0]
    tower = getattr(model, "visual", model)

    def seen(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        size = len(next(value for value in (*given, *named.values()) if isinstance(value, torch.Tensor)))
        passes[0] += size / samples * (1.0 if torch.is_grad_enabled() else 1 / 3)

    handle = tower.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def run_ways(
    given: Job, count: int, wanted: dict[str, Way], score: Callable[[TaskVector, float], float], ways: dict[str, Any]
) -> Iterator[None]:
    """Those that are not known yet, each on a job of its own; what is refined from a move of this run takes that one.

    Its cost is that of the move and of the training together.
    """
    starts: dict[str, tuple[TaskVector, list[TaskVector], float, tuple[float, float]]] = {}
    for name, way in wanted.items():
        if way.known(name, ways):
            continue
        ways.pop(name, None)  # what is made again stands last, as what is made first does
        pair = given.pair
        job = Job.of(given.source, given.target, given.tau, given.calibration, pair.objectives, pair.work)
        start = starts.get(way.settings.get("start", ""))
        with counted(job.source, count) as of_A, counted(job.target, count) as of_B:
            started = time.process_time()
            try:
                mover = Mover(job)
                if start is None:
                    moved, scale, _ = mover.take(way.row)
                else:
                    settings = Refinement(**{key: value for key, value in way.settings.items() if key != "start"})
                    moved, scale = refine(job.in_folds().pair, job.tau, start[0], settings, without=start[1]).tau, 1.0
            except CannotMove as error:
                ways[name] = {"refused": str(error), "code": way.row.code}
                continue
            seconds = time.process_time() - started
        before, (passes_A, passes_B) = (0.0, (0.0, 0.0)) if start is None else start[2:]
        seconds, passes = seconds + before, (of_A[0] + passes_A, of_B[0] + passes_B)
        if way.auto and not way.settings and not way.teacher:
            starts[way.method] = (scale * moved, [scale * each for each in mover.without], seconds, passes)
        ways[name] = {
            "score": score(moved, scale),
            "cpu": round(seconds, 2),
            "passes": [round(each, 1) for each in passes],
            "scale": round(scale, 2),
            "code": way.row.code,
        }
        yield
