"""What share of the gain to expect: the numbers of the committed measurement, and silence where it was not judged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry.collect.scale import ScaleCurve
from taskferry.jobs import forecast as module
from taskferry.jobs.forecast import forecast, foretold
from taskferry.jobs.settings import TransferSettings
from taskferry.objectives.objectives import LanguageModel, Prototypes, ZeroShot
from tests.helpers.command import taskferry
from tests.helpers.pages import ROOT

WORDS = ZeroShot(("cat", "dog", "tree"), lambda texts: texts)
CURVE = ScaleCurve(((0.0, 2.0), (1.0, 1.0)), 1.0, folds=((2.0, 1.1), (2.0, 0.9)))


def settings(**more: Any) -> TransferSettings:
    given = {"source_base": "a", "source_tuned": "t", "target_base": "b", "calibration": "c", "out": Path("out")}
    return TransferSettings(**{**given, **more})


def test_the_weights_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "forecast.json").read_text())
    assert module.weights() == measured["fit"]
    one = measured["judged"]["a pair not seen"]
    assert one["better by"] >= 0.3
    assert 0.75 <= one["inside the interval"] <= 0.85


def test_a_forecast_is_a_line_in_two_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = {"weights": {module.WENT: 0.5, module.A_CLASS: 0.5}, "constant": -0.125, "within": 0.1,
           "seen": {module.WENT: [0.0, 0.6], module.A_CLASS: [-1.0, 3.0]}}  # fmt: skip
    (tmp_path / "fit.json").write_text(json.dumps(fit))
    monkeypatch.setattr(module, "FILE", tmp_path / "fit.json")
    found = forecast(CURVE, samples=30, classes=15)
    assert found is not None
    assert found.share == pytest.approx(0.25 - 0.125 + 0.5 * math.log(2))
    assert (found.low, found.high) == pytest.approx((found.share - 0.1, found.share + 0.1))
    assert found.sentence.startswith("Expect about 47 % of what fine-tuning the target would gain (37 to 57 %")
    assert forecast(CURVE, samples=15, classes=15 * 3) is None  # fewer a class than it has seen
    assert forecast(replace(CURVE, points=((0.0, 2.0), (1.0, 0.6))), samples=30, classes=15) is None


def test_it_abstains_wherever_it_was_not_judged() -> None:
    def told(
        objective: Any = WORDS, curve: ScaleCurve = CURVE, labelled: bool = True, low_rank: bool = False, **more: Any
    ) -> bool:
        found = foretold(settings(**more), objective, curve, 30, labelled=labelled, low_rank=low_rank)
        return found is not None

    assert told()
    assert not told(labelled=False)
    assert not told(low_rank=True)  # full fine-tunes were measured
    assert not told(objective=LanguageModel())
    assert not told(objective=Prototypes())
    assert not told(curve=replace(CURVE, best=0.0))
    assert not told(curve=replace(CURVE, folds=()))  # judged on the samples that made the maps
    for more in ({"method": "bico"}, {"effort": "fast"}, {"scale": 1.0}, {"refine": 10},
                 {"as_lora": True, "rank": 4}, {"method_settings": {"halfway": 0.3}},
                 {"per_class": 3}, {"map_rank": "full"}, {"tolerance": 0.9}, {"sampler": "single-class"},
                 {"dtype": "bfloat16"}):  # fmt: skip
        assert not told(**more), more


def test_the_verdict_of_a_transfer_says_it(tmp_path: Path) -> None:
    """Between a model and itself, so that the change helps for sure."""
    pytest.importorskip("open_clip")
    image = pytest.importorskip("PIL.Image")
    from taskferry import load_model, load_samples
    from taskferry.evaluation import Pool
    from taskferry.objectives.heads import zero_shot
    from taskferry.training import FineTuning, finetune
    from tests.cli.test_images import clip_folder

    base = clip_folder(tmp_path / "a", 16, 2, 0, 32)
    generator = torch.Generator().manual_seed(2)
    for number, name in enumerate(("cat", "dog", "tree")):  # a colour each
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(6):
            pixels = torch.randint(0, 60, (40, 40, 3), generator=generator, dtype=torch.uint8)
            pixels[..., number] += 180
            image.frombytes("RGB", (40, 40), pixels.numpy().tobytes()).save(tmp_path / "images" / name / f"{i}.png")
    tuned = load_model(str(base))
    samples = load_samples(str(tmp_path / "images"))
    protocol = FineTuning(steps=60, batch=18, learning_rate=1e-3, warmup=5, validation=0.0, every=60)
    finetune(tuned.model, Pool(samples, tuned), zero_shot(tuned, samples.classes, ("a {}.",)), protocol)
    torch.save(tuned.model.state_dict(), tmp_path / "tuned.pt")
    given = ["--source-base", base, "--source-tuned", tmp_path / "tuned.pt", "--target-base", base,
             "--calibration", tmp_path / "images", "--json"]  # fmt: skip
    verdict = taskferry("transfer", *given, "--out", tmp_path / "moved").json["verdict"]
    curve = ScaleCurve(((0.0, verdict["loss_before"]), (1.0, verdict["loss_after"])), 1.0)
    expected = forecast(curve, samples=18, classes=3)
    assert expected is not None
    assert verdict["expected_share"] == expected.record()
    assert expected.sentence in verdict["sentence"]
    assert expected.sentence in (tmp_path / "moved" / "README.md").read_text()
    taskferry("report", tmp_path / "moved", "--out", tmp_path / "page.html")
    assert "Expected share of the gain" in (tmp_path / "page.html").read_text()
    fixed = taskferry("transfer", *given, "--scale", 1, "--out", tmp_path / "fixed").json["verdict"]
    assert fixed["expected_share"] is None
    assert "Expect" not in fixed["sentence"]
