"""Two models larger than memory, fitted block by block (paper, section 4, on one block of each model at a time).

    >>> for part in align_blocks(source, target, calibration, pairs): ...     # an alignment of each block

Both models are walked forward once, their block inputs kept on disk. Then from the last block of the target to the
first: its weights and those of its source block are read, the ordinary capture runs on them, the maps are solved and
handed over, and everything is let go. Since ⟨output of a block, gradient there⟩ has the gradient of the whole loss, the
statistics are those of the whole models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from taskferry.alignment import Alignment
from taskferry.calibration.batch import Calibration
from taskferry.capture import BICO, collect
from taskferry.engines.walk import Walk
from taskferry.errors import TaskferryError
from taskferry.pairing import Pair
from taskferry.solving import MapOptions, solve_group


def align_blocks(
    source: Walk,
    target: Walk,
    calibration: Calibration,
    pairs: list[Pair],
    options: MapOptions,
    done: Callable[[], None] = lambda: None,
) -> Iterator[Alignment]:
    """The maps of each target block, last block first, then of what stands outside them; `done` counts blocks."""
    by_block: dict[int | None, list[Pair]] = {}
    for pair in pairs:
        by_block.setdefault(pair.target.block, []).append(pair)
    at = len(source.blocks) - 1  # the source block whose output gradient is known
    for j in reversed(range(len(target.blocks))):
        mine = by_block.get(j, [])
        blocks = {pair.source.block for pair in mine}
        if None in blocks or len(blocks) > 1:
            raise TaskferryError(
                f"block {j} takes from blocks {sorted(map(str, blocks))} of the source: not block by block"
            )
        wanted = next(iter(blocks), at)
        while wanted is not None and at > wanted:
            source.pull(at)
            source.step()
            at -= 1
        if not mine:
            target.pull(j)
        else:
            yield _solve(source, target, calibration, mine, options, (at, j))
        target.step()
        done()
    outside = by_block.get(None, [])
    if outside:
        while at >= 0:
            source.pull(at)
            source.step()
            at -= 1
        yield _solve(source, target, calibration, outside, options, None)


def _solve(
    source: Walk,
    target: Walk,
    calibration: Calibration,
    pairs: list[Pair],
    options: MapOptions,
    blocks: tuple[int, int] | None,
) -> Alignment:
    with ExitStack() as stack:
        if blocks is None:
            parameters = source.outer, target.outer
            for walk in (source, target):
                stack.enter_context(walk.lazy.weights(walk.outer))
            sides = source.outside(), target.outside()
        else:
            parameters = source.parameters(blocks[0]), target.parameters(blocks[1])
            stack.enter_context(source.block(blocks[0]))
            stack.enter_context(target.block(blocks[1]))
            sides = source.side(blocks[0]), target.side(blocks[1])
        statistics = collect(*sides, pairs, calibration, None, BICO, options.tokens_per_width)
    # The weights are gone before the maps are solved.
    solved = solve_group(statistics, pairs, options)
    return solved.alignment(
        {name: source.lazy.shapes[name] for name in parameters[0]},
        {name: target.lazy.shapes[name] for name in parameters[1]},
        solved.reasons,
        {},
    )
