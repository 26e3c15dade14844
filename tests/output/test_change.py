"""The share of a change that moved: by its squared norm, not by a count of parameters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry.models import load_model, load_tuned
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.tiny import hf

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")

EXPERTS = {"vocab_size": 400, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "max_position_embeddings": 128, "initializer_range": 0.2}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two mixtures of experts, and a fine-tune of the first in attention and, most of it, in embeddings."""
    root = tmp_path_factory.mktemp("world")
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)
        folders.save(hf("Qwen3MoeForCausalLM", 16, 2, **EXPERTS), root / name)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(root / "a")
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.05 if "embed_tokens" in name else 0.02 if "self_attn" in name and "norm" not in name else 0.0
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(root / "tuned")
    for name, seed in (("dense-a", 1), ("dense-b", 2)):
        folders.causal(root / name, "LlamaForCausalLM", 16, 2, seed)
    folders.lora(root / "dense-a", root / "dense-lora", ["q_proj", "v_proj"])
    folders.prompts(root / "prompts.jsonl")
    return root


def moved(world: Path, tuned: str, out: Path, *more: object, kind: str = "") -> tuple[str, dict[str, Any]]:
    ran = taskferry("transfer", "--source-base", world / f"{kind}a", "--source-tuned", world / tuned, "--target-base",
                    world / f"{kind}b", "--calibration", world / "prompts.jsonl", "--samples", 8, "--method", "bico",
                            "--scale", 0.5,
                    "--force", "--out", out, *more)  # fmt: skip
    return " ".join(ran.out.split()), json.loads((out / "taskferry.json").read_text())


def test_what_stayed_is_said(world: Path, tmp_path: Path) -> None:
    told, record = moved(world, "tuned", tmp_path / "out")
    base = load_model(str(world / "a"))
    deltas = load_tuned(str(world / "tuned"), base).tau.deltas
    energy = {name: float(torch.as_tensor(delta).square().sum()) for name, delta in deltas.items()}
    stayed = sum(e for name, e in energy.items() if "embed_tokens" in name) / sum(energy.values())
    assert stayed > 0.5
    found = record["verdict"]["change"]
    assert sum(found["moved"].values()) == pytest.approx(1 - stayed, rel=1e-6)
    assert math.fsum(found["stayed"].values()) == pytest.approx(stayed, rel=1e-6)
    sentence = (
        f"{100 * stayed:.0f} % of the change (‖τ‖²) has no place in the target, most of it in model.embed_tokens."
    )
    assert sentence in told
    card = (tmp_path / "out" / "README.md").read_text()
    assert sentence in card
    assert f"that had a place to move to: {1 - stayed:.0%}" in card
    taskferry("report", tmp_path / "out", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"model.embed_tokens {stayed:.0%} stayed" in page


def test_a_change_that_moved_whole_needs_no_sentence(world: Path, tmp_path: Path) -> None:
    for engine in ("whole", "blockwise"):
        told, record = moved(world, "dense-lora", tmp_path / engine, "--engine", engine, kind="dense-")
        change = record["verdict"]["change"]
        assert (set(change["moved"]), change["stayed"]) == ({"self_attn.q_proj", "self_attn.v_proj"}, {}), engine
        assert "no place in the target" not in told


def test_what_a_lora_cannot_hold_did_not_move(tmp_path: Path) -> None:
    """Biases of a full fine-tune that is written as a LoRA: kept in the table, warned of, no part of the share."""
    for name, seed in (("a", 1), ("b", 2)):
        folders.causal(tmp_path / name, "Qwen2ForCausalLM", 16, 2, seed)
    model = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "a")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.add_(1.0 if name.endswith("bias") else 0.05)
    model.save_pretrained(tmp_path / "tuned")
    folders.prompts(tmp_path / "prompts.jsonl")
    lora = ["--as", "lora", "--rank", 4, "--method", "bico"]
    _, record = moved(tmp_path, "tuned", tmp_path / "lora", *lora)
    rows = {row["parameter"]: row for row in record["coverage"]["rows"]}
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert (rows[bias]["status"], rows[bias]["reason"]) == ("kept", "a LoRA holds matrices only")
    weight, shift = 2 * 256 * 0.05**2, 2 * 16 * 1.0
    change = record["verdict"]["change"]
    assert sum(change["moved"].values()) == pytest.approx(weight / (weight + shift), rel=1e-4)
    assert any("q_proj.bias" in text and "LoRA holds matrices" in text for text in record["verdict"]["warnings"])
