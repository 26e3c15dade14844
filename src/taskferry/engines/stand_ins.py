"""Small parts of a run block by block: replacing a block's forward, telling what it was called with, stopping early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn

from taskferry.data.batch import Batch
from taskferry.errors import TaskferryError
from taskferry.layers.discovery import block_paths
from taskferry.layers.site import Site

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a block is called with beside the hidden states


class Told(Sequence[Batch]):
    """Micro-batches, with a word before each that is looked at: a head may be made from all of them."""

    def __init__(self, batches: Sequence[Batch], tell: Callable[[int], None]) -> None:
        self.batches, self.tell = batches, tell

    def __len__(self) -> int:
        return len(self.batches)

    @overload
    def __getitem__(self, k: int) -> Batch: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[Batch]: ...
    def __getitem__(self, k: Any) -> Any:
        if not isinstance(k, slice):
            self.tell(range(len(self))[k])
        return self.batches[k]


class Caught(Exception):
    """The last block that was asked for is reached."""


@contextmanager
def until_caught() -> Iterator[None]:
    """A pass that ends where it was asked to."""
    try:
        yield
    except Caught:
        return


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module runs this instead."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's own again


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """Inside, a replaced module runs its class's own forward."""
    replaced = module.__dict__.pop("forward")
    try:
        yield
    finally:
        module.forward = replaced


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """(hidden states, the rest) of a block's call."""
    if args:
        return args[0], (args[1:], kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states"), ((), rest)


def hidden_of(output: Any) -> Tensor:
    """The hidden states that a block returns."""
    return output if isinstance(output, Tensor) else output[0]


def has_graph(value: Any) -> bool:
    """Whether a gradient can flow into something of it."""
    if isinstance(value, Tensor):
        return value.requires_grad
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(has_graph, inside))


@contextmanager
def by_output_alone(call: Call, given: str, block: str) -> Iterator[None]:
    """Refuse a block that puts something for later ones into what it is called with: no gradient would come back.

    Gemma 3n and 4 share keys and values so.
    """
    args, kwargs = call
    shared = [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping | list)]
    before = list(map(len, shared))
    yield
    if list(map(len, shared)) != before:
        raise TaskferryError(f"{given}: {block} hands later blocks more than its output: use the engine 'whole'")


def inner_products(terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ ⟨tensor, gradient⟩ over those that have a graph."""
    return sum(((t * g).sum() for t, g in terms if t.requires_grad), torch.zeros(()))


def blocks_of(sites: Sequence[Site], given: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Paths of all blocks, stack by stack in the order that the model holds them, and each stack's first and last."""
    found = block_paths(sites)
    order = list(dict.fromkeys(site.stack for site in sites if site.block is not None))
    if not 1 <= len(order) <= 2:
        raise TaskferryError(
            f"{given} has {len(order)} stacks of blocks: block by block runs one, or an encoder and a decoder; "
            "use the engine 'whole'"
        )
    blocks: list[str] = []
    stacks = []
    for stack in order:
        first = len(blocks)
        blocks += [path for (name, _), path in found.items() if name == stack]
        stacks.append((first, len(blocks) - 1))
    return blocks, stacks
