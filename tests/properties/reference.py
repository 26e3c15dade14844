"""A plain second writing of the paper's BiCo and of THESEUS: hooks, autograd, one decomposition for each map.

It imports nothing of the package, holds all it needs at once and is written to be read beside the paper's section 4,
so that an error in the package's capture, pairing, token matching, sums or solvers cannot be in both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]
Grids = tuple[tuple[int, int], tuple[int, int]]  # rows and columns of patches, source and target


def record(model: nn.Module, loss: Loss, inputs: Any) -> dict[str, dict[str, Tensor]]:
    """What every linear layer reads (x), makes (y), and the gradient of the loss at what it makes (g)."""
    found: dict[str, dict[str, Tensor]] = {"x": {}, "y": {}, "g": {}}

    def watch(name: str, module: nn.Module) -> Any:
        def seen(_: nn.Module, arguments: tuple[Tensor, ...], y: Tensor) -> None:
            found["x"][name] = read(module, arguments[0].detach().clone())
            found["y"][name] = made(y.detach().clone())
            y.register_hook(lambda g: found["g"].__setitem__(name, made(g)))

        return module.register_forward_hook(seen)

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    handles = [watch(name, module) for name, module in layers]
    loss(model, inputs).backward()
    for handle in handles:
        handle.remove()
    return found


def read(module: nn.Module, x: Tensor) -> Tensor:
    """A convolution that cuts an image into patches reads one row for each patch."""
    return F.unfold(x, module.kernel_size, stride=module.stride).mT if isinstance(module, nn.Conv2d) else x


def made(y: Tensor) -> Tensor:
    """[n, d, rows, columns] of such a convolution as [n, tokens, d]."""
    return y.flatten(2).mT if y.ndim == 4 else y


def same_tokens(a: Tensor, b: Tensor, grids: Grids | None, masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[M, d_A] and [M, d_B], row by row one token: patches brought to the target's grid, padding left out."""
    if grids is not None and a.ndim == 3:
        front = a.shape[1] - math.prod(grids[0])  # class tokens stay
        patches = F.interpolate(a[:, front:].mT.unflatten(2, grids[0]), grids[1], mode="bilinear", align_corners=False)
        a = torch.cat([a[:, :front], patches.flatten(2).mT], dim=1)
    keep = next((mask.bool() for mask in masks if mask.shape == b.shape[:-1]), torch.ones(b.shape[:-1]).bool())
    return a[keep], b[keep]


def isometry(C: Tensor) -> Tensor:
    """R = U Vᵀ of C = U Σ Vᵀ on the directions that the samples show: above a millionth of the largest."""
    U, sigma, Vh = torch.linalg.svd(C, full_matrices=False)
    kept = sigma > 1e-6 * sigma[0]
    return U[:, kept] @ Vh[kept]


def partner(name: str, A: nn.Module, B: nn.Module) -> str:
    """The layer of the same name in the source's block i(j) = round(j (D_A − 1) / (D_B − 1)), halves up."""
    found = re.match(r"(.*?)\.(\d+)\.(.*)", name)
    if found is None:
        return name
    stack, j, rest = found[1], int(found[2]), found[3]
    depth_A, depth_B = len(A.get_submodule(stack)), len(B.get_submodule(stack))  # type: ignore[arg-type]
    return f"{stack}.{math.floor(j * (depth_A - 1) / (depth_B - 1) + 0.5)}.{rest}"


def move(
    A: nn.Module,
    B: nn.Module,
    loss: Loss,
    samples: Sequence[tuple[Any, Any, Sequence[Tensor]]],
    tau: Mapping[str, Tensor],
    *,
    outputs: str = "g",
    grids: Grids | None = None,
) -> dict[str, Tensor]:
    """τ_B = R_outᵀ τ_A R_in for every layer of the target. `outputs`: "g" is BiCo, "y" is THESEUS.

    `samples`: micro-batches, each as the inputs of A, those of B and the masks [n, L] of their tokens.
    """
    C: dict[tuple[str, str], Tensor] = {}
    for inputs_A, inputs_B, masks in samples:
        rows_A, rows_B = record(A, loss, inputs_A), record(B, loss, inputs_B)
        for kind in ("x", outputs):
            for name, b in rows_B[kind].items():
                a, b = same_tokens(rows_A[kind][partner(name, A, B)], b, grids, masks)
                C[kind, name] = C.get((kind, name), 0) + a.T @ b
    moved = {}
    for name, layer in B.named_modules():
        source = partner(name, A, B)
        if (outputs, name) in C and f"{source}.weight" in tau:
            R_in, R_out = isometry(C["x", name]), isometry(C[outputs, name])
            moved[f"{name}.weight"] = (R_out.T @ tau[f"{source}.weight"].flatten(1) @ R_in).view_as(layer.weight)
            if f"{source}.bias" in tau:
                moved[f"{name}.bias"] = tau[f"{source}.bias"] @ R_out
    return moved
