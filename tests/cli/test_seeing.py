"""Rows with an image and words, through the processors of decoders that also see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from taskferry.models import load_model
from tests.helpers import folders, seeing
from tests.helpers.command import Ran, taskferry
from tests.helpers.often import often

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")
pytest.importorskip("torchvision")


@pytest.fixture(scope="module", params=often(("llava", "qwen2-vl", "gemma3", "mistral3"), ("llava", "qwen2-vl")))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    seeing.folder(root / "a", request.param, 16, 2, 1)
    seeing.folder(root / "b", request.param, 32, 3, 2)
    modules = r".*(language_model.*\.(q_proj|down_proj)|(vision|visual).*\.(q_proj|fc1|qkv))"
    folders.lora(root / "a", root / "lora", modules)
    for form in ("prompt", "messages"):
        seeing.rows(root / f"{form}.jsonl", form)
    return root


def moved(world: Path, data: Path, out: Path, *more: object, code: int = 0) -> Ran:
    return taskferry("transfer", "--source-base", world / "a", "--source-tuned", world / "lora", "--target-base",
                     world / "b", "--calibration", data, "--samples", 8, "--set", "micro_batch=4", "--method", "bico",
                             "--scale", 0.5,
                     "--method", "bico", "--force", "--out", out, *more, code=code)  # fmt: skip


def loss_of(model: Any, folder: Path, world: Path, chosen: list[int]) -> float:
    """Of the answers, a token, one row at a time and by the library's own means."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    lines = [json.loads(line) for line in (world / "prompt.jsonl").read_text().splitlines()]
    total, count = 0.0, 0
    for row in (lines[i] for i in chosen):
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"]}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": row["completion"]}]}
        text = processor.apply_chat_template([asked, answer], tokenize=False)
        image = Image.open(world / row["image"]).convert("RGB")
        inputs = processor(text=[text], images=[[image]], return_tensors="pt", add_special_tokens=False)
        words = processor.tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        ids = inputs["input_ids"][0].tolist()
        start = next(i for i in reversed(range(len(ids))) if ids[i : i + len(words)] == words)
        with torch.no_grad():
            scores = model(**inputs).logits[0]
        total += float(
            F.cross_entropy(scores[start - 1 : start - 1 + len(words)], torch.tensor(words), reduction="sum")
        )
        count += len(words)
    return total / count


def test_a_lora_moves_on_images_with_words(world: Path, tmp_path: Path) -> None:
    """Losses are those of the library on the same pictures, and the towers of images have maps of their own."""
    out = tmp_path / "out"
    ran = moved(world, world / "prompt.jsonl", out, "--json").json
    base: Any = load_model(str(world / "b")).model
    chosen = ran["calibration"]["indices"]
    assert ran["verdict"]["loss_before"] == pytest.approx(loss_of(base, world / "b", world, chosen), rel=1e-4)
    after = peft.PeftModel.from_pretrained(base, out)
    assert ran["verdict"]["loss_after"] == pytest.approx(loss_of(after, world / "b", world, chosen), rel=1e-4)
    rows = {row["parameter"]: row["status"] for row in ran["coverage"]["rows"]}
    for tower in ("language_model.layers", "vis"):
        assert any(status == "moved" and tower in name for name, status in rows.items())


def test_chats_with_an_image_part_are_the_same_rows(world: Path, tmp_path: Path) -> None:
    found = [moved(world, world / f"{form}.jsonl", tmp_path / form, "--json").json for form in ("prompt", "messages")]
    assert found[0]["verdict"]["loss_after"] == pytest.approx(found[1]["verdict"]["loss_after"], rel=1e-6)


def test_pictures_of_several_sizes(world: Path, tmp_path: Path) -> None:
    """Patches of all pictures lie in one row of some towers: no micro-batch is left out or cut in the wrong places."""
    sizes = [(32, 32), (32, 16), (16, 32), (24, 32)]
    lines = [json.loads(line) for line in (world / "prompt.jsonl").read_text().splitlines()][:8]
    for i, row in enumerate(lines):
        row["image"] = f"pictures/size{i}.png"
        pixels = torch.randint(0, 255, (*sizes[i % 4], 3), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.to(torch.uint8).numpy()).save(world / row["image"])
    data = world / "sizes.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in lines))
    found = []
    for size in (1, 3, 8):
        out = tmp_path / f"out{size}"
        found.append(moved(world, data, out, "--set", f"micro_batch={size}", "--json").json)
        found[-1]["moved"] = load_file(out / "adapter_model.safetensors")
    for other in found[1:]:
        assert other["verdict"]["loss_after"] == pytest.approx(found[0]["verdict"]["loss_after"], rel=1e-3)
        for name in found[0]["moved"]:
            if "lora_B" in name:
                A = name.replace("lora_B", "lora_A")
                change, again = (each["moved"][name] @ each["moved"][A] for each in (found[0], other))
                assert float((change - again).norm()) <= 2e-2 * float(change.norm())


def test_block_by_block_is_refused_by_a_sentence(world: Path, tmp_path: Path) -> None:
    ran = moved(world, world / "prompt.jsonl", tmp_path / "out", "--engine", "blockwise", code=2)
    assert "use the engine 'whole'" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"image": "../private.png"}, "is not in its folder: copy it there"),
        ({"image": "pictures/none.png"}, "does not exist in its folder"),
        ({"image": None, "images": ["pictures/0.png", "pictures/1.png"]}, "has 2 images: one in each row is read"),
        ({"image": "pictures/large.png"}, "pixels: 67,108,864 are the most"),
        ({"completion": None}, "need a prompt and a completion, or messages"),
    ],
)
def test_refusals(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Before any work, by the row."""
    seeing.folder(tmp_path / "a", "llava", 16, 2, 1)
    folders.lora(tmp_path / "a", tmp_path / "lora", ["q_proj"])
    (tmp_path / "data").mkdir()
    data = seeing.rows(tmp_path / "data" / "rows.jsonl")
    Image.new("RGB", (4, 4)).save(tmp_path / "private.png")
    Image.new("1", (2**13, 2**13 + 8)).save(tmp_path / "data" / "pictures" / "large.png")
    lines = [json.loads(line) | row for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    ran = moved(tmp_path, data, tmp_path / "out", code=2)
    assert says in " ".join(ran.err.split())
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_see_is_refused(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        folders.causal(tmp_path / name, "LlamaForCausalLM", 16, 2, seed)
    folders.lora(tmp_path / "a", tmp_path / "lora", ["q_proj"])
    ran = moved(tmp_path, seeing.rows(tmp_path / "rows.jsonl"), tmp_path / "out", code=2)
    assert "is a LlamaForCausalLM, which reads no images: give rows of text" in " ".join(ran.err.split())
