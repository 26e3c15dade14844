"""An alignment: all maps of a pair of models, with their quality and provenance. Fit once, apply many times.

>>> alignment = Alignment.load("a-to-b.alignment")
>>> tau_B = alignment.apply(tau_A)                     # no model, no data: two products a weight
>>> print(tau_B.coverage.summary())
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taskferry.assembly import Assembly
from taskferry.coverage import Coverage, Row, Status
from taskferry.disk.files import hash_tensor, is_kind, open_safetensors, write_safetensors
from taskferry.display.tables import ROWS, panel
from taskferry.errors import TaskferryError
from taskferry.layers.consistency import check_alignment
from taskferry.layers.site import Site
from taskferry.linalg.precision import full_precision
from taskferry.linalg.procrustes import Map, bilinear
from taskferry.linalg.sums import Quality
from taskferry.taskvector import Delta, LowRank, TaskVector, match_names, scale_delta, to_device

FORMAT = "taskferry alignment 1"
NO_CHANGE = "unchanged by the fine-tune"


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
        return [TaskVector(move.moved(), self._coverage(move.assembly, set(move.deltas) - move.used)) for move in moves]

    @cached_property
    def _lost_parts(self) -> dict[str, list[str]]:
        """Packed parameter -> its parts that are not moved, with the reasons; experts of one reason together."""
        lost: dict[str, list[str]] = {}
        experts: dict[tuple[str, str], dict[str, None]] = {}
        for site, why in self.reasons.items():
            name, _, part = site.partition("#")
            if part and part.partition(".")[0].isdigit():
                experts.setdefault((name, why), {})[part.partition(".")[0]] = None
            elif part:
                lost.setdefault(name, []).append(f"{site}: {why}")
        for (name, why), numbers in experts.items():
            lost.setdefault(name, []).append(f"experts {', '.join(numbers)}: {why}")
        return lost

    def _coverage(self, assembly: Mapping[str, Assembly], unused: set[str]) -> Coverage:
        rows = []
        for name, shape in self.target_parameters.items():
            part = assembly.get(name)
            if part is None:
                rows.append(Row(name, shape, "kept", self.reasons.get(name, "no site uses it")))
                continue
            reason = f"{NO_CHANGE} ({', '.join(dict.fromkeys(part.missing))})" if part.parts and part.missing else ""
            lost = self._lost_parts.get(name, [])
            if part.parts:
                whole = not part.missing and not lost
                reason = "; ".join(filter(None, [reason, *lost]))
                status: Status = "moved" if whole else "partly"
                rows.append(Row(name, shape, status, reason, tuple(part.sources), "; ".join(part.notes)))
            else:
                rows.append(Row(name, shape, "kept", NO_CHANGE))
        paired = {pair.source.weight for pair in self.pairs} | {pair.source.bias for pair in self.pairs}
        why = {
            name: "the target has no bias there" if name in paired else "no site of the target takes it"
            for name in sorted(unused)
        }
        moved = {name for part in assembly.values() for name in part.sources}
        for name in moved & self._rest.keys():
            why |= dict.fromkeys(self._rest[name], "no site of the target takes this part of it")
        for name, experts in self._experts.items():
            if name in moved:
                left = sorted(set(range(self.source_parameters[name][0])) - experts)
                why |= {f"{name}#{expert}": "no expert of the target takes it" for expert in left}
        return Coverage(tuple(rows), why)

    @cached_property
    def _rest(self) -> dict[str, list[str]]:
        """Packed parameters of the source that move in part -> the outputs that no pair takes.

        As slices of the parameter: `weight#64:96`, or `weight#:,64:96` where outputs are its columns.
        """
        taken: dict[tuple[str, str], Tensor] = {}
        for site in (pair.source for pair in self.pairs):
            for name in filter(None, (site.weight, site.bias) if site.rows and site.expert is None else ()):
                shape = self.source_parameters[name]
                across = site.transposed and len(shape) == 2
                outputs = torch.arange(shape[-1 if across else 0])
                mask = taken.setdefault((name, ":," if across else ""), torch.zeros(len(outputs), dtype=torch.bool))
                mask[site.own(outputs)] = True
        rest: dict[str, list[str]] = {}
        for (name, at), mask in taken.items():
            edges = (mask.diff().nonzero().flatten() + 1).tolist()
            for first, last in pairwise([0, *edges, len(mask)]):
                if not mask[first]:
                    rest.setdefault(name, []).append(f"{name}#{at}{first}:{last}")
        return rest

    @cached_property
    def _experts(self) -> dict[str, set[int]]:
        """The source's parameters of experts -> those of them that some pair takes."""
        taken: dict[str, set[int]] = {}
        for pair in self.pairs:
            if pair.source.expert is not None:
                taken.setdefault(pair.source.weight, set()).add(pair.source.expert)
        return taken

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
            if not isinstance(header["pairs"], list):
                raise TypeError("its pairs are no list")
            for name, tensor in tensors.items():
                side, kind, key = name.split("/", 2)
                maps[side].setdefault(key, {})[kind] = tensor
            alignment = cls(
                pairs=tuple(
                    AlignedPair(_site(pair["source"]), _site(pair["target"]), pair["reads"], pair.get("note", ""))
                    for pair in header["pairs"]
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
        self.assembly: dict[str, Assembly] = {}
        # One product A R_in for the parts of a packed matrix.
        self.rights: dict[tuple[str, int | None, str], Tensor] = {}
        self.used: set[str] = set()

    def add(self, pair: AlignedPair) -> None:
        source, target = pair.source, pair.target
        R_in, R_out = self.alignment.R_in[pair.reads], self.alignment.R_out[target.name]
        weight = self._part(target.weight)
        if source.weight in self.deltas:
            delta = self._beside(source.weight, R_out)
            self.used.add(source.weight)
            if isinstance(delta, LowRank):
                own = delta if source.expert is None else delta.expert(source.expert)
                own = own.T if source.transposed else own
                left = source.own(own.left)
                key = (source.weight, source.expert, pair.reads)
                if key not in self.rights:
                    self.rights[key] = R_in(own.right)
                moved: Delta = LowRank(R_out.columns(left), self.rights[key])
            else:
                moved = bilinear(R_out, source.read(delta), R_in)
            weight.add(
                target, source.weight, moved if target.share == 1 else scale_delta(moved, target.share), pair.note
            )
        else:
            weight.miss(target)
        if target.bias is not None:
            bias = self._part(target.bias)
            name = source.bias
            shift = None if name is None or name not in self.deltas else self._beside(name, R_out)
            if source.bias is not None and isinstance(shift, Tensor):
                self.used.add(source.bias)
                bias.add(target, source.bias, target.share * R_out(source.read(shift)[None])[0], pair.note)
            else:
                bias.miss(target)

    def _beside(self, name: str, R: Map) -> Delta:
        """A change where the maps lie: it is much smaller than they are, or was made there."""
        delta = self.deltas[name] = to_device(self.deltas[name], R.device)
        return delta

    def moved(self) -> dict[str, Delta]:
        return {name: part.delta() for name, part in self.assembly.items() if part.parts}

    def _part(self, name: str) -> Assembly:
        return self.assembly.setdefault(name, Assembly(self.alignment.target_parameters[name]))


def _site(data: dict[str, Any]) -> Site:
    rows = data["rows"]
    return Site(**{**data, "shape": tuple(data["shape"]), "rows": None if rows is None else tuple(rows)})
