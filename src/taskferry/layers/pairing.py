"""Which source site feeds which target site, across depths in both directions (paper, section 5.3).

Blocks pair by relative depth; in stacks of several kinds of block (sliding and full attention), within a kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from taskferry.layers.kinds import choose_block, kinds
from taskferry.layers.site import Site, depths

DepthRule = Callable[[int, int, int], int]


@dataclass(frozen=True)
class Pair:
    """A source site and the target site that takes its task vector."""

    source: Site
    target: Site
    note: str = ""  # how the source's block was chosen, where not by depth alone


def nearest_block(j: int, depth_A: int, depth_B: int) -> int:
    """i(j) = round(j (D_A − 1) / (D_B − 1)), halves up; a target of one block takes the source's first."""
    if depth_B == 1:
        return 0
    return (2 * j * (depth_A - 1) + depth_B - 1) // (2 * (depth_B - 1))


def pair_sites(
    source: Sequence[Site], target: Sequence[Site], rule: DepthRule = nearest_block
) -> tuple[list[Pair], dict[str, str]]:
    """Pairs in the target's order, and for every other target site the reason why it has no source."""
    # A place may hold several sites (two inner layers): the first pairs with the first.
    known = {(_place(site), count): site for site, count in _counted(source)}
    depth_A, depth_B = depths(source), depths(target)
    kinds_A, kinds_B = kinds(source), kinds(target)
    pairs: list[Pair] = []
    unpaired: dict[str, str] = {}
    for site, count in _counted(target):
        if site.fixed is not None:
            unpaired[site.name] = site.fixed
            continue
        stack, block, note = site.stack, site.block, ""
        if block is not None:
            if stack not in depth_A and len(depth_A) == len(depth_B) == 1:
                stack = next(iter(depth_A))  # one stack on each side: no other choice
            if stack not in depth_A:
                unpaired[site.name] = f"the source has no stack of blocks '{stack}' (it has {_names(depth_A)})"
                continue
            at = rule(block, depth_A[stack], depth_B[site.stack])
            block, note = choose_block(block, at, kinds_A[stack], kinds_B[site.stack])
        partner = known.get(((stack if block is not None else site.stream, block, site.role), count))
        if partner is None:
            unpaired[site.name] = f"the source has no layer '{site.role}' to take it from"
        elif partner.fixed is not None:
            unpaired[site.name] = partner.fixed
        elif site.role == "patch" and partner.shape[1] != site.shape[1]:
            unpaired[site.name] = (
                f"patches of different size: {partner.shape[1]} and {site.shape[1]} numbers in a patch"
            )
        else:
            pairs.append(Pair(partner, site, note))
    return pairs, unpaired


def _place(site: Site) -> tuple[str, int | None, str]:
    return (site.stack if site.block is not None else site.stream, site.block, site.role)


def _counted(sites: Iterable[Site]) -> list[tuple[Site, int]]:
    """Each with the number of those before it at its place."""
    seen: Counter[tuple[str, int | None, str]] = Counter()
    counted = []
    for site in sites:
        counted.append((site, seen[_place(site)]))
        seen[_place(site)] += 1
    return counted


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
