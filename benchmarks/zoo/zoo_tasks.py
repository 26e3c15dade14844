"""The tasks of the zoo as folders that every taskferry command reads: train.parquet, test.parquet, classes.json.

    python benchmarks/zoo/zoo_tasks.py OUT [task …]

Seven tasks: handwriting (mnist, letters), photographs (fashion, cifar10), glyphs of fonts that no model saw under
corruptions that no model saw (occluded, case), and drawings of classes that no model saw (drawings). Two more that no
choice was ever made on: traffic signs (signs) and surfaces (textures). At most 4,000 training and 1,000 test pictures
each; glyph tasks split by font, the rest as published.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from PIL import Image

from benchmarks.zoo import zoo_data

TRAIN, TEST = 4000, 1000
LETTERS = [chr(ord("a") + i) for i in range(26)]
CLOTHES = ["t-shirt", "pants", "sweater", "dress", "jacket", "flip flops", "shirt", "shoe", "purse", "boot"]
SIGNS = ["limit 20", "limit 30", "limit 50", "limit 60", "limit 70", "limit 80", "end of 80", "limit 100", "limit 120",
         "no passing", "no passing for trucks", "right of way", "priority road", "yield", "stop", "no vehicles",
         "no trucks", "no entry", "caution", "curve to the left", "curve to the right", "double curve", "bumpy road",
         "slippery road", "narrow road", "road work", "traffic signals", "pedestrians", "children", "bicycles", "snow",
         "animals", "end of all limits", "turn right", "turn left", "ahead only", "ahead or right", "ahead or left",
         "keep right", "keep left", "roundabout", "end of no passing", "end of no passing for trucks"]  # fmt: skip
TEXTURES = ["banded", "blotchy", "braided", "bubbly", "bumpy", "chequered", "cobwebbed", "cracked", "crosshatched",
            "crystalline"]  # fmt: skip
THINGS = ["airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def published(kind: Any, split: str) -> tuple[list[Any], list[int]]:
    """A seeded part of a published split."""
    pictures, labels = kind(split)
    n = TRAIN if split == "train" else TEST
    chosen = np.random.default_rng(0).permutation(len(labels))[:n]
    return [pictures[i] for i in chosen], [int(labels[i]) for i in chosen]


def glyph_task(split: str, label: Any, corrupt: Any) -> tuple[list[Any], list[int]]:
    """Corrupted glyphs of the task fonts; every fourth font is for testing."""
    glyphs, rng = zoo_data.glyphs(), np.random.default_rng(1 if split == "train" else 2)
    mine = np.flatnonzero(glyphs["parts"] == zoo_data.PARTS.index("tasks"))
    font = mine // 62
    rank = {f: i for i, f in enumerate(sorted(set(font.tolist())))}
    testing = np.array([rank[f] % 4 == 0 for f in font.tolist()])
    chosen = mine[testing if split == "test" else ~testing]
    labels = [label(int(c)) for c in glyphs["characters"][chosen]]
    kept = rng.permutation([i for i, c in enumerate(labels) if c is not None])[: TRAIN if split == "train" else TEST]
    return [corrupt(glyphs["pictures"][chosen[i]], rng) for i in kept], [labels[i] for i in kept]


def occlude(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A bar of noise across, and light ink."""
    image = picture.astype(np.float32) * rng.uniform(0.4, 1)
    start = rng.integers(8, zoo_data.SIZE - 14)
    bar = image[start : start + 7] if rng.random() < 0.5 else image[:, start : start + 7]
    bar[...] = rng.uniform(0, 255, bar.shape)
    return image.clip(0, 255).astype(np.uint8)


def drown(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Faint, under noise and a gradient of light."""
    light = np.linspace(0, rng.uniform(20, 80), zoo_data.SIZE)[None, :]
    image = picture.astype(np.float32) * 0.6 + light + rng.normal(0, 30, picture.shape)
    return image.clip(0, 255).astype(np.uint8)


def drawings(split: str) -> tuple[list[Any], list[int]]:
    """Eighty drawings of each held-out class to train on, twenty to test."""
    X, y, names = zoo_data.quickdraw()
    pictures, labels = [], []
    for label, name in enumerate(zoo_data.HELD_OUT):
        members = np.flatnonzero(y == names.index(name))
        for i in members[:80] if split == "train" else members[80:]:
            pictures.append(X[i])
            labels.append(label)
    return pictures, labels


def upper(character: int) -> int | None:
    return character if character < 26 else None


def case(character: int) -> int | None:
    return 0 if character < 26 else 1 if character < 52 else 2


TASKS: dict[str, tuple[Any, list[str]]] = {
    "mnist": (lambda split: published(zoo_data.mnist, split), [str(i) for i in range(10)]),
    "letters": (lambda split: published(lambda s: zoo_data.shared_images("emnist_letters", s), split), LETTERS),
    "fashion": (lambda split: published(zoo_data.fashion, split), CLOTHES),
    "cifar10": (lambda split: published(lambda s: zoo_data.shared_images("cifar10", s), split), THINGS),
    "occluded": (lambda split: glyph_task(split, upper, occlude), LETTERS),
    "case": (lambda split: glyph_task(split, case, drown), ["capital letter", "small letter", "digit"]),
    "drawings": (drawings, list(zoo_data.HELD_OUT)),
    "signs": (lambda split: published(lambda s: zoo_data.shared_images("gtsrb", s), split), SIGNS),
    "textures": (lambda split: published(lambda s: zoo_data.shared_images("dtd10", s), split), TEXTURES),
}


def encode(picture: Any) -> bytes:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(np.asarray(picture))
    out = io.BytesIO()
    image.convert("RGB").save(out, "PNG")
    return out.getvalue()


def write(name: str, out: Path) -> Path:
    """A task's folder, made once."""
    import pyarrow
    import pyarrow.parquet

    make, classes = TASKS[name]
    folder = out / name
    if (folder / "classes.json").exists():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        pictures, labels = make(split)
        table = pyarrow.table({"image": [encode(p) for p in pictures], "label": labels})
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
        print(f"{name} {split}: {len(labels)} pictures, {len(set(labels))} classes")
    (folder / "classes.json").write_text(json.dumps(classes))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("tasks", nargs="*", metavar="task", help=", ".join(TASKS))
    options = parser.parse_args()
    for name in options.tasks or TASKS:
        write(name, options.out)


if __name__ == "__main__":
    main()
