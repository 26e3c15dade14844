"""The head of a classification LoRA moves with it: through the installed command, loaded again by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.helpers import folders
from tests.helpers.command import Ran, taskferry
from tests.helpers.texts import SECOND, TEXTS
from tests.helpers.tiny import relative

pytest.importorskip("peft")
pytest.importorskip("datasets")

CLASSES = 3


def adapter(base: Path, out: Path, name: str, modules: list[str], head: str, **more: Any) -> Path:
    """A LoRA of random factors on a classifier, with a head of its own, as PEFT saves them."""
    import peft
    import transformers

    model = getattr(transformers, name).from_pretrained(base, num_labels=CLASSES)
    torch.manual_seed(3)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, task_type="SEQ_CLS", **more)
    adapted = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if "lora_" in path or f"{head}.modules_to_save" in path:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "a", 16, 2, 1)
    folders.encoder(root / "b", 24, 3, 2)
    adapter(root / "a", root / "lora", "BertForSequenceClassification", ["query", "value"], "classifier")
    folders.texts(root / "data.jsonl")
    return root


def moved(world: Path, out: Path, *more: object, code: int = 0, **names: str) -> Ran:
    a, b, lora = (world / names.get(each, each) for each in ("a", "b", "lora"))
    given = ["--source-base", a, "--source-tuned", lora, "--target-base", b, "--calibration", world / "data.jsonl"]
    return taskferry("transfer", *given, "--scale", 0.5, "--method", "bico", "--out", out, *more, code=code)


def loaded(base: Path, lora: Path, name: str) -> Any:
    import peft
    import transformers

    plain = getattr(transformers, name).from_pretrained(base, num_labels=CLASSES)
    return peft.PeftModel.from_pretrained(plain, lora).eval()


def head_reads(base: Path, model: Any, head: str) -> tuple[Tensor, Tensor]:
    """What the head reads of each sample, and the logits."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    seen: list[Tensor] = []
    layer = next(m for n, m in model.named_modules() if n.endswith(f".{head}"))
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        given = tokenizer(TEXTS, SECOND, padding=True, return_tensors="pt")
        logits = model(**given).logits
    handle.remove()
    return seen[0], logits


def test_peft_loads_the_moved_head_and_gives_the_predicted_logits(world: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    name, out = "BertForSequenceClassification", tmp_path / "out"
    moved(world, out, "--head", "move")
    X_A, logits_A = head_reads(world / "a", loaded(world / "a", world / "lora", name), "classifier")
    X_B, logits_B = head_reads(world / "b", loaded(world / "b", out, name), "classifier")
    head = load_file(world / "lora" / "adapter_model.safetensors")
    W, bias = (head[f"base_model.model.classifier.{part}"] for part in ("weight", "bias"))
    assert relative(X_A @ W.T + bias, logits_A) < 1e-5  # the adapter's own head was found
    U, S, Vh = torch.linalg.svd(X_A.double().T @ X_B.double())
    rank = int((1e-6 * S[0] < S).sum())
    R = (U[:, :rank] @ Vh[:rank]).float()
    assert relative(logits_B, X_B @ (W @ R).T + bias) < 1e-5
    record = json.loads((out / "taskferry.json").read_text())
    agreement = float((logits_A.argmax(1) == logits_B.argmax(1)).double().mean())
    assert record["head"]["layer"] == "classifier"
    assert record["head"]["classes"] == CLASSES
    assert record["head"]["agreement"] == pytest.approx(agreement, abs=1e-3)
    assert f"The head classifier moved too: on {agreement:.0%} of the samples" in record["verdict"]["sentence"]
    assert not any("classifier" in name for name in record["ignored"])
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["classifier"])


