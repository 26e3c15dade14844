"""An alignment: all maps of a pair of models, with their quality and provenance. Fit once, apply many times.

>>> alignment = Alignment.load("a-to-b.alignment")
>>> tau_B = alignment.apply(tau_A)                     # no model, no data: two products a weight
>>> print(tau_B.coverage.summary())
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from taskferry.coverage import Coverage, Row, Status
from taskferry.disk.files import hash_tensor, is_finite, is_kind, open_safetensors, write_safetensors
from taskferry.display.tables import ROWS, panel
from taskferry.errors import TaskferryError, first_line
from taskferry.layers.site import Site
from taskferry.linalg.precision import full_precision
from taskferry.linalg.procrustes import Map, bilinear
from taskferry.linalg.sums import Quality
from taskferry.taskvector import Delta, LowRank, TaskVector, as_dense, match_names, to_device

FORMAT = "taskferry alignment 2"
NO_CHANGE = "unchanged by the fine-tune"
PACKED = 1024  # a packed matrix has at most so many times the rows of one of its parts


@dataclass(frozen=True)
class AlignedPair:
    """A source site, the target site that takes its change, and the key of the input map they share."""

    source: Site
    target: Site
    reads: str
    note: str = ""  # how the source's block was chosen, where not by depth alone


@dataclass(frozen=True, repr=False)
class Alignment:
    """R_in and R_out of every paired site."""

    pairs: tuple[AlignedPair, ...]
    R_in: Mapping[str, Map]  # by AlignedPair.reads
    R_out: Mapping[str, Map]  # by target site
    quality_in: Mapping[str, Quality]
    quality_out: Mapping[str, Quality]
    source_parameters: Mapping[str, tuple[int, ...]]
    target_parameters: Mapping[str, tuple[int, ...]]
    reasons: Mapping[str, str]  # target parameter or site -> why it is not moved
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, tau: TaskVector) -> TaskVector:
        """τ_B = R_outᵀ τ_A R_in at every site, R_out on every bias.

        Low-rank stays low-rank, of the same rank; only where the target packs in one matrix what the source has in
        several, their factors stand side by side.
        """
        return self.apply_all([tau])[0]

    @full_precision()
    def apply_all(self, taus: Sequence[TaskVector]) -> list[TaskVector]:
        """The same for several task vectors, bit for bit: each map is fetched from memory once for all of them."""
        if self.pairs and not self.target_parameters:
            raise TaskferryError("this is a part of a fit that was not finished, not an alignment: fit it to the end")
        moves = [_Move(self, tau) for tau in taus]
        for pair in self.pairs:
            for move in moves:
                move.add(pair)
        return [move.moved() for move in moves]

    def joined(self, other: Alignment) -> Alignment:
        """The maps of both, of other layers each."""
        return replace(
            self,
            pairs=self.pairs + other.pairs,
            R_in={**self.R_in, **other.R_in},
            R_out={**self.R_out, **other.R_out},
            quality_in={**self.quality_in, **other.quality_in},
            quality_out={**self.quality_out, **other.quality_out},
            reasons={**self.reasons, **other.reasons},
        )

    def _coverage(self, parts: Mapping[str, _Parts], unused: set[str]) -> Coverage:
        lost: dict[str, list[str]] = {}  # packed parameter -> its parts that do not move
        for name, why in self.reasons.items():
            parameter, packed, _ = name.partition("#")
            if packed:
                lost.setdefault(parameter, []).append(f"{name}: {why}")
        rows = []
        for name, shape in self.target_parameters.items():
            part = parts.get(name)
            if part is None:
                rows.append(Row(name, shape, "kept", self.reasons.get(name, "no layer uses it")))
            elif not part.found:
                rows.append(Row(name, shape, "kept", NO_CHANGE))
            else:
                still = [f"{NO_CHANGE} ({', '.join(dict.fromkeys(part.missing))})"] if part.missing else []
                reasons = [*still, *lost.get(name, [])]
                status: Status = "partly" if reasons else "moved"
                rows.append(Row(name, shape, status, "; ".join(reasons), tuple(part.sources), "; ".join(part.notes)))
        paired = {pair.source.weight for pair in self.pairs} | {pair.source.bias for pair in self.pairs}
        left = {
            name: "the target has no bias there" if name in paired else "no layer of the target takes it"
            for name in sorted(unused)
        }
        taken: dict[str, dict[str, int]] = {}  # packed weight of the source -> the outputs of each part that moves
        for source in (pair.source for pair in self.pairs):
            if source.rows is not None and source.weight not in unused:
                taken.setdefault(source.weight, {})[source.name] = source.shape[0]
        moved = {name for part in parts.values() for name in part.sources}
        for name in moved & taken.keys():
            transposed = next(pair.source.transposed for pair in self.pairs if pair.source.weight == name)
            if sum(taken[name].values()) < self.source_parameters[name][-1 if transposed else 0]:
                left[name] = "no layer of the target takes some of its outputs"
        return Coverage(tuple(rows), left)

    def __repr__(self) -> str:
        return f"Alignment({len(self.pairs)} pairs of sites, {len(self.R_in)} input and {len(self.R_out)} output maps)"

    def _repr_html_(self) -> str:
        rows = []
        for pair in self.pairs[:ROWS]:
            found = self.quality_in.get(pair.reads), self.quality_out.get(pair.target.name)
            quality = [value for q in found for value in (("", "") if q is None else (q.rank, q.residual))]
            rows.append((pair.target.name, pair.source.name, *quality))
        moving = {name for pair in self.pairs for name in (pair.target.weight, pair.target.bias)}
        facts = {
            "from": self.provenance.get("source", {}).get("class", "?"),
            "to": self.provenance.get("target", {}).get("class", "?"),
            "pairs of sites": len(self.pairs),
            "stay as they are": f"{len(set(self.target_parameters) - moving)} parameters of the target",
        }
        header = ("target", "source", "rank in", "residual in", "rank out", "residual out")
        return panel("Alignment", facts, header, rows, len(self.pairs) - len(rows))

    def table(self) -> list[dict[str, Any]]:
        """One row a pair of sites: where its change comes from, and how good its two maps are."""
        rows = []
        for pair in self.pairs:
            q_in, q_out = self.quality_in[pair.reads], self.quality_out[pair.target.name]
            rows.append(
                {
                    "target": pair.target.name,
                    "source": pair.source.name,
                    "rank_in": q_in.rank,
                    "rank_out": q_out.rank,
                    "residual_in": round(q_in.residual, 6),
                    "residual_out": round(q_out.residual, 6),
                }
            )
        return rows

    def identity(self) -> str:
        """A hash of all its maps: what two alignments share that move alike."""
        return self._identity

    @cached_property
    def _identity(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors()[0].items()):
            hash_tensor(digest, name, tensor)
        return digest.hexdigest()

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(all maps by name, sites with quality and provenance): what a file or another process needs."""
        tensors: dict[str, Tensor] = {}
        for side, maps in (("in", self.R_in), ("out", self.R_out)):
            for key, R in maps.items():
                if R.R is not None:
                    tensors[f"{side}/R/{key}"] = R.R
                elif R.factors is not None:
                    tensors[f"{side}/U/{key}"], tensors[f"{side}/V/{key}"] = R.factors
        header = {
            "format": FORMAT,
            "pairs": [asdict(pair) for pair in self.pairs],
            "quality_in": {key: asdict(q) for key, q in self.quality_in.items()},
            "quality_out": {key: asdict(q) for key, q in self.quality_out.items()},
            "source_parameters": dict(self.source_parameters),
            "target_parameters": dict(self.target_parameters),
            "reasons": dict(self.reasons),
            "provenance": dict(self.provenance),
        }
        return tensors, header

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any], where: str) -> Alignment:
        """The inverse of `tensors`."""
        maps: dict[str, dict[str, dict[str, Tensor]]] = {"in": {}, "out": {}}
        try:
            for name, tensor in tensors.items():
                side, kind, key = name.split("/", 2)
                maps[side].setdefault(key, {})[kind] = tensor
            R_in, R_out = ({key: Map(**parts) for key, parts in maps[side].items()} for side in ("in", "out"))
            known = _Header.model_validate_json(json.dumps(header))
            alignment = cls(R_in=R_in, R_out=R_out, **dict(known))
            _check(alignment)
        except (KeyError, TypeError, ValueError) as error:
            raise TaskferryError(f"{where}: a damaged alignment: {first_line(error)}; fit it again") from error
        return alignment

    def model(self, side: str) -> Mapping[str, str]:
        """What is known of the "source" or "target" that it was fitted on: its class, its hash, its prefix."""
        known = self.provenance.get(side)
        if not isinstance(known, dict) or not {"class", "sha256"} <= set(known):
            raise TaskferryError(f"this alignment does not say which {side} it was fitted on: fit it again")
        return {name: str(value) for name, value in known.items()}

    def save(self, path: str | Path) -> None:
        """One safetensors file; the header holds sites, quality and provenance."""
        write_safetensors(path, *self.tensors())

    @classmethod
    def load(cls, path: str | Path) -> Alignment:
        """The inverse of `save`; what is applied is the same bit for bit."""
        with open_safetensors(path, FORMAT) as (file, header):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        return cls.from_tensors(tensors, header, str(path))

    @staticmethod
    def weights_to(path: str | Path) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the target's weights that it leads to, by the header of its file alone."""
        with open_safetensors(path, FORMAT) as (_, header):
            try:
                names, shapes = (pair["target"]["weight"] for pair in header["pairs"]), header["target_parameters"]
                return {str(name): tuple(shapes[name]) for name in names}
            except (KeyError, TypeError) as error:
                raise TaskferryError(f"{path}: a damaged alignment: {error!r}") from error


