"""Stacks of several kinds of block: sliding beside full attention, linear beside full."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from taskferry import TaskVector, fit
from taskferry.layers.discovery import find_sites
from taskferry.layers.kinds import Kind, choose_block
from taskferry.layers.pairing import Pair, nearest_block, pair_sites
from tests.helpers.architectures import MIXED, PACKED
from tests.helpers.tiny import TINY, tuned

KNOWN = {**TINY, **PACKED, **MIXED}


def model(name: str, depth: int) -> nn.Module:
    """Without weights: names and configuration are all that pairing needs."""
    with torch.device("meta"):
        return KNOWN[name].build(16, depth)


def paired(source: nn.Module, target: nn.Module) -> tuple[list[Pair], dict[str, str]]:
    return pair_sites(find_sites(source), find_sites(target))


def types(of: nn.Module) -> list[str]:
    config: Any = of.config
    return config.layer_types


@pytest.mark.parametrize(("depth_A", "depth_B"), [(34, 48), (48, 34), (26, 34)])
def test_gemma_s_sliding_blocks_feed_sliding_blocks(depth_A: int, depth_B: int) -> None:
    A, B = model("gemma3-6", depth_A), model("gemma3-6", depth_B)
    pairs, unpaired = paired(A, B)
    assert not [name for name in unpaired if "layers" in name]
    blocks = {pair.target.block: pair.source.block for pair in pairs}
    assert len(blocks) == depth_B
    for j, i in blocks.items():
        assert types(A)[i] == types(B)[j]
        assert abs(i - nearest_block(j, depth_A, depth_B)) <= 4
    moved = {j for j, i in blocks.items() if i != nearest_block(j, depth_A, depth_B)}
    assert moved == {pair.target.block for pair in pairs if pair.note}
    assert all("nearest block of its kind" in pair.note for pair in pairs if pair.note)
    crossed = {j for j in range(depth_B) if types(A)[nearest_block(j, depth_A, depth_B)] != types(B)[j]}
    assert moved == crossed  # no other block takes from elsewhere than its depth


@pytest.mark.parametrize(("source", "depth_A", "depth_B"), [("qwen3.5", 24, 32), ("qwen3-next", 4, 6)])
def test_linear_attention_feeds_linear_attention(source: str, depth_A: int, depth_B: int) -> None:
    A, B = model(source, depth_A), model("qwen3.5", depth_B)
    pairs, unpaired = paired(A, B)
    assert list(unpaired) == ["lm_head"]
    assert all(types(A)[p.source.block] == types(B)[p.target.block] for p in pairs if p.target.block is not None)


def test_a_plain_decoder_takes_its_attention_from_the_blocks_that_have_it() -> None:
    """Three of four blocks of the source have linear attention, and nothing for queries, keys and values."""
    pairs, unpaired = paired(model("qwen3.5", 24), model("llama", 12))
    assert list(unpaired) == ["lm_head"]
    blocks = {pair.target.block: pair.source.block for pair in pairs}
    assert all((i + 1) % 4 == 0 for i in blocks.values())
    assert all(abs(i - nearest_block(j, 24, 12)) <= 2 for j, i in blocks.items() if j)


@pytest.mark.parametrize(
    ("source", "target"),
    [("llama", "gemma3-6"), ("gemma3-6", "llama"), ("qwen3", "gemma3-6"), ("gemma3-6", "qwen3"), ("llama", "qwen3"),
     ("bert", "modernbert"), ("gpt2", "neox")],
)  # fmt: skip
def test_where_one_model_has_one_kind_depth_alone_decides(source: str, target: str) -> None:
    pairs, _ = paired(model(source, 7), model(target, 18))
    assert all(p.source.block == nearest_block(p.target.block, 7, 18) for p in pairs if p.target.block is not None)
    notes = Counter(pair.note for pair in pairs if pair.note)
    other = {"qwen3": "full attention for sliding attention", "gemma3-6": "sliding attention for full attention"}
    known = {source, target} == {"qwen3", "gemma3-6"}  # the others do not say what their blocks are
    assert list(notes) == ([f"from a block of another kind ({other[source]})"] if known else [])


def test_the_nearest_of_two_is_on_the_side_of_the_exact_depth() -> None:
    kinds = {letter: Kind(letter, frozenset({"attn.q"})) for letter in "sf"}
    A, B = [kinds[x] for x in "sssfsss"], [kinds[x] for x in "ssssfsss"]
    rule = [nearest_block(j, 7, 8) for j in range(8)]
    assert rule == [0, 1, 2, 3, 3, 4, 5, 6]
    assert [choose_block(j, rule[j], A, B)[0] for j in range(8)] == [0, 1, 2, 2, 3, 4, 5, 6]


def test_coverage_says_what_was_taken_from_elsewhere() -> None:
    tiny = MIXED["gemma3"]
    A, B = tiny.model(16, 4, 1), tiny.model(16, 6, 2)
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    moved = fit(A, B, tiny.calibration(8), tiny.objective).apply(tau)
    assert moved.coverage is not None
    noted = [row for row in moved.coverage if row.note]
    assert noted
    for row in noted:
        assert row.status == "moved"
        block = int(row.parameter.split(".")[2])
        source = int(row.sources[0].split(".")[2])
        assert types(A)[source] == types(B)[block] != types(A)[nearest_block(block, 4, 6)]
        assert types(B)[block].replace("_", " ") in row.note
    assert f"moved {noted[0].note}" in moved.coverage.summary()
    assert moved.coverage.to_json()["rows"][[*moved.coverage].index(noted[0])]["note"] == noted[0].note
