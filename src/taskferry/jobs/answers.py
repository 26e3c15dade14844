"""Answers of the target before and after a transfer, beside the tuned source, on held-out samples.

>>> answers = held_out_answers(opened, numbers, moved)
>>> answers.gain, answers.examples(5)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taskferry.collect.scale import moved_by
from taskferry.jobs.opening import Opened
from taskferry.models import Loaded
from taskferry.objectives.answers import Score, answers_of, choices_of, gain
from taskferry.objectives.teacher import can_answer, teacher_model
from taskferry.taskvector import TaskVector

MOST = 100  # prompts: enough for an interval of ten points, and generating takes its time
LONGEST = 300  # characters of an example
STAGE = "answers"


@dataclass(frozen=True)
class HeldOutAnswers:
    """Answers to the same prompts: of the tuned source, of the target untouched, moved, and refined."""

    prompts: tuple[str, ...]
    source: Score | None  # None where it is more than its base with a change, and not saved whole
    before: Score
    moved: Score
    refined: Score | None
    ends: bool  # whether the tuned source ends its answers, so that one without an end is wrong
    held_out: bool = True  # whether the samples made none of what is scored

    @property
    def after(self) -> Score:
        """The score of the output."""
        return self.moved if self.refined is None else self.refined

    @property
    def gain(self) -> tuple[float, float, float]:
        """Points of right answers that were gained, and the ends of a 95 % interval."""
        return gain(self.before.right_each(self.ends), self.after.right_each(self.ends))

    @property
    def sentence(self) -> str:
        """For people."""
        points, low, high = self.gain
        before, moved = self.before.right(self.ends), self.moved.right(self.ends)
        then = f"{moved:.0f} % after"
        if self.refined is not None:
            then = f"{moved:.0f} % moved, {self.refined.right(self.ends):.0f} % refined"
        change = f"{points:+.0f} points, 95 % interval {low:+.0f} to {high:+.0f}".replace("-", "−")
        on = f"{len(self.prompts)} {'held-out' if self.held_out else 'calibration'} samples"
        own = "" if self.source is None else f"; the tuned source has {self.source.right(self.ends):.0f} %"
        sentence = f"Right answers on {on}: {before:.0f} % before, {then} ({change}){own}."
        if self.ends and self.after.stopped < (100.0 if self.source is None else self.source.stopped):
            own = "" if self.source is None else f", {self.source.stopped:.0f} % of the source's"
            sentence += f" {self.after.stopped:.0f} % of the answers end by themselves{own}."
        return sentence

    def examples(self, count: int) -> list[dict[str, str]]:
        """Some of the prompts, with what each wrote."""
        step = max(1, len(self.prompts) // count)
        return [
            {
                "prompt": _cut(self.prompts[i]),
                "source": "" if self.source is None else _cut(self.source.written[i].text),
                "before": _cut(self.before.written[i].text),
                "after": _cut(self.after.written[i].text),
            }
            for i in range(0, len(self.prompts), step)
        ][:count]

    def record(self) -> dict[str, Any]:
        """For machines."""
        scores = {"source": self.source, "before": self.before, "moved": self.moved, "refined": self.refined}
        points, low, high = self.gain
        return {
            "samples": len(self.prompts),
            "held_out": self.held_out,
            "ends": self.ends,
            **{name: _facts(score, self.ends) for name, score in scores.items() if score is not None},
            "gain": {"points": round(points, 2), "low": round(low, 2), "high": round(high, 2)},
            "examples": self.examples(5),
        }


def held_out_answers(
    opened: Opened,
    numbers: Sequence[int],
    moved: TaskVector,
    refined: TaskVector | None = None,
    *,
    held_out: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> HeldOutAnswers | None:
    """Generate on samples by number; None where there are no prompts, or no models to ask."""
    questions = opened.prepared.questions
    if questions is None or len(opened.models) != 2 or opened.pair.engine != "whole":
        return None
    source, target = opened.models
    samples = [questions.samples[i] for i in _evenly(numbers, MOST)]
    choices = choices_of([sample[-1].text for sample in questions.samples])
    total, done = len(samples) * (3 + (refined is not None)), 0

    def answers(loaded: Loaded, tokenizer: Any) -> Score:
        nonlocal done
        start = done
        done += len(samples)
        tell = None if progress is None else lambda now, _: progress(STAGE, start + now, total)
        return answers_of(loaded.model, tokenizer, samples, choices=choices, progress=tell)

    def changed(change: TaskVector) -> Score:
        with moved_by(target.model, change) as set_scale:
            set_scale(1.0)
            return answers(target, target.tokenizer())

    of_source = None
    if can_answer(opened.tuned):
        with teacher_model(source, opened.tuned) as teacher:
            of_source = answers(teacher, source.tokenizer())  # a tuned folder may have none
    return HeldOutAnswers(
        tuple("\n".join(segment.text for segment in sample[:-1]) for sample in samples),
        of_source,
        answers(target, target.tokenizer()),
        changed(moved),
        None if refined is None else changed(refined),
        questions.ends,
        held_out,
    )


def _facts(score: Score, ends: bool) -> Mapping[str, float]:
    return {"right": round(score.right(ends), 2), **score.facts()}


def _evenly(numbers: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of them, from all places."""
    return [numbers[i * len(numbers) // most] for i in range(most)] if len(numbers) > most else numbers


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= LONGEST else f"…{text[1 - LONGEST :]}"
