"""One model run block by block: forward once, then backward from the last block, each with its weights read once.

    >>> run = BlockwiseModel(lazy, sites, batches, objective, scratch)
    >>> forward([run])                          # block inputs to disk, the loss, its gradient at the last block
    >>> with run.block(j):                      # the weights of block j
    ...     collect(..., run.side(j), ...)      # a loss whose backward is that of the whole model
    >>> run.step(j)                             # on to block j − 1

The model's own forward is run with its blocks replaced by stand-ins, so embeddings, masks, rotary positions, norms and
heads are the model's own code. A stand-in notes what its block is called with; the last one of a stack returns the
hidden states that were brought there. An encoder-decoder has two stacks: what the encoder gives to the blocks of the
decoder beside their hidden states (`cross`) has a gradient of its own, the sum over those blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from taskferry.collect.capture import Loss, Side
from taskferry.collect.device import frozen, narrow
from taskferry.data.batch import Batch
from taskferry.disk.files import write_plain_safetensors
from taskferry.engines.lazy import LazyModel
from taskferry.engines.memory import give_back
from taskferry.engines.stand_ins import (
    Call,
    Caught,
    Told,
    blocks_of,
    by_output_alone,
    has_graph,
    hidden_of,
    inner_products,
    own_forward,
    replaced,
    split_call,
    until_caught,
)
from taskferry.errors import TaskferryError
from taskferry.layers.site import Site
from taskferry.objectives.objectives import ForwardOnly, Objective


@dataclass(frozen=True)
class _Cross:
    """In a call: the place of a tensor that an earlier stack has made."""

    place: int


class BlockwiseModel:
    """The state of one model on its way: hidden states or gradients at one block's edge, for every micro-batch."""

    def __init__(
        self,
        lazy: LazyModel,
        sites: Sequence[Site],
        batches: Sequence[Batch],
        objective: Objective,
        scratch: Path,
        heads: list[Loss] | None = None,
    ) -> None:
        """`heads` is shared by runs of one model: the loss that the first of them binds is that of all."""
        self.heads = [] if heads is None else heads
        self.lazy, self.model, self.objective, self.scratch = lazy, lazy.model, objective, scratch
        self.batches = [batch.to(lazy.device, narrow(lazy.precision)) for batch in batches]
        self.blocks, self.stacks = blocks_of(sites, lazy.given)  # paths, and (first, last) block of every stack
        self.outer = lazy.outside(self.blocks)
        count = len(self.batches)
        self.calls: list[dict[int, Call]] = [{} for _ in range(count)]  # of every micro-batch, of every block
        self.extras: list[dict[int, tuple[Any, ...] | None]] = [{} for _ in range(count)]  # by stack: its other outputs
        self.edges: list[Tensor] = [torch.empty(0)] * count  # hidden states going forward, their gradients going back
        self.leaves: list[Tensor | None] = [None] * count
        self.cross: list[list[Tensor]] = [[] for _ in range(count)]
        self._made: list[list[Tensor]] = [[] for _ in range(count)]  # the same with their graphs, to tell them apart
        self.cross_leaves: list[list[Tensor]] = [[] for _ in range(count)]
        self.cross_gradients: list[dict[int, Tensor]] = [{} for _ in range(count)]
        self.entries: dict[int, list[Tensor]] = {}  # stack -> gradients at its first block's input
        self.kept: set[int] = set()  # blocks whose output gradient is on disk
        self.loss = 0.0
        self._arrived = False  # whether the loss is known, and the edges are gradients
        self._bound: Loss = self._unbound
        self._current = 0
        self._place = {batch.number: k for k, batch in enumerate(self.batches)}

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
            leaf = self._stored(f"into-{j}", k).requires_grad_()
            self.leaves[k], self.cross_leaves[k] = leaf, [t.clone().requires_grad_() for t in self.cross[k]]
            output = hidden_of(self._run(j, k, leaf, self.cross_leaves[k]))
            edge = self._stored(f"gradient-{j}", k) if j in self.kept else self.edges[k]
            return (output * edge).sum() if self._arrived else output.sum()

        return Side(self.model, loss, whole=True)

    def outside(self) -> Side:
        """What stands before, between and after the blocks, with the gradients that have come through them."""

        def loss(batch: Batch) -> Tensor:
            k = self._which(batch)
            entered: dict[int, Tensor] = {}
            calls: dict[int, Call] = {}
            with self._stand_ins(k, entered, calls):
                value = self._bound(batch)
            for stack, gradients in self.entries.items():
                value = value + inner_products([(entered[stack], gradients[k])])
            return value + inner_products(self._crossing(k, calls))

        return Side(self.model, loss, whole=True)

    def keep(self, j: int) -> None:
        """Store the gradient at block j's output, which is known now: the block can be run again later."""
        self._store(f"gradient-{j}")
        self.kept.add(j)

    def pull(self, j: int) -> None:
        """Backward through block j without looking at its sites; its weights are in memory."""
        side = self.side(j)
        with frozen(self.model), torch.inference_mode(False), torch.enable_grad():
            for batch in self.batches:
                side.loss(batch).backward()  # type: ignore[no-untyped-call]

    def step(self, j: int) -> None:
        """The gradients at block j's input become those at the output of the one before it."""
        gradients = [None if leaf is None else leaf.grad for leaf in self.leaves]
        if any(g is None for g in gradients):
            raise TaskferryError(f"{self.lazy.given}: a block passes no gradient on to the one before it")
        self.edges = [g for g in gradients if g is not None]
        for sums, leaves in zip(self.cross_gradients, self.cross_leaves, strict=True):
            for place, leaf in enumerate(leaves):
                if leaf.grad is not None:
                    sums[place] = sums[place] + leaf.grad if place in sums else leaf.grad
        self.leaves = [None] * len(self.batches)
        stack = next((s for s, (first, _) in enumerate(self.stacks) if first == j), None)
        if stack is not None:
            self.entries[stack] = self.edges
            if stack > 0:
                self._back_into(stack)

    def _back_into(self, stack: int) -> None:
        """From the entrance of a stack to the output of the one before it, through what stands between them."""
        forward = ForwardOnly().bind(self.model, self.batches)
        found = []
        with frozen(self.model), torch.inference_mode(False), torch.enable_grad(), self.lazy.weights(self.outer):
            for k, batch in enumerate(self.batches):
                entered: dict[int, Tensor] = {}
                calls: dict[int, Call] = {}
                leaf = self._stored(f"out-{stack - 1}", k).requires_grad_()
                with self._stand_ins(k, entered, calls, until=stack, outputs={stack - 1: leaf}), until_caught():
                    forward(batch)
                value = inner_products([(entered[stack], self.entries[stack][k])]) + inner_products(
                    self._crossing(k, calls)
                )
                if not value.requires_grad:
                    raise TaskferryError(f"{self.lazy.given}: its second stack does not read the first")
                value.backward()  # type: ignore[no-untyped-call]
                found.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        self.edges = found

    def _crossing(self, k: int, calls: Mapping[int, Call]) -> list[tuple[Tensor, Tensor]]:
        """What an earlier stack has made for the blocks that were just called, each with its gradient."""
        made: dict[int, Tensor] = {}
        for j, (args, kwargs) in calls.items():
            known_args, known_kwargs = self.calls[k][j]
            both = [*zip(known_args, args, strict=True), *((known_kwargs[name], kwargs[name]) for name in known_kwargs)]
            made |= {known.place: now for known, now in both if isinstance(known, _Cross)}
        return [(made[place], gradient) for place, gradient in self.cross_gradients[k].items()]

    def enter(self, stack: int) -> None:
        """What the first block of a stack is given, and what every block of it is called with."""
        first, last = self.stacks[stack]
        forward = ForwardOnly().bind(self.model, self.batches)
        with torch.set_grad_enabled(stack > 0), self.block(first):
            for k, batch in enumerate(self.batches):
                entered: dict[int, Tensor] = {}
                calls: dict[int, Call] = {}
                outputs = {} if stack == 0 else {stack - 1: self._stored(f"out-{stack - 1}", k).requires_grad_()}
                with self._stand_ins(k, entered, calls, until=stack, outputs=outputs), until_caught():
                    forward(batch)
                if set(calls) < set(range(first, last + 1)):
                    raise TaskferryError(
                        f"{self.lazy.given} calls {len(calls)} blocks where {last - first + 1} were found: "
                        "use the engine 'whole'"
                    )
                self.calls[k] |= {j: self._plain(k, calls[j]) for j in range(first, last + 1)}
                self.edges[k] = entered[stack].detach().clone()

    def _plain(self, k: int, call: Call) -> Call:
        """A call without its graph; what an earlier stack has made is put aside, each tensor once."""
        known = {id(tensor): place for place, tensor in enumerate(self._made[k])}

        def plain(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                if has_graph(value):
                    raise TaskferryError(f"{self.lazy.given}: its stacks are entangled: use the engine 'whole'")
                return value
            if id(value) not in known:
                known[id(value)] = len(known)
                self._made[k].append(value)
                self.cross[k].append(value.detach())
            return _Cross(known[id(value)])

        args, kwargs = call
        return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}

    def through(self, j: int, store: bool) -> None:
        """All micro-batches through block j; what goes in is stored for the way back."""
        if store:
            self._store(f"into-{j}")
        self.edges = [hidden_of(self._run(j, k, edge, self.cross[k])) for k, edge in enumerate(self.edges)]

    def end(self, stack: int) -> None:
        """What a stack gives out is stored: the model runs over it again."""
        self._store(f"out-{stack}")

    def leave(self, backward: bool) -> None:
        """The loss from the last hidden states, with the model's own tail and objective."""
        last = len(self.stacks) - 1
        outputs: dict[int, Callable[[], Tensor]] = {last: lambda: self.edges[self._current]}
        calls: dict[int, Call] = {}

        def look_at(k: int) -> None:
            self._current = k
            calls.clear()

        with self._stand_ins(None, {}, calls, outputs=outputs):
            if not self.heads:
                self.heads.append(self.objective.bind(self.model, Told(self.batches, look_at)))
            self._bound = self.heads[0]
            self.loss = 0.0
            for k, batch in enumerate(self.batches):
                look_at(k)
                self.edges[k].requires_grad_(backward)
                with torch.set_grad_enabled(backward):
                    value = self._bound(batch)
                self.loss += float(value.detach())
                if backward:
                    value.backward()  # type: ignore[no-untyped-call]
                    gradient = self.edges[k].grad
                    if gradient is None:
                        raise TaskferryError(f"the loss of {self.lazy.given} does not depend on its last block")
                    self.edges[k] = gradient
        self._arrived = backward

    @contextmanager
    def _stand_ins(
        self,
        k: int | None,
        entered: dict[int, Tensor],
        calls: dict[int, Call],
        until: int | None = None,
        outputs: Mapping[int, Any] | None = None,
    ) -> Iterator[None]:
        """Every block lets its input through, and the last of a stack returns what was brought there.

        With `until` the pass ends behind that stack's last block. `outputs` are used in place of what is stored.
        """
        outputs = outputs or {}

        def output(stack: int, at: int) -> Tensor:
            given = outputs.get(stack)
            if given is None:
                return self._stored(f"out-{stack}", at).requires_grad_(torch.is_grad_enabled())
            return given if isinstance(given, Tensor) else given()

        def stand_in(j: int, stack: int, first: int, last: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                at = self._current if k is None else k
                hidden, call = split_call(args, kwargs)
                if j in calls and until is None:  # the weights of one block for many layers, as ALBERT has them
                    raise TaskferryError(
                        f"{self.lazy.given} runs {self.blocks[j]} more than once in a pass, block by block once: "
                        "use the engine 'whole'"
                    )
                calls[j] = call
                if j == first:
                    entered[stack] = hidden
                    if stack not in self.extras[at]:
                        alone = by_output_alone(call, self.lazy.given, self.blocks[j])
                        with alone, torch.no_grad(), own_forward(self._block(j)):
                            made = self._block(j)(hidden, *call[0], **call[1])
                        self.extras[at][stack] = None if isinstance(made, Tensor) else tuple(made[1:])
                if j == last:
                    if stack == until:
                        raise Caught
                    hidden = output(stack, at)
                extras = self.extras[at][stack]
                return hidden if extras is None else (hidden, *extras)

            return forward

        with ExitStack() as undo:
            for stack, (first, last) in enumerate(self.stacks):
                for j in range(first, last + 1):
                    undo.enter_context(replaced(self._block(j), stand_in(j, stack, first, last)))
            yield

    def _store(self, name: str) -> None:
        tensors = {str(k): edge.detach().cpu() for k, edge in enumerate(self.edges)}
        write_plain_safetensors(self._file(name), tensors)

    def _stored(self, name: str, k: int) -> Tensor:
        with safe_open(str(self._file(name)), framework="pt") as file:
            hidden: Tensor = file.get_tensor(str(k))
            return hidden.to(self.lazy.device, copy=True)

    def _file(self, name: str) -> Path:
        return self.scratch / f"{name}.safetensors"

    def _unbound(self, batch: Batch) -> Tensor:  # noqa: ARG002
        raise ValueError("run forward first")

    def _block(self, j: int) -> nn.Module:
        return self.model.get_submodule(self.blocks[j])

    def _run(self, j: int, k: int, hidden: Tensor, cross: Sequence[Tensor]) -> Any:
        args, kwargs = self.calls[k][j]

        def real(value: Any) -> Any:
            return cross[value.place] if isinstance(value, _Cross) else value

        with by_output_alone((args, kwargs), self.lazy.given, self.blocks[j]):
            return self._block(j)(hidden, *map(real, args), **{name: real(value) for name, value in kwargs.items()})

    def _which(self, batch: Batch) -> int:
        return self._place[batch.number]


def forward(
    runs: Sequence[BlockwiseModel],
    *,
    backward: bool = True,
    store: bool = True,
    on_block: Callable[[], None] | None = None,
) -> None:
    """Several runs of one model (other changes, other scales) together: every weight is read once for all of them.

    Block inputs go to disk where they are wanted on the way back; then the loss, and its gradient at the last block.
    """
    give_back()  # maps of the last blocks and their sums
    one = runs[0]
    several = len(runs) > 1
    # Embeddings and heads are the largest part of a small model: one copy for all runs, where none of them changes it.
    alike = not any(name in run.lazy.changes.deltas for run in runs for name in one.outer)

    @contextmanager
    def outer(names: Sequence[str] = ()) -> Iterator[None]:
        with one.lazy.cached([*names, *([] if alike else one.outer)], several), ExitStack() as held:
            if alike:
                held.enter_context(one.lazy.weights(one.outer))
            yield

    def own(run: BlockwiseModel) -> AbstractContextManager[None]:
        return nullcontext() if alike else run.lazy.weights(run.outer)

    with frozen(one.model), torch.inference_mode(False):
        for stack, (first, last) in enumerate(one.stacks):
            with outer(one.parameters(first)):
                for run in runs:
                    with own(run):
                        run.enter(stack)
            for j in range(first, last + 1):
                with one.lazy.cached(one.parameters(j), several):
                    for run in runs:
                        with torch.no_grad(), run.block(j):
                            if j < last:
                                one.lazy.read_next(one.parameters(j + 1))
                            run.through(j, store)
                if on_block is not None:
                    on_block()
            for run in runs:
                run.end(stack)
        with outer():
            for run in runs:
                with own(run):
                    run.leave(backward)
