"""Settings that fill in or contradict one another."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from taskferry import Calibration, TaskferryError, TaskVector, fit
from taskferry.collect.maps import Maps
from taskferry.disk.records import as_json
from taskferry.jobs.settings import TransferSettings
from taskferry.methods import Job, methods, run
from taskferry.settings import load_settings
from tests.helpers.tiny import TINY, relative, tuned

GIVEN = {"source_base": "a", "source_tuned": "b", "target_base": "c", "calibration": "d", "out": Path("e")}


@pytest.mark.parametrize("more", [{}, {"scale": "1"}, {"scale": 1.0, "method": "bico"}, {"map_rank": "full"}])
def test_the_paper_to_the_letter(more: dict[str, object]) -> None:
    found = load_settings(TransferSettings, None, {**GIVEN, "paper": True, **more})
    assert (found.method, found.map_rank, found.scale) == ("bico", "full", 1.0)
    again = load_settings(TransferSettings, None, found.model_dump())  # as a run's own settings are read back
    assert again == found


def test_the_paper_and_something_else_is_a_contradiction() -> None:
    asked = {**GIVEN, "paper": True, "scale": "auto", "method": "theseus", "map_rank": "range"}
    with pytest.raises(TaskferryError, match="paper fixes method, map_rank, scale: give one or the other"):
        load_settings(TransferSettings, None, asked)


def test_without_it_the_defaults_stand() -> None:
    found = load_settings(TransferSettings, None, {**GIVEN, "paper": False})
    assert (found.map_rank, found.scale) == ("range", "auto")


def test_an_effort_is_settings_of_the_method_and_yields_to_those_given() -> None:
    def own(**given: object) -> dict[str, object]:
        return load_settings(TransferSettings, None, {**GIVEN, **given}).chosen()[1]

    assert own() == own(effort="standard") == {}
    assert own(effort="fast") == {"halfway": 0.0}
    assert own(effort="thorough", method_settings={"views": 1}) == {"views": 1}
    with pytest.raises(TaskferryError, match="the method bico has no effort 'fast': leave --effort out"):
        own(effort="fast", method="bico")
    with pytest.raises(TaskferryError, match="paper fixes effort: give one or the other"):
        own(effort="thorough", paper=True)
    for known in methods().values():
        for effort, settings in known.efforts.items():
            assert effort in ("fast", "thorough")
            assert known.checked(settings) != known.checked({}), (known.name, effort)


def test_full_rank_is_another_result_where_samples_are_few() -> None:
    """The paper's maps are isometries of the whole space; ours of what the samples show."""
    tiny = TINY["plain"]
    A, B = tiny.model(16, 2, 1), tiny.model(24, 2, 2)
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    calibration = Calibration([(tiny.batch(0, 2), tiny.batch(0, 2))])
    paper = run("bico", Job.of(A, B, tau, calibration, tiny.objective), map_rank="full").tau
    ours = run("bico", Job.of(A, B, tau, calibration, tiny.objective)).tau
    assert relative(torch.cat([paper.deltas[n].flatten() for n in ours.deltas]),
                    torch.cat([d.flatten() for d in ours.deltas.values()])) > 0.1  # fmt: skip
    for R in fit(A, B, calibration, tiny.objective, maps=Maps(rank="full")).R_in.values():
        R = R.dense().double()
        assert relative(R @ R.T, torch.eye(len(R), dtype=R.dtype)) < 1e-5


def test_a_wrong_value_is_told_without_the_kinds_that_were_tried() -> None:
    with pytest.raises(TaskferryError) as raised:
        load_settings(TransferSettings, None, {**GIVEN, "scale": "abc"})
    said = str(raised.value)
    assert "scale: Input should be a valid number" in said
    assert "constrained" not in said
    assert "literal" not in said


def test_what_is_no_number_is_null() -> None:
    data = {"a": [1, 2.5, math.nan, np.float32("inf"), np.int64(3), np.float32(0.5)], "b": (True, Path("x"), None)}
    assert json.loads(as_json(data)) == {"a": [1, 2.5, None, None, 3, 0.5], "b": [True, "x", None]}


@pytest.mark.parametrize("wrong", [[], ["a photo"], ["{} and {}"], ["{0}"], ["{name}"], ["a {"], ["{:d}"], ["{!r}"]])
def test_a_template_has_one_place_for_the_class(wrong: list[str]) -> None:
    with pytest.raises(TaskferryError, match="settings: --templates: "):
        load_settings(TransferSettings, None, {**GIVEN, "templates": wrong})
    found = load_settings(TransferSettings, None, {**GIVEN, "templates": ["{{a}} {}", "{}"]})
    assert found.templates == ["{{a}} {}", "{}"]
