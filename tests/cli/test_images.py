"""The command on image models: real timm folders, and OpenCLIP with a zero-shot head and a teacher."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import TaskVector
from taskferry.models import load_model
from tests.helpers.command import taskferry

timm = pytest.importorskip("timm")
open_clip = pytest.importorskip("open_clip")


@pytest.mark.real
def test_timm_folders(shared: Path, tmp_path: Path) -> None:
    base = shared / "models" / "deit_tiny_patch16_224"
    state = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    tuned = {k: v + 0.01 * torch.randn(v.shape, generator=generator).to(v) for k, v in state.items() if "qkv" in k}
    save_file({**state, **tuned}, tmp_path / "tuned.safetensors")
    target = shared / "models" / "vit_tiny_patch16_224_tinyimagenet"
    given = ["--source-base", base, "--source-tuned", tmp_path / "tuned.safetensors", "--target-base", target]
    data = ["--calibration", shared / "data" / "cifar10" / "train.parquet", "--set", "per_class=1"]
    ran = taskferry("transfer", *given, *data, "--method", "bico", "--scale", 1, "--out", tmp_path / "moved", "--json")
    assert len(ran.json["calibration"]["indices"]) == 10
    model = timm.create_model(f"local-dir:{tmp_path / 'moved'}", pretrained=True)
    before, after = load_file(target / "model.safetensors"), load_file(tmp_path / "moved" / "model.safetensors")
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed <= {f"blocks.{i}.attn.qkv.{kind}" for i in range(12) for kind in ("weight", "bias")}
    assert {f"blocks.{i}.attn.qkv.weight" for i in range(12)} <= changed
    assert all(after[k].dtype == before[k].dtype for k in before)
    assert torch.equal(model.head.weight.half(), before["head.weight"])


def clip_folder(folder: Path, width: int, layers: int, seed: int, image_size: int) -> Path:
    torch.manual_seed(seed)
    vision = {"image_size": image_size, "patch_size": 8, "width": width, "head_width": width // 4, "layers": layers}
    words = {"context_length": 16, "vocab_size": 49408, "width": width, "heads": 4, "layers": 1}
    config = {"model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": words}, "preprocess_cfg": {}}
    model = open_clip.CLIP(**config["model_cfg"])
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "open_clip_model.safetensors")
    return folder


def test_openclip_folders(tmp_path: Path) -> None:
    """A zero-shot head from class names, two image sizes, labels from the data and from the teacher."""
    image = pytest.importorskip("PIL.Image")
    source = clip_folder(tmp_path / "a", 16, 2, 0, 32)
    target = clip_folder(tmp_path / "b", 24, 3, 1, 48)
    generator = torch.Generator().manual_seed(2)
    for name in ("cat", "dog", "tree"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(6):
            pixels = torch.randint(0, 255, (40, 40, 3), generator=generator, dtype=torch.uint8)
            image.frombytes("RGB", (40, 40), pixels.numpy().tobytes()).save(tmp_path / "images" / name / f"{i}.png")
    state = load_file(source / "open_clip_model.safetensors")
    moved = {k: v + 0.05 * torch.randn(v.shape, generator=generator) if "visual" in k else v for k, v in state.items()}
    torch.save(moved, tmp_path / "tuned.pt")
    given = ["--source-base", source, "--source-tuned", tmp_path / "tuned.pt", "--target-base", target]
    data = ["--calibration", tmp_path / "images", "--method", "bico", "--scale", 1, "--force", "--json"]
    ran = taskferry("transfer", *given, *data, "--out", tmp_path / "moved")
    assert ran.json["provenance"]["objective"][1].startswith("ZeroShot(")
    assert ran.json["verdict"]["moved"] == 3 * 8 + 2  # blocks with biases, patches, the projection
    model = open_clip.create_model(f"local-dir:{tmp_path / 'moved'}", load_weights=True)
    written = load_file(tmp_path / "moved" / "open_clip_model.safetensors")
    assert torch.equal(model.visual.proj, written["visual.proj"])
    before = load_file(target / "open_clip_model.safetensors")
    assert torch.equal(
        written["transformer.resblocks.0.attn.in_proj_weight"], before["transformer.resblocks.0.attn.in_proj_weight"]
    )
    assert not torch.equal(written["visual.proj"], before["visual.proj"])
    taught = taskferry("transfer", *given, *data, "--labels", "teacher", "--out", tmp_path / "taught")
    assert taught.json["calibration"]["labels"] == "from the tuned source (teacher)"
    # Pictures of another domain, in no folders of classes: what they show, the tuned source says.
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "classes.json").write_text('["cat", "dog", "tree"]')
    for i in range(9):
        grey = bytes((20 * i + x * y) % 256 for x in range(30) for y in range(30))
        image.frombytes("L", (30, 30), grey).save(tmp_path / "others" / f"{i}.png")
    other = [
        "--calibration",
        tmp_path / "others",
        "--labels",
        "teacher",
        "--method",
        "bico",
        "--scale",
        1,
        "--force",
        "--json",
    ]
    foreign = taskferry("transfer", *given, *other, "--out", tmp_path / "foreign").json
    assert foreign["calibration"]["labels"] == "from the tuned source (teacher)"
    assert foreign["calibration"]["samples"] == 9
    assert foreign["verdict"]["moved"] == ran.json["verdict"]["moved"]
    name = taskferry("inspect", f"openclip:ViT-B-32:{tmp_path / 'absent.pt'}", code=2)
    assert "does not exist" in name.err


def test_timm_files_in_older_names(tmp_path: Path) -> None:
    """timm renames them on loading: the change belongs to the names that they have then."""
    args = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (1, 1, 1),
            "num_heads": (1, 2, 4), "num_classes": 3}  # fmt: skip
    model = timm.create_model("swin_tiny_patch4_window7_224", **args)
    folder, out = tmp_path / "swin", tmp_path / "out"
    folder.mkdir()
    out.mkdir()

    def older(name: str) -> str:
        moved = re.sub(r"layers\.(\d+)\.downsample", lambda at: f"layers.{int(at[1]) - 1}.downsample", name)
        return moved.replace("head.fc.", "head.")

    save_file({older(name): t.contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    known = {"input_size": [3, 32, 32], "num_classes": 3, "first_conv": "patch_embed.proj", "classifier": "head.fc"}
    config = {"architecture": "swin_tiny_patch4_window7_224", "model_args": args, "pretrained_cfg": known}
    (folder / "config.json").write_text(json.dumps(config | {"num_classes": 3}))
    target = load_model(folder)
    name = "layers.2.downsample.reduction.weight"
    tau = TaskVector({name: torch.ones_like(dict(target.model.named_parameters())[name])})
    target.format.write(target, tau, out)
    before, after = (timm.create_model(f"local-dir:{each}", pretrained=True).state_dict() for each in (folder, out))
    assert all(torch.equal(after[n], t + 1 if n == name else t) for n, t in before.items())
