"""A LoRA of experts through the command: what is not of experts moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from taskferry.models import load_model
from taskferry.models.peft import EXPERTS
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.mixtures import mixture

peft = pytest.importorskip("peft")
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixtures")
    size = {"vocab_size": 400, "max_position_embeddings": 128}
    folders.save(mixture("Mixtral", 16, 2, 1, **size), root / "a")
    folders.save(mixture("Qwen3Moe", 24, 2, 2, **size), root / "b")
    folders.lora(root / "a", root / "lora", ["q_proj"], target_parameters=BOTH)
    folders.prompts(root / "data.jsonl")
    return root


def pair(root: Path, *, target: str = "b") -> list[object]:
    data = ["--calibration", root / "data.jsonl", "--set", "micro_batch=4"]
    return ["--source-base", root / "a", "--target-base", root / target, *data]


def test_the_experts_of_a_lora_stay_and_the_coverage_says_so(things: Path, tmp_path: Path) -> None:
    maps, out = tmp_path / "maps.alignment", tmp_path / "out"
    taskferry("fit", *pair(things), "--method", "bico", "--out", maps)
    taskferry("apply", maps, things / "lora", "--out", out)
    loaded = peft.PeftModel.from_pretrained(load_model(things / "b").model, str(out))
    factors = [name for name, p in loaded.named_parameters() if "lora_B" in name and p.any()]
    assert len(factors) == 2
    record = json.loads((out / "taskferry.json").read_text())
    assert sum(reason == EXPERTS for reason in record["ignored"].values()) == 8
