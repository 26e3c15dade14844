"""docs/results.md, its appendix docs/results-tables.md, and the table of the README, from the committed results.

    python benchmarks/shared/results.py [--check]

Nothing is measured here. `--check` writes nothing and exits with 1 where the page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import common
from benchmarks.shared.costs import frontier_numbers, steps_shares, steps_table
from benchmarks.shared.language import ends_table, language_numbers, language_table, limit_numbers
from benchmarks.shared.sections import SECTIONS
from benchmarks.zoo import zoo, zoo_data
from taskferry.bench.recipe import load_recipe
from taskferry.bench.running import ORACLE, TARGET
from taskferry.bench.tables import Line, from_json, lines, markdown

PAGE = common.ROOT / "docs" / "results.md"
APPENDIX = PAGE.with_name("results-tables.md")
PAGES = ("index", "performance", "scale", "analysis", "reliability", "how-to/refine", "how-to/did-it-work")
TABLES = tuple(PAGE.parent / f"{name}.md" for name in PAGES)
README = common.ROOT / "README.md"
BEGIN, END = "<!-- made by benchmarks/shared/results.py -->", "<!-- end -->"
ROWS = ("naive", "theseus", "bico", "bico, automatic scale", "few-shot", "few-shot, from bico")

TABLES_INTRODUCTION = """# Every table

The appendix of [results](results.md). Every number comes from a file in `benchmarks/results/`, and the page from
`python benchmarks/shared/results.py`. Spreads are standard deviations over draws of the calibration set.
*Recovered* is the share of what fine-tuning the target on all training data would gain; the target fine-tuned so is
called the *oracle*. *Gain* is over the unchanged target, in the same draws. A *draw* is one random choice of the
calibration samples.
"""

ZOO = """## The zoo

The *zoo* is four small OpenCLIP models, pre-trained from scratch by `python benchmarks/zoo/pretrain_zoo.py NAME` and
committed in `benchmarks/zoo` with the command, seed and log that made them:

{models}

`narrow` saw one part of the fonts and drawings, the others a second part that shares no font family and no drawing
with the first. Seven tasks (`python benchmarks/zoo/zoo_tasks.py OUT`): handwritten digits and letters (mnist, letters),
photographs (fashion, cifar10), glyphs of unseen fonts under unseen corruptions (occluded, case), drawings of unseen
classes (drawings). Zero-shot heads from each model's own text tower. Sources and oracles are fine-tuned for
{steps} steps of {batch} at {rate:g}. Rows that train (few-shot) are run on one draw of mnist and cifar10.

