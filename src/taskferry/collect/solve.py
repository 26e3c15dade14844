"""From the sums of a group of pairs to their maps: solved once each, every sum let go with its map.

>>> solved = solve_group(GroupSums.of(statistics, group), group, MapOptions())
>>> solved.pairs, solved.reasons
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from taskferry.alignment import AlignedPair, Alignment
from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.collect.statistics import Statistics
from taskferry.errors import TaskferryError
from taskferry.layers.pairing import Pair
from taskferry.linalg.procrustes import Map
from taskferry.linalg.sums import CrossCovariance, Quality, solve_all

Step = Callable[[int], None]
UNREACHED = "the calibration pass does not reach it in both models"
NO_SIGNAL = "no signal reached it on the calibration set: its activations or gradients are zero"


@dataclass(frozen=True)
class MapOptions:
    """How maps are made."""

    rank: RankPolicy = "range"
    tolerance: float = DEFAULT_TOLERANCE
    factored: bool = False  # leave maps as two factors: low-rank changes pass through them for less than forming R


@dataclass
class Solved:
    """Maps, the pairs that have one on both sides, and the reasons of those that do not."""

    pairs: list[AlignedPair] = field(default_factory=list)
    inputs: dict[str, tuple[Map, Quality]] = field(default_factory=dict)
    outputs: dict[str, tuple[Map, Quality]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # target site -> why it has no map

    def save(self, path: Path, key: str) -> None:
        """As an alignment of these pairs alone; `key` says what they rest on."""
        self.alignment({}, {}, self.reasons, {"rests on": key}).save(path)

    @classmethod
    def load(cls, path: Path, key: str) -> Solved | None:
        """The inverse; None where there is no such file, or it rests on something else."""
        if not path.is_file():
            return None
        try:
            part = Alignment.load(path)
        except TaskferryError:
            return None  # half-written, or of an older form: solve it again
        if part.provenance.get("rests on") != key:
            return None
        inputs = {name: (R, part.quality_in[name]) for name, R in part.R_in.items()}
        outputs = {name: (R, part.quality_out[name]) for name, R in part.R_out.items()}
        return cls(list(part.pairs), inputs, outputs, dict(part.reasons))

    def pair_up(self, group: list[Pair], reads: Mapping[str, str]) -> None:
        """The pairs of a group that have a direction on both sides; the others get their reason."""
        for pair in group:
            name = pair.target.name
            if pair.experts and name in reads:
                self.outputs[name] = router_map(pair)
            if name not in reads:
                self.reasons[name] = UNREACHED
            elif self.inputs[reads[name]][1].rank and self.outputs[name][1].rank:
                self.pairs.append(AlignedPair(pair.source, pair.target, reads[name], pair.note))
            else:
                self.reasons[name] = NO_SIGNAL

    def add(self, other: Solved) -> None:
        """Take in another group."""
        self.pairs += other.pairs
        self.inputs |= other.inputs
        self.outputs |= other.outputs
        self.reasons |= other.reasons

    def alignment(
        self,
        source_parameters: Mapping[str, tuple[int, ...]],
        target_parameters: Mapping[str, tuple[int, ...]],
        reasons: Mapping[str, str],
        provenance: Mapping[str, Any],
    ) -> Alignment:
        """With the maps that its pairs use."""
        used_in = dict.fromkeys(pair.reads for pair in self.pairs)
        used_out = dict.fromkeys(pair.target.name for pair in self.pairs)
        return Alignment(
            pairs=tuple(self.pairs),
            R_in={key: self.inputs[key][0] for key in used_in},
            R_out={key: self.outputs[key][0] for key in used_out},
            quality_in={key: self.inputs[key][1] for key in used_in},
            quality_out={key: self.outputs[key][1] for key in used_out},
            source_parameters=source_parameters,
            target_parameters=target_parameters,
            reasons=reasons,
            provenance=provenance,
        )


def router_map(pair: Pair) -> tuple[Map, Quality]:
    """The output map of a router, which is known: the logit of an expert is that of the one it takes."""
    count_A, count_B = pair.source.shape[0], pair.target.shape[0]
    R = torch.zeros(count_A, count_B)
    R[list(pair.experts), range(count_B)] = 1.0
    used = len(set(pair.experts))
    return Map(R=R), Quality(rank=used, rows=count_B, similarity=1.0, residual=0.0, largest=1.0, smallest=1.0)


@dataclass(frozen=True)
class Finished:
    """Finished groups of sites in a folder, so that a fit that was killed goes on after the last of them."""

    folder: Path | None  # None: nothing is stored
    groups: int
    key: str  # what they rest on

    def load(self, number: int, group: list[Pair]) -> Solved | None:
        """A group that an earlier run has finished."""
        file = self._file(number)
        return None if file is None else Solved.load(file, self._key(group))

    def save(self, number: int, group: list[Pair], solved: Solved) -> None:
        """Store a group."""
        file = self._file(number)
        if file is not None:
            solved.save(file, self._key(group))

    def _file(self, number: int) -> Path | None:
        """A single group is not stored: there would be nothing to go on with."""
        if self.folder is None or self.groups < 2:
            return None
        return self.folder / f"group-{number + 1}-of-{self.groups}.alignment"

    def _key(self, group: list[Pair]) -> str:
        names = [(pair.source.name, pair.target.name) for pair in group]
        return hashlib.sha256(repr((self.key, names)).encode()).hexdigest()


@dataclass
class GroupSums:
    """The sums that a group of pairs needs, each once: by the key that a pair reads, and by its target site."""

    reads: dict[str, str]  # target site -> key of `inputs`
    inputs: dict[str, CrossCovariance]
    outputs: dict[str, CrossCovariance]

    @classmethod
    def of(cls, statistics: Statistics, group: list[Pair]) -> GroupSums:
        """Those of the statistics that the group needs; pairs that no pass reaches are left out."""
        known = statistics.outputs
        names = [p.target.name for p in group if p.experts or p.target.name in known]  # a router's output map is known
        names = [name for name in names if statistics.reads.get(name)]
        found = cls({}, {}, {})
        for name in names:
            key, sums = statistics.input_of(name)
            found.reads[name], found.inputs[key] = key, sums
        found.outputs = {name: known[name] for name in names if name in known}
        return found

    def solve(self, options: MapOptions, step: Step = lambda _: None) -> Solved:
        """The maps of all sums; each sum is let go with its map."""
        found = Solved()
        readers = Counter(self.reads.values())
        for sums, into in ((self.inputs, found.inputs), (self.outputs, found.outputs)):
            for key, R, quality in solve_all(
                sums, rank=options.rank, tolerance=options.tolerance, factored=options.factored
            ):
                into[key] = (R, quality)
                step(readers[key] if into is found.inputs else 1)
        return found


def solve_group(sums: GroupSums, group: list[Pair], options: MapOptions, step: Step = lambda _: None) -> Solved:
    """The maps of a group of pairs; consumes the sums. `step` is told of maps done, two for each pair."""
    found = sums.solve(options, step)
    found.pair_up(group, sums.reads)
    step(2 * (len(group) - len(sums.reads)))
    return found
