"""What share of the gain to expect of a move, before anything is tested: from two numbers that the move has found.

    >>> forecast(curve, samples=100, classes=10)

They are the share of the loss that the move takes away on samples that did not make its maps, and the samples a class,
which say how well the maps are known. The weights in `forecast.json` are a regression on moves between small image-text
models, made and judged on pairs and tasks that it had not seen by `benchmarks/quality/forecast.py`. Whoever asks has to
abstain elsewhere.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taskferry.collect.scale import ScaleCurve
from taskferry.jobs.settings import DEFAULT_METHOD, TransferSettings
from taskferry.objectives.objectives import Objective, ZeroShot

FILE = Path(__file__).parent / "forecast.json"
WENT, A_CLASS = "loss, share that went", "samples a class, logarithm"


@dataclass(frozen=True)
class Forecast:
    """The share of what fine-tuning the target would gain, and between what four of five such shares lie."""

    share: float
    low: float
    high: float

    @property
    def sentence(self) -> str:
        """For the verdict."""
        low, high = (f"{100 * end:.0f}".replace("-", "−") for end in (self.low, self.high))
        return (
            f"Expect about {100 * self.share:.0f} % of what fine-tuning the target would gain "
            f"({low} to {high} % in four of five such moves)."
        )

    def record(self) -> dict[str, float]:
        """For machines."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def weights() -> dict[str, Any]:
    """The regression: a weight for each fact, a constant, half of the interval, and the facts it has seen."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def facts(curve: ScaleCurve, samples: int, classes: int) -> dict[str, float]:
    """What the regression rests on."""
    return {WENT: 1 - curve.loss(curve.best) / curve.loss(0.0), A_CLASS: math.log(samples / classes)}


def forecast(curve: ScaleCurve, *, samples: int, classes: int) -> Forecast | None:
    """None where a fact lies outside of what the regression has seen."""
    known, told = weights(), facts(curve, samples, classes)
    if any(not low <= told[name] <= high for name, (low, high) in known["seen"].items()):
        return None
    share = known["constant"] + sum(known["weights"][name] * value for name, value in told.items())
    return Forecast(share, share - known["within"], share + known["within"])


def foretold(
    settings: TransferSettings,
    objective: Objective,
    curve: ScaleCurve,
    samples: int,
    *,
    labelled: bool,
    low_rank: bool,
) -> Forecast | None:
    """The forecast of a transfer; it abstains wherever it was not judged.

    That is: LoRAs, other methods, efforts, settings of maps, samplers and precisions, given scales, changes cut to a
    rank, labels of the tuned source, training, and all models but those whose classes are words.
    """
    usual = ("effort", "method_settings", "map_rank", "tolerance", "sampler", "per_class", "dtype")
    by_default = settings.method == DEFAULT_METHOD and not any(
        getattr(settings, name) != settings.default_of(name) for name in usual
    )
    whole = not low_rank and settings.rank is None and settings.energy is None and not settings.refine
    chosen = settings.scale == "auto" and curve.helps and bool(curve.folds)
    if not (by_default and whole and chosen and labelled and isinstance(objective, ZeroShot)):
        return None
    return forecast(curve, samples=samples, classes=len(objective.classes))