All of it: `python benchmarks/zoo/zoo.py --json benchmarks/results/zoo.json`.
"""


def read(name: str) -> dict[str, Any]:
    path = common.RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def zoo_models() -> str:
    rows = []
    for folder in sorted(path.parent for path in zoo_data.ZOO.glob("*/training.json")):
        config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]["vision_cfg"]
        log = json.loads((folder / "training.json").read_text())
        grid = config["image_size"] // config["patch_size"]
        rows.append(
            [folder.name, str(config["width"]), str(config["layers"]), f"{config['image_size']} ({grid}×{grid})",
             log["part"], str(log["seed"]), f"{log['log'][-1]['held_out_fonts']} %", f"{log['seconds'] / 60:.0f} min"]
        )  # fmt: skip
    header = ["", "width", "blocks", "pixels (patches)", "part", "seed", "62 characters of unseen fonts", "made in"]
    return common.table(header, rows)


def zoo_part(results: dict[str, Any]) -> list[str]:
    protocol = load_recipe("zoo/table1").finetune
    text = [
        ZOO.format(models=zoo_models(), steps=protocol.steps, batch=protocol.batch, rate=protocol.learning_rate),
        "### In short\n",
    ]
    scenarios = zoo.at_hundred(results)
    header = ["at N = 100", "draws", "target", "oracle", *(f"{row}: gain" for row in ROWS[:4]), "BiCo", "automatic"]
    rows = []
    for scenario, groups in scenarios.items():
        for key, scores in groups.items():
            found = {line.row: line for line in lines(scores, key[3])}
            gains = [f"{found[row].gain:+.1f}" if row in found else "" for row in ROWS[:4]]
            shares = [f"{found[row].recovered:.0%}" for row in ROWS[2:4]]
            fixed = [f"{found[row].average:.1f}" for row in (TARGET, ORACLE)]
            draws = str(found["bico"].draws)
            rows.append([f"{scenario} ({key[0]} → {key[1]})", draws, *fixed, *gains, *shares])
    mean = zoo.averages(results)
    gains = [f"**{mean[row]['gain']:+.1f}**" for row in ROWS[:4]]
    shares = [f"**{mean[row]['recovered']:.0%}**" for row in ROWS[2:4]]
    rows.append(["**mean over scenarios**", "", "", "", *gains, *shares])
    text.append(common.table(header, rows))
    text.append(few_shot_part(scenarios))
    grown = {row: zoo.growth(results, row) for row in ("theseus", "bico", "bico, automatic scale")}
    counts = list(grown["bico"])
    growing = [[row, *(f"{values[c]:+.1f}" for c in counts)] for row, values in grown.items()]
    text.append(
        "\n### Gain by number of samples\n\nMean over tasks, draws and the scenarios that were run at every N.\n\n"
        + common.table(["", *(f"N = {c}" for c in counts)], growing)
    )
    for name, found in results.items():
        share = (
            f"{found['seconds_moving'] / 60:.0f} minutes of one core for moving (fine-tunes and scoring not counted)"
        )
        scale = found["scales"]
        chosen = f" Automatic scales: mean {scale['mean']}, from {scale['least']} to {scale['most']}." if scale else ""
        page = markdown(from_json(found["groups"]), found["counted"], found["refused"])
        seeds = load_recipe(name).seeds - 1
        command = f"`taskferry bench run {name}`, seeds 0 to {seeds}; {share}.{chosen}"
        text.append(f"\n### {found['title']}\n\n{command}\n\n{page}")
    return text


def row_table(results: dict[str, Any]) -> str:
    """The averages of every row that is not trained, and of the oracle."""
    mean, scenarios = zoo.averages(results), zoo.at_hundred(results)
    target = [
        line.average for g in scenarios.values() for k, s in g.items() for line in lines(s, k[3]) if line.row == TARGET
    ]
    names = {
        "naive": "+ the source's weight change copied directly (padded or cropped)",
        "theseus": "+ THESEUS",
        "bico": "+ BiCo, scale 1 (the paper)",
        "bico, automatic scale": "+ BiCo, scale chosen on the 100 samples",
        ORACLE: "target fine-tuned on all 960 to 4,000 samples",
    }
    rows = [["unchanged target", f"{statistics.mean(target):.1f}", ""]]
    for row, name in names.items():
        rows.append([name, f"{statistics.mean(target) + mean[row]['gain']:.1f}", f"{mean[row]['recovered']:.0%}"])
    tasks = max(len(s[TARGET]) for g in scenarios.values() for s in g.values())
    header = [
        f"{len(scenarios)} pairs of small CLIP models, {tasks} tasks, 100 samples",
        "accuracy",
        "recovered",
    ]
    return common.table(header, rows)


def few_shot_rows(scenarios: dict[str, Any]) -> list[list[str]]:
    """What a user would do instead, on the same draws and tasks."""
    rows = []
    for row in ("bico", "bico, automatic scale", "few-shot", "few-shot, from bico"):
        gains, shares, wins, cells = [], [], 0, 0
        for groups in scenarios.values():
            for scores in groups.values():
                if "few-shot" not in scores:
                    continue
                for task, draws in scores["few-shot"].items():
                    for draw in draws:
                        gains.append(scores[row][task][draw] - scores[TARGET][task][draw])
                        shares.append(scores[ORACLE][task][draw] - scores[TARGET][task][draw])
                        best = max(scores[r][task][draw] for r in ROWS[2:])
                        wins += scores[row][task][draw] == best
                        cells += 1
        if gains:
            recovered = f"{statistics.mean(gains) / statistics.mean(shares):.0%}"
            rows.append([row, f"{statistics.mean(gains):+.1f}", recovered, f"{wins} of {cells}"])
    return rows


def few_shot_part(scenarios: dict[str, Any]) -> str:
    header, rows = ["", "gain", "recovered", "best of the four"], few_shot_rows(scenarios)
    return (
        "\n### What a user would do instead\n\nFew-shot fine-tuning of the target on the same 100 samples, its steps "
        "chosen by cross-validation within them, and the same from the moved start. Only the draws and tasks on which "
        "all four were run.\n\n" + common.table(header, rows)
    )


def real_part(results: dict[str, Any]) -> list[str]:
    text = [
        "\n## Real pre-trained pairs\n\n`python benchmarks/quality/real_pairs.py --json "
        "benchmarks/results/real_pairs.json`: published models and data, sources tuned on thousands of samples, every "
        "row of the target with a linear probe fitted on the same 100 samples. The oracle and the source, fine-tuned, "
        "are scored by such a probe as well; their fine-tunes have seen these samples."
    ]
    for name, found in results.items():
        page = markdown(from_json(found["groups"]), "N", found["refused"])
        text.append(f"\n### {found['title']}\n\n`{name}`, seeds 0 to {load_recipe(name).seeds - 1}.\n\n{page}")
    return text


def plain_part(name: str, title: str, words: str) -> list[str]:
    path = common.RESULTS / f"{name}.md"
    if not path.exists():
        return []
    seconds = read(name).get("seconds", 0)
    command = f"`python benchmarks/quality/{name}.py --json benchmarks/results/{name}.json`"
    took = f", {seconds / 60:.0f} minutes" if seconds >= 60 else ""
    return [f"\n## {title}\n\n{words} {command}{took}.\n\n{path.read_text().strip()}"]


def page() -> str:
    """The findings and their figures."""
    zoo_results, real, causal, costs = (read(name) for name in ("zoo", "real_pairs", "causal", "frontier"))
    mean, scenarios = zoo.averages(zoo_results), zoo.at_hundred(zoo_results)
    few = {row[0]: row[2] for row in few_shot_rows(scenarios)}
    vision = {line.row: line for line in real_lines(real["real/vision"], "cifar10")}
    text = (Path(__file__).parent / "findings.md").read_text().format(
        pairs=len(scenarios),
        tasks=max(len(s[TARGET]) for g in scenarios.values() for s in g.values()),
        **{name: f"{mean[row]['recovered']:.0%}".replace("-", "−") for name, row in
           (("bico", "bico"), ("auto", "bico, automatic scale"), ("naive", "naive"), ("theseus", "theseus"))},
        **frontier_numbers(costs),
        **steps_shares(costs),
        **language_numbers(read("language_models")),
        **limit_numbers(read("language_ideas")),
        few=few["few-shot"],
        few_bico=few["bico"],
        few_from=few["few-shot, from bico"],
        v_few=f"{vision['few-shot'].recovered:.0%}",
        v_bico=f"{vision['bico'].recovered:.0%}",
        **{name: causal_share(causal, f"{name}, small → large") for name in ("scripture", "sentiment", "speeches")},
        speeches_other=causal_share(causal, "speeches, small → other").replace("-", "−"),
    )  # fmt: skip
    parts = [
        text,
        f"## By row\n\nFive draws of the samples for each pair: narrow to wide and back, shallow to deep and back, "
        f"one shape with another pre-training.\n\n{row_table(zoo_results)}",
        f"## By pair\n\n{short_table(scenarios)}",
        "## Quality against cost\n\nWhat each row recovers against the CPU-seconds that it takes, with 100 samples and "
        "with 10. Rows that train are drawn beside those that do not. "
        "[The numbers](results-tables.md#quality-against-cost).\n\n"
        "![Recovered share against CPU-seconds, 100 samples](images/frontier-100.svg)\n\n"
        "![The same with 10 samples](images/frontier-10.svg)\n\n"
        "With 30 samples, all 16 cells, without the rows that train:\n\n"
        "![Recovered share against CPU-seconds, 30 samples](images/frontier-30.svg)",
        few_shot_part(scenarios).strip().replace("### ", "## ", 1),
        f"## Real pre-trained pairs\n\nPublished models and data, 100 samples, one or two draws. "
        f"[The tasks](results-tables.md#real-pre-trained-pairs).\n\n{real_table(real)}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def real_lines(found: dict[str, Any], task: str | None = None) -> list[Line]:
    """The lines of one table, of one task alone where it is named."""
    ((key, scores),) = from_json(found["groups"]).items()
    if task is not None:
        scores = {row: {task: tasks[task]} for row, tasks in scores.items() if task in tasks}
        seeds = set(next(iter(scores["few-shot"].values())))
        scores = {row: {task: {s: v for s, v in tasks[task].items() if s in seeds}} for row, tasks in scores.items()}
    return lines(scores, key[3])


def real_table(results: dict[str, Any]) -> str:
    """Averages of the rows of every real pair."""
    names = {TARGET: "unchanged target", ORACLE: "target fine-tuned (oracle)"}
    rows = []
    for found in results.values():
        pair = found["title"].rsplit(": ", 1)[-1]
        for line in real_lines(found):
            if line.row in (TARGET, ORACLE, "naive", "theseus", "bico", "bico, automatic scale"):
                share = "" if line.row == TARGET else f"{line.recovered:.0%}"
                rows.append([pair, names.get(line.row, line.row), f"{line.average:.1f}", share])
    return common.table(["pair", "row", "accuracy", "recovered"], rows)


def short_table(scenarios: dict[str, Any]) -> str:
    """What BiCo recovers on each pair."""
    rows = []
    for scenario, groups in scenarios.items():
        for key, scores in groups.items():
            found = {line.row: line for line in lines(scores, key[3])}
            shares = [f"{found[row].recovered:.0%}" for row in ROWS[2:4]]
            rows.append([f"{scenario} ({key[0]} → {key[1]})", f"{found[TARGET].average:.1f}", *shares])
    return common.table(["pair", "target", "BiCo", "BiCo, automatic scale"], rows)


def causal_share(results: dict[str, Any], cell: str) -> str:
    """Of the loss that a LoRA trained on the target takes away, what BiCo takes."""
    scores = {row: statistics.mean(values) for row, values in results["cells"][cell]["scores"].items()}
    target = scores["target as it is"]
    return f"{(target - scores['bico']) / (target - scores['LoRA trained on the target (oracle)']):.0%}"


def appendix() -> str:
    """Every table."""
    parts = [TABLES_INTRODUCTION]
    if results := read("zoo"):
        parts += zoo_part(results)
    if results := read("real_pairs"):
        parts += real_part(results)
    for name, (title, words) in SECTIONS.items():
        parts += plain_part(name, title, words)
    limits = common.RESULTS / "limits.md"
    if limits.exists():
        words = (Path(__file__).parent / "analysis.md").read_text()
        parts.insert(1, words.replace("LIMITS", limits.read_text().strip()))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def stages(results: dict[str, Any]) -> str:
    """Seconds of the first pair: the bare engine beside ours."""
    wall = next(iter(results.values()))["wall"]
    svd = next(iter(results.values()))["svd_seconds"]
    bare = wall["bare passes"] + wall["bare products"]
    rows = [
        ["capture", f"{wall['bare passes']:.0f} + {wall['bare products']:.0f} = {bare:.0f}", f"{wall['capture']:.0f}"],
        ["solve", f"{svd:.0f} (float64 SVD)", f"{wall['solve']:.0f}"],
        ["apply", f"{wall['bare apply']:.1f}", f"{wall['apply']:.1f}"],
        ["end to end", "", f"{wall['end to end']:.0f}"],
    ]
    return common.table(["stage", "bare engine", "taskferry"], rows)


def with_tables(page: Path) -> str:
    """A page with the tables of its marks put in."""
    text = page.read_text()
    found = {}
    for name in re.findall(r"<!-- end (\w+) -->", text):
        path = common.RESULTS / f"{name}.md"
        if path.exists():
            found[name] = path.read_text().strip()
    if "<!-- stages -->" in text and (results := read("speed")):
        found["stages"] = stages(results)
    if "<!-- language -->" in text and (results := read("language_models")):
        found["language"] = language_table(results)
    if "<!-- ends -->" in text and (results := read("language_models")):
        found["ends"] = ends_table(results)
    if "<!-- refining -->" in text and (results := read("frontier")):
        found["refining"] = steps_table(results)
    for name, table in found.items():
        before, rest = text.split(f"<!-- {name} -->")
        text = f"{before}<!-- {name} -->\n{table}\n<!-- end {name} -->{rest.split(f'<!-- end {name} -->')[1]}"
    return text


def spaced(text: str) -> str:
    """Per cents as the pages write them: 30 %."""
    return re.sub(r"(?<=\d)%(?=[\s|,.;:)*]|$)", " %", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where the page is old")
    options = parser.parse_args()
    made = {PAGE: spaced(page()), APPENDIX: spaced(appendix()), **{path: with_tables(path) for path in TABLES}}
    if results := read("language_models"):
        before, rest = README.read_text().split(BEGIN)
        after = rest.split(END)[1]
        made[README] = f"{before}{BEGIN}\n{spaced(language_table(results))}\n{END}{after}"
    if options.check:
        sys.exit(0 if all(p.exists() and p.read_text() == text for p, text in made.items()) else 1)
    for path, text in made.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
