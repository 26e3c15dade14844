"""Pre-train the zoo: small true OpenCLIP models on glyphs of Debian's fonts and QuickDraw drawings with captions.

    python benchmarks/zoo/pretrain_zoo.py narrow [--quick]  # or wide, twin, deep; about ten minutes each

Writes benchmarks/zoo/NAME: open_clip_model.safetensors (float16), open_clip_config.json, training.json (command, seed,
versions, losses, accuracy on held-out fonts). `narrow` sees the first part of fonts and drawings, the others the
second: no font family and no drawing is shared, the vocabulary of captions is.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.zoo import zoo_data

# name: width, blocks, image size, patch, embedding, part of the data, seed
MODELS: dict[str, tuple[int, int, int, int, int, str, int]] = {
    "narrow": (128, 6, 32, 8, 64, "first", 0),
    "wide": (192, 6, 40, 8, 96, "second", 1),
    "twin": (128, 6, 32, 8, 64, "second", 2),
    "deep": (128, 10, 32, 8, 64, "second", 3),
}
STEPS, BATCH, RATE = 1600, 256, 1e-3
MEAN, STD = (0.25, 0.25, 0.25), (0.35, 0.35, 0.35)
LETTER = ("a {} letter {}.", "the {} letter {}.", "a picture of a {} letter {}.", "the letter {1}.", "a letter {1}.")
DIGIT = ("a digit {1}.", "the digit {1}.", "a picture of the digit {1}.", "the number {1}.", "a picture of a {1}.")
DRAWING = ("a drawing of a {}.", "a picture of a {}.", "a sketch of a {}.", "a {}.", "a photo of a {}.")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STYLES = ("", "italic ", "bold ", "bold italic ")


def configuration(name: str) -> dict[str, Any]:
    """What OpenCLIP builds the model from."""
    width, blocks, image, patch, embedding, _, _ = MODELS[name]
    vision = {"image_size": image, "patch_size": patch, "width": width, "layers": blocks, "head_width": 32}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    model = {"embed_dim": embedding, "vision_cfg": vision, "text_cfg": text}
    return {"model_cfg": model, "preprocess_cfg": {"mean": MEAN, "std": STD, "interpolation": "bicubic"}}


class Pairs:
    """Pictures with captions of one part of the data, drawn with fresh colours, places and words each time."""

    def __init__(self, part: str, image_size: int, seed: int) -> None:
        self.size, self.rng = image_size, np.random.default_rng(seed)
        glyphs = zoo_data.glyphs()
        mine = glyphs["parts"] == zoo_data.PARTS.index(part)
        drawings, classes, self.names = zoo_data.quickdraw()
        held_out = np.isin(classes, [self.names.index(name) for name in zoo_data.HELD_OUT])
        # Each class has its hundred drawings in a row: even ones for one part, odd ones for the other.
        half = (np.arange(len(classes)) % 2 == ("first", "second").index(part)) & ~held_out
        enlarged = F.interpolate(torch.from_numpy(drawings[half])[:, None].float(), zoo_data.SIZE, mode="bilinear")
        self.pictures = torch.cat([torch.from_numpy(glyphs["pictures"][mine]), enlarged[:, 0].round().to(torch.uint8)])
        self.classes = np.concatenate([glyphs["characters"][mine].astype(int), classes[half] + 62])
        self.styles = np.concatenate([glyphs["styles"][mine], np.zeros(half.sum(), np.uint8)])

    def batch(self, n: int) -> tuple[Tensor, list[str], Tensor]:
        """Pictures [n, 3, S, S] normalised, captions, classes [n]."""
        chosen = self.rng.integers(len(self.classes), size=n)
        pictures = augment(self.pictures[torch.from_numpy(chosen)], self.size, self.rng)
        captions = [self.caption(int(self.classes[i]), int(self.styles[i])) for i in chosen]
        return pictures, captions, torch.from_numpy(self.classes[chosen])

    def caption(self, number: int, style: int) -> str:
        pick = self.rng.integers(5)
        if number >= 62:
            return DRAWING[pick].format(self.names[number - 62])
        character = zoo_data.CHARACTERS[number]
        words = STYLES[style] if self.rng.random() < 0.5 else ""
        if number >= 52:
            return DIGIT[pick].format("", DIGITS[int(character)] if self.rng.random() < 0.5 else character)
        return LETTER[pick].format(words + ("capital" if number < 26 else "small"), character.lower())


def augment(pictures: Tensor, size: int, rng: np.random.Generator) -> Tensor:
    """A bright colour on a dark one, turned, moved and scaled a little; normalised as the models expect."""
    n = len(pictures)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.from_numpy(rng.uniform(low, high, shape or (n,)).astype(np.float32))

    angle, zoom, shear = uniform(-0.2, 0.2), uniform(0.8, 1.3), uniform(-0.2, 0.2)
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    rows = [torch.stack([cos, -sin + shear, uniform(-0.15, 0.15)], 1), torch.stack([sin, cos, uniform(-0.15, 0.15)], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), [n, 1, size, size], align_corners=False)
    grey = F.grid_sample(pictures[:, None].float() / 255, grid, align_corners=False)
    ink, paper = uniform(0.4, 1.0, n, 3, 1, 1), uniform(0.0, 0.25, n, 3, 1, 1)
    image = (
        paper
        + (ink - paper) * grey
        + 0.05 * torch.from_numpy(rng.standard_normal((n, 3, size, size)).astype(np.float32))
    )
    return (image.clamp(0, 1) - MEAN[0]) / STD[0]


def contrast(image: Tensor, text: Tensor, scale: Tensor, classes: Tensor) -> Tensor:
    """CLIP's loss in both directions; pictures and captions of one class are all right answers to each other."""
    logits = scale * image.float() @ text.float().T
    same = (classes[:, None] == classes[None, :]).float()
    right = same / same.sum(1, keepdim=True)
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


