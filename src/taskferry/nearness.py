"""Distance between two bases, layer by layer, read from their files in parts: no model is loaded.

>>> near = nearness(Path("base-a"), Path("base-b"), change_norms(Path("my-lora"), Path("base-a")))
>>> near.sentence
'close relative: 3.1% of the weights apart, cosine 0.9995; 2.4 times the fine-tune's change"
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from taskferry.errors import TaskferryError
from taskferry.models.peft import TIED, Skeleton, is_adapter, read_adapter, read_config
from taskferry.models.states import tensor_files

MAPPED, PART = 2**23, 2**18  # numbers of a tensor that are mapped at once, and that are compared at once
# Rounding to 4 bits moves weights by about a tenth and leaves a model that works; independent trainings of one shape
# have a cosine near 0 (0.006 between deit-tiny and vit-tiny).
CLOSE, UNRELATED = 0.15, 0.1
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a block or an expert
Sums = tuple[float, ...]  # ‖θ_A‖², ‖θ_B − θ_A‖², ⟨θ_A, θ_B − θ_A⟩; ‖τ‖², ‖θ_B − θ_A‖² where τ changes something


def figures(layers: Iterable[Sums]) -> dict[str, float | None]:
    """‖θ_B − θ_A‖ / ‖θ_A‖, the cosine, and ‖θ_B − θ_A‖ / ‖τ‖ where τ changes something, over some layers together."""
    before, apart, along, change, noise = map(math.fsum, zip(*layers, strict=True))
    after = before + 2 * along + apart
    return {
        "distance": math.sqrt(apart / before) if before else None,
        "cosine": (before + along) / math.sqrt(before * after) if before and after > 0 else None,
        "to_change": math.sqrt(noise / change) if change else None,
    }


@dataclass(frozen=True)
class Nearness:
    """Sums of every tensor that two bases share, and why the others cannot be compared."""

    layers: Mapping[str, Sums]
    differ: Mapping[str, str]
    total: Mapping[str, float | None]  # of the matrices in blocks: gains and tables of tokens are alike in any model

    @property
    def relation(self) -> str:
        """A word for people."""
        distance, cosine = self.total["distance"], self.total["cosine"]
        if distance is None or cosine is None or len(self.differ) > len(self.layers):
            return "not comparable"
        if not any(apart for _, apart, *_ in self.layers.values()):
            return "same base"
        return "close relative" if distance < CLOSE else "unrelated" if cosine < UNRELATED else "distant relative"

    @property
    def sentence(self) -> str:
        """One line for people."""
        total, text = self.total, self.relation
        if text not in ("not comparable", "same base"):
            text += f": {total['distance']:.1%} of the weights apart, cosine {total['cosine']:.4f}"
            if total["to_change"] is not None:
                text += f"; {total['to_change']:.2g} times the fine-tune's change"
        for name, why in list(self.differ.items())[:1]:
            text += f"; {len(self.differ)} tensors cannot be compared, such as {name}: {why}"
        return text

    def record(self) -> dict[str, Any]:
        """For machines."""
        return {"relation": self.relation, **self.total, "not_compared": len(self.differ), "sentence": self.sentence}


def nearness(A: Path, B: Path, changes: Mapping[str, float] | None = None, most: int = sys.maxsize) -> Nearness:
    """Compare two folders of weights, of large tensors the rows of the first `most` numbers alone.

    `changes` are norms of what a fine-tune changes in A, by parameter.
    """
    of_A, layers, matrices, differ = tensors(A), {}, [], {}
    of_B, norms = respelled(tensors(B), of_A), respelled(changes or {}, of_A)
    for name in dict.fromkeys([*of_A, *of_B]):
        if name not in of_A or name not in of_B:
            if name.split(".")[-2:][0] not in TIED:  # a model without an output layer uses its table of tokens
                differ[name] = f"{(A if name in of_A else B).name} alone has it"
            continue
        (file_A, key_A, shape, form), (file_B, key_B, other, form_B) = of_A[name], of_B[name]
        if shape != other or not {form, form_B} <= {"F64", "F32", "F16", "BF16"}:
            differ[name] = f"{shape} in {form}, and {other} in {form_B}"
            continue
        rows, wide = shape[0], max(1, math.prod(shape[1:]))
        seen, sums, change = min(rows, max(1, most // wide)), [0.0, 0.0, 0.0], norms.get(name, 0.0) ** 2
        for x, y in zip(parts(file_A, key_A, seen, wide), parts(file_B, key_B, seen, wide), strict=True):
            d = y - x
            sums = [a + float(b @ c) * rows / seen for a, b, c in zip(sums, (x, d, x), (x, d, d), strict=True)]
        layers[name] = (*sums, change, sums[1] if change else 0.0)
        matrices += [layers[name]] if len(shape) > 1 and NUMBER.search(name) else []
    return Nearness(layers, differ, figures(matrices or [*layers.values(), (0.0,) * 5]))


def tensors(folder: Path) -> dict[str, tuple[Any, ...]]:
    """File, name, shape and format of every tensor; buffers that count or index are left out."""
    found = {}
    for name, path in tensor_files(folder).items():
        with safe_open(str(path), framework="pt") as file:
            found[name] = path, name, (part := file.get_slice(name)).get_shape(), part.get_dtype()
    if not found:
        raise TaskferryError(f"{folder} has no weights as safetensors: no other files are compared without loading")
    return {name: each for name, each in found.items() if each[2] and each[3] not in ("I64", "BOOL")}


def parts(path: Path, name: str, rows: int, wide: int) -> Iterator[Tensor]:
    """First rows of a tensor in float32; its file is closed again and again, so that no mapped page stays resident."""
    step = max(1, MAPPED // wide)
    for start in range(0, rows, step):
        with safe_open(str(path), framework="pt") as file:
            for part in file.get_slice(name)[start : min(start + step, rows)].flatten().split(PART):
                yield part.float()


def respelled(found: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any]:
    """By the names of another side, which may have a first part such as `model.` more or less."""
    outer = {name.partition(".")[2]: name for name in known}
    inner = {name: name.partition(".")[2] for name in found if name.partition(".")[2] in known}
    return {n if n in known else outer.get(n) or inner.get(n, n): value for n, value in found.items()}


def change_norms(tuned: Path, base: Path) -> dict[str, float]:
    """Norms of what a LoRA or a tuned model changes in its base, by parameter."""
    if not is_adapter(tuned):
        return {name: math.sqrt(apart) for name, (_, apart, *_) in nearness(base, tuned).layers.items()}
    shapes = {name: tuple(shape) for name, (_, _, shape, _) in tensors(base).items()}
    matrices = frozenset(name for name, shape in shapes.items() if len(shape) == 2)
    transposed = matrices if read_config(tuned).get("fan_in_fan_out") else frozenset[str]()
    tau = read_adapter(tuned, Skeleton(shapes, matrices, transposed)).tau
    return {name: float(change.norm()) for name, change in tau.deltas.items()}
