"""What makes right answers move between real language models, and what limits it: one change of the default at a time.

    python benchmarks/quality/language_ideas.py [--quick] [--json benchmarks/results/language_ideas.json]
        [--tasks NAME …] [--pairs A:B …] [--only IDEA …] [--seeds N]

The tasks are those that settings are chosen on; `language_models.py` reports on others. Every idea is a function that
gives task vectors for one pair, task and draw; the table has the share of the oracle's gain in right answers that each
recovers, and the CPU-seconds that it took. No weight is trained here. The rows of limits look at the oracle's own
change, or at the test questions: they are no methods. A run goes on where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import language_models as real
from benchmarks.quality.language_tasks import BATCH, LENGTH, TASKS
from benchmarks.shared import common
from benchmarks.shared.language import share
from benchmarks.zoo import zoo_data
from taskferry import TaskVector, load_model, load_tuned
from taskferry.collect.capture import Loss
from taskferry.collect.solve import MapOptions
from taskferry.collect.statistics import BASE, Capture, Point
from taskferry.data.batch import IGNORED, Batch, Calibration
from taskferry.data.data import Samples
from taskferry.layers.site import depths
from taskferry.linalg.decompositions import of_rows
from taskferry.linalg.whitening import Whitened
from taskferry.methods import Job, Moved, run
from taskferry.models import Loaded, Tuned
from taskferry.objectives.language import predicted
from taskferry.objectives.objectives import LanguageModel
from taskferry.objectives.preparation import Prepared, prepare
from taskferry.settings import CalibrationSettings
from taskferry.taskvector import LowRank

ASKED = ("emotion", "snli")
PAIRS = real.PAIRS[:2]
COUNT, MORE = 100, 400
DEFAULT = "the default"
Found = Iterator[tuple[str, TaskVector, float]]  # name, what is added, its scale


@dataclass
class Trial:
    """A pair of models with the LoRA of a task on either, and a draw of its samples."""

    models: tuple[Loaded, Loaded]
    changes: tuple[Tuned, Tuned]  # of the source, and of the target: the oracle
    task: str
    seed: int
    tested: int

    @cached_property
    def samples(self) -> Samples:
        return TASKS[self.task].samples("train")

    @cached_property
    def test(self) -> Samples:
        return TASKS[self.task].questions(self.tested)

    def prepared(self, count: int = COUNT, samples: Samples | None = None) -> Prepared:
        settings = CalibrationSettings(
            calibration=self.task, samples=count, seed=self.seed, micro_batch=BATCH, max_length=LENGTH
        )
        return prepare(settings, *self.models, self.changes[0], samples=samples or self.samples)

    def job(self, calibration: Calibration, objective: Any = None) -> Job:
        A, B = self.models
        given = objective or (LanguageModel(), LanguageModel())
        return Job.of(A.model, B.model, self.changes[0].tau, calibration, given)

    @cached_property
    def plain(self) -> Job:
        """The default's own job."""
        return self.job(self.prepared().calibration).in_folds()

    @cached_property
    def default(self) -> Moved:
        return run("twofold", self.plain)

    def score(self, added: TaskVector, scale: float = 1.0) -> tuple[float, float]:
        """Right answers in per cent, and the loss."""
        found = TASKS[self.task].score(self.models[1], self.test, added, scale)
        return found.score, found.loss

    def answered(self, others: int) -> Calibration:
        """The default's samples, and each of them again with so many answers that are not its own: for maps alone."""
        drawn = [self.samples.rows[i] for i in self.prepared().indices]
        answers = sorted({row["completion"] for row in drawn})
        fold_of = {i: A.fold for A, _ in self.plain.calibration for i in A.ids}
        more = []
        for step in range(1, min(others, len(answers) - 1) + 1):
            rows = [
                {**row, "completion": answers[(answers.index(row["completion"]) + step) % len(answers)]}
                for row in drawn
            ]
            made = self.prepared(len(rows), replace(self.samples, rows=rows))
            more += as_others(made, fold_of)
        return Calibration([*self.plain.calibration, *more], self.plain.calibration.tokenizers)