@torch.no_grad()
def held_out_accuracy(model: nn.Module, tokenizer: Any, size: int, seed: int) -> float:
    """Zero-shot accuracy in per cent on characters (62 classes) of fonts that no model saw."""
    glyphs, rng = zoo_data.glyphs(), np.random.default_rng(seed)
    mine = np.flatnonzero(glyphs["parts"] == zoo_data.PARTS.index("tasks"))
    chosen = rng.choice(mine, min(2000, len(mine)), replace=False)
    names = [
        f"the digit {c}." if c.isdigit() else f"a {'capital' if c.isupper() else 'small'} letter {c.lower()}."
        for c in zoo_data.CHARACTERS
    ]
    clip: Any = model.eval()
    head = F.normalize(clip.encode_text(tokenizer(names)), dim=-1)
    features = clip.encode_image(augment(torch.from_numpy(glyphs["pictures"][chosen]), size, rng))
    right = (F.normalize(features, dim=-1) @ head.T).argmax(1).numpy() == glyphs["characters"][chosen]
    model.train()
    return 100 * float(right.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--quick", action="store_true", help="20 steps, nothing written to the zoo")
    options = parser.parse_args()
    import open_clip
    import safetensors.torch

    _, _, size, _, _, part, seed = MODELS[options.name]
    steps, started = 20 if options.quick else STEPS, time.time()
    torch.manual_seed(seed)
    config = configuration(options.name)
    model = open_clip.CLIP(**config["model_cfg"]).train()
    tokenizer = open_clip.SimpleTokenizer(context_length=16)
    pairs = Pairs(part, size, seed)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimiser = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], RATE
    )

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    log: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        pictures, captions, classes = pairs.batch(BATCH)
        # Half precision is twice as fast here, but not in the fused attention, whose backward pass is slow.
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
            image, text, scale = model(pictures, tokenizer(captions))
        loss = contrast(image, text, scale, classes)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if step % (10 if options.quick else 200) == 0:
            accuracy = held_out_accuracy(model, tokenizer, size, 0)
            log.append({"step": step, "loss": round(loss.item(), 3), "held_out_fonts": round(accuracy, 1)})
            print(log[-1], f"{time.time() - started:.0f} s", flush=True)
    record = {
        "command": f"python benchmarks/zoo/pretrain_zoo.py {options.name}",
        "seed": seed,
        "part": part,
        "pictures": len(pairs.classes),
        "steps": steps,
        "batch": BATCH,
        "precision": "bfloat16 autocast, float32 weights, kept as float16",
        "torch": torch.__version__,
        "open_clip": open_clip.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
        "seconds": round(time.time() - started),
        "log": log,
    }
    if not options.quick:
        out = zoo_data.ZOO / options.name
        out.mkdir(parents=True, exist_ok=True)
        state = {k: v.detach().half().contiguous() for k, v in model.state_dict().items()}
        safetensors.torch.save_file(state, out / "open_clip_model.safetensors", metadata={"format": "pt"})
        (out / "open_clip_config.json").write_text(json.dumps(config, indent=1) + "\n")
        (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
