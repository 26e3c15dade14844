"""Merging tools take what we write: a task-arithmetic merge of two moved fine-tunes with mergekit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from taskferry.checkpoints import load_model, load_tuned
from tests import folders
from tests.command import taskferry

mergekit = pytest.importorskip("mergekit", reason="mergekit is not installed: pip install mergekit==0.1.5")


def test_a_task_arithmetic_merge_is_the_sum_of_moved_task_vectors(tmp_path: Path) -> None:
    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(tmp_path / "b", "LlamaForCausalLM", 24, 3, 2)
    folders.prompts(tmp_path / "data.jsonl")
    for name, size in (("one", 0.02), ("two", 0.03)):
        folders.shifted(tmp_path / "a", tmp_path / f"tuned-{name}", size=size)
        taskferry("transfer", "--source-base", tmp_path / "a", "--source-tuned", tmp_path / f"tuned-{name}",
                  "--target-base", tmp_path / "b", "--calibration", tmp_path / "data.jsonl", "--scale", 1,
                  "--out", tmp_path / name)  # fmt: skip
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(tmp_path / "b"),
        "models": [
            {"model": str(tmp_path / "one"), "parameters": {"weight": 0.5}},
            {"model": str(tmp_path / "two"), "parameters": {"weight": 0.25}},
        ],
        "dtype": "float32",
    }
    (tmp_path / "merge.yaml").write_text(json.dumps(recipe))
    merge = [
        str(Path(sys.executable).with_name("mergekit-yaml")),
        str(tmp_path / "merge.yaml"),
        str(tmp_path / "merged"),
    ]
    done = subprocess.run(merge, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    base = load_model(str(tmp_path / "b"))
    one, two, merged = (load_tuned(str(tmp_path / name), base).tau for name in ("one", "two", "merged"))
    expected = 0.5 * one + 0.25 * two
    assert len(merged) == len(expected) > 0
    assert (merged - expected).norm() < 1e-5 * expected.norm()
