"""Settings that fill in or contradict one another, on the command line and in YAML."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from taskferry import TaskferryError
from taskferry.config import FitSettings, TransferSettings, dump_settings, load_settings
from taskferry.disk.files import as_json

GIVEN = {"source_base": "a", "source_tuned": "b", "target_base": "c", "calibration": "d", "out": Path("e")}


def transfer(**more: object) -> TransferSettings:
    return load_settings(TransferSettings, None, {**GIVEN, **more})


def test_at_most_twenty_options() -> None:
    assert sum(map(len, TransferSettings.groups.values())) + 1 <= 20  # --config is one more


@pytest.mark.parametrize("more", [{}, {"scale": "1"}, {"scale": 1.0, "method": "bico"}, {"set": ["map_rank=full"]}])
def test_the_paper_to_the_letter(more: dict[str, object], tmp_path: Path) -> None:
    found = transfer(paper=True, **more)
    assert (found.method, found.set, found.scale) == ("bico", {"map_rank": "full"}, 1.0)
    (tmp_path / "run.yaml").write_text(dump_settings(found))  # as a run's own settings are read back
    assert load_settings(TransferSettings, tmp_path / "run.yaml", {}) == found


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"scale": "auto", "method": "theseus"}, "method, scale"),
        ({"set": ["map_rank=range"]}, "set"),
        ({"set": ["tolerance=0.5"]}, "set"),
    ],
)
def test_the_paper_and_something_else_is_a_contradiction(more: dict[str, object], wrong: str) -> None:
    with pytest.raises(TaskferryError, match=f"paper fixes {wrong}: give one or the other"):
        transfer(paper=True, **more)


def test_set_takes_settings_of_the_run_and_of_the_method(tmp_path: Path) -> None:
    found = transfer(set=["max_length=32", "map_rank=full", "per-class=2", "tolerance=0.5"])
    assert (found.max_length, found.per_class) == (32, 2)
    assert found.set == {"map_rank": "full", "tolerance": 0.5}
    (tmp_path / "x.yaml").write_text("set: {map_rank: full, tolerance: 0.5}\nmax_length: 16\n")
    both = load_settings(TransferSettings, tmp_path / "x.yaml", {**GIVEN, "set": ["max_length=64", "tolerance=0.25"]})
    assert (both.max_length, both.set) == (64, {"map_rank": "full", "tolerance": 0.25})
    for wrong, told in (("halfway=[0.5", "halfway=\\[0.5 cannot be read"), ("alone", "give each as name=value")):
        with pytest.raises(TaskferryError, match=told):
            transfer(set=[wrong])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"rank": 4, "as_": "model"}, "rank is of a LoRA"),
        ({"dtype": "bfloat16"}, "distil trains, which needs weights in float32"),
        ({"engine": "blockwise", "labels": "teacher"}, "--labels teacher needs whole"),
        ({"engine": "blockwise", "calibration": "generate"}, "--calibration generate needs whole models"),
        ({"set": ["temperature=2"]}, "temperature is of generated samples"),
        ({"calibration": "generate", "labels": "data"}, "generated samples have no labels"),
        ({"as_": "lora-ish"}, "--as: Input should be"),
    ],
)
def test_what_contradicts_itself_is_refused(more: dict[str, object], told: str) -> None:
    with pytest.raises(TaskferryError, match=told):
        transfer(**more)


def test_two_devices() -> None:
    assert transfer(device="cuda").devices == ("cuda", "cuda")
    assert transfer(device="cuda:0, cuda:1").devices == ("cuda:0", "cuda:1")


def test_adapters_write_samples() -> None:
    given = {name: value for name, value in GIVEN.items() if name != "source_tuned"}
    with pytest.raises(TaskferryError, match="adapters write samples"):
        load_settings(FitSettings, None, {**given, "adapters": "x"})


def test_a_wrong_value_is_told_without_the_kinds_that_were_tried() -> None:
    with pytest.raises(TaskferryError) as raised:
        transfer(scale="abc")
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
        transfer(templates=wrong)
    assert transfer(templates=["{{a}} {}", "{}"]).templates == ["{{a}} {}", "{}"]
