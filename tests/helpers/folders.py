"""Tiny models as folders on disk, with tokenizers, adapters and data: what a user would have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.texts import SECOND, TEXTS, train
from tests.helpers.tiny import hf

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"


def save(
    model: nn.Module, folder: Path, kind: str = "pieces", *, dtype: torch.dtype = torch.float32, **more: Any
) -> Path:
    """A model with a tokenizer beside it."""
    model.to(dtype).save_pretrained(folder, **more)
    tokenizer = train(kind)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def causal(folder: Path, name: str, width: int, depth: int, seed: int, kind: str = "pieces", **more: Any) -> Path:
    torch.manual_seed(seed)
    size = {"vocab_size": 400, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
    if name.startswith("Qwen3"):
        size["head_dim"] = width // 4
    return save(hf(name, width, depth, **size), folder, kind, **more)


def encoder(folder: Path, width: int, depth: int, seed: int, name: str = "BertModel", **more: Any) -> Path:
    torch.manual_seed(seed)
    return save(hf(name, width, depth, vocab_size=400, initializer_range=0.2), folder, **more)


def shifted(folder: Path, out: Path, size: float = 0.05, only: str = "") -> Path:
    """A pretended full fine-tune of a folder: of the parameters whose names have `only` in them."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter))
    model.save_pretrained(out)
    return out


def sees(folder: Path, size: int = 32) -> Path:
    """With an image processor beside the model."""
    import transformers

    transformers.ViTImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)
    return folder


def pictures(folder: Path, size: int = 32, each: int = 4) -> Path:
    """A folder of random pictures in three classes."""
    from PIL import Image

    generator = torch.Generator().manual_seed(2)
    for name in ("cat", "dog", "tree"):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = torch.randint(0, 255, (size, size, 3), generator=generator, dtype=torch.uint8)
            Image.frombytes("RGB", (size, size), pixels.numpy().tobytes()).save(folder / name / f"{i}.png")
    return folder


def texts(path: Path, labels: bool = True) -> Path:
    rows = [{"text": a, "text_pair": b, **({"label": i % 3} if labels else {})}
            for i, (a, b) in enumerate(zip(TEXTS, SECOND, strict=True))]  # fmt: skip
    return _lines(path, rows)


def prompts(path: Path, completions: bool = True) -> Path:
    rows = [
        {"prompt": a, **({"completion": " " + b} if completions else {})} for a, b in zip(TEXTS, SECOND, strict=True)
    ]
    return _lines(path, rows)


def passages(path: Path) -> Path:
    """Plain texts of a language model: no answer, whose end a random model never writes."""
    return _lines(path, [{"text": f"{a} {b}"} for a, b in zip(TEXTS, SECOND, strict=True)])


def chats(path: Path) -> Path:
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in zip(TEXTS, SECOND, strict=True)]  # fmt: skip
    return _lines(path, rows)


def _lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lora(base: Path, out: Path, modules: str | Sequence[str], seed: int = 0, **more: Any) -> Path:
    """A LoRA adapter of random factors on a folder's model, written by PEFT."""
    import peft
    import transformers

    config = transformers.AutoConfig.from_pretrained(base)
    model = getattr(transformers, config.architectures[0]).from_pretrained(base)
    torch.manual_seed(seed)
    names = modules if isinstance(modules, str) else list(modules)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": names, **more}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(out)
    return out


def times(given: Path, out: Path, factor: float) -> Path:
    """The same adapter with its change multiplied: backwards, by a negative number."""
    out.mkdir()
    shutil.copy(given / "adapter_config.json", out)
    tensors = load_file(given / "adapter_model.safetensors")
    save_file({name: factor * value if "lora_B" in name else value for name, value in tensors.items()},
              out / "adapter_model.safetensors", metadata={"format": "pt"})  # fmt: skip
    return out
