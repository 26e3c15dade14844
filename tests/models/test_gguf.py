"""Files of llama.cpp as bases: the numbers they stand for, the tokenizer they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from taskferry.errors import TaskferryError
from taskferry.models import load_model, load_tuned
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.gguf_files import written
from tests.helpers.quantised import PROJECTIONS, same, transfer, words
from tests.helpers.tiny import relative

pytest.importorskip("gguf", reason="gguf is not installed")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    for name, depth, seed in (("a", 2, 1), ("b", 3, 2)):
        folders.causal(root / name, "LlamaForCausalLM", 32, depth, seed, kind="bytes")
    folders.lora(root / "a", root / "lora", PROJECTIONS)
    folders.shifted(root / "a", root / "tuned")
    (root / "files").mkdir()
    written(root / "b", root / "files" / "b.gguf")
    folders.prompts(root / "prompts.jsonl")
    return root


def test_a_file_moves_as_the_numbers_that_it_stands_for(world: Path, tmp_path: Path) -> None:
    for name in ("b.gguf", "b.plain"):
        transfer(world, world / "a", world / "lora", world / "files" / name, tmp_path / name)
    same(*(tmp_path / name / "adapter_model.safetensors" for name in ("b.gguf", "b.plain")))


def test_a_model_on_a_file_is_a_folder(world: Path, tmp_path: Path) -> None:
    ran = transfer(world, world / "a", world / "tuned", world / "files" / "b.gguf", tmp_path / "out")
    transfer(world, world / "a", world / "tuned", world / "files" / "b.plain", tmp_path / "plain")
    assert "stored in GGUF (Q8_0): the model is written dequantised, in bfloat16" in words(ran)
    one, two = (
        dict(transformers.LlamaForCausalLM.from_pretrained(tmp_path / n, dtype=torch.float32).named_parameters())
        for n in ("out", "plain")
    )
    assert all(relative(value, two[name]) < 2**-8 for name, value in one.items())
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert "stored in GGUF" in words(taskferry("inspect", world / "files" / "b.gguf"))


def test_two_roundings_are_no_fine_tune(world: Path, tmp_path: Path) -> None:
    """One model in two types: their difference is rounding, and is refused as such."""
    coarse = written(world / "b", tmp_path / "coarse.gguf", "Q4_0")
    base = load_model(str(world / "files" / "b.gguf"))
    with pytest.raises(TaskferryError, match=r"Q4_0.* would be rounding, not a fine-tune"):
        load_tuned(str(coarse), base)
    assert len(load_tuned(str(world / "files" / "b.gguf"), base).tau) == 0
    half, brain = (load_model(str(written(world / "b", tmp_path / f"{kind}.gguf", kind))) for kind in ("F16", "BF16"))
    load_tuned(half.given, brain)  # two forms of 16 bits


def test_refusals(world: Path, tmp_path: Path) -> None:
    file = world / "files" / "b.gguf"
    ran = transfer(world, world / "a", world / "lora", file, tmp_path / "out", "--engine", "blockwise", code=2)
    assert "use the engine 'whole'" in words(ran)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "cut.gguf").write_bytes(file.read_bytes()[:3000])
    with pytest.raises(TaskferryError, match="does not load through transformers"):
        load_model(str(tmp_path / "files" / "cut.gguf"))
    with pytest.raises(TaskferryError, match=r"a folder of GGUF files \(cut.gguf\)"):
        load_model(str(tmp_path / "files"))
