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
TITLES = {"trec": "TREC", "chat": "TREC as a chat", "json": "TREC as JSON", "ag_news": "AG News", "snli": "SNLI"}
LANGUAGE_WAYS = {
    "the default": "the default",
    "refined from the default, 30 steps": "30 steps after it",
    "refined, no move, 30 steps": "30 steps from scratch",
}
FACTS = {"score": "right", "begins": "begun right", "stopped": "stopped", "valid_json": "valid JSON"}
LEGEND = (
    "Right answers in %: generated, as wanted, and ended by the model itself; in brackets CPU-seconds. Steps are of\n"
    "training on the samples without labels: `--refine 30`, from scratch `--method cold --refine 30`.\n"
    "Models: SmolLM2-135M-Instruct, Gemma-3-270M (no chat template of its own), Qwen2.5-Coder-Instruct."
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
    """The numbers that the findings tell of one pair."""
    draws = language_places(cells)[" ".join(["trec", *PAIR])]
    found = {f"l_{name}": f"{draws[0][name]:.1f}" for name in ("target", "oracle", "source")}
    for name, way in zip(("default", "refined", "cold"), LANGUAGE_WAYS, strict=True):
        found[f"l_{name}"] = shown(*of_draws(draws, way))
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
        ways = [shown(*of_draws(draws, way)) for way in LANGUAGE_WAYS]
        oracle = shown([draws[0]["oracle"]], [draws[0]["oracle cpu"]])
        rows.append([_named(place), shown([draws[0]["target"]]), *ways, oracle])
    titles = ["a LoRA, from → to, 100 samples", "unchanged target", *LANGUAGE_WAYS.values(), "new LoRA, all samples"]
    return f"{common.table(titles, rows)}\n\n{LEGEND}"


def ends_table(cells: dict[str, Any]) -> str:
    """How the answers of the first draw are, and whether they end: of the tuned source, and of what was made of it."""
    rows = []
    for place, draws in language_places(cells).items():
        for start, name in ((_named(place), "source"), ("", "target"), ("", "oracle")):
            facts = {fact: draws[0].get(f"{name} {fact}") for fact in FACTS} | {"score": draws[0][name]}
            rows.append([start, {"source": "tuned source", "oracle": "new LoRA, all samples"}.get(name, name), facts])
        ways = {words: draws[0]["ways"].get(way, {}) for way, words in LANGUAGE_WAYS.items()}
        rows[-1:-1] = [["", words, way] for words, way in ways.items() if "score" in way]
    shown_rows = [
        [place, who, *("" if facts.get(name) is None else f"{facts[name]:.1f}" for name in FACTS)]
        for place, who, facts in rows
    ]
    return common.table(["", "% of the answers", *FACTS.values()], shown_rows)


def _named(place: str) -> str:
    task, *pair = place.split()
    return f"{TITLES[task]}, {' → '.join(MODELS.get(name, name) for name in pair)}"