def is_alignment(path: str | Path) -> bool:
    """Whether this is a file that `Alignment.save` wrote, damaged or not."""
    return is_kind(path, FORMAT)


@dataclass
class _Parts:
    """What the layers of one target parameter take: rows of a packed matrix, or all of it."""

    shape: tuple[int, ...]
    found: list[tuple[Site, Delta]] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # roles of layers whose source does not change

    def add(self, layer: Site, source: str, delta: Delta, note: str) -> None:
        """What a layer takes from a parameter of the source; a note says how that was chosen."""
        self.found.append((layer, delta))
        self.sources[source] = None
        if note:
            self.notes[note] = None

    def together(self) -> Delta:
        """The change of the whole parameter, as it is stored; rows that do not move are zero."""
        first, delta = self.found[0]
        if first.rows is not None:
            out = self.shape[-1] if first.transposed else self.shape[0]
            low = [(layer, part) for layer, part in self.found if isinstance(part, LowRank)]
            if len(low) == len(self.found):
                delta = _side_by_side(low, out)
            else:
                dense = [(layer, as_dense(part)) for layer, part in self.found]
                delta = dense[0][1].new_zeros(out, *dense[0][1].shape[1:])
                for layer, part in dense:
                    layer.put(part, delta)
        if isinstance(delta, LowRank):
            return delta.T if first.transposed else delta
        return (delta.T.contiguous() if first.transposed and delta.ndim == 2 else delta).reshape(self.shape)


