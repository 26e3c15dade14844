"""What the pages say of real language models: the README's table, and the numbers of the findings."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.shared import common

MODELS = {
    "smollm2-135m-instruct": "SmolLM2-135M",
    "gemma-3-270m": "Gemma-3-270M",
    "qwen2.5-coder-0.5b-instruct": "Qwen2.5-Coder-0.5B",
    "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder-1.5B",
}
TITLES = {"trec": "TREC", "ag_news": "AG News", "snli": "SNLI"}
LANGUAGE_ROWS = {
    "BiCo, automatic scale": "+ BiCo, scale chosen on the samples",
    "the default": "+ the default",
    "refined from the default, 30 steps": "+ the default and `--refine 30`: 30 training steps without labels",
    "refined, no move, 30 steps": "the same 30 steps from scratch (`--method cold --refine 30`)",
    "LoRA from scratch, labels, 30 steps": "a new LoRA, 30 steps on the same samples with their labels",
}


def language_cells(cells: dict[str, Any]) -> dict[str, Any]:
    """Pairs and tasks with 100 samples in which every row of the README's table was run."""
    rows, labelled = set(LANGUAGE_ROWS), {key: cell for key, cell in cells.items() if "+" not in key}
    hundred = {key: cell for key, cell in labelled.items() if key.split()[3:4] == ["100"]}
    return {key: cell for key, cell in hundred.items() if rows <= set(cell.get("ways", {}))}


def language_numbers(cells: dict[str, Any]) -> dict[str, str]:
    """Means over those cells, for the text of the findings."""
    some = list(language_cells(cells).values())
    names = zip(("l_bico", "l_default", "l_refined", "l_cold", "l_scratch"), LANGUAGE_ROWS, strict=True)
    return {
        "l_target": _mean_of(some, lambda cell: cell["target"]),
        "l_oracle": _mean_of(some, lambda cell: cell["oracle"]),
        **{name: _mean_of(some, lambda cell, way=way: cell["ways"][way]["score"]) for name, way in names},
    }


def language_table(cells: dict[str, Any]) -> str:
    """Real language models, over the pairs and tasks in which every row was run; short enough for the README."""
    whole = language_cells(cells)
    mean = partial(_mean_of, list(whole.values()))
    rows = [["unchanged target", mean(lambda cell: cell["target"]), ""]]
    for way, name in LANGUAGE_ROWS.items():
        rows.append([name, mean(lambda cell, way=way: cell["ways"][way]["score"]),
                     mean(lambda cell, way=way: cell["ways"][way]["cpu"], 0)])  # fmt: skip
    rows.append(["a new LoRA on all samples of the task", mean(lambda cell: cell["oracle"]),
                 mean(lambda cell: cell["oracle cpu"], 0)])  # fmt: skip
    tasks = sorted({TITLES.get(name, name) for name in (key.split()[0] for key in whole)})
    pairs = sorted({" → ".join(MODELS.get(name, name) for name in key.split()[1:3]) for key in whole})
    title = f"{'; '.join(pairs)}: a LoRA that classifies ({', '.join(tasks)}), 100 samples"
    return common.table([title, "right answers, %", "CPU-seconds"], rows)


def _mean_of(cells: list[Any], value: Callable[[Any], float], digits: int = 1) -> str:
    return f"{statistics.mean(map(value, cells)):.{digits}f}"
