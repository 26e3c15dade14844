"""One model run block by block: forward once, then backward from the last block, each with its weights read once.

    >>> run = BlockRun(lazy, sites, batches, scratch)
    >>> forward([run], objective)                # hidden states at every edge to disk, the loss, its last gradient
    >>> run.reach(j + 1)                         # the gradient at the output of block j
    >>> with lazy.weights(run.names(j)):
    ...     collect(..., run.side(j), ...)       # a loss whose backward is that of the whole model
    >>> run.passed(j)

Edge j is what block j reads; the last edge is what the last block gives out. The model's own forward is run with its
blocks replaced by stand-ins, so embeddings, masks, rotary positions, norms and heads are the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from taskferry.collect.capture import Loss, Side
from taskferry.collect.device import frozen, narrow
from taskferry.collect.scale import moved_by
from taskferry.data.batch import Batch
from taskferry.disk.files import write_plain_safetensors
from taskferry.engines.lazy import LazyModel
from taskferry.errors import TaskferryError
from taskferry.layers.discovery import block_paths
from taskferry.layers.site import Site
from taskferry.objectives.objectives import ForwardOnly, Objective
from taskferry.taskvector import TaskVector

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a block is called with beside the hidden states
StandIn = Callable[[int, Tensor, Call], Any]  # (number of the block, hidden states, the rest of its call)
WHOLE = "use the engine 'whole'"


class BlockRun:
    """One model on some micro-batches."""

    def __init__(self, lazy: LazyModel, sites: Sequence[Site], batches: Sequence[Batch], scratch: Path) -> None:
        self.lazy, self.model, self.scratch = lazy, lazy.model, scratch
        self.batches = [batch.to(lazy.device, narrow(lazy.precision)) for batch in batches]
        paths = block_paths(sites)
        stacks = sorted({stack for stack, _ in paths})
        if len(stacks) != 1:
            raise TaskferryError(
                f"{lazy.given} has {len(stacks)} stacks of blocks ({', '.join(stacks) or 'none'}): block by block runs "
                f"models of one; {WHOLE}"
            )
        self.blocks = list(paths.values())
        depth = getattr(getattr(lazy.model, "config", None), "num_hidden_layers", len(self.blocks))
        if isinstance(depth, int) and depth > len(self.blocks):  # one block for many layers, as in ALBERT
            raise TaskferryError(f"{lazy.given} runs {self.blocks[0]} more than once in a pass: {WHOLE}")
        self.outer = lazy.outside(self.blocks)
        self.loss = 0.0  # summed over all samples
        self.bound: Loss | None = None
        self._place = {batch.number: k for k, batch in enumerate(self.batches)}
        self._calls: list[list[Call]] = []  # of every micro-batch, of every block
        self._extras: list[tuple[Any, ...] | None] = []  # of every micro-batch: what a block returns behind its states
        self._marks: list[tuple[torch.Size, float]] = []  # of every micro-batch: by what its states at edge 0 are known
        self._edge: list[Tensor] = []  # hidden states at the edge that the way forward has reached
        self._lowest = len(self.blocks) + 1  # edge whose gradient is known
        self._leaves: dict[int, Tensor] = {}  # hidden states that a block has read, which take their gradient

    def names(self, j: int | None) -> list[str]:
        """The parameters of a block, or of all that stands outside of them."""
        return self.outer if j is None else self.lazy.under(self.blocks[j])

    # The way forward.

    def enter(self) -> None:
        """What the first block reads, and what every block is called with; the weights of the first are there too."""
        for batch in self.batches:
            hidden, calls, extras = self._entered(batch)
            self._calls.append(calls)
            self._extras.append(extras)
            self._edge.append(hidden)
            self._marks.append(_mark(hidden))

    def _entered(self, batch: Batch) -> tuple[Tensor, list[Call], tuple[Any, ...] | None]:
        """Of one micro-batch the states at edge 0, the call of every block, and what a block returns behind them."""
        last, made, calls = len(self.blocks) - 1, list[Any](), list[Call]()
        entered: list[Tensor] = []

        def note(j: int, hidden: Tensor, call: Call) -> Any:
            if j != len(calls):  # the weights of one block for many layers, as ALBERT has them
                raise TaskferryError(
                    f"{self.lazy.given} runs {self.blocks[j]} more than once in a pass, or not in order: {WHOLE}"
                )
            if j == 0:
                entered.append(hidden.clone())
                made.append(self._run(0, hidden, call))
            calls.append(call)
            if j == last:
                raise _Reached
            return _with(hidden, _extras(made[0]))

        with self._stand_ins(note):
            try:
                self._forward_only(batch)
            except _Reached:
                return entered[0], calls, _extras(made[0])
        raise TaskferryError(f"{self.lazy.given} calls {len(calls)} blocks where {last + 1} were found: {WHOLE}")

    def through(self, j: int, keep: bool) -> None:
        """All micro-batches through block j; with `keep` what it reads stays on disk for the way back."""
        if keep:
            self._store(f"states-{j}", self._edge)
        self._edge = [_states(self._run(j, edge, self._calls[k][j])) for k, edge in enumerate(self._edge)]

    def leave(self, objective: Objective, loss: Loss | None, *, backward: bool, keep: bool) -> None:
        """The loss from the last states, with the model's own tail; a head may be made from all micro-batches."""
        last = len(self.blocks) - 1
        if keep:
            self._store(f"states-{last + 1}", self._edge)

        def jump(j: int, hidden: Tensor, _: Call) -> Any:
            k = self._which(hidden)
            return _with(self._edge[k] if j == last else hidden, self._extras[k])

        with self._stand_ins(jump):
            with torch.no_grad():
                self.bound = loss or objective.bind(self.model, self.batches)
            self.loss = 0.0
            for edge, batch in zip(self._edge, self.batches, strict=True):
                edge.requires_grad_(backward)
                with torch.set_grad_enabled(backward):
                    value = self.bound(batch)
                self.loss += float(value.detach())
                if backward:
                    if value.requires_grad:
                        value.backward()  # type: ignore[no-untyped-call]
                    if edge.grad is None:
                        raise TaskferryError(f"the loss of {self.lazy.given} does not depend on its last block")
        if backward:
            self._store(f"gradients-{last + 1}", [_gradient(edge) for edge in self._edge])
            self._lowest = last + 1
        self._edge = []

    # The way back.

    def reach(self, edge: int) -> None:
        """Backward through blocks, until the gradients at an edge are known."""
        with frozen(self.model), torch.inference_mode(False), torch.enable_grad():
            while self._lowest > edge:
                j = self._lowest - 1
                side = self.side(j)
                with self.lazy.weights(self.names(j)):
                    for batch in self.batches:
                        side.loss(batch).backward()  # type: ignore[no-untyped-call]
                self.passed(j)

    def side(self, j: int | None) -> Side:
        """Block j as a model of its own: ⟨its output, the gradient there⟩ has the gradient of the whole loss.

        Or what stands outside of the blocks, with the gradient that has come through all of them.
        """
        return Side(self.model, self._outside if j is None else lambda batch: self._inside(j, batch))

    def passed(self, j: int | None) -> None:
        """All micro-batches have gone back through block j: their gradients at its input are known."""
        if j is not None and j < self._lowest <= j + 1:
            if any(leaf.grad is None for leaf in self._leaves.values()):
                raise TaskferryError(f"{self.lazy.given}: a block passes no gradient on to the one before it")
            self._store(f"gradients-{j}", [_gradient(self._leaves[k]) for k in range(len(self.batches))])
            self._lowest = j
        self._leaves.clear()

    def _inside(self, j: int, batch: Batch) -> Tensor:
        k = self._place[batch.number]
        self._leaves[k] = self._stored(f"states-{j}", k).requires_grad_()
        output = _states(self._run(j, self._leaves[k], self._calls[k][j]))
        return (output * self._stored(f"gradients-{j + 1}", k)).sum() if self._lowest <= j + 1 else output.sum()

    def _outside(self, batch: Batch) -> Tensor:
        last, k, entered = len(self.blocks) - 1, self._place[batch.number], list[Tensor]()

        def jump(j: int, hidden: Tensor, _: Call) -> Any:
            if j == 0:
                entered.append(hidden)
            return _with(self._stored(f"states-{last + 1}", k) if j == last else hidden, self._extras[k])

        with self._stand_ins(jump):
            value = self._forward_only(batch) if self.bound is None else self.bound(batch)
        if self._lowest == 0 and entered[0].requires_grad:
            value = value + (entered[0] * self._stored("gradients-0", k)).sum()
        return value

    # Its parts.

    @contextmanager
    def _stand_ins(self, forward: StandIn) -> Iterator[None]:
        """Inside, every block calls this in place of its own forward."""

        def stand_in(j: int) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if args:
                    return forward(j, args[0], (args[1:], kwargs))
                return forward(
                    j, kwargs["hidden_states"], ((), {n: v for n, v in kwargs.items() if n != "hidden_states"})
                )

            return call

        modules = [self.model.get_submodule(path) for path in self.blocks]
        for j, module in enumerate(modules):
            module.forward = stand_in(j)
        try:
            yield
        finally:
            for module in modules:
                del module.forward  # the class's own again

    def _run(self, j: int, hidden: Tensor, call: Call) -> Any:
        """A block's own forward.

        One that puts something for later blocks into what it is called with is refused, for no gradient would come
        back from there: Gemma 3n and 4 share keys and values so.
        """
        block: nn.Module = self.model.get_submodule(self.blocks[j])
        args, kwargs = call
        shared = [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping | list)]
        before = list(map(len, shared))
        made = type(block).forward(block, hidden, *args, **kwargs)
        if list(map(len, shared)) != before:
            raise TaskferryError(
                f"{self.lazy.given}: {self.blocks[j]} hands later blocks more than its output: {WHOLE}"
            )
        return made

    def _forward_only(self, batch: Batch) -> Tensor:
        return ForwardOnly().bind(self.model, ())(batch)

    def _which(self, hidden: Tensor) -> int:
        """The micro-batch whose states these are: a head asks for any of them, in any order."""
        shape, total = _mark(hidden)
        alike = [k for k, (other, _) in enumerate(self._marks) if other == shape]
        return min(alike, key=lambda k: abs(self._marks[k][1] - total))

    def _store(self, name: str, tensors: Sequence[Tensor]) -> None:
        parts = {str(k): tensor.detach().cpu().contiguous() for k, tensor in enumerate(tensors)}
        write_plain_safetensors(self.scratch / f"{name}.safetensors", parts)

    def _stored(self, name: str, k: int) -> Tensor:
        with safe_open(str(self.scratch / f"{name}.safetensors"), framework="pt") as file:
            tensor: Tensor = file.get_tensor(str(k))
            return tensor.to(self.lazy.device, copy=True)