def as_others(made: Prepared, fold_of: dict[int, int]) -> list[tuple[Batch, Batch]]:
    """Samples that make maps and judge nothing, each in the fold of its original."""
    found = []
    for A, B in made.calibration:
        for fold in sorted(set(fold_of.values())):
            mine = [i for i, sample in enumerate(A.ids) if fold_of[made.indices[sample]] == fold]
            if mine:
                found.append(
                    (replace(A.take(mine), fold=fold, judges=False), replace(B.take(mine), fold=fold, judges=False))
                )
    return found


@dataclass(frozen=True)
class Among(LanguageModel):
    """The next-token loss with the softmax over the tokens that the answers of the samples have, no others."""

    def bind(self, model: nn.Module, batches: Sequence[Batch]) -> Loss:
        tokens = torch.unique(torch.cat([batch.inputs["labels"].flatten() for batch in batches]))
        tokens = tokens[tokens >= 0]

        def loss(batch: Batch) -> Tensor:
            scores, labels, _ = predicted(model, batch)
            return F.cross_entropy(scores[:, tokens], torch.searchsorted(tokens, labels), reduction="sum")

        return loss


def plain(trial: Trial) -> Found:
    moved = run("bico", trial.plain)
    yield "BiCo, automatic scale", moved.tau, trial.plain.best_scale(moved.judged).best


def default(trial: Trial) -> Found:
    yield DEFAULT, trial.default.tau, 1.0


def parts(trial: Trial) -> Found:
    for name, settings in (("one capture", {"halfway": 0.0}), ("not whitened", {"whiten": False})):
        yield name, run("twofold", trial.plain, **settings).tau, 1.0


def where(trial: Trial) -> Found:
    for halfway in (0.75, 1.0):
        yield f"the second capture at {halfway:g} of the way", run("twofold", trial.plain, halfway=halfway).tau, 1.0


def third(trial: Trial) -> Found:
    """Once more halfway, by what the default moved: where the target's answers have the form already."""
    job, moved = trial.plain, trial.default
    points = (BASE, Point(0.5 * job.tau, 0.5 * moved.tau))
    capture = Capture(sums=Whitened, directions=512, points=points)
    last = job.move(capture, job.maps())
    yield "a third capture, halfway by the default's move", last.tau, job.best_scale(last.judged).best


def among(trial: Trial) -> Found:
    """Gradients that say which answer, and not that there be one; the scale is chosen by the whole loss."""
    job = trial.job(trial.plain.calibration, (Among(), Among()))
    moved = run("twofold", job)
    yield "softmax over the answers", moved.tau, trial.plain.best_scale(moved.judged).best


def asked(trial: Trial) -> Found:
    for name, others in (("every answer asked of every sample", 50), ("one other answer asked as well", 1)):
        yield name, run("twofold", trial.job(trial.answered(others))).tau, 1.0


def tokens(trial: Trial) -> Found:
    """Which tokens of the two models meet: the default takes all of them."""
    yield "only tokens that predict an answer", run("twofold", trial.plain, tokens="answers").tau, 1.0
    pairs = [(near(A, 0), near(B, 1)) for A, B in trial.plain.calibration]
    job = trial.job(Calibration(pairs, trial.plain.calibration.tokenizers))
    yield "the answer and four tokens in front of it", run("twofold", job).tau, 1.0


def near(batch: Batch, side: int, before: int = 4) -> Batch:
    """No token meets another, but the answers' and the last of the prompts."""
    kept = batch.inputs["labels"] != IGNORED
    for _ in range(before):
        kept[:, :-1] |= kept[:, 1:].clone()
    spans = batch.spans["tokens"].clone()
    spans[~kept] = torch.tensor([0, 1]) + 10**6 * (side + 1)  # where no other token of either model stands
    return replace(batch, spans={"tokens": spans})


def prompts(trial: Trial) -> Found:
    """The tokens of the questions have a loss too: many more rows. The scale is chosen by the answers."""
    rows = [{"text": row["prompt"] + row["completion"]} for row in trial.samples.rows]
    job = trial.job(trial.prepared(samples=replace(trial.samples, kind="text", rows=rows)).calibration).in_folds()
    moved = run("twofold", job)
    yield "a loss on the questions too", moved.tau, trial.plain.best_scale(moved.judged).best


