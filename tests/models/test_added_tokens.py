"""Fine-tunes whose vocabulary grew: everything but the tables of tokens moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import folders
from tests.helpers.command import Ran, taskferry

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

TABLES = ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune, and the same with eight tokens more."""
    root = tmp_path_factory.mktemp("world")
    for name, seed in (("a", 1), ("b", 2)):
        folders.causal(root / name, "LlamaForCausalLM", 16, 2, seed)
    folders.shifted(root / "a", root / "plain")
    model = transformers.LlamaForCausalLM.from_pretrained(root / "plain")
    model.resize_token_embeddings(408)
    model.save_pretrained(root / "more")
    folders.prompts(root / "prompts.jsonl")
    return root


def moved(world: Path, tuned: Path, out: Path, *more: object, code: int = 0) -> Ran:
    return taskferry("transfer", "--source-base", world / "a", "--source-tuned", tuned, "--target-base", world / "b",
                     "--calibration", world / "prompts.jsonl", "--samples", 8, "--scale", 0.5, "--method", "bico",
                     "--force", "--out", out, *more, code=code)  # fmt: skip


def record(out: Path) -> Any:
    return json.loads((out / "taskferry.json").read_text())


@pytest.mark.parametrize("engine", ["whole", "blockwise"])
def test_what_can_move_moves(engine: str, world: Path, tmp_path: Path) -> None:
    ran = moved(world, world / "more", tmp_path / "more", "--engine", engine)
    moved(world, world / "plain", tmp_path / "plain", "--engine", engine)
    one, two = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("more", "plain")
    )
    assert all(torch.equal(one[key], value) for key, value in two.items())
    unused = record(tmp_path / "more")["coverage"]["unused"]
    for name in TABLES:
        assert "the table of 408 tokens, 400 in the base" in unused[name]
    assert "the table of 408 tokens" in " ".join(ran.out.split())
    assert "the table of 408 tokens" in (tmp_path / "more" / "README.md").read_text()


def test_a_state_file_with_more_tokens(world: Path, tmp_path: Path) -> None:
    save_file(load_file(world / "more" / "model.safetensors"), tmp_path / "state.safetensors")
    moved(world, tmp_path / "state.safetensors", tmp_path / "out")
    assert set(TABLES) <= record(tmp_path / "out")["coverage"]["unused"].keys()


def test_another_shape_elsewhere_is_another_base(world: Path, tmp_path: Path) -> None:
    folders.causal(tmp_path / "wide", "LlamaForCausalLM", 32, 2, 1)
    assert "give the base model that was tuned" in moved(world, tmp_path / "wide", tmp_path / "out", code=2).err
