"""The three states of a verdict, by answers where there are some and by the loss where there are none."""

from __future__ import annotations

import pytest

from taskferry.collect.scale import ScaleCurve
from taskferry.objectives.answers import Score, Written
from taskferry.output.verdict import HARMS, HELPS, NOT_SHOWN, HeldOutAnswers, judge

LOWER, HIGHER = ScaleCurve(((0.0, 2.0), (1.0, 1.0)), 1.0), ScaleCurve(((0.0, 2.0), (1.0, 3.0)), 1.0)
NOTHING = ScaleCurve(((0.0, 2.0), (1.0, 3.0)), 0.0)


def score(right: int, of: int = 40, stopped: bool = True) -> Score:
    said = [Written("yes" if i < right else "no", stopped) for i in range(of)]
    return Score(("yes",) * of, tuple(said))


def answers(before: int, after: int, **more: Score) -> HeldOutAnswers:
    return HeldOutAnswers(("?",) * 40, score(38), score(before), more.get("moved", score(after)), ends=True)


@pytest.mark.parametrize(
    ("curve", "found", "state"),
    [
        (LOWER, answers(12, 30), HELPS),
        (LOWER, answers(12, 12), NOT_SHOWN),  # 30 % before and 30 % after was called a help once
        (LOWER, answers(12, 14), NOT_SHOWN),  # within what forty samples can tell
        (LOWER, answers(30, 12), HARMS),  # though the loss fell
        (HIGHER, answers(12, 12), HARMS),
        (LOWER, answers(12, 40, moved=score(40, stopped=False)), HARMS),  # right words that never end
        (LOWER, None, HELPS),
        (HIGHER, None, HARMS),
        (NOTHING, None, NOT_SHOWN),
    ],
)
def test_states(curve: ScaleCurve, found: HeldOutAnswers | None, state: str) -> None:
    verdict = judge(curve, "per token", samples=40, answers=found)
    told = verdict.record()
    assert told["state"] == state
    if found is None:
        assert told["answers"] is None
        assert "held-out samples" in told["sentence"]
        return
    assert f"{found.before.exact:.0f} % before" in told["sentence"]
    assert "the tuned source has 95 %" in told["sentence"]
    assert len(told["answers"]["examples"]) == 5


def test_an_answer_that_does_not_end_is_told() -> None:
    found = judge(LOWER, "per token", samples=40, answers=answers(0, 0, moved=score(40, stopped=False)))
    assert "0 % of the answers end by themselves, 100 % of the source's." in found.notes
