"""LoRAs of experts, as PEFT writes them by `target_parameters` and as older releases did, one module an expert.

PEFT wraps a module once for each parameter that is named, the last of them outside: with gate_up_proj and down_proj of
`mlp.experts`, `mlp.experts.lora_A` belongs to down_proj and `mlp.experts.base_layer.lora_A` to gate_up_proj. The
factors of all experts stand in one matrix each: lora_A [experts · r, in], lora_B [out, r · experts].

Until transformers 5 every expert was a module (`mlp.experts.3.gate_proj`, in Mixtral `w1`): its factors become the
slice of that expert, those of gate and up side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from taskferry.errors import TaskferryError
from taskferry.taskvector import LowRank

if TYPE_CHECKING:
    from taskferry.models.adapters import Skeleton

Factors = dict[str, dict[str, Tensor]]  # module -> "A" and "B"
_OLD = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj|w1|w2|w3)")
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
OLD_NAMES = (*_PARTS, "gate")


def parameters_of(
    folder: Path, factors: Factors, wanted: Any, base: Skeleton
) -> dict[str, tuple[str, dict[str, Tensor]]]:
    """The base's parameters -> the module that holds their factors, and the factors; taken out of `factors`.

    `wanted` is `target_parameters`: whole names, or their ends.
    """
    wanted = wanted or []
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise TaskferryError(f"{folder}: target_parameters is no list of names: the adapter is damaged")
    named = [
        n
        for n in base.parameters
        if any(n == end or f".{n}".endswith(f".{end}") or end.endswith(f".{n}") for end in wanted)
    ]
    found: dict[str, tuple[str, dict[str, Tensor]]] = {}
    for name in named:
        module = wrapped(name, named, base.parameters)
        key = next((key for key in factors if alike(key, module)), None)
        if key is not None:
            found[name] = (key, factors.pop(key))
    return found


def wrapped(name: str, named: Collection[str], parameters: Mapping[str, Any]) -> str:
    """The module of PEFT that has the factors of a parameter, where these are named: the last is the outermost."""
    module = name.rpartition(".")[0]
    beside = [n for n in parameters if n in named and n.rpartition(".")[0] == module]
    return module + (len(beside) - 1 - beside.index(name)) * ".base_layer"


def alike(a: str, b: str) -> bool:
    """With or without a prefix such as `model.`"""
    return a == b or a.endswith(f".{b}") or b.endswith(f".{a}")


def unstacked(A: Tensor, B: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """lora_A and lora_B of all experts as [experts, r, in] and [experts, out, r]."""
    return A.reshape(experts, -1, A.shape[1]), B.reshape(B.shape[0], -1, experts).permute(2, 0, 1)


def stacked(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse."""
    return A.reshape(-1, A.shape[-1]), B.permute(1, 2, 0).reshape(B.shape[1], -1)


def old_experts(
    factors: Factors, change: Callable[[str, dict[str, Tensor]], LowRank], base: Skeleton
) -> dict[str, LowRank]:
    """The changes of experts that were modules, by the parameter that holds them now; taken out of `factors`."""
    plain = {name for name in base.stacked if name not in base.transposed}
    slices: dict[str, dict[int, dict[str, LowRank]]] = {}
    for module in list(factors):
        old = _OLD.fullmatch(module)
        if old is None:
            continue
        part = _PARTS[old["leaf"]]
        now = old["experts"].replace("block_sparse_moe", "mlp")  # Mixtral's
        now += ".down_proj" if part == "down" else ".gate_up_proj"
        name = next((name for name in plain if alike(name, now)), None)
        if name is not None:
            slices.setdefault(name, {}).setdefault(int(old["number"]), {})[part] = change(module, factors.pop(module))
    return {name: _joined(name, experts, base.parameters[name]) for name, experts in slices.items()}


def _joined(name: str, experts: Mapping[int, Mapping[str, LowRank]], shape: tuple[int, ...]) -> LowRank:
    """One stack: experts without factors stay as they are."""
    count, out, in_ = shape
    places = {"gate": (0, out // 2), "up": (out // 2, out), "down": (0, out)}
    rank = max(sum(part.rank for part in parts.values()) for parts in experts.values())
    left, right = torch.zeros(count, out, rank), torch.zeros(count, rank, in_)
    for number, parts in experts.items():
        at = 0
        for part, change in parts.items():
            start, stop = places[part]
            if number >= count or change.shape != (stop - start, in_):
                raise TaskferryError(
                    f"expert {number} of {name} changes by {change.shape}, the base has {count} experts of "
                    f"{(stop - start, in_)}: it was made on another base model"
                )
            left[number, start:stop, at : at + change.rank] = change.left
            right[number, at : at + change.rank] = change.right
            at += change.rank
    return LowRank(left, right)
