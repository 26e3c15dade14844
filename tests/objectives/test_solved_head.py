"""A classification LoRA's head, solved for a target that has none: through the command, loaded again by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry.objectives.heads import ridge
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.texts import SECOND, TEXTS
from tests.helpers.tiny import relative

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

CLASSES = 3


def adapter(base: Path, out: Path, name: str, modules: list[str], head: str, **more: Any) -> Path:
    """A LoRA of random factors on a classifier, with a head of its own, as PEFT saves them."""
    model = getattr(transformers, name).from_pretrained(base, num_labels=CLASSES)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, task_type="SEQ_CLS", **more)
    )
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if "lora_" in path or f"{head}.modules_to_save" in path:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(out)
    return out


def moved(root: Path, out: Path, target: str = "b", data: str = "data.jsonl") -> dict[str, Any]:
    """What the command says of it: its record."""
    found: dict[str, Any] = taskferry(
        "transfer", "--source-base", root / "a", "--source-tuned", root / "lora", "--target-base", root / target,
        "--calibration", root / data, "--scale", 0.5, "--method", "bico", "--force", "--out", out, "--json",
    ).json  # fmt: skip
    return found


def test_a_ridge_finds_a_head_that_is_there() -> None:
    torch.manual_seed(0)
    X, W, b = torch.randn(40, 6), torch.randn(3, 6), torch.randn(3)
    found, bias = ridge(X, X @ W.T + b, share=1e-9)
    assert relative(found, W) < 1e-4
    assert relative(bias, b) < 1e-4
    few, _ = ridge(X[:4], X[:4] @ W.T + b)  # fewer samples than features
    assert bool(few.isfinite().all())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "a", 16, 2, 1)
    folders.encoder(root / "b", 24, 3, 2)
    adapter(root / "a", root / "lora", "BertForSequenceClassification", ["query", "value"], "classifier")
    folders.texts(root / "data.jsonl")
    return root


def logits(base: Path, lora: Path, name: str) -> Any:
    """What PEFT's users get."""
    plain = getattr(transformers, name).from_pretrained(base, num_labels=CLASSES)
    model = peft.PeftModel.from_pretrained(plain, lora).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        return model(**tokenizer(TEXTS, SECOND, padding=True, return_tensors="pt")).logits


def test_peft_loads_a_head_that_says_what_the_tuned_source_says(world: Path, tmp_path: Path) -> None:
    record = moved(world, tmp_path / "out")
    name = "BertForSequenceClassification"
    A, B = logits(world / "a", world / "lora", name), logits(world / "b", tmp_path / "out", name)
    assert float((A.argmax(1) == B.argmax(1)).double().mean()) > 0.6
    assert (record["head"]["layer"], record["head"]["classes"]) == ("classifier", CLASSES)
    assert "The head classifier was solved from the tuned source's scores" in " ".join(record["verdict"]["notes"])
    assert not any("classifier" in name for name in record["ignored"])
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["classifier"])


def test_a_target_keeps_a_head_of_its_own_and_one_that_cannot_be_read_stays(world: Path, tmp_path: Path) -> None:
    kind = transformers.BertForSequenceClassification
    folders.save(kind.from_pretrained(world / "b", num_labels=CLASSES), world / "headed")
    folders.save(transformers.BertModel.from_pretrained(world / "b", add_pooling_layer=False), world / "bare")
    for target in ("headed", "bare"):
        record = moved(world, tmp_path / target, target)
        config = json.loads((tmp_path / target / "adapter_config.json").read_text())
        assert (config["task_type"], config["modules_to_save"]) == (None, None)
        assert not record["head"]
        assert any("classifier" in name for name in record["ignored"])


def test_a_decoder_s_head_reads_the_last_token(tmp_path: Path) -> None:
    name = "LlamaForSequenceClassification"
    for place, width, depth in (("a", 16, 2), ("b", 24, 3)):
        torch.manual_seed(depth)
        size = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth, "vocab_size": 400}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.2}
        folders.save(transformers.LlamaModel(transformers.LlamaConfig(**size, **heads)), tmp_path / place)
    adapter(tmp_path / "a", tmp_path / "lora", name, ["q_proj", "v_proj"], "score")
    folders.texts(tmp_path / "data.jsonl")
    assert moved(tmp_path, tmp_path / "out")["head"]["layer"] == "score"
    A, B = logits(tmp_path / "a", tmp_path / "lora", name), logits(tmp_path / "b", tmp_path / "out", name)
    assert float((A.argmax(1) == B.argmax(1)).double().mean()) > 0.6


def test_the_head_of_an_image_model(tmp_path: Path) -> None:
    for place, width, seed in (("a", 16, 1), ("b", 24, 2)):
        torch.manual_seed(seed)
        sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * width}
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, initializer_range=0.2)
        transformers.ViTModel(config).save_pretrained(tmp_path / place)
        folders.sees(tmp_path / place)
    adapter(tmp_path / "a", tmp_path / "lora", "ViTForImageClassification", ["q_proj", "v_proj"], "classifier",
            modules_to_save=["classifier"])  # fmt: skip
    folders.pictures(tmp_path / "data")
    assert moved(tmp_path, tmp_path / "out", data="data")["head"]["classes"] == CLASSES
