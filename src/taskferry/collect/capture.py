"""One frozen forward and backward pass of both models in lockstep, into cross-covariances.

    >>> collect(statistics, Side(A, loss_A), Side(B, loss_B), pairs, calibration)

The source runs first and its activations and gradients of one micro-batch are held; the target's are
multiplied into the sums the moment they appear, and nothing outlives its micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from torch import Tensor, nn

from taskferry.collect.device import device_of, frozen, place_of
from taskferry.collect.halving import Halving
from taskferry.collect.mixture import experts_in_parts
from taskferry.collect.recorder import Call, OnForward, OnGradient, Recorder
from taskferry.collect.statistics import Capture, Paired, S, Statistics
from taskferry.data.batch import Batch, Calibration
from taskferry.errors import TaskferryError
from taskferry.layers import Family, family_of
from taskferry.layers.pairing import Pair
from taskferry.layers.routed import Routed, Rows, paired_rows
from taskferry.layers.site import Site
from taskferry.layers.tokens import Layout, TokenMatch, match
from taskferry.linalg.sums import CrossCovariance

Loss = Callable[[Batch], Tensor]
Place = tuple[bool, str]  # whether of the inputs, and the key of its sums
BICO = Capture()


@dataclass(frozen=True)
class Side:
    """One model with the loss whose gradient is taken, summed over the samples of a micro-batch."""

    model: nn.Module
    loss: Loss
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # what is used in place of a sharded parameter
    turned: dict[str, bool] = field(
        default_factory=dict
    )  # site -> whether it works on [L, n, d], as far as it was seen
    whole: bool = False  # whether its loss knows micro-batches by their number

    @property
    def cut(self) -> bool:
        """Whether a micro-batch may be run in parts."""
        return not self.weights and not self.whole

    @property
    def family(self) -> Family:
        """The family of the model."""
        return family_of(self.model)


def collect(
    kept: Paired[S],
    source: Side,
    target: Side,
    pairs: Iterable[Pair],
    calibration: Calibration | Sequence[tuple[Batch, Batch]],
    capture: Capture = BICO,
    on_batch: Callable[[], None] | None = None,
    uncounted: Sequence[tuple[Batch, Batch]] = (),
) -> None:
    """Show both models the calibration set, and the rows of all pairs to what is kept of them.

    `uncounted`: micro-batches that are run and not kept, because other ranks wait for this one's part of the weights.

    Memory: what is kept, one graph at a time, and the source's activations and gradients of one micro-batch.
    """
    by_target = {pair.target.name: pair for pair in pairs}
    _look_at_one(source, [pair.source for pair in by_target.values()], [A for A, _ in calibration])
    _look_at_one(target, [pair.target for pair in by_target.values()], [B for _, B in calibration])
    copy = False
    # Ranks that share the weights wait for each other's passes, and a block finds its samples by their number.
    halving = Halving(cut=source.cut and target.cut)
    unchecked: list[tuple[nn.Module, Tensor]] = []
    with torch.inference_mode(False), frozen(source.model), frozen(target.model), torch.enable_grad():
        for number, (batch_A, batch_B) in enumerate((*calibration, *uncounted)):
            counted = number < len(calibration)
            into: Paired[Any] = kept if counted else Statistics()
            done: list[tuple[range, set[Place]]] = []

            def part(A: Batch, B: Batch, into: Paired[Any] = into, done: list[tuple[range, set[Place]]] = done) -> None:
                nonlocal copy
                micro_batch = MicroBatch(source, target, by_target, into, capture, A, B, copy)
                micro_batch.unchecked = unchecked
                micro_batch.done = {place for rows, some in done if halving.within(rows) for place in some}
                try:
                    micro_batch.run()
                except torch.OutOfMemoryError:
                    # Sums that have all of these samples: their halves are not added to them again.
                    done.append((halving.rows, micro_batch.added))
                    raise
                copy = micro_batch.copy

            halving.run(part, batch_A, batch_B)
            if on_batch is not None and counted:
                on_batch()
    _check_losses(unchecked, [bool(torch.isfinite(loss)) for _, loss in unchecked])


class MicroBatch(Generic[S]):
    """The state of one micro-batch: the source's rows, and what the target has already been paired with."""

    def __init__(
        self,
        source: Side,
        target: Side,
        by_target: dict[str, Pair],
        kept: Paired[S],
        capture: Capture,
        batch_A: Batch,
        batch_B: Batch,
        copy: bool,
    ) -> None:
        self.source, self.target = source, target
        self.by_target = by_target
        self.kept = kept
        self.capture = capture
        self.batch_A = batch_A.to(*place_of(source.model))
        self.batch_B = batch_B.to(*place_of(target.model))
        self.unchecked: list[tuple[nn.Module, Tensor]] = []  # losses on a device that nobody has looked at yet
        self.alive: dict[tuple[bool, str, int], Tensor] = {}  # rows of the source that say anything, of either side
        self.done: set[Place] = set()  # sums that have these samples already
        self.added: set[Place] = set()
        self.copy = copy  # whether the source writes into what its layers have read
        self.takers = Counter(pair.source.name for pair in by_target.values())
        self.taken: Counter[tuple[str, str, int]] = Counter()
        self.calls: dict[tuple[str, int], Call] = {}
        self.inputs: dict[tuple[str, int], Rows] = {}
        self.outputs: dict[tuple[str, int], Rows] = {}
        self.shared: dict[tuple[int, int], str] = {}
        self.matches: dict[tuple[str, str, int, int], TokenMatch] = {}
        # Of the batches as they were given, which is on the host: tokens are matched there.
        self.layouts_A = source.family.layouts(source.model, batch_A)
        self.layouts_B = target.family.layouts(target.model, batch_B)

    def run(self) -> None:
        """Both passes."""
        if not self._run_source():
            # The model wrote into what a layer had read or made (x += f(x)): run again, keeping copies.
            self.copy = True
            self._run_source()
        if device_of(self.source.model).type != "cpu":
            self._look()
        targets = [pair.target for pair in self.by_target.values()]
        loss = _pass(
            self.target, self.batch_B, targets, self._pair_forward, self._pair_gradient, self.layouts_B, self.capture
        )
        self._keep(self.target, loss)

    def _keep(self, side: Side, loss: Tensor | None) -> None:
        if loss is not None:
            self.unchecked.append((side.model, loss))

    def _look(self) -> None:
        """All that the host must know of a micro-batch on a device, in the one copy that it waits for.

        Whether the losses are finite, and which rows of the source are zero: those are left out, as on a CPU.
        """
        device = device_of(self.source.model)
        flags = [torch.isfinite(loss).reshape(1).to(device) for _, loss in self.unchecked]
        held = [
            ((inputs, *at), CrossCovariance.alive(x))
            for inputs, rows in ((True, self.inputs), (False, self.outputs))
            for at, x in rows.items()
            if isinstance(x, Tensor)
        ]
        parts = [*flags, *(mask.flatten() for _, mask in held)]
        if not parts:
            return
        found = torch.cat(parts).cpu()
        _check_losses(self.unchecked, found[: len(flags)].tolist())
        self.unchecked.clear()
        masks = torch.split(found[len(flags) :], [mask.numel() for _, mask in held])
        self.alive = {key: mask.view(like.shape) for (key, like), mask in zip(held, masks, strict=True)}

    def _run_source(self) -> bool:
        """Hold the source's rows; whether all of them are still what they were when they were seen."""
        versions: list[tuple[Tensor, int]] = []
        copies: dict[int, Tensor] = {}  # by the tensor read: one for all experts of a module

        def hold(rows: Rows, read: int | None = None) -> Rows:
            if isinstance(rows, Routed):
                return replace(rows, rows=own(rows.rows))
            if not self.copy or read is None:
                return own(rows)
            if read not in copies or copies[read].shape != rows.shape:
                copies[read] = own(rows)
            return copies[read]

        def own(rows: Tensor) -> Tensor:
            held = rows.clone() if self.copy else rows
            versions.append((held, held._version))
            return held

        def forward(call: Call, x: Rows, y: Rows) -> None:
            key = (call.site.name, call.index)
            self.calls[key] = call
            if self.capture.inputs == "activations":
                self.inputs[key] = hold(x, call.input if call.site.expert is not None else None)
            if self.capture.outputs == "activations":
                self.outputs[key] = hold(y)

        def gradient(call: Call, g: Rows) -> None:
            key = (call.site.name, call.index)
            if self.capture.outputs == "gradients":
                self.outputs[key] = g
            if self.capture.inputs == "gradients":
                self.inputs[key] = _through(self.source, call.site, g)

        sources = {pair.source.name: pair.source for pair in self.by_target.values()}.values()
        loss = _pass(self.source, self.batch_A, sources, forward, gradient, self.layouts_A, self.capture)
        self._keep(self.source, loss)
        return all(rows._version == version for rows, version in versions)

    def _pair_forward(self, call: Call, x: Rows, y: Rows) -> None:
        if self.capture.inputs == "activations":
            self._pair_input(call, x, share=True)
        if self.capture.outputs == "activations":
            self._pair_output(call, y)

    def _pair_gradient(self, call: Call, g: Rows) -> None:
        if self.capture.outputs == "gradients":
            self._pair_output(call, g)
        if self.capture.inputs == "gradients":
            self._pair_input(call, _through(self.target, call.site, g), share=False)

    def _pair_input(self, call: Call, rows: Rows, share: bool) -> None:
        """Sites that read the same tensors share one map; gradients through different sites differ."""
        at = (self.by_target[call.site.name].source.name, call.index)
        if at not in self.inputs:
            return  # the source never reaches its site: no sums, and the coverage says so
        tensors = (self.calls[at].input, call.input)
        key = self.shared.get(tensors) if share else None
        if key is None:
            key = call.site.name if call.index == 0 else f"{call.site.name}@{call.index}"
            self.shared[tensors] = key
            self._add(self.kept.inputs, key, call, self.inputs[at], rows)
        self._take(self.inputs, "in", at)
        keys = self.kept.reads.setdefault(call.site.name, [])
        if key not in keys and key in self.kept.inputs:
            keys.append(key)

    def _pair_output(self, call: Call, rows: Rows) -> None:
        at = (self.by_target[call.site.name].source.name, call.index)
        if at in self.outputs:
            self._add(self.kept.outputs, call.site.name, call, self.outputs[at], rows)
            self._take(self.outputs, "out", at)

    def _take(self, held: dict[tuple[str, int], Rows], side: str, at: tuple[str, int]) -> None:
        """Let the source's rows go with their last reader: what is held shrinks while the target's graph grows."""
        self.taken[(side, *at)] += 1
        if self.taken[(side, *at)] == self.takers[at[0]]:
            del held[at]

    def _add(self, sums: dict[str, S], key: str, call: Call, rows_A: Rows, rows_B: Rows) -> None:
        pair = self.by_target[call.site.name]
        inputs = sums is self.kept.inputs
        place = (inputs, key)
        if place in self.done:
            return
        try:
            tokens = self._match(pair, rows_A.shape[1], rows_B.shape[1])
            X_A, X_B = paired_rows(tokens, rows_A, rows_B)
            routed = isinstance(rows_A, Routed) or isinstance(rows_B, Routed)
            if routed and not len(X_A):
                return  # no token reaches both
            if key not in sums:
                sums[key] = self.kept.start(inputs, call.site.name, rows_A.shape[-1], rows_B.shape[-1])
            into = sums[key]
            alive = None if routed else self.alive.get((inputs, pair.source.name, call.index))
            shown = None if alive is None else tokens.source(alive[..., None].float())[:, 0] != 0
            if isinstance(into, CrossCovariance) and shown is not None and not bool(shown.all()):
                into.add(X_A, X_B, shown.nonzero()[:, 0].to(X_A.device))
            else:
                into.add(X_A, X_B)
            self.added.add(place)
        except ValueError as error:
            raise TaskferryError(
                f"{pair.source.name} {list(rows_A.shape)} with {pair.target.name} {list(rows_B.shape)}: {error}"
            ) from error

    def _match(self, pair: Pair, length_A: int, length_B: int) -> TokenMatch:
        key = (pair.source.stream, pair.target.stream, length_A, length_B)
        if key not in self.matches:
            layout_A = self.layouts_A.get(pair.source.stream, Layout())
            layout_B = self.layouts_B.get(pair.target.stream, Layout())
            self.matches[key] = match(layout_A, layout_B, length_A, length_B)
        return self.matches[key]


