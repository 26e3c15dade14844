"""One model walked block by block: forward once, then backward from the last block, each with its weights read once.

    >>> walk = Walk(lazy, batches, objective, scratch)
    >>> walk.forward()                          # block inputs to disk, the loss, its gradient at the last block
    >>> with walk.block(j):                     # the weights of block j
    ...     collect(..., walk.side(j), ...)     # a loss whose backward is that of the whole model
    >>> walk.step()                             # on to block j − 1

The model's own forward is run with its blocks replaced by stand-ins, so embeddings, masks, rotary positions, norms and
heads are the model's own code. A stand-in notes what its block is called with; the last one returns the hidden states
that the walk has brought there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from taskferry.calibration.batch import Batch
from taskferry.capture import Loss, Side, frozen
from taskferry.engines.lazy import LazyModel
from taskferry.errors import TaskferryError
from taskferry.files import write_plain_safetensors
from taskferry.finding import block_paths, find_sites
from taskferry.objectives import ForwardOnly, Objective

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a block is called with beside the hidden states


class Walk:
    """The state of one model on its way: hidden states or gradients at one block's edge, for every micro-batch."""

    def __init__(self, lazy: LazyModel, batches: Sequence[Batch], objective: Objective, scratch: Path) -> None:
        self.lazy, self.model = lazy, lazy.model
        self.batches, self.objective, self.scratch = list(batches), objective, scratch
        self.sites = find_sites(self.model)
        self.blocks = _block_paths(self.sites, lazy.given)
        self.outer = lazy.outside(self.blocks)
        self.calls: list[list[Call]] = [[] for _ in self.batches]  # of every micro-batch, of every block
        self.edges: list[Tensor] = []  # hidden states going forward, their gradients going back
        self.leaves: list[Tensor | None] = [None] * len(self.batches)
        self.loss = 0.0
        self._arrived = False  # whether the loss is known, and the edges are gradients
        self._bound: Loss = self._unbound
        self._returns: Any = None
        self._current = 0
        self._number = {_identity(batch): k for k, batch in enumerate(self.batches)}

    def forward(self, backward: bool = True, on_block: Callable[[], None] | None = None) -> None:
        """All blocks in order, their inputs to disk; then the loss, and its gradient at the last block's output."""
        with frozen(self.model), torch.inference_mode(False):
            with torch.no_grad(), self.lazy.weights(self.outer):
                self._enter()
            for j in range(len(self.blocks)):
                with torch.no_grad(), self.block(j):
                    self._through(j, keep=backward)
                if on_block is not None:
                    on_block()
            with self.lazy.weights(self.outer):
                self._leave(backward)

    def parameters(self, j: int) -> list[str]:
        """Names of the parameters of one block."""
        return self.lazy.under(self.blocks[j])

    @contextmanager
    def block(self, j: int) -> Iterator[None]:
        """The weights of one block in memory."""
        with self.lazy.weights(self.parameters(j)):
            yield

    def side(self, j: int) -> Side:
        """Block j as a model of its own: ⟨its output, the gradient there⟩ has the gradient of the whole loss."""

        def loss(batch: Batch) -> Tensor:
            k = self._which(batch)
            leaf = self._stored(j, k).requires_grad_()
            self.leaves[k] = leaf
            return (_first(self._run(j, k, leaf)) * self.edges[k]).sum()

        return Side(self.model, loss)

    def outside(self) -> Side:
        """What stands before and after the blocks, with the gradient that has come through them."""
        bound = self._bound

        def loss(batch: Batch) -> Tensor:
            entered: list[Tensor] = []
            with self._stand_ins(self._which(batch), entered):
                value = bound(batch)
            first = entered[0]
            return value + (first * self.edges[self._which(batch)]).sum() if first.requires_grad else value

        return Side(self.model, loss)

    def pull(self, j: int) -> None:
        """Backward through block j without looking at it."""
        side = self.side(j)
        with frozen(self.model), torch.inference_mode(False), torch.enable_grad(), self.block(j):
            for batch in self.batches:
                side.loss(batch).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """The gradients at the last block's input become those at the next one's output."""
        gradients = [None if leaf is None else leaf.grad for leaf in self.leaves]
        if any(g is None for g in gradients):
            raise TaskferryError(f"{self.lazy.given}: a block passes no gradient on to the one before it")
        self.edges = [g for g in gradients if g is not None]
        self.leaves = [None] * len(self.batches)

    def _enter(self) -> None:
        """What the first block is given, and what every block is called with."""
        caught: list[tuple[Tensor, Call]] = []

        def catch(*args: Any, **kwargs: Any) -> Any:
            caught.append(_split(args, kwargs))
            raise _Caught

        forward = ForwardOnly().bind(self.model, self.batches)
        for k, batch in enumerate(self.batches):
            if self._returns is None:
                with _replaced(self._block(0), catch), _until_caught():
                    forward(batch)
                with self.block(0):  # a tensor, or a tuple that begins with one: the loop above it expects the same
                    self._returns = self._block(0)(caught[0][0], *caught[0][1][0], **caught[0][1][1])
            entered: list[Tensor] = []
            with self._stand_ins(k, entered, calls=self.calls[k], through=True):
                forward(batch)
            if len(self.calls[k]) != len(self.blocks):
                raise TaskferryError(
                    f"{self.lazy.given} calls {len(self.calls[k])} blocks where {len(self.blocks)} were found: "
                    "use the engine 'whole'"
                )
            self.edges.append(entered[0].detach().clone())

    def _through(self, j: int, keep: bool) -> None:
        if keep:
            write_plain_safetensors(self._file(j), {str(k): edge for k, edge in enumerate(self.edges)})
        self.edges = [_first(self._run(j, k, edge)) for k, edge in enumerate(self.edges)]

    def _leave(self, backward: bool) -> None:
        """The loss from the last hidden states, with the model's own tail and objective."""
        write_plain_safetensors(self._file(len(self.blocks)), {str(k): edge for k, edge in enumerate(self.edges)})
        with self._lookup():
            bound = self._bound = self.objective.bind(self.model, self.batches)
            self.loss = 0.0
            for k, batch in enumerate(self.batches):
                self.edges[k].requires_grad_(backward)
                with torch.set_grad_enabled(backward):
                    value = bound(batch)
                self.loss += float(value.detach())
                if backward:
                    value.backward()  # type: ignore[no-untyped-call]
                    gradient = self.edges[k].grad
                    if gradient is None:
                        raise TaskferryError(f"the loss of {self.lazy.given} does not depend on its last block")
                    self.edges[k] = gradient
        self._arrived = True

    @contextmanager
    def _lookup(self) -> Iterator[None]:
        """Stand-ins that return the hidden states of whatever batch the model is called with."""

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and value.data_ptr() in self._number:
                    self._current = self._number[value.data_ptr()]

        handle = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with self._stand_ins(None, []):
                yield
        finally:
            handle.remove()

    @contextmanager
    def _stand_ins(
        self, k: int | None, entered: list[Tensor], calls: list[Call] | None = None, through: bool = False
    ) -> Iterator[None]:
        """Every block lets its input through; the last returns what the walk has brought there, unless `through`."""
        last = len(self.blocks) - 1

        def stand_in(j: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                hidden, call = _split(args, kwargs)
                if j == 0:
                    entered.append(hidden)
                if calls is not None:
                    calls.append(call)
                if j == last and not through:
                    hidden = self._output(self._current if k is None else k)
                return hidden if isinstance(self._returns, Tensor) else (hidden, *self._returns[1:])

            return forward

        with ExitStack() as stack:
            for j in range(len(self.blocks)):
                stack.enter_context(_replaced(self._block(j), stand_in(j)))
            yield

    def _output(self, k: int) -> Tensor:
        """The last block's output, on its way forward in memory, later from disk."""
        if not self._arrived:
            return self.edges[k]
        return self._stored(len(self.blocks), k).requires_grad_()

    def _stored(self, j: int, k: int) -> Tensor:
        """What went into block j."""
        with safe_open(str(self._file(j)), framework="pt") as file:
            hidden: Tensor = file.get_tensor(str(k))
            return hidden.clone()

    def _unbound(self, batch: Batch) -> Tensor:  # noqa: ARG002
        raise ValueError("walk forward first")

    def _block(self, j: int) -> nn.Module:
        return self.model.get_submodule(self.blocks[j])

    def _run(self, j: int, k: int, hidden: Tensor) -> Any:
        args, kwargs = self.calls[k][j]
        return self._block(j)(hidden, *args, **kwargs)

    def _file(self, j: int) -> Path:
        return self.scratch / f"into-{j}.safetensors"

    def _which(self, batch: Batch) -> int:
        return self._number[_identity(batch)]


class _Caught(Exception):
    """The first block was reached."""


@contextmanager
def _until_caught() -> Iterator[None]:
    try:
        yield
    except _Caught:
        return


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's own again


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """(hidden states, the rest) of a block's call."""
    if args:
        return args[0], (args[1:], kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states"), ((), rest)


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _identity(batch: Batch) -> int:
    """The address of its first input: the same tensor wherever the batch goes on this machine."""
    return next(iter(batch.inputs.values())).data_ptr()


def _block_paths(sites: Sequence[Any], given: str) -> list[str]:
    blocks = block_paths(sites)
    stacks = {stack for stack, _ in blocks}
    if len(stacks) != 1:
        raise TaskferryError(
            f"{given} has {len(stacks)} stacks of blocks: block by block walks one (an encoder or a decoder); "
            "use the engine 'whole'"
        )
    return list(blocks.values())
