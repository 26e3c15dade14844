"""taskferry apply: what an alignment alone knows of the models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import folders
from tests.helpers.command import MAPS, taskferry
from tests.helpers.tiny import hf

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def gpt2(folder: Path, width: int, depth: int) -> None:
    torch.manual_seed(depth)
    config = transformers.GPT2Config(n_embd=width, n_layer=depth, n_head=4, vocab_size=400, n_positions=64)
    folders.save(transformers.GPT2LMHeadModel(config), folder)


def mixtral(folder: Path, width: int, depth: int) -> None:
    torch.manual_seed(depth)
    size = {"vocab_size": 400, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    folders.save(hf("MixtralForCausalLM", width, depth, **size), folder)


@pytest.mark.parametrize(
    ("made", "trained"),
    [
        (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
        (mixtral, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    ],
    ids=["stored-across", "experts"],
)
def test_a_lora_moves_to_fewer_blocks(made: Any, trained: dict[str, Any], tmp_path: Path) -> None:
    """The blocks of the source that no block of the target takes: what they are is known from the others."""
    made(tmp_path / "a", 16, 4)
    made(tmp_path / "b", 24, 2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **trained))
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    adapter.save_pretrained(tmp_path / "lora")
    folders.passages(tmp_path / "texts.jsonl")
    pair = ["--source-base", tmp_path / "a", "--target-base", tmp_path / "b", "--calibration",
            tmp_path / "texts.jsonl", "--samples", 6, "--method", "bico"]  # fmt: skip
    taskferry("fit", *pair, "--out", tmp_path / "maps")
    taskferry("apply", tmp_path / "maps", tmp_path / "lora", "--out", tmp_path / "applied")
    taskferry("transfer", *pair, "--source-tuned", tmp_path / "lora", *MAPS, "--force", "--out",
              tmp_path / "moved")  # fmt: skip
    config = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("applied", "moved")]
    assert config[0]["target_modules"] == config[1]["target_modules"]
    targets = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b") for _ in range(2)]
    found = [peft.PeftModel.from_pretrained(target, tmp_path / name).state_dict()
             for target, name in zip(targets, ("applied", "moved"), strict=True)]  # fmt: skip
    factors = [name for name in found[0] if "lora_B" in name]
    assert factors
    for name in factors:
        assert bool(found[0][name].any())
        assert torch.allclose(found[0][name], found[1][name], atol=1e-5)
    card = (tmp_path / "applied" / "README.md").read_text()
    assert f"moved from: `{tmp_path / 'lora'}`\n" in card


def test_a_base_without_its_pooler_is_known_again(tmp_path: Path) -> None:
    """Parameters that no file holds are made by chance when a model is loaded, the same every time."""
    for name, seed, width in (("a", 1, 16), ("b", 2, 24)):
        torch.manual_seed(seed)
        whole = hf("BertModel", width, 2, vocab_size=400, initializer_range=0.2)
        bare = transformers.BertModel(whole.config, add_pooling_layer=False)
        folders.save(bare, tmp_path / name)
        if name == "a":
            with torch.no_grad():
                bare.encoder.layer[0].attention.self.query.weight.add_(0.05)
            folders.save(bare, tmp_path / "tuned")
    folders.texts(tmp_path / "texts.jsonl")
    pair = ["--source-base", tmp_path / "a", "--target-base", tmp_path / "b"]
    taskferry("fit", *pair, "--calibration", tmp_path / "texts.jsonl", "--samples", 12, "--out", tmp_path / "maps")
    taskferry("apply", tmp_path / "maps", tmp_path / "tuned", *pair, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_another_target_is_refused(tmp_path: Path) -> None:
    for name, width, depth in (("a", 16, 2), ("b", 24, 2), ("c", 32, 2), ("d", 24, 1)):
        folders.causal(tmp_path / name, "LlamaForCausalLM", width, depth, width)
    folders.lora(tmp_path / "a", tmp_path / "lora", ["q_proj"], task_type="CAUSAL_LM")
    folders.passages(tmp_path / "texts.jsonl")
    taskferry("fit", "--source-base", tmp_path / "a", "--target-base", tmp_path / "b", "--calibration",
              tmp_path / "texts.jsonl", "--samples", 6, "--method", "bico", "--out", tmp_path / "maps")  # fmt: skip
    given = ["apply", tmp_path / "maps", tmp_path / "lora"]
    for wrong, says in (("c", "is there of shape (32, 32)"), ("d", "model.layers.1.self_attn.q_proj.weight")):
        ran = taskferry(*given, "--target-base", tmp_path / wrong, "--out", tmp_path / "out", code=2)
        assert "is not the target that this alignment was fitted on" in " ".join(ran.err.split())
        assert says in " ".join(ran.err.split())
    taskferry(*given, "--target-base", tmp_path / "b", "--out", tmp_path / "out")
    taskferry(*given, "--target-base", "a/name", "--out", tmp_path / "named")


def test_an_adapter_with_names_of_an_older_release(tmp_path: Path) -> None:
    """As `transfer` reads it: ViT's layers had other names."""
    from safetensors.torch import load_file, save_file

    for place, width, seed in (("a", 16, 1), ("b", 24, 2)):
        torch.manual_seed(seed)
        hf("ViTModel", width, 2, image_size=32, patch_size=8, initializer_range=0.2).save_pretrained(tmp_path / place)
        folders.sees(tmp_path / place)
    model = transformers.ViTModel.from_pretrained(tmp_path / "a")
    names = [name for name, _ in model.named_modules()]
    query = next(name for name in ("q_proj", "query") if any(each.endswith(f".{name}") for each in names))
    folders.lora(tmp_path / "a", tmp_path / "lora", [query])
    shutil.copytree(tmp_path / "lora", tmp_path / "old")
    weights = tmp_path / "old" / "adapter_model.safetensors"
    state = load_file(weights)

    def older(name: str) -> str:
        place = name.replace(".layers.", ".encoder.layer.").replace(f".{query}.", ".attention.query.")
        return place.replace(".attention.attention.attention.", ".attention.attention.")

    save_file({older(name): tensor for name, tensor in state.items()}, weights)
    assert set(load_file(weights)) != set(state)
    folders.pictures(tmp_path / "data")
    taskferry("fit", "--source-base", tmp_path / "a", "--target-base", tmp_path / "b", "--calibration",
              tmp_path / "data", "--method", "bico", "--out", tmp_path / "maps")  # fmt: skip
    for name in ("lora", "old"):
        taskferry("apply", tmp_path / "maps", tmp_path / name, "--out", tmp_path / f"moved-{name}")
    found = [load_file(tmp_path / f"moved-{name}" / "adapter_model.safetensors") for name in ("lora", "old")]
    assert set(found[0]) == set(found[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_body_or_a_classifier_around_it_is_the_same_target(tmp_path: Path) -> None:
    for name, width, seed in (("a", 16, 1), ("b", 24, 2)):
        folders.encoder(tmp_path / name, width, 2, seed)
    kind = transformers.BertForSequenceClassification
    folders.save(kind.from_pretrained(tmp_path / "b", num_labels=3), tmp_path / "b-classifier")
    folders.lora(tmp_path / "a", tmp_path / "lora", ["query"])
    folders.texts(tmp_path / "texts.jsonl")
    taskferry("fit", "--source-base", tmp_path / "a", "--target-base", tmp_path / "b", "--calibration",
              tmp_path / "texts.jsonl", "--method", "bico", "--out", tmp_path / "maps")  # fmt: skip
    given = ["apply", tmp_path / "maps", tmp_path / "lora", "--target-base", tmp_path / "b-classifier"]
    taskferry(*given, "--out", tmp_path / "out")
