"""Fit: two base models and a calibration set in, an alignment out.

>>> alignment = fit(A, B, calibration)
>>> alignment.apply(TaskVector.between(A, A_tuned)).add_to(B)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from taskferry.alignment import NO_CHANGE, AlignedPair, Alignment
from taskferry.calibration.batch import Batch, Calibration
from taskferry.capture import BICO, Side, Signals, Statistics, collect, device_of
from taskferry.coverage import reasons_to_keep
from taskferry.errors import TaskferryError
from taskferry.files import hash_tensor
from taskferry.finding import find_sites
from taskferry.objectives import ForwardOnly, Objective, as_objective, default_objective
from taskferry.pairing import DepthRule, Pair, nearest_block, pair_sites
from taskferry.procrustes import DEFAULT_TOLERANCE, Map, RankPolicy
from taskferry.progress import with_bars
from taskferry.sites import Site
from taskferry.solving import UNREACHED, Alone, Kept, MapOptions, Solved
from taskferry.version import __version__

AnyObjective = Objective | Callable[[nn.Module, Batch], Tensor]
Progress = Callable[[str, int, int], None]  # (what, done, total)
Capture = Callable[..., Statistics]


@with_bars
def fit(
    source: nn.Module,
    target: nn.Module,
    calibration: Calibration,
    objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None = None,
    *,
    map_rank: RankPolicy = "range",
    tolerance: float = DEFAULT_TOLERANCE,
    depth_rule: DepthRule = nearest_block,
    signals: Signals = BICO,
    only: Collection[str] | None = None,
    tokens_per_width: float | None = None,
    factored: bool = False,
    statistics_memory: int = 4 * 2**30,
    progress: Progress | bool | None = None,
    ranks: Alone | None = None,
    keep: Path | None = None,
    capture: Capture = collect,
    capture_key: str = "",
    sums: Callable[[Pair], int] | None = None,
) -> Alignment:
    """All maps from one frozen forward and backward pass of both models on the calibration set.

    `map_rank` "range" keeps the directions the calibration set has seen; "full" is the paper to the letter.
    `statistics_memory` bounds the bytes of cross-covariances alive at once: where they do not fit, the
    sites are visited in groups, with one more pass over the calibration set for each.
    `only` names the source parameters that will change: no other map is solved (a LoRA on q and v needs no MLP map).
    `tokens_per_width` lets so many tokens, as a multiple of a map's width, stand for all where there are more.
    `factored` leaves maps as two factors: for low-rank task vectors, which pass through them for less than forming R.
    `signals` says what is aligned on each side; anything but the default is another method.
    `ranks` splits the work over processes; the first one gets the maps, the others an alignment without any.
    `keep` is a folder for finished groups of sites: a fit that was killed goes on after the last of them.
    `capture` gathers a group's statistics as `collect` does; anything but the default is another method, and
    `capture_key` says what it rests on beside the models and samples, `sums` how many numbers it keeps for a pair.
    `progress=True` shows bars; a function is called with what is done, the steps done and the steps in all.
    """
    if signals.backward or callable(objective):  # a function of the user's own knows how to run the models
        objective_A, objective_B = both_objectives(objective, source, target, calibration)
    else:
        objective_A = objective_B = ForwardOnly()
    ranks = ranks or Alone()
    side_A = Side(source, objective_A.bind(source, _on_device(calibration, 0, source)), ranks.whole(source))
    side_B = Side(target, objective_B.bind(target, _on_device(calibration, 1, target)), ranks.whole(target))

    target_sites = find_sites(target)
    pairs, reasons = pair_sites(find_sites(source), target_sites, depth_rule)
    if not pairs:
        raise TaskferryError(
            f"no linear layer of {type(target).__name__} has a partner in {type(source).__name__}: "
            "their blocks or roles have no name in common"
        )
    if only is not None:
        pairs, left_out = changed_pairs(pairs, only)
        reasons |= dict.fromkeys(left_out, NO_CHANGE)
    options = MapOptions(map_rank, tolerance, factored, tokens_per_width)
    solved = Solved()
    widest = max((p.element_size() for model in (source, target) for p in model.parameters()), default=4)
    groups = list(_groups(pairs, statistics_memory // max(4, widest), sums or numbers_of))
    share, company = ranks.share(calibration), ranks.company(calibration)
    # Each rank keeps its part of the tokens that stand for all.
    kept_tokens = None if tokens_per_width is None else tokens_per_width * len(share) / len(calibration)
    tell = None if isinstance(progress, bool) else progress
    capturing = Steps(tell, "capture", len(groups) * len(share))
    solving = Steps(tell, "solve", 2 * len(pairs))
    rests_on = {
        "source": _describe(source),
        "target": _describe(target),
        "objective": [objective_A.describe(), objective_B.describe()],
        "calibration": {"samples": calibration.samples, "sha256": calibration.identity()},
        "versions": {"taskferry": __version__, "torch": torch.__version__},
    }
    kept = Kept(keep, len(groups), repr((rests_on, options, signals, capture_key)))
    for number, group in enumerate(groups):
        known = kept.load(number, group) if ranks.rank == 0 else None
        if ranks.told(known is not None):
            solved.add(known or Solved())
            capturing.step(len(share))
            solving.step(2 * len(group))
            continue
        # A group's sums live in this call only: two groups never exist at once.
        statistics = capture(
            side_A, side_B, group, share, capturing.step, signals, kept_tokens, exact=ranks.exact, company=company
        )
        found = ranks.solve(statistics, group, options, solving.step)
        if ranks.rank == 0:
            kept.save(number, group, found)
        solved.add(found)
    if ranks.rank == 0 and pairs and not solved.pairs and set(solved.reasons.values()) == {UNREACHED}:
        names = " or of ".join(dict.fromkeys(type(model).__name__ for model in (source, target)))
        raise TaskferryError(f"the loss of {names} does not depend on any of its linear layers")
    return solved.alignment(
        source_parameters={name: tuple(p.shape) for name, p in source.named_parameters()},
        target_parameters={name: tuple(p.shape) for name, p in target.named_parameters()},
        reasons=parameter_reasons(target, target_sites, reasons | solved.reasons),
        provenance={
            "method": "bico" if signals == BICO else f"{signals.inputs} in, {signals.outputs} out",
            "settings": {
                "map_rank": map_rank,
                "tolerance": tolerance,
                "tokens_per_width": tokens_per_width,
                "depth_rule": getattr(depth_rule, "__name__", repr(depth_rule)),
            },
            **rests_on,
        },
    )


def changed_pairs(pairs: list[Pair], only: Collection[str]) -> tuple[list[Pair], list[str]]:
    """(pairs whose source parameters are among those named, target sites of the others)."""
    names = set(only)
    needed = [p for p in pairs if p.source.weight in names or p.source.bias in names]
    kept = {p.target.name for p in needed}
    return needed, [p.target.name for p in pairs if p.target.name not in kept]


def both_objectives(
    objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None,
    source: nn.Module,
    target: nn.Module,
    calibration: Calibration,
) -> tuple[Objective, Objective]:
    """One objective for each model: as given, the same for both, or what each model's kind suggests."""
    if isinstance(objective, tuple):
        return as_objective(objective[0]), as_objective(objective[1])
    if objective is None:
        return default_objective(source, calibration), default_objective(target, calibration)
    return as_objective(objective), as_objective(objective)


