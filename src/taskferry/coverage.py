"""What moved, what did not, and why: one row for every parameter of the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

from torch import Tensor, nn

from taskferry.display.tables import ROWS, panel
from taskferry.layers.family import EXPERT, ROUTER
from taskferry.layers.site import is_patch_embedding

Status = Literal["moved", "partly", "kept"]


@dataclass(frozen=True)
class Row:
    """One parameter of the target: moved, moved in part (some rows of a packed matrix), or kept as it was."""

    parameter: str
    shape: tuple[int, ...]
    status: Status
    reason: str = ""  # why it, or part of it, did not move
    sources: tuple[str, ...] = ()  # parameters of the source
    note: str = ""  # how they were chosen, where not by depth alone


@dataclass(frozen=True)
class Coverage:
    """The table, and what the task vector changes in the source that found no place in the target."""

    rows: tuple[Row, ...]
    unused: Mapping[str, str] = field(default_factory=dict)  # source parameter -> reason

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], moved: Collection[str], why: str) -> Coverage:
        """Of what changed as a whole; all the rest is kept for one reason."""
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        return cls(tuple(Row(n, s, "moved") if n in moved else Row(n, s, "kept", why) for n, s in shapes.items()))

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, parameter: str) -> Row:
        for row in self.rows:
            if row.parameter == parameter:
                return row
        raise KeyError(parameter)

    def without(self, lost: Mapping[str, str]) -> Coverage:
        """Where some of the moved parameters of the target are not written after all, with the reasons."""
        rows = tuple(
            Row(row.parameter, row.shape, "kept", lost[row.parameter]) if row.parameter in lost else row
            for row in self.rows
        )
        used = {name for row in rows for name in row.sources}
        unused = {name: lost[row.parameter] for row in self.rows if row.parameter in lost for name in row.sources}
        return Coverage(rows, {**self.unused, **{name: why for name, why in unused.items() if name not in used}})

    def moved(self) -> list[str]:
        """Names of the parameters that moved, whole or in part."""
        return [row.parameter for row in self.rows if row.status != "kept"]

    def kept(self) -> dict[str, str]:
        """Parameter -> reason, for those that did not move."""
        return {row.parameter: row.reason for row in self.rows if row.status == "kept"}

    def share(self) -> float:
        """Of all numbers of the target, those in parameters that moved, whole or in part."""
        sizes = [(prod(row.shape), row.status != "kept") for row in self.rows]
        return sum(n for n, moved in sizes if moved) / max(1, sum(n for n, _ in sizes))

    def summary(self) -> str:
        """One line a reason, for people."""
        lines = [
            f"{len(self.moved())} of {len(self.rows)} parameters of the target moved, {100 * self.share():.3g} % of "
            "its weights"
        ]
        for note, count in Counter(row.note for row in self.rows if row.note).most_common():
            lines.append(f"  {count} moved {note}")
        for reason, count in Counter(self.kept().values()).most_common():
            lines.append(f"  {count} kept: {reason}")
        for row in self.rows:
            if row.status == "partly":
                lines.append(f"  {row.parameter} in part: {row.reason}")
        for reason, count in Counter(self.unused.values()).most_common():
            lines.append(f"  {count} changes of the source not used: {reason}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        reasons = Counter((row.status, row.reason or row.note) for row in self.rows)
        shown: list[tuple[int, str, str]] = [
            (count, status, reason) for (status, reason), count in reasons.most_common()
        ]
        shown += [(n, "of the source, not used", why) for why, n in Counter(self.unused.values()).most_common()]
        facts = {"moved": f"{len(self.moved())} of {len(self.rows)} parameters of the target"}
        header = ("parameters", "", "why")
        return panel("Coverage", facts, header, shown[:ROWS], len(shown) - len(shown[:ROWS]))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"rows": [asdict(row) for row in self.rows], "unused": dict(self.unused)}


def reasons_to_keep(model: nn.Module) -> dict[str, str]:
    """For every parameter that is no part of a linear map: what it is instead."""
    reasons: dict[str, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            reasons[full] = _reason(module, name, parameter.ndim)
    return reasons


def _reason(module: nn.Module, name: str, ndim: int) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.Embedding) or "Embedding" in kind:
        return "an embedding table: its rows are tokens or positions, not activations"
    if "Norm" in kind:
        return "a normalisation weight: per coordinate, cannot be rotated"
    if isinstance(module, nn.Conv2d) and is_patch_embedding(module):
        return "a patch convolution that the source does not have in this size"
    if "Conv" in kind and ndim > 2:
        return "a convolution: not a linear map of one token"
    if "emb" in name or "token" in name:
        return "an embedding table: its rows are tokens or positions, not activations"
    if "expert" in kind.lower():
        return EXPERT
    if "router" in kind.lower() or hasattr(module, "num_experts"):
        return ROUTER
    if ndim < 2:
        return f"a vector or scalar of {kind}, not a linear map"
    return f"a parameter of {kind} that no linear operation was found to use"
