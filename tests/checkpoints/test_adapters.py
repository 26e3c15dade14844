"""Adapters and tuned models of other classes, precisions and starts than their base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import TaskferryError
from taskferry.checkpoints import Skeleton, load_model, load_tuned, read_adapter
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.tiny import hf

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "masked", 24, 3, 2, "BertForMaskedLM")
    folders.encoder(root / "head", 16, 2, 1, "BertForSequenceClassification")
    folders.encoder(root / "wide", 24, 3, 2)
    folders.lora(root / "head", root / "lora", ["query"], task_type="SEQ_CLS")
    folders.texts(root / "texts.jsonl")
    return root


def test_an_adapter_s_prefix_is_not_doubled(world: Path, tmp_path: Path) -> None:
    """From a headless base to a target whose class has a head: PEFT must find every factor."""
    taskferry("transfer", "--source-base", world / "bert", "--source-tuned", world / "lora", "--scale", 1,
              "--target-base", world / "masked", "--calibration", world / "texts.jsonl",
              "--out", tmp_path / "moved")  # fmt: skip
    target = transformers.BertForMaskedLM.from_pretrained(world / "masked")
    loaded = peft.PeftModel.from_pretrained(target, tmp_path / "moved")
    factors = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(factors) == 3
    assert all(bool(factor.any()) for factor in factors)


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_4", "corda"])
def test_adapters_that_rewrite_the_base_are_refused(start: str, world: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(world / "lora", tmp_path / "bad")
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": start}))
    with pytest.raises(TaskferryError, match="changes the base's own weights"):
        read_adapter(bad, Skeleton.of(load_model(str(world / "bert")).model))


def test_half_precision_adapters_move(world: Path, tmp_path: Path) -> None:
    half = shutil.copytree(world / "lora", tmp_path / "half")
    state = load_file(half / "adapter_model.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in state.items()}, half / "adapter_model.safetensors")
    taskferry("transfer", "--source-base", world / "bert", "--source-tuned", half, "--target-base", world / "wide",
              "--calibration", world / "texts.jsonl", "--scale", 1, "--out", tmp_path / "moved")  # fmt: skip
    written = load_file(tmp_path / "moved" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in written.values())


def test_heads_of_the_tuned_model_may_differ(world: Path, tmp_path: Path) -> None:
    """A masked language model as base, a classifier as its fine-tune: the commonest case there is."""
    torch.manual_seed(1)
    folders.save(hf("BertForMaskedLM", 16, 2, vocab_size=400), tmp_path / "base")
    classifier = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        classifier.bert.encoder.layer[0].output.dense.weight.add_(0.1)
    classifier.save_pretrained(tmp_path / "tuned")
    found = load_tuned(str(tmp_path / "tuned"), load_model(str(tmp_path / "base")))
    assert list(found.tau.deltas) == ["bert.encoder.layer.0.output.dense.weight"]
    assert any("classifier" in name for name in found.ignored)
