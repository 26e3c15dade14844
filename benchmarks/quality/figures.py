"""The figures of the paper on the zoo, and the pages and pictures of docs/analysis.md.

    python benchmarks/quality/figures.py [--quick] [--only measure draw pages]

measure   CKA and cosine before and after alignment, outputs against the fine-tuned target, drift along fine-tunes and
          cost, averaged over three tasks: benchmarks/results/analysis.json (about ten minutes of one core)
draw      its figures as SVG, and its table: docs/images/analysis-*.svg, benchmarks/results/analysis.md
pages     a real transfer and the committed results as pages, and pictures of them: docs/images/report-*.png; needs
          Chromium and playwright

Fine-tunes are those of the recipes zoo/*, taken from the folder of TASKFERRY_BENCH_DATA or made there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared import common
from benchmarks.zoo import zoo_data, zoo_tasks
from taskferry.analysis import Trajectory
from taskferry.analysis.study import analyze
from taskferry.bench.recipe import Recipe, load_recipe
from taskferry.bench.running import Bench, Places, Reporter
from taskferry.data.samplers import choose
from taskferry.report.analysis import all_figures, outputs_figure
from taskferry.report.command import write_report
from taskferry.report.figures import alone
from taskferry.settings import AnalyzeSettings
from taskferry.training import finetune

RESULTS = common.RESULTS / "analysis.json"
IMAGES = common.ROOT / "docs" / "images"
PAIRS = {"same width": ("narrow", "twin"), "other width": ("narrow", "wide")}
TASKS = ["mnist", "letters", "fashion"]
ROWS = ["bico, input-only", "theseus", "bico"]
LOOKS = 10  # along a fine-tune
PICTURES = {"phone": 360, "tablet": 800, "desktop": 1440}


class Zoo:
    """Models, tasks and fine-tunes of the recipes."""

    def __init__(self, quick: bool) -> None:
        recipe: Recipe = load_recipe("zoo/table5")
        self.tasks = TASKS[:1] if quick else TASKS
        work = zoo_data.DATA / ("work-quick" if quick else "work")
        if quick:
            short = recipe.finetune.model_copy(update={"steps": 20, "every": 20, "warmup": 2})
            recipe = recipe.model_copy(update={"finetune": short})
        for task in self.tasks:
            zoo_tasks.write(task, zoo_data.DATA / "tasks")
        self.recipe = recipe
        self.bench = Bench(recipe, Places(zoo_data.ZOO, zoo_data.DATA / "tasks", work), Reporter())

    def task_vector(self, model: str, task: str, folder: Path) -> Path:
        """A fine-tune as a file."""
        path = folder / f"{model}-on-{task}.safetensors"
        if not path.exists():
            self.bench.tuned(model, task).save(path)
        return path

    def study(self, source: str, target: str, task: str, folder: Path) -> dict[str, Any]:
        """What `taskferry analyze` says about a pair on a task."""
        settings = AnalyzeSettings(
            source_base=str(zoo_data.ZOO / source),
            target_base=str(zoo_data.ZOO / target),
            source_tuned=str(self.task_vector(source, task, folder)),
            target_tuned=str(self.task_vector(target, task, folder)),
            calibration=str(zoo_data.DATA / "tasks" / task),
            templates=self.recipe.tasks[task].templates,
            rows=ROWS,
            micro_batch=20,
        )
        return analyze(settings, command="")

    def trajectory(self, model: str, task: str) -> list[dict[str, Any]]:
        """A fine-tune by the recipe's protocol, looked at as it goes on; 100 training samples are looked at."""
        bench, protocol = self.bench, self.recipe.finetune
        loaded, data = bench.model(model), bench.task(task)
        pool = data.pool(loaded)
        student = bench.model(model).model
        before = {name: p.detach().clone() for name, p in student.named_parameters()}
        trajectory = Trajectory(student, pool.batches(choose(len(pool), 100), 50))
        every = max(1, protocol.steps // LOOKS)
        finetune(student, pool, bench.head(loaded, task), protocol, progress=trajectory.follow(student, every))
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                parameter.copy_(before[name])
        return trajectory.to_json()


def mean_rows(studies: Iterable[Sequence[Mapping[str, Any]]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of several tasks as one: numbers averaged over the rows with the same keys, the rest as it is."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for rows in studies:
        for row in rows:
            found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {
            name: round(statistics.mean(row[name] for row in rows), 5) if isinstance(value, float) else value
            for name, value in rows[0].items()
        }
        for rows in found.values()
    ]


def measure(quick: bool) -> dict[str, Any]:
    """Task by task; what is done is kept at once, and the means are over the tasks that are done."""
    zoo, results, started = Zoo(quick), {}, time.time()
    studies: dict[str, list[dict[str, Any]]] = {pair: [] for pair in PAIRS}
    drift: list[list[dict[str, Any]]] = []
    for number, task in enumerate(zoo.tasks, 1):
        with tempfile.TemporaryDirectory() as folder:
            for pair, (source, target) in PAIRS.items():
                studies[pair].append(zoo.study(source, target, task, Path(folder)))
        drift.append(zoo.trajectory("narrow", task))
        results = {pair: averaged(PAIRS[pair], found) for pair, found in studies.items()}
        rows = mean_rows(drift, ("step", "stack", "block"))
        results |= {"trajectory": {"model": "narrow", "rows": rows}, "tasks": zoo.tasks[:number]}
        results["seconds"] = round(time.time() - started)
        print(f"{task} {results['seconds']} s", flush=True)
        if not quick:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return results


def averaged(pair: Sequence[str], studies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The studies of several tasks as one."""
    first = studies[0]
    measured = {
        of: mean_rows([study["similarity"][of] for study in studies], ("side", "site")) for of in first["similarity"]
    }
    return {
        "pair": list(pair),
        "samples": first["samples"],
        "similarity": measured,
        "outputs": mean_rows([study["outputs"] for study in studies], ("row", "stack", "block")),
        "refused": first["refused"],
        "isometries": max((row for s in studies for row in s["isometries"]), key=lambda row: row["error"]),
        "cost": first["cost"],
    }


def draw(results: Mapping[str, Any]) -> str:
    """The figures as files; returns the table of their means."""
    IMAGES.mkdir(exist_ok=True)
    for pair in PAIRS:
        kind = pair.replace(" ", "-")
        for name, figure in all_figures({**results[pair], "outputs": None}).items():
            if (pair, name) == ("other width", "similarity-out"):
                continue  # it says what the one at equal width says
            (IMAGES / f"analysis-{kind}-{name.removeprefix('similarity-')}.svg").write_text(alone(figure.draw()))
    outputs = outputs_figure(results["same width"]["outputs"])
    (IMAGES / "analysis-outputs.svg").write_text(alone(outputs.draw()))
    empty = {"similarity": {"calibration": []}, "trajectory": results["trajectory"]["rows"]}
    for name, figure in all_figures(empty).items():
        (IMAGES / f"analysis-{name}.svg").write_text(alone(figure.draw()))
    return table(results)


def table(results: Mapping[str, Any]) -> str:
    rows = []
    for pair in PAIRS:
        found = results[pair]
        for of, words in (("calibration", "samples of the fit"), ("fresh", "fresh samples")):
            for side, word in (("in", "activations"), ("out", "gradients")):
                mine = [r for r in found["similarity"][of] if r["side"] == side and r["block"] is not None]

                def mean(what: str, mine: list[Any] = mine) -> str:
                    values = [r[what] for r in mine if r[what] is not None]
                    return f"{round(statistics.mean(values), 2) + 0.0:.2f}" if values else ""  # no minus before a zero

                name = f"{' → '.join(found['pair'])}, {word}, {words}"
                rows.append([name, *map(mean, ("cka", "cka_after", "cosine", "cosine_after", "norms_kept"))])
    header = ["means over blocks and tasks", "CKA", "CKA, aligned", "cosine", "cosine, aligned", "energy kept"]
    return common.table(header, rows)


def outputs_table(results: Mapping[str, Any]) -> str:
    """How close each row comes to the fine-tuned target: over the blocks, in the last, and in the features."""
    rows = []
    for pair in PAIRS:
        found = results[pair]
        for name in dict.fromkeys(row["row"] for row in found["outputs"]):
            mine = [row for row in found["outputs"] if row["row"] == name]
            blocks = [row["cosine"] for row in mine if row["block"] is not None]
            (features,) = [row["cosine"] for row in mine if row["stack"] == "visual.proj"]
            words = f"{' → '.join(found['pair'])}: {name}"
            rows.append([words, *(f"{value:.3f}" for value in (statistics.mean(blocks), blocks[-1], features))])
    return common.table(["cosine to the fine-tuned target", "all blocks", "last block", "features"], rows)


def pages() -> None:
    """One transfer by the command, the committed results, and pictures of both pages."""
    zoo = Zoo(quick=False)
    with tempfile.TemporaryDirectory() as name:
        desk = Path(name)
        for model in ("narrow", "wide"):
            (desk / model).symlink_to(zoo_data.ZOO / model)
        (desk / "mnist").symlink_to(zoo_data.DATA / "tasks" / "mnist")
        zoo.task_vector("narrow", "mnist", desk)
        template = zoo.recipe.tasks["mnist"].templates
        command = ["transfer", "--source-base", "narrow", "--source-tuned", "narrow-on-mnist.safetensors"]
        command += ["--target-base", "wide", "--calibration", "mnist", "--out", "mnist-on-wide"]
        command += [word for text in template for word in ("--templates", text)]
        subprocess.run([sys.executable, "-m", "taskferry", *command], cwd=desk, check=True, env=dict(os.environ))
        shutil.copy(common.RESULTS / "zoo.json", desk / "zoo.json")
        transfer, _ = write_report(desk / "mnist-on-wide")
        write_report(desk / "mnist-on-wide", form="md")
        benchmark, _ = write_report(desk / "zoo.json")
        picture({"transfer": transfer, "benchmark": benchmark})


def picture(made: Mapping[str, Path]) -> None:
    """PNG of the first screens of each page, light and dark, in few colours so that they stay small."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for kind, path in made.items():
            for (device, width), dark in zip(PICTURES.items(), (True, False, False), strict=True):
                scheme = "dark" if dark else "light"
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page = context.new_page()
                page.goto(path.as_uri())
                shot = IMAGES / f"report-{kind}-{device}.png"
                height = 2400 if device == "phone" else 1600
                page.screenshot(path=shot, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
                _shrink(shot)
                if (kind, device) == ("transfer", "desktop"):
                    curves = page.locator("section").filter(has=page.get_by_role("heading", name="Curves"))
                    curves.screenshot(path=IMAGES / "report-transfer-curves.png")
                    _shrink(IMAGES / "report-transfer-curves.png")
                context.close()
        browser.close()


def _shrink(path: Path) -> None:
    from PIL import Image

    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one task and twenty steps; nothing committed is written")
    parser.add_argument("--only", nargs="*", choices=("measure", "draw", "pages"), default=["measure", "draw", "pages"])
    options = parser.parse_args()
    if options.quick:
        print(table(measure(quick=True)))
        return
    if "measure" in options.only:
        measure(quick=False)
    if "draw" in options.only:
        made = draw(json.loads(RESULTS.read_text()))
        RESULTS.with_suffix(".md").write_text(made + "\n")
        found = outputs_table(json.loads(RESULTS.read_text()))
        (common.RESULTS / "analysis_outputs.md").write_text(found + "\n")
        print(f"{made}\n\n{found}")
    if "pages" in options.only:
        pages()


if __name__ == "__main__":
    main()