def more(trial: Trial) -> Found:
    yield f"{MORE} samples", run("twofold", trial.job(trial.prepared(MORE).calibration)).tau, 1.0


def roles(trial: Trial) -> Found:
    """One scale for attention and one for the MLP, each by the loss on the fold that made no maps."""
    job, moved = trial.plain, trial.default
    attention = {pair.target.weight for pair in job.pair.pairs if pair.target.role.startswith("attn")}

    def scaled(tau: TaskVector, a: float, m: float) -> TaskVector:
        return TaskVector({name: (a if name in attention else m) * delta for name, delta in tau.deltas.items()})

    best = (1.0, 1.0)
    for side in (0, 1):
        tries = [best, *((best[0] * s, best[1]) if side == 0 else (best[0], best[1] * s) for s in (0.5, 0.75, 1.5, 2))]
        best = min(tries, key=lambda pair: job.losses([scaled(each, *pair) for each in moved.judged], [1.0])[0])
    yield "a scale for attention and one for the MLP", scaled(moved.tau, *best), 1.0


@dataclass(frozen=True)
class Late(Job):
    """A job whose early target sites stay; the source goes its whole way."""

    early: dict[str, str] = field(default_factory=dict)

    def move(
        self, capture: Capture, maps: MapOptions, stage: str = "", left_out: Mapping[str, str] | None = None
    ) -> Moved:
        return super().move(capture, maps, stage, {**self.early, **(left_out or {})})


