"""Kinds of block in one stack: sliding, full or linear attention, blocks that mix tokens by other layers.

A block of the target takes from a block of its own kind. Stacks of one kind are paired by depth alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taskferry.layers.site import Site

_MLP = ("mlp.", "shared.", "router")


@dataclass(frozen=True)
class Kind:
    """What a block is called, and the roles of all its sites but those of the MLP."""

    name: str
    roles: frozenset[str]


def kinds(sites: Sequence[Site]) -> Mapping[str, list[Kind]]:
    """The kind of every block, by stack."""
    names: dict[str, dict[int, str]] = {}
    roles: dict[tuple[str, int], set[str]] = {}
    for site in sites:
        if site.block is None:
            continue
        names.setdefault(site.stack, {})[site.block] = site.kind
        mixing = roles.setdefault((site.stack, site.block), set())
        if not site.role.startswith(_MLP):
            mixing.add(site.role)
    return {
        stack: [Kind(blocks[j], frozenset(roles[stack, j])) for j in sorted(blocks)] for stack, blocks in names.items()
    }


def choose_block(j: int, at: int, A: Sequence[Kind], B: Sequence[Kind]) -> tuple[int, str]:
    """The source's block for block j of the target, whose place by depth is `at`; and what to say about the choice."""
    if not 0 <= at < len(A):
        return at, ""  # a rule of the caller's own that leaves the source: such a site has no partner
    wanted = B[j]
    i = _nearest(_candidates(A, B, wanted, at), at, j * (len(A) - 1) / max(1, len(B) - 1))
    taken = A[i].name
    if i != at:
        return i, f"from the nearest block of its kind{f' ({wanted.name})' if wanted.name else ''}"
    if taken and wanted.name and taken != wanted.name:
        return i, f"from a block of another kind ({taken} for {wanted.name})"
    return i, ""


def _candidates(A: Sequence[Kind], B: Sequence[Kind], wanted: Kind, at: int) -> list[int]:
    """Blocks of the same kind where both stacks have several; else those that mix tokens by the same layers."""
    same: list[int] = []
    if len(set(A)) > 1 and len(set(B)) > 1:
        same = [i for i, kind in enumerate(A) if kind == wanted]
    if not same and wanted.name and len({kind.name for kind in A}) > 1 and len({kind.name for kind in B}) > 1:
        same = [i for i, kind in enumerate(A) if kind.name == wanted.name]
    if not same and not A[at].roles & wanted.roles:
        same = [i for i, kind in enumerate(A) if kind.roles & wanted.roles]
    return same or [at]


def _nearest(candidates: Sequence[int], at: int, exact: float) -> int:
    """The candidate nearest to a place; of two equally near, the one on the side of the exact depth, or the later."""
    return min(candidates, key=lambda i: (abs(i - at), abs(i - exact), -i))
