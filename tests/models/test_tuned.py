"""Full fine-tunes beside their base: grown vocabularies, other heads, tensors that the base has no use for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import TaskferryError
from taskferry.models import load_model, load_tuned
from taskferry.objectives.teacher import check_whole, teacher_model
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


def test_heads_may_differ(tmp_path: Path) -> None:
    """A masked language model as base, a classifier as its fine-tune: the commonest case there is."""
    folders.encoder(tmp_path / "base", 16, 2, 1, "BertForMaskedLM")
    classifier = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        classifier.bert.encoder.layer[0].output.dense.weight.add_(0.1)
    classifier.save_pretrained(tmp_path / "tuned")
    found = load_tuned(tmp_path / "tuned", load_model(tmp_path / "base"))
    assert list(found.tau.deltas) == ["bert.encoder.layer.0.output.dense.weight"]
    assert any("classifier" in name for name in found.ignored)


def test_what_the_base_has_no_use_for_is_no_hindrance(world: Path, tmp_path: Path) -> None:
    """Tensors of another class in a fine-tune's files, and the second name of a tied weight."""
    folders.shifted(world / "a", tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    save_file({**load_file(file), "v_head.summary.weight": torch.zeros(1, 32)}, file, {"format": "pt"})
    tuned = load_tuned(tmp_path / "tuned", load_model(world / "a"))
    assert list(tuned.ignored) == ["v_head.summary.weight"]
    check_whole(tuned, "give --method bico")
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "a", tie_word_embeddings=True)
    folders.save(model, tmp_path / "tied")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert not load_tuned(tmp_path / "state.pt", load_model(tmp_path / "tied")).ignored


def test_a_resized_fine_tune_teaches_as_it_was_saved_or_not_at_all(world: Path, tmp_path: Path) -> None:
    base = load_model(world / "a")
    tuned = load_tuned(world / "more", base)
    with teacher_model(base, tuned) as teacher:
        assert teacher.model.get_input_embeddings().num_embeddings == 408
    with pytest.raises(TaskferryError, match="give --method bico"):
        check_whole(tuned, "give --method bico")
    torch.save(transformers.LlamaForCausalLM.from_pretrained(world / "more").state_dict(), tmp_path / "more.pt")
    with (
        pytest.raises(TaskferryError, match="give labels"),
        teacher_model(base, load_tuned(tmp_path / "more.pt", base)),
    ):
        pass
