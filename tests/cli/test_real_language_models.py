"""The command on real language models: a LoRA of all seven projections between them, Gemma 3's two kinds of attention.

The models are folders of TASKFERRY_REAL, as `benchmarks/language/run.py` takes them. Minutes for each pair:
for the nightly run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers import folders
from tests.helpers.command import taskferry

pytestmark = [pytest.mark.real, pytest.mark.every]
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")

REAL = Path(os.environ.get("TASKFERRY_REAL", Path.home() / ".cache" / "taskferry-real"))
SMOL, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
SMALL, LARGE = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ASKED = [f"Question: what is {a} plus {b}?\nAnswer:" for a in range(4) for b in range(4)]


@pytest.mark.parametrize(("source", "target"), [(SMOL, GEMMA), (SMOL, SMALL), (SMALL, LARGE)])
def test_all_seven_projections_move(source: str, target: str, tmp_path: Path) -> None:
    """Every projection of every block of the target has its change, and PEFT loads it."""
    for name in (source, target):
        if not (REAL / name).is_dir():
            pytest.skip(f"no {name} at {REAL}: set TASKFERRY_REAL")
    lora = folders.lora(REAL / source, tmp_path / "lora", PROJECTIONS, r=8, task_type="CAUSAL_LM")
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": asked, "completion": f" {i // 4 + i % 4}"} for i, asked in enumerate(ASKED)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskferry("transfer", "--source-base", REAL / source, "--source-tuned", lora, "--target-base", REAL / target,
              "--calibration", data, "--samples", 16, "--set", "max_length=48", "--method", "bico",
              "--scale", 0.1, "--force", "--out", tmp_path / "moved")  # fmt: skip
    record = json.loads((tmp_path / "moved" / "taskferry.json").read_text(encoding="utf-8"))
    depths = [transformers.AutoConfig.from_pretrained(REAL / name).num_hidden_layers for name in (source, target)]
    depth = depths[1]
    moved = {row["parameter"] for row in record["coverage"]["rows"] if row["status"] == "moved"}
    assert len(moved) == 7 * depth
    assert {name.split(".")[-2] for name in moved} == set(PROJECTIONS)
    # A target with fewer blocks takes the changes of as many of the source's, and the verdict says so.
    assert sum(record["verdict"]["change"]["moved"].values()) == pytest.approx(min(1.0, depth / depths[0]), abs=0.02)
    model = transformers.AutoModelForCausalLM.from_pretrained(REAL / target)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "moved")
    assert sum("lora_B" in name for name, _ in loaded.named_parameters()) == 7 * depth
