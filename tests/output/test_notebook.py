"""What notebooks show of our objects: tables, with everything escaped."""

from __future__ import annotations

from pathlib import Path

import torch

from taskferry import Coverage, LowRank, TaskVector, fit
from taskferry.coverage import Row
from taskferry.output.record import Result
from tests.helpers.tiny import TINY

EVIL = "<script>alert('x')</script>"


def test_names_from_models_are_escaped() -> None:
    coverage = Coverage((Row(EVIL, (2, 2), "kept", EVIL), Row("b", (2, 2), "moved")), {EVIL: EVIL})
    tau = TaskVector({EVIL: torch.ones(2, 2)}, coverage)
    verdict = {"sentence": EVIL, "scale": 1.0, "state": "helps", "warnings": [EVIL]}
    outcome = Result({"verdict": verdict}, Path(EVIL), tau)
    assert "<strong>Moved</strong>" in outcome._repr_html_()
    for shown in (coverage._repr_html_(), tau._repr_html_(), outcome._repr_html_()):
        assert "<script>" not in shown
    assert "&lt;script&gt;" in coverage._repr_html_()
    assert "1 of 2 parameters" in coverage._repr_html_()


def test_a_task_vector_shows_its_size_and_its_largest_changes() -> None:
    tau = TaskVector({"small": torch.ones(2, 2), "low": LowRank(torch.full((3, 1), 2.0), torch.ones(1, 3))})
    assert repr(tau) == "TaskVector(2 changes, dense, norm 6.325)"
    shown = tau._repr_html_()
    assert shown.index("low") < shown.index("small")
    assert "6.325" in shown
    many = TaskVector({f"w{i}": torch.ones(1) * i for i in range(1, 30)})
    assert "and 17 others" in many._repr_html_()


def test_an_alignment_shows_its_maps() -> None:
    tiny = TINY["llama"]
    alignment = fit(tiny.model(16, 2, 1), tiny.model(24, 3, 2), tiny.calibration(), tiny.objective)
    pairs = len(alignment.pairs)
    assert repr(alignment).startswith(f"Alignment({pairs} pairs of sites")
    shown = alignment._repr_html_()
    first = alignment.pairs[0]
    quality = alignment.quality_in[first.reads]
    assert f'<td style="text-align:left">{first.target.name}</td>' in shown
    assert f'<td style="text-align:left">{quality.rank}</td>' in shown
    assert f"{quality.residual:.4g}" in shown
    assert f"and {pairs - 12} others" in shown
    moving = sum(1 + (pair.target.bias is not None) for pair in alignment.pairs)
    assert f"{len(alignment.target_parameters) - moving} parameters of the target" in shown