def _look_at_one(side: Side, sites: Sequence[Site], batches: Sequence[Batch]) -> None:
    """Show the model one sample, where as many samples as tokens could hide which of them a layer has first.

    Not where the engine has the weights of one block alone, or other ranks wait for each pass: there the other
    micro-batches tell, and [n, L, d] is taken where none does.
    """
    if side.weights or any(parameter.is_meta for parameter in side.model.parameters()):
        return
    streams = {site.stream for site in sites}
    for batch in batches:
        layouts = side.family.layouts(side.model, batch)
        lengths = {layouts.get(stream, Layout()).length for stream in streams}
        if batch.rows > 1 and lengths & {None, batch.rows}:
            with torch.inference_mode(False), frozen(side.model), torch.no_grad():
                one = batch.take([0]).to(*place_of(side.model))
                watch(side, one, sites, lambda *_: None, lambda *_: None, {})
            return


def _weight(side: Side, site: Site) -> Tensor:
    weight = side.weights.get(site.weight)
    return site.read((side.model.get_parameter(site.weight) if weight is None else weight).detach())


def _through(side: Side, site: Site, g: Rows) -> Rows:
    """The gradient with respect to what a site reads."""
    W = _weight(side, site)
    return replace(g, rows=g.rows @ W) if isinstance(g, Routed) else g @ W


