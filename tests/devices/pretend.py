"""Devices that are not there: `pretend:0` and `pretend:1`, as strict as real ones, on any machine.

A tensor there is a wrapper around a CPU tensor, so results are those of the CPU bit for bit. An operation over two
devices, or with a tensor of the host, raises. Each device has a budget of memory, and raises `torch.OutOfMemoryError`
beyond.

    >>> from tests.devices import pretend
    >>> with pretend.limited(2**20):
    ...     model.to("pretend:1")(x.to("pretend:1")).sum().item()
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
HOST = torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.addmm_, aten.baddbmm, aten.mv}


@dataclass
class Device:
    """What lies on one device."""

    used: int = 0
    peak: int = 0
    budget: float = float("inf")


DEVICES = [Device(), Device()]
rounded: list[str] = []  # products of float32 that torch may round (TF32)
_held: dict[int, weakref.ref[_Memory]] = {}


class _Memory:
    """The bytes of one storage, which tensors share; given back with the last of them."""

    def __init__(self, index: int, storage: torch.UntypedStorage) -> None:
        device, size, key = DEVICES[index], storage.nbytes(), storage._cdata
        if device.used + size > device.budget:
            raise torch.OutOfMemoryError(
                f"{NAME} out of memory. Tried to allocate {size} bytes. Device {index} has a budget of "
                f"{device.budget:.0f} bytes, of which {device.used} are in use."
            )
        device.used += size
        device.peak = max(device.peak, device.used)
        _held[key] = weakref.ref(self)
        weakref.finalize(self, _give_back, device, size, key).atexit = False

    @staticmethod
    def of(index: int, raw: torch.Tensor) -> _Memory:
        known = _held.get(raw.untyped_storage()._cdata)
        memory = None if known is None else known()
        return memory or _Memory(index, raw.untyped_storage())


def _give_back(device: Device, size: int, key: int) -> None:
    device.used -= size
    del _held[key]


class Pretend(torch.Tensor):
    """A CPU tensor `raw` that says it lies elsewhere."""

    raw: torch.Tensor
    memory: _Memory

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int) -> Pretend:
        memory = _Memory.of(index, raw)
        self = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=torch.device(NAME, index)
        )
        self.raw, self.memory = raw, memory
        return self

    def __init__(self, raw: torch.Tensor, index: int) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    # A module that is moved keeps its parameters, and ties between them, as on real devices.
    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["raw"], self.device.index

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], index: int, size: Any, stride: Any) -> Pretend:
        return Pretend(inner["raw"], index)

    # Memory on a device has addresses too, though the host cannot read there.
    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.detach().clone()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"Pretend({self.raw!r}, device='{self.device}')"


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on CPU tensors; its results lie where its operands lay, or where `device` says."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    places = {leaf.device for leaf in given if leaf.device != HOST or leaf.dim() > 0}  # numbers may come from the host
    asked = kwargs.get("device")
    there = _place_of(given) if asked is None else _index(torch.device(asked))
    if func not in COPIES and len(places) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {sorted(map(str, places))}")
    matmul = torch.backends.cuda.matmul
    if func.overloadpacket in PRODUCTS and args[0].dtype == torch.float32 and matmul.fp32_precision == "tf32":
        rounded.append(str(func))
    results = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    if func is aten.copy_.default:
        return args[0]
    known = {id(leaf.raw): leaf for leaf in given if isinstance(leaf, Pretend)}

    def wrapped(value: Any) -> Any:
        if there is None or not isinstance(value, torch.Tensor):
            return value
        operand = known.get(id(value))  # in place: the operand itself
        if operand is not None and operand.shape != value.shape:
            raise NotImplementedError(f"{func} changes the shape of its operand")
        return Pretend(value, there) if operand is None else operand

    return tree_map(wrapped, results)


def _raw(value: Any) -> Any:
    if isinstance(value, torch.device):
        return HOST if value.type == NAME else value
    return value.raw if isinstance(value, Pretend) else value


def _index(device: torch.device) -> int | None:
    """The number of a pretended device; None for the host."""
    return None if device.type != NAME else device.index or 0


def _place_of(given: list[torch.Tensor]) -> int | None:
    return next((leaf.device.index for leaf in given if isinstance(leaf, Pretend)), None)


@contextmanager
def limited(size: float, *devices: int) -> Iterator[None]:
    """So many bytes on each device, or on those named."""
    gc.collect()  # what earlier tests left in cycles does not count
    chosen = [DEVICES[i] for i in devices] or DEVICES
    try:
        for device in chosen:
            device.budget = size
        yield
    finally:
        for device in chosen:
            device.budget = float("inf")


class _Module(_DummyBackendModule):
    """What `torch.cuda` is for CUDA."""

    def device_count(self) -> int:
        return len(DEVICES)

    def memory_allocated(self, device: Any = 0) -> int:
        return DEVICES[self._number(device)].used

    def max_memory_allocated(self, device: Any = 0) -> int:
        return DEVICES[self._number(device)].peak

    def reset_peak_memory_stats(self, device: Any = 0) -> None:
        one = DEVICES[self._number(device)]
        one.peak = one.used

    def mem_get_info(self, device: Any = 0) -> tuple[float, float]:
        one = DEVICES[self._number(device)]
        return one.budget - one.used, one.budget

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: Any = 0) -> None:
        pass

    def _number(self, device: Any) -> int:
        return device if isinstance(device, int) else torch.device(device).index or 0


# Torch knows one device of a backend in Python, and starts one thread for backward passes on it; they are done here.
_engine = torch.autograd._engine_run_backward


def _backward(*args: Any, **kwargs: Any) -> Any:
    with torch.autograd.set_multithreading_enabled(False):
        return _engine(*args, **kwargs)


torch.autograd._engine_run_backward = _backward
_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
# These would be made by an operation that changes the shape of its operand, which a wrapper cannot.
_own = torch.library.Library("aten", "IMPL")
for _name in ("eye", "eye.m", "arange", "arange.start", "arange.start_step", "linspace", "randperm"):
    _packet, _, _overload = _name.partition(".")
    _function = getattr(getattr(aten, _packet), _overload or "default")
    _own.impl(_name, lambda *args, _function=_function, **kwargs: run(_function, args, kwargs), "PrivateUse1")
