"""What maps are made of, the sums that a pass leaves of every pair of layers, and the maps of these sums.

>>> Maps()                                # BiCo: activations in, gradients back (paper, section 4)
>>> Maps(outputs="activations")           # THESEUS
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from taskferry.alignment import AlignedPair, Alignment
from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.errors import TaskferryError
from taskferry.layers.pairing import Pair
from taskferry.linalg.procrustes import Map
from taskferry.linalg.sums import CrossCovariance, Quality

Signal = Literal["activations", "gradients"]
UNREACHED = "the calibration pass does not reach it in both models"
NO_SIGNAL = "no signal reached it on the calibration set: its activations or gradients are zero"


@dataclass(frozen=True)
class Maps:
    """How the maps of a pair of layers are made."""

    inputs: Signal = "activations"  # x, or the gradient of the loss with respect to x through this layer
    outputs: Signal = "gradients"  # the gradient with respect to y, or y
    rank: RankPolicy = "range"
    tolerance: float = DEFAULT_TOLERANCE
    factored: bool = False  # left as two factors: low-rank changes pass through them for less than forming R

    @property
    def backward(self) -> bool:
        """Whether a backward pass is needed."""
        return "gradients" in (self.inputs, self.outputs)


@dataclass
class Sums:
    """Cross-covariances of pairs of layers. Layers that read the same tensors share one entry of `inputs`."""

    inputs: dict[str, CrossCovariance] = field(default_factory=dict)  # by the first target layer that reads it
    outputs: dict[str, CrossCovariance] = field(default_factory=dict)  # by target layer
    reads: dict[str, list[str]] = field(default_factory=dict)  # target layer -> keys of `inputs`, one a use

    def start(self, d_A: int, d_B: int) -> CrossCovariance:
        """Empty sums of one side of a layer."""
        return CrossCovariance(d_A, d_B)

    def solve(self, pairs: Sequence[Pair], maps: Maps, step: Callable[[int], None] = lambda _: None) -> Alignment:
        """The maps of these pairs; each sum goes with its map. `step` is told of maps done, two for each pair."""
        inputs: dict[str, tuple[Map, Quality]] = {}
        outputs: dict[str, tuple[Map, Quality]] = {}
        aligned, reasons = [], {}
        merged = {key for keys in self.reads.values() if len(keys) > 1 for key in keys}

        def solved(key: str, S: CrossCovariance) -> tuple[Map, Quality]:
            try:
                return S.solve(rank=maps.rank, tolerance=maps.tolerance, factored=maps.factored)
            except ValueError as error:
                raise TaskferryError(f"{key}: {error}") from error

        for pair in pairs:
            name = pair.target.name
            keys = self.reads.get(name)
            if not keys or name not in self.outputs:
                reasons[name] = UNREACHED
                step(2)
                continue
            key = keys[0] if len(keys) == 1 else f"{name}@all"
            if key not in inputs and len(keys) > 1:
                inputs[key] = solved(key, self._total(keys))
            elif key not in inputs:
                inputs[key] = solved(key, self.inputs[key] if key in merged else self.inputs.pop(key))
            outputs[name] = solved(name, self.outputs.pop(name))
            if inputs[key][1].rank and outputs[name][1].rank:
                aligned.append(AlignedPair(pair.source, pair.target, key, pair.note))
            else:
                reasons[name] = NO_SIGNAL
            step(2)
        used = {pair.reads: inputs[pair.reads] for pair in aligned}
        mine = {pair.target.name: outputs[pair.target.name] for pair in aligned}
        return Alignment(
            pairs=tuple(aligned),
            R_in={key: R for key, (R, _) in used.items()},
            R_out={key: R for key, (R, _) in mine.items()},
            quality_in={key: quality for key, (_, quality) in used.items()},
            quality_out={key: quality for key, (_, quality) in mine.items()},
            source_parameters={},
            target_parameters={},
            reasons=reasons,
        )

    def _total(self, keys: Sequence[str]) -> CrossCovariance:
        """The inputs of a layer that is used several times."""
        total = CrossCovariance(self.inputs[keys[0]].d_A, self.inputs[keys[0]].d_B)
        for key in keys:
            total.merge(self.inputs[key])
        return total
