"""What the pages say of real language models: the README's table, and the numbers of the findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.shared import common

MODELS = {
    "smollm2-135m-instruct": "SmolLM2-135M",
    "gemma-3-270m": "Gemma-3-270M",
    "qwen2.5-coder-0.5b-instruct": "Qwen2.5-Coder-0.5B",
    "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder-1.5B",
}
PAIR = ("smollm2-135m-instruct", "gemma-3-270m")
BESIDE = "BiCo, automatic scale"
TITLES = {"trec": "TREC", "ag_news": "AG News", "snli": "SNLI"}
LANGUAGE_ROWS = {
    BESIDE: "+ BiCo, scale chosen on the samples",
    "the default": "+ the default",
    "refined from the default, 30 steps": "+ the default and `--refine 30`: 30 training steps without labels",
    "refined, no move, 30 steps": "the same 30 steps from scratch (`--method cold --refine 30`)",
    "refined, no move, 100 steps": "a hundred such steps from scratch (`--method cold --refine 100`)",
    "LoRA from scratch, labels, 30 steps": "a new LoRA, 30 steps on the same samples with their labels",
}


def language_cells(cells: dict[str, Any]) -> dict[str, Any]:
    """Pairs and tasks with 100 labelled samples in which every row of the README's table but BiCo's was run."""
    rows = set(LANGUAGE_ROWS) - {BESIDE}
    labelled = {key: cell for key, cell in cells.items() if "+" not in key and key.split()[3:4] == ["100"]}
    return {key: labelled[key] for key in sorted(labelled, reverse=True) if rows <= set(labelled[key].get("ways", {}))}


def language_numbers(cells: dict[str, Any]) -> dict[str, str]:
    """Right answers of both directions between the two smallest models, for the text of the findings."""
    found = {}
    for prefix, pair in (("l", PAIR), ("r", PAIR[::-1])):
        cell = cells[" ".join(["trec", *pair, "100", "0"])]
        found |= {f"{prefix}_{name}": f"{cell[name]:.1f}" for name in ("target", "oracle")}
        for name, way in zip(("bico", "default", "refined", "cold", "longer", "scratch"), LANGUAGE_ROWS, strict=True):
            found[f"{prefix}_{name}"] = f"{cell['ways'].get(way, {}).get('score', float('nan')):.1f}"
    return found


def language_table(cells: dict[str, Any]) -> str:
    """Real language models, a column for each pair and task; short enough for the README."""
    whole = language_cells(cells)

    def row(name: str, value: Callable[[Any], tuple[float, float | None] | None]) -> list[str]:
        found = [value(cell) for cell in whole.values()]
        return [name, *("" if f is None else f"{f[0]:.1f}" + ("" if f[1] is None else f" ({f[1]:.0f})") for f in found)]

    def of_way(way: str) -> Callable[[Any], tuple[float, float] | None]:
        return lambda cell: (cell["ways"][way]["score"], cell["ways"][way]["cpu"]) if way in cell["ways"] else None

    rows = [row("unchanged target", lambda cell: (cell["target"], None))]
    rows += [row(name, of_way(way)) for way, name in LANGUAGE_ROWS.items()]
    rows.append(row("a new LoRA on all samples of the task", lambda cell: (cell["oracle"], cell["oracle cpu"])))
    tasks = sorted({TITLES.get(key.split()[0], key.split()[0]) for key in whole})
    pairs = [" → ".join(MODELS.get(name, name) for name in key.split()[1:3]) for key in whole]
    if len(tasks) > 1:
        pairs = [
            f"{pair}, {TITLES.get(key.split()[0], key.split()[0])}" for pair, key in zip(pairs, whole, strict=True)
        ]
    title = f"A LoRA that classifies ({', '.join(tasks)}), 100 samples: right answers in % (CPU-seconds)"
    return common.table([title, *pairs], rows)