@pytest.mark.parametrize("family", ["ViT", "DeiT"])  # of the second transformers has two classifiers
def test_the_head_of_an_image_model_moves(family: str, tmp_path: Path) -> None:
    import peft
    import transformers

    name = f"{family}ForImageClassification"
    for place, width, seed in (("a", 16, 1), ("b", 24, 2)):
        torch.manual_seed(seed)
        sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 2 * width}
        config = getattr(transformers, f"{family}Config")(**sizes, image_size=32, patch_size=8, initializer_range=0.2)
        model = getattr(transformers, f"{family}Model")(config)
        model.save_pretrained(tmp_path / place)
        folders.sees(tmp_path / place)
    adapter(tmp_path / "a", tmp_path / "lora", name, ["q_proj", "v_proj"], "classifier", modules_to_save=["classifier"])
    folders.pictures(tmp_path / "data")
    given = ["--source-base", tmp_path / "a", "--source-tuned", tmp_path / "lora", "--target-base", tmp_path / "b"]
    more = ["--calibration", tmp_path / "data", "--scale", 0.5, "--method", "bico", "--head", "move"]
    record = taskferry("transfer", *given, *more, "--out", tmp_path / "out", "--json").json
    samples = [str(path) for path in sorted((tmp_path / "data").rglob("*.png"))]
    said = []
    for base, lora in (("a", "lora"), ("b", "out")):
        plain = getattr(transformers, name).from_pretrained(tmp_path / base, num_labels=CLASSES)
        tuned = peft.PeftModel.from_pretrained(plain, tmp_path / lora).eval()
        reader = transformers.AutoImageProcessor.from_pretrained(tmp_path / base)
        with torch.no_grad():
            said.append(tuned(**reader([Image.open(path) for path in samples], return_tensors="pt")).logits.argmax(1))
    agreement = float((said[0] == said[1]).double().mean())
    assert record["head"]["agreement"] == pytest.approx(agreement, abs=1e-3)


def test_a_head_stays_unless_it_is_asked_for(world: Path, tmp_path: Path) -> None:
    moved(world, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == (None, None)
    record = json.loads((tmp_path / "out" / "taskferry.json").read_text())
    assert "head" not in record
    assert any("classifier" in name for name in record["ignored"])


def test_a_decoder_s_head_reads_the_last_token(world: Path, tmp_path: Path) -> None:
    import transformers

    name = "LlamaForSequenceClassification"
    for place, width, depth in (("a", 16, 2), ("b", 24, 3)):
        torch.manual_seed(depth)
        size = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth, "vocab_size": 400}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.2}
        folders.save(transformers.LlamaModel(transformers.LlamaConfig(**size, **heads)), tmp_path / place)
    adapter(tmp_path / "a", tmp_path / "lora", name, ["q_proj", "v_proj"], "score")
    folders.texts(tmp_path / "data.jsonl")
    moved(tmp_path, tmp_path / "out", "--head", "move")
    _, logits_A = head_reads(tmp_path / "a", loaded(tmp_path / "a", tmp_path / "lora", name), "score")
    _, logits_B = head_reads(tmp_path / "b", loaded(tmp_path / "b", tmp_path / "out", name), "score")
    record = json.loads((tmp_path / "out" / "taskferry.json").read_text())
    agreement = float((logits_A.argmax(1) == logits_B.argmax(1)).double().mean())
    assert record["head"]["agreement"] == pytest.approx(agreement, abs=1e-3)


def test_a_head_that_cannot_move_is_refused_before_work(world: Path, tmp_path: Path) -> None:
    import transformers

    given = ("--head", "move")
    for more, told in (
        (("--engine", "blockwise"), "a head moves by running both models whole"),
        (("--as-model",), "a head is written beside a LoRA, not in a full model"),
    ):
        assert told in " ".join(moved(world, tmp_path / "out", *given, *more, code=2).err.split())
    folders.lora(world / "a", tmp_path / "plain", ["query"])
    told = moved(world, tmp_path / "out", *given, code=2, lora=str(tmp_path / "plain")).err
    assert "this one brings none" in " ".join(told.split())
    bare = transformers.BertModel.from_pretrained(world / "b", add_pooling_layer=False)
    folders.save(bare, tmp_path / "bare")
    told = moved(world, tmp_path / "out", *given, code=2, b=str(tmp_path / "bare")).err
    assert "pooler.dense.bias is in none of its files" in " ".join(told.split())
    kind = transformers.BertForSequenceClassification
    for place, base, classes, labels in (("ours", "a", 3, None), ("four", "b", 4, None), ("named", "b", 3, "yes")):
        names = {} if labels is None else {"id2label": {0: "no", 1: "maybe", 2: labels}}
        folders.save(kind.from_pretrained(world / base, num_labels=classes, **names), tmp_path / place)
    for place, sentence in (
        ("four", "has 4 classes, the head of the adapter 3"),
        ("named", "no, maybe, yes: the head cannot move"),
    ):
        bases = {"a": str(tmp_path / "ours"), "b": str(tmp_path / place)}
        assert sentence in " ".join(moved(world, tmp_path / "out", *given, code=2, **bases).err.split())
