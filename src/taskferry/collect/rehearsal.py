"""What a capture keeps in memory, without any: one block of each model on torch's meta device, counted.

    >>> found = rehearse(source, target, pairs, (batch_A, batch_B), capture)
    >>> found.source.forward, found.target.forward                 # bytes that the graph of one block keeps

Meta tensors have sizes and no numbers, so the passes are those of the capture itself, for models that no machine here
could hold. All blocks of a model are taken to be alike.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from taskferry.collect.capture import Loss, MicroBatch, Side
from taskferry.collect.device import frozen
from taskferry.collect.statistics import Capture, Statistics
from taskferry.data.batch import IGNORED, Batch
from taskferry.errors import TaskferryError, first_line
from taskferry.layers import family_of
from taskferry.layers.pairing import Pair
from taskferry.objectives.language import expected, head_of, is_language_model

META = torch.device("meta")


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the meta tensors that are alive, from the moment that an operation makes them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if _is_meta(leaf):
                self._hold(leaf.untyped_storage())
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: Any) -> None:
            self.used -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.used += size
        self.peak = max(self.peak, self.used)

    def since(self) -> int:
        """The peak since this was last asked."""
        found, self.peak = self.peak, self.used
        return found


@dataclass(frozen=True)
class Kept:
    """Bytes of one model's pass over one micro-batch."""

    forward: int  # kept of one block when its forward pass is over: its graph, and rows that are held for the target
    backward: int  # when its backward pass is over: rows that are held, and the gradient of what came in
    gradients: int  # of these, the rows of the output side
    most: int  # at the peak of one block, with what is kept
    quiet: int  # at the peak of a forward pass of one block without a graph
    call: int  # what all blocks are called with beside the hidden states: masks, rotary tables
    edge: int  # the hidden states between two blocks
    head: int  # at the peak of what follows the last block, forward and backward


@dataclass(frozen=True)
class Rehearsal:
    """Of both models; the target's pass is that beside the rows of the source, which are not counted in it."""

    source: Kept
    target: Kept


def rehearse(
    models: tuple[nn.Module, nn.Module],
    paths: tuple[str, str],
    pairs: Sequence[Pair],
    batches: tuple[Batch, Batch],
    capture: Capture,
) -> Rehearsal:
    """One micro-batch through the blocks at `paths`, which `pairs` are of; both models lie on the meta device."""
    live = Live()
    marks: list[tuple[int, int]] = []  # (bytes in use, peak since the mark before)
    try:
        with torch.inference_mode(False), frozen(models[0]), frozen(models[1]), live:
            calls = [_call(*each) for each in zip(models, paths, batches, strict=True)]
            quiet = []
            for model, path, (args, kwargs) in zip(models, paths, calls, strict=True):
                before, _ = live.used, live.since()
                with torch.no_grad():
                    model.get_submodule(path)(*args, **kwargs)
                quiet.append(live.since() - before)

            held: list[Any] = []  # what the target would let go: both are counted by themselves

            def mark() -> None:
                marks.append((live.used, live.since()))
                if len(marks) == 3:
                    held.extend((dict(micro_batch.inputs), dict(micro_batch.outputs)))

            source_side, target_side = (
                Side(model, _loss(model.get_submodule(path), call, mark))
                for model, path, call in zip(models, paths, calls, strict=True)
            )
            statistics, by_target = Statistics(capture=capture), {pair.target.name: pair for pair in pairs}
            micro_batch = MicroBatch(source_side, target_side, by_target, statistics, capture, *batches, copy=False)
            micro_batch.batch_A, micro_batch.batch_B = (_on_meta(batch) for batch in batches)
            with torch.enable_grad():
                micro_batch.run()
            mark()
            sums = _sums_bytes(statistics)
            heads = [_head(live, *each) for each in zip(models, batches, strict=True)]
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        names = " and ".join(dict.fromkeys(type(model).__name__ for model in models))
        raise TaskferryError(
            f"the memory of {names} on a device cannot be told without their weights ({first_line(error)}): leave "
            "--device-memory out, the plan then rests on a trial"
        ) from error
    edges = [_bytes(call[0][:1]) for call in calls]
    (start, _), (forward_A, _), (after_A, most_A), (forward_B, _), (_, most_B) = marks
    sizes = [_bytes(call) - edge for call, edge in zip(calls, edges, strict=True)]
    kept = (forward_A - start, after_A - start, _bytes(list(held[1].values())), most_A - start)
    source = Kept(*kept, quiet[0], sizes[0], edges[0], heads[0])
    # Sums of the inputs are there when the forward pass is over, all of them at the end: they are counted elsewhere.
    inputs = _sums_bytes(statistics, outputs=False)
    kept = (forward_B - after_A - inputs, 0, 0, most_B - after_A - sums)
    return Rehearsal(source, Kept(*kept, quiet[1], sizes[1], edges[1], heads[1]))


