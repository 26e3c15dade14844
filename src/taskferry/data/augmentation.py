"""More inputs than there are samples: augmented views of images, the same change for both models.

    >>> views = Views(calibration, views=15)
    >>> A, B = views.pair([3, 141])              # the third sample as it is, and a copy of sample 41

A copy is turned, stretched and shifted a little, its contrast changed, and some (half, unless told) are blended with
another sample: what a copy then is, a model says best, and labels are blended in the same shares. Coordinates are
relative to the image, so two models of different resolution see the same picture. Texts have no views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from taskferry.data.batch import IGNORED, Batch, Calibration

TURN, STRETCH, SHEAR, SHIFT, CONTRAST = 0.26, 0.15, 0.15, 0.2, 0.2  # radians, shares; shift of half a side
BLENDED = 0.5  # share of the views that are blended with another sample


class Views:
    """The samples of a calibration set by number, then `views` of each; number i is of sample i mod N.

    `strength` is a share of the largest changes, `blended` the share of the views that another sample is blended into.
    """

    def __init__(
        self, calibration: Calibration, views: int, seed: int = 0, strength: float = 1.0, blended: float = BLENDED
    ) -> None:
        self.strength, self.blended = strength, blended
        self.sides = _whole(calibration.side(0)), _whole(calibration.side(1))
        self.samples, self.seed = calibration.samples, seed
        self.views = views if are_images(calibration) else 0

    def __len__(self) -> int:
        return self.samples * (1 + self.views)

    def pair(self, indices: Sequence[int]) -> tuple[Batch, Batch]:
        """These inputs as each of the models takes them."""
        return self.side(0, indices), self.side(1, indices)

    def side(self, which: int, indices: Sequence[int]) -> Batch:
        """These inputs as one of the models takes them."""
        numbers, copied, of, other, share = self._parts(indices)
        changed = {}
        for name, x in self.sides[which].items():
            if not bool(copied.any()):
                changed[name] = x[of.to(x.device)]
                continue
            by = 0.5 + self.strength * (numbers - 0.5)
            mine = warp(x[of], by[:, :6])
            if self.blended:
                part = share.to(x)[:, None, None, None]
                mine = (1 - part) * mine + part * warp(x[other], by[:, 6:12])
            keep = copied[:, None, None, None].to(x.device)
            changed[name] = torch.where(keep, mine, x[of])
        return Batch(changed, ids=tuple(indices))

    def samples_in(self, index: int) -> set[int]:
        """Which samples an input shows."""
        _, _, of, other, share = self._parts([index])
        return {int(of), int(other)} if share > 0 else {int(of)}

    def blend(self, values: Tensor, indices: Sequence[int]) -> Tensor:
        """[n, …] what is known of each sample, [N, …], in the shares that these inputs have of two of them."""
        _, _, of, other, share = self._parts(indices)
        part = share.to(values)[:, None]
        return (1 - part) * values[of] + part * values[other]

    def _parts(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Numbers [n, 14] in 0 … 1; [n] each: whether a copy, its sample, the one blended in, the share of that."""
        numbers = torch.stack([self._numbers(i) for i in indices])
        copied = torch.tensor([i >= self.samples for i in indices])
        of = torch.tensor([i % self.samples for i in indices])
        other = (numbers[:, 13] * self.samples).long().clamp_max(self.samples - 1)
        blended = copied & (numbers[:, 12] < self.blended)
        return numbers, copied, of, other, torch.where(blended, numbers[:, 12], 0.0)

    def _numbers(self, index: int) -> Tensor:
        """The same for the same input, whatever it is asked for with."""
        return torch.rand(14, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + index))


def are_images(calibration: Calibration) -> bool:
    """Whether all inputs of both models are images, of one size each."""
    for which in (0, 1):
        batches = [batch.inputs for batch in calibration.side(which)]
        if not all(x.ndim == 4 and x.is_floating_point() for inputs in batches for x in inputs.values()):
            return False
        if len({tuple((name, x.shape[1:]) for name, x in inputs.items()) for inputs in batches}) > 1:
            return False
    return True


def warp(images: Tensor, numbers: Tensor) -> Tensor:
    """Images [n, c, h, w] turned, stretched, sheared, shifted and of other contrast; 0.5 everywhere changes nothing."""
    turn, stretch, shear, right, down, contrast = (2 * numbers.to(images) - 1).T
    size, angle = 1 + STRETCH * stretch, TURN * turn
    cos, sin = angle.cos() / size, angle.sin() / size
    rows = [torch.stack([cos, sin + SHEAR * shear, SHIFT * right], 1), torch.stack([-sin, cos, SHIFT * down], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    moved: Tensor = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    brighter: Tensor = moved * (1 + CONTRAST * contrast)[:, None, None, None]
    return brighter


def _whole(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """All samples of one model in one tensor for each input; shorter texts are padded, and masked as before."""
    whole = {}
    for name in batches[0].inputs:
        parts = [batch.inputs[name] for batch in batches]
        largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        value = IGNORED if name == "labels" else 0
        whole[name] = torch.cat([_padded(part, largest, value) for part in parts])
    return whole


def _padded(x: Tensor, largest: Sequence[int], value: int) -> Tensor:
    """Behind what is there, in every dimension but that of the samples: tokens, or patches of smaller pictures."""
    behind = [
        amount for size, most in zip(x.shape[:0:-1], reversed(largest), strict=True) for amount in (0, most - size)
    ]
    return F.pad(x, behind, value=value) if any(behind) else x