def _pass(
    side: Side,
    batch: Batch,
    sites: Iterable[Site],
    on_forward: OnForward,
    on_gradient: OnGradient,
    layouts: Mapping[str, Layout],
    capture: Capture,
) -> Tensor | None:
    """One forward pass, and a backward pass where gradients are asked for; the loss where it was not measured."""
    loss = watch(side, batch, sites, on_forward, on_gradient, layouts)
    if not capture.backward:
        return None
    here = loss.device.type == "cpu"
    if loss.ndim or here:
        _check_losses([(side.model, loss)], [not loss.ndim and bool(torch.isfinite(loss))])
    if loss.requires_grad:  # else it depends on none of these sites (a pooler that nobody reads): they stay unreached
        loss.backward()  # type: ignore[no-untyped-call]
    return None if here else loss.detach()


def _check_losses(losses: Sequence[tuple[nn.Module, Tensor]], finite: Sequence[bool]) -> None:
    for (model, loss), good in zip(losses, finite, strict=True):
        if not good:
            raise TaskferryError(
                f"the objective returned {loss.detach().cpu()} on {type(model).__name__}: one finite number is needed, "
                "the loss summed over the samples; check the labels, or load the model in float32"
            )


def watch(
    side: Side,
    batch: Batch,
    sites: Iterable[Site],
    on_forward: OnForward,
    on_gradient: OnGradient,
    layouts: Mapping[str, Layout],
) -> Tensor:
    """The loss of a micro-batch, its sites recorded."""
    lengths = {stream: layout.length for stream, layout in layouts.items() if layout.length is not None}
    sites = list(sites)
    recorder = Recorder(
        side.model,
        sites,
        samples=batch.rows,
        on_forward=on_forward,
        on_gradient=on_gradient,
        lengths=lengths,
        weights=side.weights,
        turned=side.turned,
    )
    with recorder, experts_in_parts(side.model, sites, recorder):
        return side.loss(batch)
