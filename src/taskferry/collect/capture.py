"""One frozen forward and backward pass of both models in lockstep, into cross-covariances.

    >>> collect(sums, Side(A, loss_A), Side(B, loss_B), pairs, calibration)

The source runs first and its activations and gradients of one micro-batch are held; the target's are
multiplied into the sums the moment they appear, and nothing outlives its micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from taskferry.collect.device import frozen, place_of
from taskferry.collect.maps import Maps, Sums
from taskferry.collect.recorder import Call, OnForward, OnGradient, Recorder
from taskferry.data.batch import Batch
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.layers.pairing import Pair
from taskferry.layers.site import Site
from taskferry.layers.tokens import Layout, TokenMatch, match
from taskferry.linalg.sums import CrossCovariance

Loss = Callable[[Batch], Tensor]
Place = tuple[str, int]  # the name of a layer, and which of its uses in a pass


@dataclass(frozen=True)
class Side:
    """One model with the loss whose gradient is taken, summed over the samples of a micro-batch."""

    model: nn.Module
    loss: Loss
    turned: dict[str, bool] = field(default_factory=dict)  # layer -> whether it works on [L, n, d], where that was seen

    def run(
        self,
        batch: Batch,
        layers: Iterable[Site],
        on_forward: OnForward,
        on_gradient: OnGradient,
        layouts: Mapping[str, Layout],
        backward: bool,
    ) -> None:
        """A forward pass, and a backward pass where gradients are asked for, with these layers recorded."""
        lengths = {stream: layout.length for stream, layout in layouts.items() if layout.length is not None}
        recorder = Recorder(
            self.model,
            layers,
            samples=batch.rows,
            on_forward=on_forward,
            on_gradient=on_gradient,
            lengths=lengths,
            turned=self.turned,
        )
        with recorder:
            loss = self.loss(batch)
        if not backward:
            return
        if loss.ndim or not bool(torch.isfinite(loss)):
            raise TaskferryError(
                f"the objective returned {loss.detach().cpu()} on {type(self.model).__name__}: one finite number is "
                "needed, the loss summed over the samples; check the labels, or load the model in float32"
            )
        if loss.requires_grad:  # else it depends on none of these layers (a pooler that nobody reads)
            loss.backward()  # type: ignore[no-untyped-call]

    def layouts(self, batch: Batch) -> dict[str, Layout]:
        """How the tokens of a micro-batch lie."""
        return family_of(self.model).layouts(self.model, batch)

    def look_at_one(self, layers: Sequence[Site], batches: Sequence[Batch]) -> None:
        """Show the model one sample, where as many samples as tokens could hide which of them a layer has first.

        Not where the weights of one block alone are in memory: there the other micro-batches tell, and [n, L, d] is
        taken where none does.
        """
        if any(parameter.is_meta for parameter in self.model.parameters()):
            return
        streams = {layer.stream for layer in layers}
        for batch in batches:
            layouts = self.layouts(batch)
            lengths = {layouts.get(stream, Layout()).length for stream in streams}
            if batch.rows > 1 and lengths & {None, batch.rows}:
                with torch.inference_mode(False), frozen(self.model), torch.no_grad():
                    one = batch.take([0]).to(*place_of(self.model))
                    self.run(one, layers, lambda *_: None, lambda *_: None, {}, backward=False)
                return


@dataclass
class _Held:
    """The source's rows of one micro-batch."""

    inputs: dict[Place, Tensor] = field(default_factory=dict)
    outputs: dict[Place, Tensor] = field(default_factory=dict)
    read: dict[Place, int] = field(default_factory=dict)  # the number of the tensor that a layer reads
    changed: bool = False  # whether the model wrote into what a layer had read or made (x += f(x))


def collect(
    sums: Sums,
    source: Side,
    target: Side,
    pairs: Iterable[Pair],
    samples: Iterable[tuple[Batch, Batch]],
    maps: Maps,
    on_batch: Callable[[], None] = lambda: None,
) -> None:
    """Show both models the samples, and add the rows of all pairs to the sums.

    Memory: the sums, one graph at a time, and the source's activations and gradients of one micro-batch.
    """
    by_target = {pair.target.name: pair for pair in pairs}
    samples = list(samples)
    source.look_at_one([pair.source for pair in by_target.values()], [A for A, _ in samples])
    target.look_at_one([pair.target for pair in by_target.values()], [B for _, B in samples])
    copy = False
    with torch.inference_mode(False), frozen(source.model), frozen(target.model), torch.enable_grad():
        for A, B in samples:
            held = _hold(source, by_target, A, maps, copy)
            if held.changed:
                copy = True
                held = _hold(source, by_target, A, maps, copy)
            _add(sums, held, source.layouts(A), target, by_target, B, maps)
            on_batch()


