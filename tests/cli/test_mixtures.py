"""Mixtures of experts through the command: LoRAs of experts, full fine-tunes, and the engines that cannot take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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
    folders.save(mixture("GptOss", 16, 2, 3, **size), root / "oss")
    folders.lora(root / "a", root / "lora", ["q_proj"], target_parameters=BOTH)
    folders.prompts(root / "data.jsonl")
    return root


def pair(root: Path, *, target: str = "b") -> list[object]:
    data = ["--calibration", root / "data.jsonl", "--micro-batch", 4]
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


def test_a_full_fine_tune_of_experts(things: Path, tmp_path: Path) -> None:
    tuned = folders.shifted(things / "a", tmp_path / "tuned", size=0.02)
    out = tmp_path / "out"
    taskferry(
        "transfer", *pair(things), "--source-tuned", tuned, "--method", "bico", "--scale", 1, "--force", "--out", out
    )
    record = json.loads((out / "taskferry.json").read_text())
    experts = {row["parameter"]: row for row in record["coverage"]["rows"] if ".experts." in row["parameter"]}
    assert len(experts) == 4
    assert all(row["status"] == "moved" or "experts" in row["reason"] for row in experts.values())
    assert set(record["provenance"]["experts"]) == {"blocks.0", "blocks.1"}
    before, after = (dict(load_model(folder).model.named_parameters()) for folder in (things / "b", out))
    assert all(not torch.equal(before[name], after[name]) for name in experts)


def test_block_by_block_is_refused_before_any_work(things: Path, tmp_path: Path) -> None:
    common = ["--source-tuned", things / "lora", "--engine", "blockwise", "--out", tmp_path / "out"]
    ran = taskferry("transfer", *pair(things), *common, code=None)
    assert ran.code == 2
    assert "cannot be walked block by block" in ran.err
    assert "Traceback" not in ran.err
    swap = ["--source-base", things / "oss", "--target-base", things / "oss", "--calibration", things / "data.jsonl"]
    oss = folders.lora(things / "oss", tmp_path / "lora", ["q_proj"], target_parameters=BOTH)
    common = ["--source-tuned", oss, "--engine", "blockwise", "--out", tmp_path / "out"]
    ran = taskferry("transfer", *swap, *common, code=None)
    assert ran.code == 2
    assert "has experts" in ran.err.replace("\n", " ")
    assert "use the engine 'whole'" in " ".join(ran.err.split())
