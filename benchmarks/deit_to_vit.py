"""One real pair: a CIFAR-10 fine-tune of deit_tiny moved to vit_tiny, pre-trained independently (same shape).

    python benchmarks/deit_to_vit.py [--quick] [--json benchmarks/results/deit_to_vit.json]

The head of every row is the class prototypes of the same N labelled training images, computed with that row's own
features; nothing is chosen on test images, and the few-shot steps are fixed beforehand.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from pathlib import Path

import common
import torch
from torch import Tensor, nn

from taskferry import Batch, Prototypes, TaskVector, fit, image_calibration
from taskferry.scale import scale_on_calibration

SIZE = 112


def load(name: str) -> nn.Module:
    import timm

    folder = common.SHARED / "models" / name
    return timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=SIZE, num_classes=0).eval().float()


def images(path: Path, limit: int | None) -> tuple[Tensor, Tensor]:
    import pyarrow.parquet as parquet
    from PIL import Image

    rows = parquet.read_table(path).to_pydict()
    pixels = []
    for cell in rows["image"][:limit]:
        data = cell["bytes"] if isinstance(cell, dict) else cell
        picture = Image.open(io.BytesIO(data)).convert("RGB").resize((SIZE, SIZE))
        raw = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        pixels.append(raw.reshape(SIZE, SIZE, 3).permute(2, 0, 1))
    return torch.stack(pixels), torch.tensor(rows["label"][:limit])


def transform(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Each model's own normalisation."""
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    return lambda pixels: (pixels.float() / 255 - mean) / std


def train(model: nn.Module, pixels: Tensor, labels: Tensor, steps: int, lr: float, batch: int, seed: int) -> nn.Module:
    """AdamW towards a linear head trained with it; the head is thrown away."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model).train()
    prepare = transform(model)
    head = nn.Linear(model.num_features, 10)
    parameters = [{"params": model.parameters(), "lr": lr}, {"params": head.parameters(), "lr": 1e-3}]
    optimiser = torch.optim.AdamW(parameters, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        chosen = torch.randint(0, len(pixels), (batch,))
        loss = nn.functional.cross_entropy(head(model(prepare(pixels[chosen]))), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, shots: list[Batch], pixels: Tensor, labels: Tensor) -> float:
    logits, prepare, right = Prototypes().logits(model, shots), transform(model), 0
    for start in range(0, len(pixels), 250):
        batch = Batch({"x": prepare(pixels[start : start + 250])})
        right += int((logits(batch).argmax(1) == labels[start : start + 250]).sum())
    return 100 * right / len(pixels)


def main() -> None:
    options = common.arguments(__doc__ or "")
    shared, started = common.need_shared(), time.time()
    steps, seeds, limit = (20, [0], 400) if options.quick else (250, [0, 1, 2], None)
    source, target = load("deit_tiny_patch16_224"), load("vit_tiny_patch16_224_tinyimagenet")
    pixels, labels = images(shared / "data/cifar10/train.parquet", limit)
    test = images(shared / "data/cifar10/test.parquet", limit)
    tuned = train(source, pixels, labels, steps, 5e-5, 64, seed=0)
    tau = TaskVector.between(source, tuned)
    rows: dict[str, list[float]] = {}
    scales: list[float] = []
    for seed in seeds:
        chosen = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))[:100].tolist()
        shots = image_calibration(
            [pixels[i] for i in chosen],
            transform(source),
            transform(target),
            key=("x", "x"),
            labels=[int(labels[i]) for i in chosen],
            micro_batch=25,
        )
        moved = fit(source, target, shots).apply(tau)
        curve = scale_on_calibration(target, moved, Prototypes().bind(target, shots.side(1)), shots.side(1))
        print(f"seed {seed}: scale {curve.best:.2f}", [(round(s, 2), round(v, 3)) for s, v in curve.points], flush=True)
        scales.append(curve.best)
        few = train(target, pixels[chosen], labels[chosen], min(steps, 60), 5e-5, 50, seed=seed)
        candidates = {
            "target as it is": target,
            "+ source's task vector, added as it is": tau.add_to(copy.deepcopy(target)),
            "+ BiCo, scale 1 (the paper)": moved.add_to(copy.deepcopy(target)),
            "+ BiCo, scale chosen on the 100 images": moved.add_to(copy.deepcopy(target), scale=curve.best),
            "target, few-shot tuned on the same 100 images": few,
            "source, tuned on all 4,000 images": tuned,
        }
        for name, model in candidates.items():
            # Each row's head is made of its own model's features of the 100 images.
            side = shots.side(0 if model is tuned else 1)
            rows.setdefault(name, []).append(accuracy(model, side, *test))
            print(f"seed {seed}: {name}: {rows[name][-1]:.1f}", flush=True)
    markdown = common.table(
        ["deit_tiny → vit_tiny, CIFAR-10, 100 labelled images", "accuracy"],
        [[name, common.mean_spread(values)] for name, values in rows.items()],
    )
    failures = []
    if not options.quick and sum(rows["+ BiCo, scale 1 (the paper)"]) <= sum(rows["target as it is"]):
        failures.append("BiCo does not gain over the target")
    common.finish(
        {"rows": rows, "seeds": seeds, "steps": steps, "scales": scales}, markdown, options.json, failures, started
    )


if __name__ == "__main__":
    main()