def on_meta(model: nn.Module, precision: torch.dtype | None = None) -> nn.Module:
    """The same model without numbers; its weights in another precision where one is given."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        whole = precision is None or not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point()
        empty = torch.empty_like(tensor, device=META, dtype=None if whole else precision)
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


class _Reached(Exception):
    """The block whose call was asked for."""


def _call(model: nn.Module, path: str, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block is called with, the hidden states first."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = dict(kwargs)
        given = args or (rest.pop("hidden_states"),)
        found.append((given, rest))
        raise _Reached

    handle = model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
    given = dict(family_of(model).arguments(model, _on_meta(batch)))
    given.pop("labels", None)
    try:
        with torch.no_grad():
            model(**given, **({"use_cache": False} if is_language_model(model) else {}))
    except _Reached:
        pass
    finally:
        handle.remove()
    return found[0]


def _on_meta(batch: Batch) -> Batch:
    """A mask as models make it of one with padding: whether there is any, they would have to look."""
    inputs = {name: tensor.to(META) for name, tensor in batch.inputs.items()}
    mask = inputs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        n, length = mask.shape
        inputs["attention_mask"] = torch.empty(n, 1, length, length, dtype=torch.bool, device=META)
    return Batch(inputs, None if batch.labels is None else batch.labels.to(META))


def _loss(block: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], mark: Callable[[], None]) -> Loss:
    """As a block has it in a walk block by block; marks the beginning and the end of its forward pass."""

    def loss(batch: Batch) -> Tensor:  # noqa: ARG001
        mark()
        (hidden, *rest), kwargs = call
        output = block(hidden.detach().requires_grad_(), *rest, **kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        mark()
        return (output * torch.empty_like(output)).sum()  # as the gradient that comes from above

    return loss


def _head(live: Live, model: nn.Module, batch: Batch) -> int:
    """Scores of the words at the positions that count, their loss and its gradient; 0 for models without words."""
    words = head_of(model) if is_language_model(model) else None
    if words is None or "labels" not in batch.inputs:
        return 0
    count = int((expected(model, batch) != IGNORED).sum())
    before, _ = live.used, live.since()
    with torch.enable_grad():
        hidden = torch.empty(count, words.weight.shape[1], dtype=words.weight.dtype, device=META, requires_grad=True)
        loss = F.cross_entropy(
            words(hidden).float(), torch.empty(count, dtype=torch.long, device=META), reduction="sum"
        )
        loss.backward()  # type: ignore[no-untyped-call]
    return live.since() - before


def _bytes(values: Any) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tree_leaves(values) if _is_meta(t)}
    return sum(storages.values())


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _sums_bytes(statistics: Statistics, outputs: bool = True) -> int:
    held = [*statistics.inputs.values(), *(statistics.outputs.values() if outputs else ())]
    return _bytes([[getattr(S, name) for name in S.moments] + S._pending for S in held])