def _side_by_side(parts: Sequence[tuple[Site, LowRank]], out: int) -> LowRank:
    """Parts that share their right factor keep their rank; others stand side by side."""
    groups: dict[int, LowRank] = {}
    for layer, part in parts:
        group = groups.setdefault(id(part.right), LowRank(part.left.new_zeros(out, part.rank), part.right))
        layer.put(part.left, group.left)
    left, right = zip(*((group.left, group.right) for group in groups.values()), strict=True)
    return LowRank(torch.cat(left, 1), torch.cat(right))


class _Move:
    """One task vector on its way, layer by layer."""

    def __init__(self, alignment: Alignment, tau: TaskVector) -> None:
        self.alignment = alignment
        shapes = alignment.source_parameters
        names = match_names(tau.deltas, shapes)
        self.deltas = {names[name]: delta for name, delta in tau.deltas.items()}
        for name, delta in self.deltas.items():
            if tuple(delta.shape) != tuple(shapes[name]):
                raise TaskferryError(
                    f"{name}: the task vector's change is {tuple(delta.shape)}, this alignment's source has "
                    f"{tuple(shapes[name])}: was it made on another base model?"
                )
        self.parts: dict[str, _Parts] = {}
        self.rights: dict[tuple[str, str], Tensor] = {}  # one product A R_in for the parts of a packed matrix
        self.used: set[str] = set()

    def add(self, pair: AlignedPair) -> None:
        source, target = pair.source, pair.target
        R_in, R_out = self.alignment.R_in[pair.reads], self.alignment.R_out[target.name]
        delta = self._change(source.weight, R_out)
        if delta is None:
            self._parts(target.weight).missing.append(target.role)
        elif isinstance(delta, LowRank):
            own = delta.T if source.transposed else delta
            key = (source.weight, pair.reads)
            if key not in self.rights:
                self.rights[key] = R_in(own.right)
            moved = LowRank(R_out.columns(source.own(own.left)), self.rights[key])
            self._parts(target.weight).add(target, source.weight, moved, pair.note)
        else:
            moved_dense = bilinear(R_out, source.read(delta), R_in)
            self._parts(target.weight).add(target, source.weight, moved_dense, pair.note)
        if target.bias is None:
            return
        shift = None if source.bias is None else self._change(source.bias, R_out)
        if source.bias is None or not isinstance(shift, Tensor):
            self._parts(target.bias).missing.append(target.role)
        else:
            self._parts(target.bias).add(target, source.bias, R_out(source.read(shift)[None])[0], pair.note)

    def _change(self, name: str, R: Map) -> Delta | None:
        """A change where the maps lie: it is much smaller than they are, or was made there."""
        if name not in self.deltas:
            return None
        self.used.add(name)
        self.deltas[name] = to_device(self.deltas[name], R.device)
        return self.deltas[name]

    def _parts(self, name: str) -> _Parts:
        return self.parts.setdefault(name, _Parts(self.alignment.target_parameters[name]))

    def moved(self) -> TaskVector:
        deltas = {name: part.together() for name, part in self.parts.items() if part.found}
        return TaskVector(deltas, self.alignment._coverage(self.parts, set(self.deltas) - self.used))


