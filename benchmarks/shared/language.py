"""What the pages say of real language models: the README's table, and the numbers of the findings."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.shared import common

MODELS = {
    "smollm2-135m-instruct": "SmolLM2",
    "gemma-3-270m": "Gemma 3",
    "qwen2.5-coder-0.5b-instruct": "Qwen 0.5B",
    "qwen2.5-coder-1.5b-instruct": "Qwen 1.5B",
}
PAIR = ("smollm2-135m-instruct", "gemma-3-270m")
BESIDE = "BiCo, automatic scale"
TITLES = {"trec": "TREC", "ag_news": "AG News", "snli": "SNLI", "json": "TREC as JSON"}
LANGUAGE_WAYS = {
    BESIDE: "BiCo",
    "the default": "the default",
    "refined from the default, 30 steps": "30 steps after it",
    "refined, no move, 30 steps": "30 steps from scratch",
    "refined, no move, 100 steps": "100 steps from scratch",
    "LoRA from scratch, labels, 30 steps": "new LoRA, 30 steps with labels",
}
LEGEND = (
    "Right answers in %, in brackets CPU-seconds. BiCo has its scale chosen on the samples. Steps are of training on\n"
    "the samples without labels: `--refine 30`, from scratch `--method cold --refine 30`. An empty cell was not run.\n"
    "Models: SmolLM2-135M-Instruct, Gemma-3-270M, Qwen2.5-Coder-Instruct."
)


def language_places(cells: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Pairs and tasks with answers and 100 labelled samples in which the default was run: their draws."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key in sorted(key for key, cell in cells.items() if isinstance(cell, dict)):
        task, *_, count, _ = place = key.split()
        if task in TITLES and count == "100":
            found.setdefault(" ".join(place[:3]), []).append(cells[key])
    return {
        place: found[place]
        for place in sorted(found, key=_order)
        if any("the default" in cell.get("ways", {}) for cell in found[place])
    }


def _order(place: str) -> list[int]:
    """Tasks and models as they are listed above."""
    known = [*TITLES, *MODELS]
    return [known.index(word) if word in known else len(known) for word in place.split()]


def of_draws(draws: list[dict[str, Any]], way: str) -> tuple[list[float], list[float]]:
    """Right answers and CPU-seconds of a way, in each draw that it was run in."""
    run = [cell["ways"][way] for cell in draws if "score" in cell["ways"].get(way, {})]
    return [each["score"] for each in run], [each["cpu"] for each in run]


def share(cell: dict[str, Any], score: float) -> float:
    """Of the points that a LoRA trained on the target gains."""
    gain = cell["oracle"] - cell["target"]
    return float(100 * (score - cell["target"]) / gain) if gain else float("nan")  # a quick one may learn nothing


def shown(scores: list[float], costs: list[float] | None = None) -> str:
    """Mean and spread, or the one draw that there is; in brackets what it took."""
    if not scores:
        return ""
    return common.mean_spread(scores) + (f" ({statistics.mean(costs):.0f})" if costs else "")


def language_numbers(cells: dict[str, Any]) -> dict[str, str]:
    """Right answers of every pair and task, for the text of the findings."""
    found, all_draws = {}, language_places(cells)
    small, larger = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
    places = (
        ("l", "trec", PAIR), ("r", "trec", PAIR[::-1]), ("q", "trec", (PAIR[0], small)),
        ("b", "trec", (small, larger)),
        ("a", "ag_news", PAIR), ("s", "snli", PAIR), ("j", "json", PAIR),
    )  # fmt: skip
    for prefix, task, pair in places:
        draws = all_draws[" ".join([task, *pair])]
        found |= {f"{prefix}_{name}": f"{draws[0][name]:.1f}" for name in ("target", "oracle")}
        found[f"{prefix}_oracle_cpu"] = f"{draws[0]['oracle cpu']:.0f}"
        for name, way in zip(("bico", "default", "refined", "cold", "longer", "scratch"), LANGUAGE_WAYS, strict=True):
            scores, costs = of_draws(draws, way)
            found[f"{prefix}_{name}"] = shown(scores)
            found[f"{prefix}_{name}_cpu"] = f"{statistics.mean(costs):.0f}" if costs else ""
    pairs = [draws for place, draws in all_draws.items() if place.split()[0] == "trec"]
    shares = [share(draws[0], statistics.mean(of_draws(draws, "the default")[0])) for draws in pairs]
    found |= {"t_pairs": str(len(shares)), "t_default": f"{statistics.mean(shares):.0f}"}
    found["j_valid"] = f"{all_draws[' '.join(['json', *PAIR])][0]['ways']['the default']['valid']:.1f}"
    # Four times as many samples; and the same LoRA under either's answers.
    for name, task, count in (("many", "trec", 400), ("true", "trec+ends", 100), ("teacher", "trec+teacher", 100)):
        cell = cells[" ".join([task, *PAIR, str(count), "0"])]
        found[f"l_{name}"] = shown(of_draws([cell], "the default")[0])
    for name, way in (("theseus", "THESEUS"), ("paper", "BiCo at scale 1")):
        found[f"l_{name}"] = shown(of_draws(all_draws[" ".join(["trec", *PAIR])], way)[0])
    return found


def limit_numbers(cells: dict[str, Any]) -> dict[str, str]:
    """Right answers on the task of the ideas: of the default, and with maps that know the oracle's change."""
    cell = next(cell for cell in cells.values() if isinstance(cell, dict))
    rows = {name: row["right"] for each in cell.values() if isinstance(each, dict) for name, row in each.items()}
    wanted = {"default": "the default", "scale": "scale that is best", "output": "output maps", "both": "both maps"}
    found = {f"i_{key}": next(right for name, right in rows.items() if words in name) for key, words in wanted.items()}
    return {
        key: f"{value:.1f}" for key, value in {**found, "i_target": cell["target"], "i_oracle": cell["oracle"]}.items()
    }


def language_table(cells: dict[str, Any]) -> str:
    """Real language models, a row for each pair and task; short enough for the README."""
    rows = []
    for place, draws in language_places(cells).items():
        task, *pair = place.split()
        named = f"{TITLES[task]}, {' → '.join(MODELS.get(name, name) for name in pair)}"
        ways = [shown(*of_draws(draws, way)) for way in LANGUAGE_WAYS]
        oracle = shown([draws[0]["oracle"]], [draws[0]["oracle cpu"]])
        rows.append([named, shown([draws[0]["target"]]), *ways, oracle])
    titles = ["a LoRA, from → to, 100 samples", "unchanged target", *LANGUAGE_WAYS.values(), "new LoRA, all samples"]
    return f"{common.table(titles, rows)}\n\n{LEGEND}"
