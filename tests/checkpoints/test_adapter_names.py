"""Adapters are named as the model that they are for: around a head or bare, whatever class the target's folder has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry import TaskferryError
from taskferry.checkpoints import Skeleton, load_model, load_tuned, read_adapter
from taskferry.fitting.teacher import check_whole, teacher_model
from taskferry.jobs.output import write_form
from tests.helpers import folders
from tests.helpers.command import taskferry

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    folders.causal(root / "llama", "LlamaForCausalLM", 32, 2, 1)
    folders.causal(root / "qwen", "Qwen3ForCausalLM", 24, 2, 2)
    folders.encoder(root / "masked", 16, 2, 3, "BertForMaskedLM")
    folders.encoder(root / "bert", 24, 2, 4)
    folders.texts(root / "texts.jsonl")
    return root


def made(model: Any, folder: Path, modules: list[str], **more: Any) -> Path:
    """A LoRA with random factors, and random biases where it trains them."""
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=modules, **more))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapter.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapter.save_pretrained(folder)
    return folder


CASES: list[tuple[str, str, str, list[str], str]] = [
    # the source's folder and the target's, the class that the adapter is for, its modules, its task
    ("llama", "qwen", "AutoModel", ["q_proj", "v_proj"], "FEATURE_EXTRACTION"),
    ("llama", "qwen", "AutoModelForCausalLM", ["q_proj", "v_proj"], "CAUSAL_LM"),
    ("masked", "bert", "AutoModelForSequenceClassification", ["query", "value"], "SEQ_CLS"),
    ("masked", "bert", "AutoModel", ["query", "value"], "FEATURE_EXTRACTION"),
    ("bert", "masked", "AutoModel", ["query", "value"], "FEATURE_EXTRACTION"),
    ("bert", "masked", "AutoModelForQuestionAnswering", ["query", "value"], "QUESTION_ANS"),
    ("bert", "masked", "AutoModelForTokenClassification", ["query", "value"], "TOKEN_CLS"),
]


@pytest.mark.parametrize(
    ("source", "target", "cls", "modules", "task", "through"),
    [(*case, "transfer") for case in CASES] + [(*case, "apply") for case in CASES[:3]],
    ids=str,
)
def test_peft_finds_every_factor(
    source: str, target: str, cls: str, modules: list[str], task: str, through: str, world: Path, tmp_path: Path
) -> None:
    """On the class of model that the adapter was made for: before, PEFT left all factors at zero, with a warning."""
    of_class = getattr(transformers, cls)
    lora = made(of_class.from_pretrained(world / source), tmp_path / "lora", modules, task_type=task)
    pair = ["--source-base", world / source, "--target-base", world / target, "--calibration", world / "texts.jsonl",
            "--samples", 6, "--method", "bico", "--max-length", 16]  # fmt: skip
    if through == "transfer":
        taskferry("transfer", *pair, "--source-tuned", lora, "--scale", 1, "--out", tmp_path / "moved")
    else:
        taskferry("fit", *pair, "--out", tmp_path / "maps.alignment")
        taskferry("apply", tmp_path / "maps.alignment", lora, "--out", tmp_path / "moved")
    loaded = peft.PeftModel.from_pretrained(of_class.from_pretrained(world / target), tmp_path / "moved")
    factors = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(factors) == 4
    assert all(bool(factor.any()) for factor in factors)


def test_a_frozen_table_beside_a_lora_is_no_part_of_it(world: Path, tmp_path: Path) -> None:
    """PEFT saves the base's own output layer beside its LoRA: base and change are all of the tuned source."""
    lora = made(transformers.AutoModelForCausalLM.from_pretrained(world / "llama"), tmp_path / "lora",
                ["q_proj", "lm_head"], task_type="CAUSAL_LM")  # fmt: skip
    base = load_model(str(world / "llama"))
    tuned = load_tuned(str(lora), base)
    assert not tuned.ignored
    assert "lm_head.weight" in tuned.tau.deltas
    reference = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(world / "llama"), lora)
    with teacher_model(base, tuned) as teacher, torch.no_grad():
        ids = torch.arange(6)[None]
        assert torch.allclose(teacher(ids).logits, reference(ids).logits, atol=1e-5)


def test_a_lora_with_biases_is_no_teacher(world: Path, tmp_path: Path) -> None:
    lora = made(transformers.AutoModelForMaskedLM.from_pretrained(world / "masked"), tmp_path / "lora",
                ["query"], bias="all")  # fmt: skip
    tuned = load_tuned(str(lora), load_model(str(world / "masked")))
    with pytest.raises(TaskferryError, match=r"has also trained .*bias.* merge the adapter"):
        check_whole(tuned, "give labels")


def test_a_resized_fine_tune_teaches_as_it_was_saved_or_not_at_all(world: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "llama")
    model.resize_token_embeddings(401)
    folders.save(model, tmp_path / "more")
    tuned = load_tuned(str(tmp_path / "more"), load_model(str(world / "llama")))
    check_whole(tuned, "give labels")
    with pytest.raises(TaskferryError, match="leave --refine out"):
        check_whole(tuned, "leave --refine out", saved=False)


@pytest.mark.parametrize(("given", "name", "revision"), [
    ("org/tiny@v1", "org/tiny", "v1"), ("org/tiny", "org/tiny", None), ("./at@home/b", "./at@home/b", None),
])  # fmt: skip
def test_a_revision_stands_where_peft_reads_it(
    given: str, name: str, revision: str | None, world: Path, tmp_path: Path
) -> None:
    lora = made(transformers.AutoModelForCausalLM.from_pretrained(world / "llama"), tmp_path / "lora", ["q_proj"])
    skeleton = Skeleton.of(load_model(str(world / "llama")).model)
    adapter = read_adapter(lora, skeleton)
    (tmp_path / "out").mkdir()
    write_form("lora", adapter.tau, tmp_path / "out", target=skeleton, adapter=adapter, base=given)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (name, revision)
    assert peft.LoraConfig.from_pretrained(tmp_path / "out").revision == revision
