"""Decoders that also see: text rows go through their text blocks, which pair with each other and with nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import pair_sites
from taskferry.models import Skeleton, load_model, read_adapter
from tests.helpers import folders
from tests.helpers.command import Ran, taskferry
from tests.helpers.often import often
from tests.helpers.seeing import FAMILIES
from tests.helpers.tiny import relative

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")


OLDER = {  # what text blocks are called now, and before transformers 4.52
    "gemma3": ("model.language_model.layers", "language_model.model.layers"),
    "llava": ("model.language_model.layers", "language_model.model.layers"),
    "qwen2-vl": ("model.language_model.layers", "model.layers"),
    "mistral3": ("model.language_model.layers", "language_model.model.layers"),
}


@pytest.fixture(scope="module", params=often(FAMILIES, ("gemma3", "qwen2-vl")))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    for name, width, depth, seed in (("a", 16, 2, 1), ("b", 32, 3, 2)):
        torch.manual_seed(seed)
        folders.save(FAMILIES[request.param](width, depth), root / name)
    folders.lora(root / "a", root / "lora", r".*language_model.*\.(q_proj|v_proj|down_proj)")  # type: ignore[arg-type]
    folders.prompts(root / "prompts.jsonl")
    folders.chats(root / "chats.jsonl")
    return root


def sees(name: str) -> bool:
    """Whether a site stands in the tower of images."""
    return "vision" in name or "visual" in name


def test_text_blocks_pair_with_text_blocks(world: Path) -> None:
    pairs, _ = pair_sites(*(find_sites(load_model(str(world / name)).model) for name in ("a", "b")))
    assert all(sees(pair.source.name) == sees(pair.target.name) for pair in pairs)
    text = {p.target.name: p.source.block for p in pairs if "language_model.layers" in p.target.name}
    assert len(text) == 3 * 7
    assert {text[name] for name in text if "layers.2." in name} == {1}


@pytest.mark.parametrize("data", ["prompts", "chats"])
def test_a_lora_moves_on_text(data: str, world: Path, tmp_path: Path) -> None:
    """What PEFT loads is the moved change, on text blocks alone."""
    out = tmp_path / "out"
    moved(world, f"{data}.jsonl", out)
    record = json.loads((out / "taskferry.json").read_text())
    assert record["verdict"]["moved"] == 9
    assert record["verdict"]["loss_before"] != record["verdict"]["loss_after"]
    target: Any = load_model(str(world / "b")).model
    tau = read_adapter(out, Skeleton.of(target)).tau
    assert all("language_model" in name for name in tau.deltas)
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        untouched = target(input_ids=ids).logits
        loaded = peft.PeftModel.from_pretrained(load_model(str(world / "b")).model, out)
        by_peft = loaded(input_ids=ids).logits
        predicted = tau.add_to(target)(input_ids=ids).logits
    assert relative(by_peft, predicted) < 1e-5
    assert relative(by_peft, untouched) > 1e-3


def test_block_by_block_is_refused_by_a_sentence(world: Path, tmp_path: Path) -> None:
    """transformers writes these models with names of old, which only its own loader knows."""
    ran = moved(world, "prompts.jsonl", tmp_path / "out", "--engine", "blockwise", code=2)
    assert "cannot be walked block by block" in ran.err
    assert "use the engine 'whole'" in ran.err


def test_an_adapter_with_the_names_of_older_transformers(world: Path, tmp_path: Path) -> None:
    """As PEFT reads it: the same change, by the names that transformers knows its own files by."""
    old = shutil.copytree(world / "lora", tmp_path / "old")
    before, after = OLDER[next(name for name in OLDER if world.name.startswith(name))]
    state = load_file(old / "adapter_model.safetensors")
    renamed = {key.replace(f"base_model.model.{before}", f"base_model.model.{after}"): t for key, t in state.items()}
    assert not renamed.keys() & state.keys()
    save_file(renamed, old / "adapter_model.safetensors")
    ids = torch.arange(3, 23).view(2, 10)
    new_, old_ = (peft.PeftModel.from_pretrained(load_model(str(world / "a")).model, lora)(input_ids=ids).logits
                  for lora in (world / "lora", old))  # fmt: skip
    if not world.name.startswith("qwen2-vl"):  # whose old names PEFT itself misses, with a warning
        assert relative(old_, new_) < 1e-6
    results = []
    for lora in (world / "lora", old):
        moved(world, "prompts.jsonl", tmp_path / f"moved-{lora.name}", lora=lora)
        results.append(load_file(tmp_path / f"moved-{lora.name}" / "adapter_model.safetensors"))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][key], value) for key, value in results[1].items())


def moved(world: Path, data: str, out: Path, *more: object, code: int = 0, lora: Path | None = None) -> Ran:
    return taskferry("transfer", "--source-base", world / "a", "--source-tuned", lora or world / "lora",
                     "--target-base", world / "b", "--calibration", world / data, "--samples", 8, "--method", "bico",
                             "--scale", 0.5,
                     "--force", "--out", out, *more, code=code)  # fmt: skip