def forward(
    runs: Sequence[BlockRun],
    objective: Objective,
    loss: Loss | None = None,
    *,
    change: TaskVector | None = None,
    scales: Sequence[float] = (0.0,),
    backward: bool = True,
    keep: bool = True,
    on_block: Callable[[], None] = lambda: None,
) -> None:
    """Runs of one model together, each at its scale of a change: every weight is read once for all of them.

    With `keep` hidden states stay on disk for the way back.
    """
    one = runs[0]

    @contextmanager
    def shifted(names: Sequence[str]) -> Iterator[Iterator[BlockRun]]:
        """The runs, each with these weights at its scale."""
        with one.lazy.weights(names):
            parameters = {name: one.model.get_parameter(name) for name in names}
            mine = TaskVector({}) if change is None else change.take(names)
            with moved_by(parameters, mine) as set_scale:

                def each() -> Iterator[BlockRun]:
                    for run, scale in zip(runs, scales, strict=True):
                        set_scale(scale)
                        yield run

                yield each()

    with frozen(one.model), torch.inference_mode(False), torch.no_grad():
        with shifted([*one.outer, *one.names(0)]) as each:
            for run in each:
                run.enter()
        for j in range(len(one.blocks)):
            with shifted(one.names(j)) as each:
                for run in each:
                    run.through(j, keep)
            on_block()
        with shifted(one.outer) as each:
            for run in each:
                run.leave(objective, loss, backward=backward, keep=keep)


class _Reached(Exception):
    """The last block is called: the rest of a pass is not needed."""


def _states(output: Any) -> Tensor:
    """The hidden states that a block returns."""
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def _extras(output: Any) -> tuple[Any, ...] | None:
    """What a block returns behind its hidden states; None where it returns them alone."""
    return None if isinstance(output, Tensor) else tuple(output[1:])


def _with(hidden: Tensor, extras: tuple[Any, ...] | None) -> Any:
    return hidden if extras is None else (hidden, *extras)


def _mark(hidden: Tensor) -> tuple[torch.Size, float]:
    return hidden.shape, float(hidden.detach().double().sum())


def _gradient(leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        raise ValueError("no backward pass has reached it")
    return leaf.grad