def identity_alignment(source: nn.Module, target: nn.Module, depth_rule: DepthRule = nearest_block) -> Alignment:
    """Maps that change no coordinate: a narrower space is padded with zeros, a wider one cropped."""
    target_sites = find_sites(target)
    pairs, reasons = pair_sites(find_sites(source), target_sites, depth_rule)
    names = [pair.target.name for pair in pairs]
    return Alignment(
        pairs=tuple(AlignedPair(pair.source, pair.target, pair.target.name) for pair in pairs),
        R_in={n: Map(R=torch.eye(p.source.shape[1], p.target.shape[1])) for n, p in zip(names, pairs, strict=True)},
        R_out={n: Map(R=torch.eye(p.source.shape[0], p.target.shape[0])) for n, p in zip(names, pairs, strict=True)},
        quality_in={},
        quality_out={},
        source_parameters={name: tuple(p.shape) for name, p in source.named_parameters()},
        target_parameters={name: tuple(p.shape) for name, p in target.named_parameters()},
        reasons=parameter_reasons(target, target_sites, reasons),
        provenance={"method": "naive"},
    )


def _describe(model: nn.Module) -> dict[str, str]:
    return {
        "class": type(model).__name__,
        "prefix": str(getattr(model, "base_model_prefix", "")),
        "sha256": hash_parameters(model),
    }


def hash_parameters(model: nn.Module) -> str:
    """sha256 over names, shapes, types and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        hash_tensor(digest, name, parameter)
    return digest.hexdigest()


def _on_device(calibration: Calibration, which: int, model: nn.Module) -> list[Batch]:
    device = device_of(model)
    return [batch.to(device) for batch in calibration.side(which)]


def _groups(pairs: list[Pair], most: int, numbers: Callable[[Pair], int]) -> Iterator[list[Pair]]:
    """Pairs whose sums have at most so many numbers together; a block is never split, it shares inputs."""
    group: list[Pair] = []
    used = 0
    for _, block in groupby(pairs, key=lambda pair: (pair.target.stack, pair.target.block)):
        members = list(block)
        size = sum(map(numbers, members))
        if group and used + size > most:
            yield group
            group, used = [], 0
        group.extend(members)
        used += size
    yield group


def numbers_of(pair: Pair) -> int:
    """Of the cross-covariances of a pair: d_A · d_B for its inputs and for its outputs."""
    (out_A, in_A), (out_B, in_B) = pair.source.shape, pair.target.shape
    return out_A * out_B + in_A * in_B


def parameter_reasons(model: nn.Module, sites: list[Site], reasons: dict[str, str]) -> dict[str, str]:
    """Parameter, or parameter#part of a packed one -> why it is not moved."""
    by_parameter = reasons_to_keep(model)
    for site in sites:
        part = site.name.partition("#")[2]
        for parameter in (site.weight, site.bias):
            if parameter is None:
                continue
            if site.name in reasons:
                by_parameter[parameter] = reasons[site.name]
                if part:
                    by_parameter[f"{parameter}#{part}"] = reasons[site.name]
    return by_parameter


class Steps:
    """Counts steps for the progress callback."""

    def __init__(self, progress: Progress | None, what: str, total: int) -> None:
        self.progress, self.what, self.done, self.total = progress, what, 0, total

    def step(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        if self.progress is not None:
            self.progress(self.what, self.done, self.total)
