"""The next block is read while this one runs: the same result, in this order, and errors are not lost."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry.engines import lazy as lazy_module
from taskferry.engines.blocks import BlockPair
from taskferry.engines.blockwise import BlockwiseModel
from taskferry.engines.lazy import LazyModel
from taskferry.errors import TaskferryError
from taskferry.methods import Job, run
from taskferry.taskvector import TaskVector, as_dense
from tests.engines.test_blocks import pairs


@pytest.fixture
def world(tmp_path: Path) -> tuple[BlockPair, TaskVector]:
    _, blocks, tau = pairs("llama", (2, 4), tmp_path)
    return blocks, tau


def ahead(blocks: BlockPair, wanted: bool) -> None:
    for lazy in blocks.lazy:
        lazy.reads_ahead = wanted


def test_the_result_is_the_same_and_nothing_stays(world: tuple[BlockPair, TaskVector]) -> None:
    blocks, tau = world
    assert not any(lazy.reads_ahead for lazy in blocks.lazy)  # a host that is short of memory has none for it
    moved, losses = [], []
    for wanted in (False, True):
        ahead(blocks, wanted)
        moved.append(run("bico", Job(blocks, tau)).tau)
        losses.append(blocks.losses([moved[-1]], [0.0, 1.0]))
        assert not any(lazy._coming for lazy in blocks.lazy)
    assert losses[0] == losses[1]
    assert set(moved[0].deltas) == set(moved[1].deltas)
    for name, delta in moved[0].deltas.items():
        assert torch.equal(as_dense(moved[1].deltas[name]), as_dense(delta)), name


def test_a_block_is_read_before_the_one_before_it_ends(
    world: tuple[BlockPair, TaskVector], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, tau = world
    ahead(blocks, True)
    begun: dict[tuple[str, str], threading.Event] = {}
    real_read, real_through = LazyModel._on_host, BlockwiseModel.through
    waited = []

    def event(lazy: LazyModel, name: str) -> threading.Event:
        return begun.setdefault((str(lazy.folder), name), threading.Event())

    def read(self: LazyModel, names: Iterable[str]) -> dict[str, torch.Tensor]:
        assert threading.current_thread().name.startswith("taskferry-reader")
        for name in names:
            event(self, name).set()
        return real_read(self, names)

    def through(self: BlockwiseModel, j: int, store: bool) -> None:
        real_through(self, j, store)
        if j + 1 < len(self.blocks):
            assert event(self.lazy, self.parameters(j + 1)[0]).wait(20), f"block {j + 1} is not read yet"
            waited.append(j)

    monkeypatch.setattr(LazyModel, "_on_host", read)
    monkeypatch.setattr(BlockwiseModel, "through", through)
    alone = []  # what was read while nothing ran
    real_files = LazyModel._from_files

    def files(self: LazyModel, names: Iterable[str]) -> Any:
        names = list(names)
        if threading.current_thread() is threading.main_thread():
            alone.extend((self.folder, name) for name in names)
        return real_files(self, names)

    blocks.hash_of(0)  # of both, kept: that reads every parameter by itself
    monkeypatch.setattr(LazyModel, "_from_files", files)
    run("bico", Job(blocks, tau))
    assert waited == [0, 0, 1, 2]  # of two blocks, and of four
    # Forward, the first block is waited for; on the way back the last one.
    target = blocks.lazy[1]
    counts = [alone.count((target.folder, target.under(f"model.layers.{j}")[0])) for j in range(4)]
    assert counts[1] == counts[2] == 0
    assert counts[0] > 0
    assert counts[3] == 1


def test_an_error_of_the_reader_is_the_usual_one(
    world: tuple[BlockPair, TaskVector], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, tau = world
    ahead(blocks, True)
    real = lazy_module.safe_open

    def opening(path: str, **more: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the disk is gone")
        return real(path, **more)

    monkeypatch.setattr(lazy_module, "safe_open", opening)
    with pytest.raises(TaskferryError, match=r"safetensors cannot be read: the disk is gone"):
        run("bico", Job(blocks, tau))
