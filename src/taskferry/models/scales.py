"""Weights of 8 bits with scales beside them: FP8 by blocks, rows or tensors, and plain 8-bit integers.

    >>> scales = Scales(form_of(folder), files)                    # names in the files -> what belongs together
    >>> scales.restore("model.layers.0.mlp.up_proj.weight", stored)           # stored x scale, in float32

The products are those of transformers (fp8, mxfp8, fbgemm_fp8) and of compressed-tensors. Blocks at the edges may be
cut, which transformers refuses, or takes for smaller ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from taskferry.errors import TaskferryError
from taskferry.models.folders import tensor_files
from taskferry.models.quantised import ORIGINAL, Form

_EIGHT_BITS = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8", "uint8")
)
_INTEGERS = (torch.int8, torch.uint8)
_SCALES = ("_scale_inv", "_scale")  # behind the name of a weight
_OTHER_SCALES = (".scale", ".qscale_weight")  # in place of ".weight"
_ZERO, _ORDER = "_zero_point", "_g_idx"
# What belongs to a weight or to activations that were quantised as well, and is no weight.
BESIDE = (
    "weight_scale_inv", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "qscale_weight",
    "activation_scale", "input_scale", "input_scale_ub", "input_zero_point", "output_scale", "output_zero_point",
    "q_scale", "k_scale", "v_scale", "qscale_act",
)  # fmt: skip


class Scales:
    """Which names in a checkpoint belong to which weight, and what the weight is."""

    def __init__(self, form: Form | None, files: Mapping[str, Path]) -> None:
        self.form, self.files = form, files

    def restore(self, name: str, stored: Tensor) -> Tensor:
        """The weight itself; anything of more than 8 bits is one already."""
        if stored.dtype not in _EIGHT_BITS:
            return stored
        scale, where = self._scale(name), self.files[name]
        if self.form is None or scale is None or f"{name}{_ORDER}" in self.files:
            lacks = "config.json does not say how it was quantised" if self.form is None else "its scale is not there"
            if scale is not None and self.form is not None:
                lacks = "its columns are in an order of their own"
            raise TaskferryError(f"{where}: {name} is stored as {_called(stored)} and {lacks}: {ORIGINAL}")
        if stored.dtype in _INTEGERS and not self.form.integers:
            raise TaskferryError(f"{where}: {name} is stored as {_called(stored)}, packed somehow: {ORIGINAL}")
        values = stored.float()
        if f"{name}{_ZERO}" in self.files:
            zero = self._read(f"{name}{_ZERO}")
            if zero.dtype not in _EIGHT_BITS:
                raise TaskferryError(f"{where}: {name} has zero points of {_called(zero)}: {ORIGINAL}")
            values -= self._spread(name, zero.float(), values.shape)
        factors = self._read(scale)
        # A byte is the exponent of a power of two.
        factors = (factors.float() - 127).exp2() if factors.dtype == torch.uint8 else factors.float()
        return values.mul_(self._spread(name, factors, values.shape))

    def belongs(self, name: str) -> bool:
        """Whether this is a scale or the like, not a weight."""
        if name.rpartition(".")[2] in BESIDE:
            return True
        stems = [name.removesuffix(end) for end in (*_SCALES, _ZERO) if name.endswith(end)]
        weights = [f"{name.removesuffix(end)}.weight" for end in _OTHER_SCALES if name.endswith(end)]
        return any(each in self.files for each in (*stems, *weights))

    def has_scale(self, name: str) -> bool:
        """Whether this is a weight that is stored with a scale."""
        return self._scale(name) is not None

    def _read(self, name: str) -> Tensor:
        return read_tensor(self.files[name], name)

    def _scale(self, name: str) -> str | None:
        others = [name.removesuffix(".weight") + end for end in _OTHER_SCALES] if name.endswith(".weight") else []
        return next((each for each in (*(name + end for end in _SCALES), *others) if each in self.files), None)

    def _spread(self, name: str, grid: Tensor, shape: Sequence[int]) -> Tensor:
        """A number for every weight of a block, or something that torch spreads itself."""
        if grid.numel() == 1:
            return grid.reshape(())
        if grid.ndim == 1 and grid.shape[0] == shape[0]:
            grid = grid.reshape(-1, *(1 for _ in shape[1:]))
        given = tuple(grid.shape)
        blocks = (None,) * (len(shape) - 2) + (self.form.block if self.form and self.form.block else (None, None))
        for axis, (size, block) in enumerate(zip(shape, blocks, strict=False)):
            count = grid.shape[axis] if grid.ndim == len(shape) else 0
            if count in (1, size):
                continue
            fits = block is not None and -(-size // block) == count
            step = block if fits else size // count if count and size % count == 0 else None
            if step is None:
                raise TaskferryError(
                    f"{self.files[name]}: {name} is {tuple(shape)}, its scales {given} do not fit: {ORIGINAL}"
                )
            grid = grid.repeat_interleave(step, axis).narrow(axis, 0, size)
        return grid


def restored_state(folder: Path, form: Form) -> dict[str, Tensor]:
    """All tensors of a folder by their names in the files, weights restored in float32."""
    files = tensor_files(folder)
    scales = Scales(form, files)
    return {
        name: scales.restore(name, read_tensor(file, name)) for name, file in files.items() if not scales.belongs(name)
    }


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a safetensors file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise TaskferryError(f"{path} cannot be read: {error}") from error


def _called(stored: Tensor) -> str:
    return str(stored.dtype).removeprefix("torch.")
