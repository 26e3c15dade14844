"""Which source site feeds which target site, across depths in both directions (paper, section 5.3).

Blocks pair by relative depth; in stacks of several kinds of block (sliding and full attention), within a kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from taskferry.layers.experts import ROUTER
from taskferry.layers.kinds import choose_block, kinds
from taskferry.layers.site import Site, depths

DepthRule = Callable[[int, int, int], int]
Place = tuple[str, int | None]  # stack and block
_Role = tuple[str, int | None, str]  # and the role
_LAST = "experts.down"
UNMATCHED = "a router: its outputs are experts, and those of the source are not matched with the target's"


@dataclass(frozen=True)
class Pair:
    """A source site and the target site that takes its task vector."""

    source: Site
    target: Site
    note: str = ""  # how the source's block was chosen, where not by depth alone
    experts: tuple[int, ...] = ()  # of a router: the source's expert for each of the target's


@dataclass(frozen=True)
class Mixture:
    """What is known of the experts that meet in a block of the target."""

    source: tuple[int, ...] = ()  # the source's expert for each of the target's
    shares: tuple[float, ...] = ()  # of the tokens that each expert of the source gets, for a target without experts


def nearest_block(j: int, depth_A: int, depth_B: int) -> int:
    """i(j) = round(j (D_A − 1) / (D_B − 1)), halves up; a target of one block takes the source's first."""
    if depth_B == 1:
        return 0
    return (2 * j * (depth_A - 1) + depth_B - 1) // (2 * (depth_B - 1))


def pair_sites(
    source: list[Site],
    target: list[Site],
    rule: DepthRule = nearest_block,
    mixtures: Mapping[Place, Mixture] | None = None,
) -> tuple[list[Pair], dict[str, str]]:
    """Pairs in the target's order, and for every other target site the reason why it has no source.

    `mixtures` by blocks of the target; until they are known, experts pair in their order.
    """
    # A place may hold several sites (experts, two inner layers): the first pairs with the first.
    known = {(_place(site), count): site for site, count in _counted(source)}
    depth_A, depth_B = depths(source), depths(target)
    kinds_A, kinds_B = kinds(source), kinds(target)
    experts_B = Counter((site.stack, site.block) for site in target if site.expert is not None and site.role == _LAST)
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
        place = (stack if block is not None else site.stream, block, site.role)
        if mixtures is None:
            mixture = _in_order(len(_experts(known, (*place[:2], _LAST))), experts_B[site.stack, site.block])
        else:
            mixture = mixtures.get((site.stack, site.block), Mixture())
        if site.expert is not None and mixture.source:
            count = mixture.source[site.expert]
        partner = known.get((place, count))
        if partner is None and site.expert is not None:  # a plain MLP gives its change to every expert
            partner = known.get(((*place[:2], site.role.replace("experts.", "mlp.")), 0))
        if partner is None and site.expert is None and site.role.startswith("mlp."):
            experts = _experts(known, (*place[:2], site.role.replace("mlp.", "experts.")))
            pairs += [Pair(expert, _shared(site, expert, mixture, len(experts)), note) for expert in experts]
            if experts:
                continue
        if site.role == ROUTER and not mixture.source:
            unpaired[site.name] = UNMATCHED if partner is not None else f"the source has no '{ROUTER}' to take it from"
        elif partner is None:
            unpaired[site.name] = f"the source has no layer '{site.role}' to take it from"
        elif partner.fixed is not None:
            unpaired[site.name] = partner.fixed
        elif site.role == "patch" and partner.shape[1] != site.shape[1]:
            unpaired[site.name] = (
                f"patches of different size: {partner.shape[1]} and {site.shape[1]} numbers in a patch"
            )
        else:
            pairs.append(Pair(partner, site, note, mixture.source if site.role == ROUTER else ()))
    return pairs, unpaired


def _experts(known: Mapping[tuple[_Role, int], Site], place: _Role) -> list[Site]:
    """All experts of the source at a place."""
    found: list[Site] = []
    while (site := known.get((place, len(found)))) is not None and site.expert is not None:
        found.append(site)
    return found


def _in_order(count_A: int, count_B: int) -> Mixture:
    return Mixture(source=tuple(expert % count_A for expert in range(count_B)) if count_A else ())


def _shared(site: Site, expert: Site, mixture: Mixture, count: int) -> Site:
    """The target's site as it takes its share of the change of one expert of the source."""
    mark = "." if "#" in site.name else "#"
    share = mixture.shares[expert.expert or 0] if mixture.shares else 1 / count
    return replace(site, name=f"{site.name}{mark}{expert.expert}", share=share)


def _place(site: Site) -> tuple[str, int | None, str]:
    return (site.stack if site.block is not None else site.stream, site.block, site.role)


def _counted(sites: list[Site]) -> list[tuple[Site, int]]:
    seen: Counter[tuple[str, int | None, str]] = Counter()
    counted = []
    for site in sites:
        counted.append((site, seen[_place(site)]))
        seen[_place(site)] += 1
    return counted


def _names(names: object) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"  # type: ignore[attr-defined]
