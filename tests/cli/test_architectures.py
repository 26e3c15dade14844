"""The installed command between architectures that pack their layers differently, or have several kinds of block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from taskferry.models import Skeleton, load_model, read_adapter
from tests.helpers import folders
from tests.helpers.architectures import MIXED, PACKED
from tests.helpers.command import Ran, taskferry
from tests.helpers.tiny import TINY, Tiny, relative

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def saved(tiny: Tiny, width: int, depth: int, seed: int, folder: Path) -> Path:
    """With as many words as the tokenizer has."""
    model = tiny.model(width, depth, seed)
    model.resize_token_embeddings(400)  # type: ignore[operator]
    return folders.save(model, folder)


def transfer(root: Path, tuned: str, data: str, *more: object) -> Ran:
    models = ["--source-base", root / "a", "--source-tuned", root / tuned, "--target-base", root / "b"]
    options = ["--calibration", root / data, "--samples", 8, "--method", "bico", "--scale", 1, "--force", "--json"]
    return taskferry("transfer", *models, *options, *more)


def test_a_fine_tune_from_bert_to_modernbert(tmp_path: Path) -> None:
    saved(TINY["bert"], 16, 2, 1, tmp_path / "a")
    saved(PACKED["modernbert"], 24, 3, 2, tmp_path / "b")
    folders.shifted(tmp_path / "a", tmp_path / "tuned")
    folders.texts(tmp_path / "texts.jsonl")
    out = tmp_path / "out"
    transfer(tmp_path, "tuned", "texts.jsonl", "--out", out)
    rows = {row["parameter"]: row for row in json.loads((out / "taskferry.json").read_text())["coverage"]["rows"]}
    before, after = (dict(transformers.AutoModel.from_pretrained(f).named_parameters()) for f in (tmp_path / "b", out))
    for i in range(3):
        for leaf in ("attn.Wqkv", "attn.Wo", "mlp.Wo"):
            assert rows[f"layers.{i}.{leaf}.weight"]["status"] == "moved"
        assert rows[f"layers.{i}.mlp.Wi.weight"]["status"] == "partly"
        assert "no layer 'mlp.gate'" in rows[f"layers.{i}.mlp.Wi.weight"]["reason"]
        qkv, Wi = (after[f"layers.{i}.{leaf}.weight"] - before[f"layers.{i}.{leaf}.weight"]
                   for leaf in ("attn.Wqkv", "mlp.Wi"))  # fmt: skip
        assert all(float(part.detach().abs().max()) > 1e-4 for part in qkv.chunk(3))
        gate, up = Wi.detach().chunk(2)
        assert float(gate.abs().max()) == 0
        assert float(up.abs().max()) > 1e-4


def test_a_lora_from_llama_to_phi_3(tmp_path: Path) -> None:
    """What PEFT loads on the packed layers is the moved change."""
    saved(TINY["llama"], 16, 2, 1, tmp_path / "a")
    saved(PACKED["phi3"], 24, 3, 2, tmp_path / "b")
    folders.lora(tmp_path / "a", tmp_path / "lora", LAYERS, task_type="CAUSAL_LM")
    folders.prompts(tmp_path / "prompts.jsonl")
    out = tmp_path / "out"
    ran = transfer(tmp_path, "lora", "prompts.jsonl", "--out", out)
    assert ran.json["verdict"]["moved"] == 3 * 4
    config = json.loads((out / "adapter_config.json").read_text())
    largest = max(config["r"], *config["rank_pattern"].values())
    assert f"Rank {largest} (it came with {largest // 3})" in " ".join(ran.json["verdict"]["notes"])
    assert sorted(config["target_modules"]) == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    target = load_model(str(tmp_path / "b")).model
    tau = read_adapter(out, Skeleton.of(target)).tau
    qkv = tau.deltas["model.layers.1.self_attn.qkv_proj.weight"].dense()  # type: ignore[union-attr]
    assert all(float(part.abs().max()) > 1e-4 for part in qkv.split([24, 12, 12]))
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        before = target(input_ids=ids).logits
        by_peft = peft.PeftModel.from_pretrained(load_model(str(tmp_path / "b")).model, out)(input_ids=ids).logits
        predicted = tau.add_to(target)(input_ids=ids).logits
    assert relative(by_peft, predicted) < 1e-5
    assert relative(by_peft, before) > 1e-3


def test_a_lora_between_two_gemmas_on_both_engines(tmp_path: Path) -> None:
    """Sliding blocks take from sliding ones, and the record says which were taken from elsewhere than their depth."""
    saved(MIXED["gemma3"], 16, 4, 1, tmp_path / "a")
    saved(MIXED["gemma3"], 24, 6, 2, tmp_path / "b")
    folders.lora(tmp_path / "a", tmp_path / "lora", LAYERS, task_type="CAUSAL_LM")
    folders.prompts(tmp_path / "prompts.jsonl")
    found = []
    for engine in ("whole", "blockwise"):
        transfer(tmp_path, "lora", "prompts.jsonl", "--engine", engine, "--out", tmp_path / engine)
        rows = json.loads((tmp_path / engine / "taskferry.json").read_text())["coverage"]["rows"]
        found.append({row["parameter"]: (row["note"], row["sources"]) for row in rows if row["status"] == "moved"})
    assert found[0] == found[1]
    notes = {note for note, _ in found[0].values() if note}
    assert notes == {"from the nearest block of its kind (full attention)",
                     "from the nearest block of its kind (sliding attention)"}  # fmt: skip