Size = Annotated[int, Field(ge=0, lt=2**40)]


class _Header(BaseModel):
    """What a file says beside its maps."""

    model_config = ConfigDict(strict=True)

    pairs: tuple[AlignedPair, ...]
    quality_in: dict[str, Quality]
    quality_out: dict[str, Quality]
    source_parameters: dict[str, tuple[Size, ...]]
    target_parameters: dict[str, tuple[Size, ...]]
    reasons: dict[str, str]
    provenance: dict[str, Any]


def _check(alignment: Alignment) -> None:
    """Refuse an alignment that contradicts itself: a file may be damaged, or made to do harm.

    Layers, maps and parameters must fit each other, so that applying it can neither fail half-way nor take more memory
    than its own maps suggest.
    """
    for key, R in [*alignment.R_in.items(), *alignment.R_out.items()]:
        tensors = [tensor for tensor in (R.R, R.U, R.V) if tensor is not None]
        plain = all(t.ndim == 2 and t.is_floating_point() and is_finite(t) for t in tensors)
        _need(plain and len({t.shape[1] for t in tensors}) == 1, f"the map of {key}")
    tables = (alignment.source_parameters, alignment.target_parameters)
    stored: dict[str, tuple[str, bool]] = {}  # target parameter -> what it is
    names: set[str] = set()
    weights: set[str] = set()
    for pair in alignment.pairs:
        source, target = pair.source, pair.target
        what = f"{source.name} and {target.name}"
        R_in, R_out = alignment.R_in[pair.reads], alignment.R_out[target.name]
        _need(R_in.shape == (source.shape[1], target.shape[1]), f"the input map of {what}")
        _need(R_out.shape == (source.shape[0], target.shape[0]), f"the output map of {what}")
        _need(alignment.quality_in[pair.reads].rank >= 0, f"the quality of {what}")
        _need(alignment.quality_out[target.name].rank >= 0, f"the quality of {what}")
        _need(target.name not in names and (target.weight not in weights or target.rows is not None), target.name)
        names.add(target.name)
        weights.add(target.weight)
        for layer, table in zip((source, target), tables, strict=True):
            _need(not any(tables) or _fits(layer, table), f"the parameters of {layer.name}")  # a group knows none yet
        for parameter, kind in ((target.weight, "weight"), (target.bias, "bias")):
            if parameter is not None:
                now = (kind, target.transposed)
                _need(stored.setdefault(parameter, now) == now, parameter)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} does not fit"[:200])


def _fits(layer: Site, parameters: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a layer is (a part of) its parameters as they are stored."""
    weight = parameters.get(layer.weight, ())
    if len(weight) < 2 or min(layer.shape) < 1:
        return False
    sizes = (weight[0], math.prod(weight[1:]))
    out, wide = sizes[::-1] if layer.transposed else sizes
    held = wide == layer.shape[1] and _holds(out, layer)
    if layer.bias is None:
        return held
    bias = parameters.get(layer.bias, ())
    return held and len(bias) == 1 and _holds(bias[0], layer)


def _holds(out: int, layer: Site) -> bool:
    """Whether a matrix of so many outputs has those of a layer, and no more than `PACKED` times as many."""
    if layer.rows is None:
        return out == layer.shape[0]
    start, stop, *period = layer.rows
    width = stop - start
    if len(period) > 1 or not 0 <= start < stop or layer.shape[0] % width:
        return False
    if period:  # one run of rows for every head
        return stop <= period[0] <= PACKED * width and out == layer.shape[0] // width * period[0]
    return width == layer.shape[0] and stop <= out <= PACKED * width