def _hold(side: Side, by_target: Mapping[str, Pair], batch: Batch, maps: Maps, copy: bool) -> _Held:
    """Both passes of the source; `copy` where the model writes into what its layers have read."""
    held, versions = _Held(), []

    def own(rows: Tensor) -> Tensor:
        rows = rows.clone() if copy else rows
        versions.append((rows, rows._version))
        return rows

    def forward(call: Call, x: Tensor, y: Tensor) -> None:
        at = (call.site.name, call.index)
        held.read[at] = call.input
        if maps.inputs == "activations":
            held.inputs[at] = own(x)
        if maps.outputs == "activations":
            held.outputs[at] = own(y)

    def gradient(call: Call, g: Tensor) -> None:
        at = (call.site.name, call.index)
        if maps.outputs == "gradients":
            held.outputs[at] = g
        if maps.inputs == "gradients":
            held.inputs[at] = g @ _weight(side.model, call.site)

    layers = {pair.source.name: pair.source for pair in by_target.values()}.values()
    side.run(batch.to(*place_of(side.model)), layers, forward, gradient, side.layouts(batch), maps.backward)
    held.changed = any(rows._version != version for rows, version in versions)
    return held


def _add(
    sums: Sums,
    held: _Held,
    layouts_A: Mapping[str, Layout],
    side: Side,
    by_target: Mapping[str, Pair],
    batch: Batch,
    maps: Maps,
) -> None:
    """Both passes of the target, its rows paired with those of the source and added."""
    layouts_B = side.layouts(batch)  # of the batch as it was given, on the host: tokens are matched there
    matches: dict[tuple[str, str, int, int], TokenMatch] = {}
    shared: dict[tuple[int, int], str] = {}  # by the numbers of the tensors that both models read
    takers = Counter(pair.source.name for pair in by_target.values())
    taken: Counter[tuple[str, Place]] = Counter()

    def take(which: str, rows: dict[Place, Tensor], at: Place) -> Tensor:
        """Let the source's rows go with their last reader: they shrink while the target's graph grows."""
        taken[which, at] += 1
        return rows.pop(at) if taken[which, at] == takers[at[0]] else rows[at]

    def add(into: dict[str, CrossCovariance], key: str, pair: Pair, rows_A: Tensor, rows_B: Tensor) -> None:
        try:
            what = (pair.source.stream, pair.target.stream, rows_A.shape[1], rows_B.shape[1])
            if what not in matches:
                A, B = layouts_A.get(what[0], Layout()), layouts_B.get(what[1], Layout())
                matches[what] = match(A, B, *what[2:])
            tokens = matches[what]
            if key not in into:
                into[key] = sums.start(rows_A.shape[-1], rows_B.shape[-1])
            into[key].add(tokens.source(rows_A), tokens.target(rows_B))
        except ValueError as error:
            raise TaskferryError(
                f"{pair.source.name} {list(rows_A.shape)} with {pair.target.name} {list(rows_B.shape)}: {error}"
            ) from error

    def inputs(call: Call, rows: Tensor, share: bool) -> None:
        """Layers that read the same tensors share one map; gradients through different layers differ."""
        pair = by_target[call.site.name]
        at = (pair.source.name, call.index)
        if at not in held.inputs:
            return  # the source never reaches its layer: no sums, and the coverage says so
        rows_A, both = take("in", held.inputs, at), (held.read[at], call.input)
        key = shared.get(both) if share else None
        if key is None:
            key = call.site.name if call.index == 0 else f"{call.site.name}@{call.index}"
            shared[both] = key
            add(sums.inputs, key, pair, rows_A, rows)
        keys = sums.reads.setdefault(call.site.name, [])
        if key not in keys:
            keys.append(key)

    def outputs(call: Call, rows: Tensor) -> None:
        pair = by_target[call.site.name]
        at = (pair.source.name, call.index)
        if at in held.outputs:
            add(sums.outputs, call.site.name, pair, take("out", held.outputs, at), rows)

    def forward(call: Call, x: Tensor, y: Tensor) -> None:
        if maps.inputs == "activations":
            inputs(call, x, share=True)
        if maps.outputs == "activations":
            outputs(call, y)

    def gradient(call: Call, g: Tensor) -> None:
        if maps.outputs == "gradients":
            outputs(call, g)
        if maps.inputs == "gradients":
            inputs(call, g @ _weight(side.model, call.site), share=False)

    layers = [pair.target for pair in by_target.values()]
    side.run(batch.to(*place_of(side.model)), layers, forward, gradient, layouts_B, maps.backward)


def _weight(model: nn.Module, layer: Site) -> Tensor:
    return layer.read(model.get_parameter(layer.weight).detach())
