"""A fit that is cut off goes on after its last finished group, and ends with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from taskferry import Alignment, fit
from taskferry.engines.pair import Work
from tests.helpers.tiny import TINY

pytest.importorskip("transformers")


class CutOff(Exception):
    """The power went."""


def fitted(folder: Path | None, stop_at: int | None = None, calls: list[str] | None = None, seed: int = 2) -> Alignment:
    """Llamas of two and three blocks, every block a group of its own: three groups of seven pairs."""
    tiny = TINY["llama"]

    def progress(what: str, done: int, total: int) -> None:
        if calls is not None:
            calls.append(what)
        if what == "solve" and stop_at is not None and done >= stop_at:
            raise CutOff

    models: list[Any] = [tiny.model(16, 2, 1), tiny.model(24, 3, seed)]
    work = Work(sums_memory=1, progress=progress, resume=folder)
    return fit(*models, tiny.calibration(), tiny.objective, work=work)


def test_finished_groups_are_not_done_again(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    with pytest.raises(CutOff):
        fitted(keep, stop_at=2 * 7 + 1)  # in the second group
    assert [path.name for path in keep.iterdir()] == ["group-1-of-3.alignment"]
    calls: list[str] = []
    resumed = fitted(keep, calls=calls)
    assert calls.count("capture") == 1 + 2 * 3  # the first group in one step, then three micro-batches for each
    resumed.save(tmp_path / "resumed")
    fitted(None).save(tmp_path / "fresh")
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "fresh").read_bytes()


def test_groups_of_another_model_are_not_taken(tmp_path: Path) -> None:
    fitted(tmp_path / "kept", seed=3)
    calls: list[str] = []
    found = fitted(tmp_path / "kept", calls=calls)
    assert calls.count("capture") == 3 * 3
    found.save(tmp_path / "found")
    fitted(None).save(tmp_path / "fresh")
    assert (tmp_path / "found").read_bytes() == (tmp_path / "fresh").read_bytes()


def test_a_damaged_group_is_done_again(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    fitted(keep)
    victim = keep / "group-2-of-3.alignment"
    victim.write_bytes(victim.read_bytes()[:-8])
    calls: list[str] = []
    fitted(keep, calls=calls)
    assert calls.count("capture") == 2 + 3
