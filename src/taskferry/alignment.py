"""An alignment: all maps of a pair of models, with their quality and provenance. Fit once, apply many times.

>>> alignment = Alignment.load("a-to-b.alignment")
>>> tau_B = alignment.apply(tau_A)                     # no model, no data: two products a weight
>>> print(tau_B.coverage.summary())
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taskferry.coverage import Coverage, Row
from taskferry.disk.files import hash_tensor, is_kind, open_safetensors, write_safetensors
from taskferry.display.tables import ROWS, panel
from taskferry.errors import TaskferryError
from taskferry.maths.precision import full_precision
from taskferry.maths.procrustes import Map, bilinear
from taskferry.maths.sums import Quality
from taskferry.sites.consistency import check_alignment
from taskferry.sites.site import Site
from taskferry.taskvector import Delta, LowRank, TaskVector, as_dense, match_names, to_device

FORMAT = "taskferry alignment 1"
NO_CHANGE = "the task vector does not change it"


@dataclass(frozen=True)
class AlignedPair:
    """A source site, the target site that takes its change, and the key of the input map they share."""

    source: Site
    target: Site
    reads: str


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
        return [TaskVector(move.moved(), self._coverage(move.assembly, set(move.deltas) - move.used)) for move in moves]

    @cached_property
    def _lost_parts(self) -> dict[str, list[str]]:
        """Packed parameter -> its parts that are not moved, with the reasons."""
        lost: dict[str, list[str]] = {}
        for site, why in self.reasons.items():
            name, part, _ = site.partition("#")
            if part:
                lost.setdefault(name, []).append(f"{site}: {why}")
        return lost

    def _coverage(self, assembly: Mapping[str, _Assembly], unused: set[str]) -> Coverage:
        rows = []
        for name, shape in self.target_parameters.items():
            part = assembly.get(name)
            if part is None:
                rows.append(Row(name, shape, "kept", self.reasons.get(name, "no site uses it")))
                continue
            reason = f"{NO_CHANGE} ({', '.join(part.missing)})" if part.parts and part.missing else ""
            lost = self._lost_parts.get(name, [])
            if part.parts:
                whole = not part.missing and not lost
                reason = "; ".join(filter(None, [reason, *lost]))
                rows.append(Row(name, shape, "moved" if whole else "partly", reason, tuple(part.sources)))
            else:
                rows.append(Row(name, shape, "kept", NO_CHANGE))
        paired = {pair.source.weight for pair in self.pairs} | {pair.source.bias for pair in self.pairs}
        why = {
            name: "the target has no bias there" if name in paired else "no site of the target takes it"
            for name in sorted(unused)
        }
        return Coverage(tuple(rows), why)

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

    def with_identity(self, inputs: bool) -> Alignment:
        """The same with the input (or the output) maps replaced by the identity; widths must be equal."""
        maps = self.R_in if inputs else self.R_out
        for key, R in maps.items():
            if R.shape[0] != R.shape[1]:
                raise ValueError(f"{key} goes from {R.shape[0]} to {R.shape[1]}")
        same = {key: Map(R=torch.eye(R.shape[0], dtype=R.dtype, device=R.device)) for key, R in maps.items()}
        return replace(self, R_in=same) if inputs else replace(self, R_out=same)

    def times(self, scale: float) -> Alignment:
        """With the output maps multiplied, so that what they move is."""
        return replace(self, R_out={name: R.times(scale) for name, R in self.R_out.items()})

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
            if not isinstance(header["pairs"], list):
                raise TypeError("its pairs are no list")
            for name, tensor in tensors.items():
                side, kind, key = name.split("/", 2)
                maps[side].setdefault(key, {})[kind] = tensor
            alignment = cls(
                pairs=tuple(
                    AlignedPair(_site(pair["source"]), _site(pair["target"]), pair["reads"]) for pair in header["pairs"]
                ),
                R_in={key: Map(**tensors) for key, tensors in maps["in"].items()},
                R_out={key: Map(**tensors) for key, tensors in maps["out"].items()},
                quality_in={key: Quality(**q) for key, q in header["quality_in"].items()},
                quality_out={key: Quality(**q) for key, q in header["quality_out"].items()},
                source_parameters={k: tuple(v) for k, v in header["source_parameters"].items()},
                target_parameters={k: tuple(v) for k, v in header["target_parameters"].items()},
                reasons=header["reasons"],
                provenance=header["provenance"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TaskferryError(f"{where}: a damaged alignment: {error!r}") from error
        check_alignment(alignment, where)
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


def is_alignment(path: str | Path) -> bool:
    """Whether this is a file that `Alignment.save` wrote, damaged or not."""
    return is_kind(path, FORMAT)


class _Move:
    """One task vector on its way, site by site."""

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
        self.assembly: dict[str, _Assembly] = {}
        self.rights: dict[tuple[str, str], Tensor] = {}  # one product A R_in for the parts of a packed matrix
        self.used: set[str] = set()

    def add(self, pair: AlignedPair) -> None:
        source, target = pair.source, pair.target
        R_in, R_out = self.alignment.R_in[pair.reads], self.alignment.R_out[target.name]
        weight = self._part(target.weight)
        if source.weight in self.deltas:
            delta = self._beside(source.weight, R_out)
            self.used.add(source.weight)
            if isinstance(delta, LowRank):
                oriented = delta.T if source.transposed else delta
                left = source.read_bias(oriented.left)  # rows of this site
                key = (source.weight, pair.reads)
                if key not in self.rights:
                    self.rights[key] = R_in(oriented.right)
                weight.add(target, source.weight, LowRank(R_out.columns(left), self.rights[key]))
            else:
                weight.add(target, source.weight, bilinear(R_out, source.read(delta), R_in))
        else:
            weight.miss(target)
        if target.bias is not None:
            bias = self._part(target.bias)
            name = source.bias
            shift = None if name is None or name not in self.deltas else self._beside(name, R_out)
            if source.bias is not None and isinstance(shift, Tensor):
                self.used.add(source.bias)
                bias.add(target, source.bias, R_out(source.read_bias(shift)[None])[0])
            else:
                bias.miss(target)

    def _beside(self, name: str, R: Map) -> Delta:
        """A change where the maps lie: it is much smaller than they are, or was made there."""
        delta = self.deltas[name] = to_device(self.deltas[name], R.device)
        return delta

    def moved(self) -> dict[str, Delta]:
        return {name: part.delta() for name, part in self.assembly.items() if part.parts}

    def _part(self, name: str) -> _Assembly:
        return self.assembly.setdefault(name, _Assembly(self.alignment.target_parameters[name]))


class _Assembly:
    """The parts of one target parameter, put together in its stored form."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.parts: list[tuple[Site, Delta]] = []
        self.sources: dict[str, None] = {}
        self.missing: list[str] = []

    def add(self, target: Site, source: str, delta: Delta) -> None:
        self.parts.append((target, delta))
        self.sources[source] = None

    def miss(self, target: Site) -> None:
        self.missing.append(target.role)

    def delta(self) -> Delta:
        first, delta = self.parts[0]
        if first.rows is None:
            return self._stored(first, delta)
        if all(isinstance(part, LowRank) for _, part in self.parts):
            return self._stored(first, self._pack_low_rank())
        # A packed matrix is put together in the orientation [out, …]; rows that did not move stay zero.
        out = self.shape[-1] if first.transposed else self.shape[0]
        dense = [(site.rows or (0, 0), as_dense(p)) for site, p in self.parts]
        whole = dense[0][1].new_zeros(out, *dense[0][1].shape[1:])
        for (start, stop), part in dense:
            whole[start:stop] = part
        return self._stored(first, whole)

    def _pack_low_rank(self) -> LowRank:
        """Parts that share their right factor keep their rank; others stand side by side."""
        rows = self.shape[1] if self.parts[0][0].transposed else self.shape[0]
        groups: dict[int, LowRank] = {}
        for site, part in self.parts:
            if not isinstance(part, LowRank) or site.rows is None:
                raise TypeError("only low-rank rows can be packed")
            group = groups.get(id(part.right))
            if group is None:
                group = LowRank(part.left.new_zeros(rows, part.rank), part.right)
                groups[id(part.right)] = group
            group.left[site.rows[0] : site.rows[1]] = part.left
        return LowRank(
            torch.cat([group.left for group in groups.values()], 1),
            torch.cat([group.right for group in groups.values()], 0),
        )

    def _stored(self, site: Site, delta: Delta) -> Delta:
        if isinstance(delta, LowRank):
            return delta.T if site.transposed else delta
        return (delta.T.contiguous() if site.transposed and delta.ndim == 2 else delta).reshape(self.shape)


def _site(data: dict[str, Any]) -> Site:
    rows = data["rows"]
    return Site(**{**data, "shape": tuple(data["shape"]), "rows": None if rows is None else tuple(rows)})
