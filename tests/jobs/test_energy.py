"""The share of a change that moved: by its energy, not by a count of parameters."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry import TaskVector
from taskferry.collect.scale import ScaleCurve
from taskferry.jobs.settings import TransferSettings
from taskferry.jobs.transfer import scaled
from taskferry.methods import run
from taskferry.models import load_model, load_tuned
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.tiny import hf, job

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
                    world / f"{kind}b", "--calibration", world / "prompts.jsonl", "--samples", 8, "--scale", 0.5,
                    "--force", "--out", out, *more)  # fmt: skip
    return " ".join(ran.out.split()), json.loads((out / "taskferry.json").read_text())


def test_what_stayed_is_said(world: Path, tmp_path: Path) -> None:
    told, record = moved(world, "tuned", tmp_path / "out")
    base = load_model(str(world / "a"))
    deltas = load_tuned(str(world / "tuned"), base).tau.deltas
    energy = {name: float(torch.as_tensor(delta).square().sum()) for name, delta in deltas.items()}
    stayed = sum(e for name, e in energy.items() if "embed_tokens" in name) / sum(energy.values())
    assert stayed > 0.5
    found = record["verdict"]["energy"]
    assert found["moved"] == pytest.approx(1 - stayed, rel=1e-6)
    assert math.fsum(found["stayed"].values()) == pytest.approx(stayed, rel=1e-6)
    sentence = f"{100 * stayed:.0f} % of the change (‖τ‖²) stayed behind, most of it in model.embed_tokens."
    assert sentence in told
    card = (tmp_path / "out" / "README.md").read_text()
    assert sentence in card
    assert f"that had a place to move to: {100 * (1 - stayed):.0f} %" in card
    taskferry("report", tmp_path / "out", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Change moved" in page
    assert f"{100 * (1 - stayed):.1f} %" in page


def test_a_change_that_moved_whole_needs_no_sentence(world: Path, tmp_path: Path) -> None:
    for engine in ("whole", "blockwise"):
        told, record = moved(world, "dense-lora", tmp_path / engine, "--engine", engine, kind="dense-")
        assert record["verdict"]["energy"] == {"moved": 1.0, "stayed": {}}, engine
        assert "stayed behind" not in told


def test_apply_says_it_as_well(world: Path, tmp_path: Path) -> None:
    taskferry("fit", "--source-base", world / "a", "--target-base", world / "b", "--calibration",
              world / "prompts.jsonl", "--samples", 8, "--method", "bico", "--out", tmp_path / "maps")  # fmt: skip
    taskferry("apply", tmp_path / "maps", world / "tuned", "--source-base", world / "a", "--target-base", world / "b",
              "--out", tmp_path / "out")  # fmt: skip
    verdict = json.loads((tmp_path / "out" / "taskferry.json").read_text())["verdict"]
    assert "stayed behind, most of it in model.embed_tokens" in verdict["sentence"]


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
    lora = ["--as-lora", "--rank", 4]
    _, record = moved(tmp_path, "tuned", tmp_path / "lora", *lora)
    rows = {row["parameter"]: row for row in record["coverage"]["rows"]}
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert (rows[bias]["status"], rows[bias]["reason"]) == ("kept", "a LoRA holds matrices only")
    weight, shift = 2 * 256 * 0.05**2, 2 * 16 * 1.0
    assert record["verdict"]["energy"]["moved"] == pytest.approx(weight / (weight + shift), rel=1e-4)
    assert any("q_proj.bias" in text and "LoRA holds matrices" in text for text in record["verdict"]["warnings"])
    _, whole = moved(tmp_path, "tuned", tmp_path / "model")
    assert whole["verdict"]["energy"]["moved"] == pytest.approx(1.0)
    pair = ["--source-base", tmp_path / "a", "--target-base", tmp_path / "b"]
    taskferry("fit", *pair, "--calibration", tmp_path / "prompts.jsonl", "--samples", 8, "--out", tmp_path / "maps")
    taskferry("apply", tmp_path / "maps", tmp_path / "tuned", *pair, "--out", tmp_path / "applied", *lora)
    applied = json.loads((tmp_path / "applied" / "taskferry.json").read_text())["verdict"]
    assert applied["energy"]["moved"] == pytest.approx(weight / (weight + shift), rel=1e-4)
    assert any("q_proj.bias" in text for text in applied["warnings"])


@pytest.mark.parametrize(("engine", "lora"), [("whole", False), ("blockwise", True)])
def test_the_part_of_a_packed_matrix_that_has_no_place(tmp_path: Path, lora: bool, engine: str) -> None:
    """Phi-3 packs gate and up, GPT-2 has no gate: half of that change stays, as of separate matrices."""
    torch.manual_seed(1)
    size = {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0}
    folders.save(hf("Phi3ForCausalLM", 16, 2, vocab_size=400, **size), tmp_path / "a")
    torch.manual_seed(2)
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=400, n_positions=128)
    folders.save(transformers.GPT2LMHeadModel(config), tmp_path / "b")
    folders.prompts(tmp_path / "prompts.jsonl")
    if lora:
        folders.lora(tmp_path / "a", tmp_path / "tuned", ["gate_up_proj"])
    else:
        folders.shifted(tmp_path / "a", tmp_path / "tuned", only="gate_up_proj")
    _, record = moved(tmp_path, "tuned", tmp_path / "out", "--engine", engine, "--method", "bico")
    deltas = load_tuned(str(tmp_path / "tuned"), load_model(str(tmp_path / "a"))).tau.deltas
    dense = [delta if isinstance(delta, torch.Tensor) else delta.left @ delta.right for delta in deltas.values()]
    gate = sum(float(d[: len(d) // 2].square().sum()) for d in dense) / sum(float(d.square().sum()) for d in dense)
    half = len(dense[0]) // 2
    assert record["coverage"]["unused"][f"model.layers.0.mlp.gate_up_proj.weight#0:{half}"]
    assert record["verdict"]["energy"]["stayed"]["mlp.gate_up_proj"] == pytest.approx(gate, rel=1e-3)
    assert any("most of it in mlp.gate_up_proj" in text for text in record["verdict"]["warnings"])


def test_a_cut_is_judged_by_what_it_leaves() -> None:
    """Losses of every part of the samples are of the cut change; where it harms there is no doubt, and no scale."""
    given = job("vit").in_folds()
    moved = run("bico", given)
    moved = replace(moved, curve=ScaleCurve(((0.0, 5.0), (0.5, 4.0)), 0.5, ((5.0, 4.0), (5.0, 4.5))))
    settings = TransferSettings(source_base="a", source_tuned="b", target_base="c", calibration="d", out=Path("e"))
    untouched = given.pair.losses(given.in_shares([TaskVector({})] * 2), [0.0])[0]
    helped = set()
    for size in (0.3, 1.0, -3.0, -10.0):
        left = [size * each for each in moved.without]
        curve, scale = scaled(settings, given, moved, size * moved.tau, left)
        losses = given.pair.losses(left, [1.0])[0]
        assert scale == 1.0
        helped.add(curve.helps)
        assert curve.loss(0.5) == pytest.approx(given.mean(losses), rel=1e-6)
        if curve.helps:
            assert [pytest.approx(each, rel=1e-6) for each in curve.folds] == [*zip(untouched, losses, strict=True)]
        else:
            assert not curve.doubtful
    assert helped == {True, False}