def late(trial: Trial) -> Found:
    """Target blocks nearest to the words stay as they are: cut out of the default's move, then of the fit as well."""
    job, moved = trial.plain, trial.default.tau
    blocks = {pair.target.weight: pair.target.block or 0 for pair in job.pair.pairs}
    (depth,) = depths([pair.target for pair in job.pair.pairs]).values()
    for name, first in (("sixth", depth // 6), ("third", depth // 3), ("half", depth // 2)):
        kept = {key: delta for key, delta in moved.deltas.items() if blocks.get(key, depth) >= first}
        yield f"the first {name} of the blocks left out of the move", TaskVector(kept), 1.0
    early = {p.target.name: "an early block" for p in job.pair.pairs if blocks[p.target.weight] < depth // 3}
    yield "the first third left out of the fit", run("twofold", Late(job.pair, job.tau, early=early)).tau, 1.0


def limits(trial: Trial) -> Found:
    """What a better scale would give, and what maps that know the oracle's own change would carry."""
    tau, moved, oracle = trial.changes[0].tau, trial.default.tau, trial.changes[1].tau
    best = max((0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0), key=lambda scale: trial.score(moved, scale)[0])
    yield "a limit: the scale that is best on the test questions", moved, best
    names: dict[str, Callable[[LowRank, LowRank, LowRank], LowRank]] = {
        "output maps": lambda a, m, o: turned(LowRank(a.left, m.right), o),
        "input maps": lambda a, m, o: turned(LowRank(m.left, a.right).T, o.T).T,
        "both maps": lambda a, _, o: of_spectrum(a, o),
    }
    for name, made in names.items():
        deltas = {}
        for pair in trial.plain.pair.pairs:
            A, B = pair.source.weight, pair.target.weight
            known = [changes.deltas.get(at) for changes, at in ((tau, A), (moved, B), (oracle, B))]
            if all(isinstance(each, LowRank) for each in known):
                deltas[B] = made(*known)  # type: ignore[arg-type]
        carried = TaskVector(deltas)
        yield f"a limit: {name} from the oracle's own change", carried, trial.plain.best_scale([carried]).best


def turned(change: LowRank, onto: LowRank) -> LowRank:
    """The rows of a change turned onto another of the same columns: the orthogonal map of both row spaces that fits."""
    left, across = change.left.double(), change.right.double() @ onto.right.double().T
    U, _, V = of_rows((left @ across).T, onto.left.T)
    return LowRank((V @ (U.T @ left)).to(change.left.dtype), change.right)


def of_spectrum(change: LowRank, onto: LowRank) -> LowRank:
    """The singular vectors of one change with the singular values of another: all that two isometries leave of it."""
    values = of_rows(change.left.T, change.right)[1]
    U, own, V = of_rows(onto.left.T, onto.right)
    rank = min(len(values), len(own))
    return LowRank((U[:, :rank] * values[:rank]).to(onto.left.dtype), V[:, :rank].T.to(onto.left.dtype))


IDEAS: dict[str, Callable[[Trial], Found]] = {
    each.__name__: each
    for each in (plain, default, late, asked, third, tokens, where, more, among, prompts, roles, parts, limits)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the models that come with the package, a few steps")
    parser.add_argument("--json", type=Path, help="write the results here; what it holds already is kept")
    parser.add_argument("--models", type=Path, default=real.HOME, help="where the folders of the models are")
    parser.add_argument("--pairs", nargs="+", type=lambda pair: tuple(pair.split(":")), default=PAIRS, metavar="A:B")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=ASKED)
    parser.add_argument("--only", nargs="+", choices=IDEAS, default=list(IDEAS))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    steps, tested = real.TRAINED, real.TEST
    folder = zoo_data.DATA / ("language-quick" if options.quick else "language")
    folder.mkdir(parents=True, exist_ok=True)
    if options.quick:
        from taskferry.example import FILES

        options.models, options.pairs, options.tasks, steps, tested = FILES, [("base-a", "base-b")], ["trec"], 4, 30
        options.only = ["plain", "default", "third", "limits"]
    cells = common.kept(options.json, {})
    for seed, task, (source, target) in product(range(options.seeds), options.tasks, options.pairs):
        key = f"{task} {source} {target} {seed}"
        known = cells.setdefault(key, {})
        if set(options.only) <= set(known):
            continue
        models = load_model(str(options.models / source)), load_model(str(options.models / target))
        changes = [load_tuned(str(real.tuned(loaded, folder, task, steps)), loaded) for loaded in models]
        trial = Trial(models, (changes[0], changes[1]), task, seed, tested)
        known.setdefault("target", trial.score(TaskVector({}))[0])
        known.setdefault("oracle", trial.score(changes[1].tau)[0])
        for idea in options.only:
            if idea in known:
                continue
            rows, before = {}, time.process_time()
            for name, added, scale in IDEAS[idea](trial):
                spent = round(time.process_time() - before, 1)
                right, loss = trial.score(added, scale)
                rows[name] = {"right": right, "loss": loss, "scale": round(scale, 2), "cpu": spent}
                print(key, name, rows[name], f"{time.time() - started:.0f} s", flush=True)
                before = time.process_time()
            known[idea] = rows
            common.kept(options.json, {key: known})
    cells = common.kept(options.json, {}) or cells  # with those of another process
    common.finish(cells, table(cells), options.json, [], started)


def table(cells: dict[str, Any]) -> str:
    """Mean shares over the cells that a row was run in, with the default in the same cells beside it."""
    found = {key: {name: row for rows in cell.values() if isinstance(rows, dict) for name, row in rows.items()}
             for key, cell in cells.items()}  # fmt: skip
    lines = []
    for name in dict.fromkeys(name for rows in found.values() for name in rows):
        keys = [key for key in found if name in found[key] and DEFAULT in found[key]]
        keys = [key for key in keys if cells[key]["oracle"] != cells[key]["target"]]
        shares = [[share(cells[key], found[key][row]["right"]) for key in keys] for row in (name, DEFAULT)]
        if keys:
            seconds = statistics.mean(found[key][name]["cpu"] for key in keys)
            own = not name.startswith("a limit") and not name.endswith("out of the move")  # cut out of another
            spent = f"{seconds:.0f}" if own else ""
            each = ", ".join(f"{share:.0f}" for share in shares[0])
            lines.append(
                [name, f"{statistics.mean(shares[0]):.0f} %", f"{statistics.mean(shares[1]):.0f} %", each, spent]
            )
    header = ["", "share of the oracle's gain", f"{DEFAULT}, same cells", "in each cell", "CPU-seconds"]
    told = ", ".join(" ".join(key.split()[:1]) + " " + " → ".join(key.split()[1:3]) for key in found)
    return f"{common.table(header, lines)}\n\nCells, in order: {told}."


if __name__ == "__main__":
    main()
