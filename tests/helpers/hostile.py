"""Files that are made to do harm, and what they are made from."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from taskferry import Alignment
from taskferry.alignment import AlignedPair
from taskferry.layers.site import Site
from taskferry.linalg.procrustes import Map
from taskferry.linalg.sums import Quality
from taskferry.models import Skeleton

WIDE, SMALL, RANK = 6, 4, 2
MODULE = "encoder.layer.0.attention.self.query"
EVIL = "\x1b]0;owned\x07\x1b[31m[bold]<script>alert(1)</script>\u202e"


def raw_safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header over any bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def skeleton() -> Skeleton:
    """The base of the adapters here: one linear layer and its bias."""
    weight = f"{MODULE}.weight"
    return Skeleton({weight: (WIDE, SMALL), f"{MODULE}.bias": (WIDE,)}, frozenset({weight}), frozenset())


def factors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    at = f"base_model.model.{MODULE}"
    return {
        f"{at}.lora_A.weight": torch.randn(RANK, SMALL, generator=generator),
        f"{at}.lora_B.weight": torch.randn(WIDE, RANK, generator=generator),
    }


def adapter(folder: Path, **changes: Any) -> Path:
    """A good adapter with some fields of its configuration changed."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["query"], **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(save(factors()))
    return folder


def alignment() -> Alignment:
    """From the base above to one of other widths, with a packed matrix on the target's side."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = f"{MODULE}.weight", f"{MODULE}.bias"
    source = Site(MODULE, weight, bias, (WIDE, SMALL), "attn.q", "text", 0)
    target = Site("h.0.qkv#q", "h.0.qkv.weight", "h.0.qkv.bias", (5, 3), "attn.q", "text", 0, rows=(0, 5))
    quality = Quality(rank=3, rows=20, similarity=0.5, residual=0.8, largest=2.0, smallest=None)
    return Alignment(
        pairs=(AlignedPair(source, target, "h.0.qkv#q"),),
        R_in={"h.0.qkv#q": Map(R=torch.randn(SMALL, 3, generator=generator))},
        R_out={"h.0.qkv#q": Map(U=torch.randn(WIDE, 2, generator=generator), V=torch.randn(5, 2, generator=generator))},
        quality_in={"h.0.qkv#q": quality},
        quality_out={"h.0.qkv#q": quality},
        source_parameters={weight: (WIDE, SMALL), bias: (WIDE,)},
        target_parameters={"h.0.qkv.weight": (15, 3), "h.0.qkv.bias": (15,), "scale": ()},
        reasons={"scale": "no layer uses it"},
        provenance={"source": {"class": "A", "sha256": "0"}, "target": {"class": "B", "sha256": "1", "prefix": ""}},
    )


class Runs:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def packed_again(path: Path, out: Path) -> Path:
    """A torch file with its records compressed, as a bomb would have them."""
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as after:
        for entry in before.infolist():
            after.writestr(entry.filename, before.read(entry))
    return out
