"""Loading the real pre-trained models and data of the shared folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def bert(shared: Path, name: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    folder = shared / "models" / name
    model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def vit(shared: Path, name: str, size: int = 112) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model(f"local-dir:{shared / 'models' / name}", pretrained=True, img_size=size).eval().float()


def texts(shared: Path, task: str, n: int, split: str = "train") -> list[dict[str, Any]]:
    with open(shared / "data" / task / f"{split}.jsonl", encoding="utf-8") as lines:
        return [json.loads(next(lines)) for _ in range(n)]


def pictures(shared: Path, task: str, n: int, size: int = 112, split: str = "train") -> tuple[Tensor, Tensor]:
    """Images [n, 3, size, size] in [−1, 1] and labels, drawn evenly over the file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    table = parquet.read_table(shared / "data" / task / f"{split}.parquet").to_pydict()
    step = len(table["label"]) // n
    pixels = []
    for data in table["image"][: step * n : step]:
        encoded = data["bytes"] if isinstance(data, dict) else data
        picture = image.open(io.BytesIO(encoded)).convert("RGB").resize((size, size))
        raw = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        pixels.append(raw.reshape(size, size, 3).permute(2, 0, 1).float() / 127.5 - 1)
    return torch.stack(pixels), torch.tensor(table["label"][: step * n : step])
