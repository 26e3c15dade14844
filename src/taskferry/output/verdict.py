"""Judge a change on samples that did not make it: by right answers where samples have answers, by the loss beside them.

>>> answers = held_out_answers(source, target, tuned, questions, numbers, moved)
>>> judge(curve, "per token", samples=20, answers=answers).state
'helps'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from taskferry.collect.scale import ScaleCurve, moved_by
from taskferry.layers.family import split_path
from taskferry.models import Loaded, Tuned
from taskferry.objectives.answers import Score, answers_of, choices_of, gain
from taskferry.objectives.preparation import Questions
from taskferry.objectives.teacher import can_answer, teacher_model
from taskferry.taskvector import LazyDeltas, TaskVector

State = Literal["helps", "not shown to help", "harms"]
HELPS: State = "helps"
NOT_SHOWN: State = "not shown to help"
HARMS: State = "harms"
LEADS = {HELPS: "It helps", NOT_SHOWN: "Not shown to help", HARMS: "It does harm"}
FEW = 50  # samples: fewer say little about others
MOST = 100  # prompts: enough for an interval of ten points, and generating takes its time
LONGEST = 300  # characters of an example
EXAMPLES = 5


@dataclass(frozen=True)
class HeldOutAnswers:
    """Answers to the same prompts: of the tuned source, and of the target before and after."""

    prompts: tuple[str, ...]
    source: Score | None  # None where it is more than its base with a change, and not saved whole
    before: Score
    after: Score
    ends: bool  # whether the tuned source ends its answers, so that one without an end is wrong
    held_out: bool = True  # whether the samples made none of what is scored

    @property
    def gain(self) -> tuple[float, float, float]:
        """Points of right answers that were gained, and the ends of a 95 % interval."""
        return gain(self.before.right_each(self.ends), self.after.right_each(self.ends))

    @property
    def sentence(self) -> str:
        """For people."""
        points, low, high = (f"{value:+.0f}".replace("-", "−") for value in self.gain)
        now = f"{self.after.right(self.ends):.0f} % of the answers are right"
        own = "" if self.source is None else f"; the tuned source has {self.source.right(self.ends):.0f} %"
        return (
            f"{now} on {len(self.prompts)} {'held-out' if self.held_out else 'calibration'} samples, "
            f"{self.before.right(self.ends):.0f} % before ({points} points, 95 % interval {low} to {high}){own}"
        )

    @property
    def endless(self) -> str:
        """A sentence where fewer answers end by themselves than the source's."""
        wanted = 100.0 if self.source is None else self.source.stopped
        if not self.ends or self.after.stopped >= wanted:
            return ""
        own = "" if self.source is None else f", {wanted:.0f} % of the source's"
        return f"{self.after.stopped:.0f} % of the answers end by themselves{own}."

    def record(self) -> dict[str, Any]:
        """For machines."""
        scores = {"source": self.source, "before": self.before, "after": self.after}
        step = max(1, len(self.prompts) // EXAMPLES)
        found: dict[str, Any] = {
            name: {"right": round(score.right(self.ends), 2), **score.facts()}
            for name, score in scores.items()
            if score is not None
        }
        found["samples"], found["held_out"], found["ends"] = len(self.prompts), self.held_out, self.ends
        found["gain"] = dict(zip(("points", "low", "high"), (round(value, 2) for value in self.gain), strict=True))
        found["examples"] = [
            {
                "prompt": _cut(self.prompts[i]),
                "source": "" if self.source is None else _cut(self.source.written[i].text),
                "before": _cut(self.before.written[i].text),
                "after": _cut(self.after.written[i].text),
            }
            for i in range(0, len(self.prompts), step)[:EXAMPLES]
        ]
        return found


def held_out_answers(
    source: Loaded,
    target: Loaded,
    tuned: Tuned,
    questions: Questions,
    numbers: Sequence[int],
    moved: TaskVector,
    *,
    held_out: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> HeldOutAnswers:
    """Let the tuned source and the target, before and after, answer the prompts of some samples (by number)."""
    chosen = [numbers[i * len(numbers) // MOST] for i in range(MOST)] if len(numbers) > MOST else numbers
    samples = [questions.samples[i] for i in chosen]
    choices = choices_of([sample[-1].text for sample in questions.samples])
    done = 0

    def answers(model: Loaded, tokenizer: Any) -> Score:
        nonlocal done
        start, done = done, done + len(samples)
        tell = None if progress is None else lambda now, of: progress("answers", start + now, 3 * of)
        return answers_of(model.model, tokenizer, samples, choices=choices, progress=tell)

    def changed(change: TaskVector) -> Score:
        with moved_by(target.model, change) as set_scale:
            set_scale(1.0)
            return answers(target, target.tokenizer())

    of_source = None
    if can_answer(tuned):
        with teacher_model(source, tuned) as teacher:
            of_source = answers(teacher, source.tokenizer())  # a tuned folder may have none
    prompts = tuple("\n".join(segment.text for segment in sample[:-1]) for sample in samples)
    before, after = answers(target, target.tokenizer()), changed(moved)
    return HeldOutAnswers(prompts, of_source, before, after, questions.ends, held_out)


@dataclass(frozen=True)
class Verdict:
    """What a change does, for people and in numbers."""

    state: State | None  # None where nothing was measured
    sentence: str
    scale: float
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """For machines."""
        own = {"state": self.state, "sentence": self.sentence, "scale": self.scale}
        return {**own, "notes": list(self.notes), "warnings": list(self.warnings), **self.facts}


def judge(
    curve: ScaleCurve,
    unit: str,
    *,
    samples: int,
    held_out: bool = True,
    answers: HeldOutAnswers | None = None,
) -> Verdict:
    """Decide by right answers, and by the loss where there are none; `curve` has the losses by scale."""
    before, after = curve.loss(0.0), curve.loss(curve.best)
    lower = after < before
    on = f"{samples} {'held-out' if held_out else 'calibration'} samples"
    notes, warnings = [], []
    way = "down" if lower else "UP"
    loss = f"the loss on {on} went {way} from {before:.4g} to {after:.4g} {unit}"
    if not curve.helps:
        state = NOT_SHOWN
        sentence = (
            f"Nothing helps: no scale up to {curve.points[-1][0]:g} lowers the loss of the target on {on} "
            f"({before:.4g} {unit}), and nothing was written."
        )
    elif answers is not None:
        _, low, high = answers.gain
        state = HELPS if low > 0 else HARMS if high < 0 or not lower else NOT_SHOWN
        sentence = f"{LEADS[state]}: {answers.sentence}."
        notes += [text for text in (answers.endless, f"{loss[0].upper()}{loss[1:]}.") if text]
    else:
        state = HELPS if lower else HARMS
        sentence = f"{LEADS[state]}: {loss}."
    if curve.helps and not lower:
        warnings.append(
            "the loss went UP: this makes the target worse on the samples; leave --scale out, so that a scale that "
            "helps is searched"
        )
    facts = {"loss_before": before, "loss_after": after, "loss_unit": unit}
    facts["answers"] = None if answers is None else answers.record()
    return Verdict(state, sentence, curve.best, tuple(notes), tuple(warnings), facts)


def change_by_place(tau: TaskVector, moved: TaskVector) -> dict[str, Any]:
    """Shares of ‖τ‖² that had a place in the target and that had none, by where they stand in the source's blocks.

    Of a method that has no parts of the source, shares of the target's change. Nothing is said of changes on disk.
    """
    rows = () if moved.coverage is None else moved.coverage.rows
    taken = {name for row in rows if row.status != "kept" for name in row.sources}
    shown = tau if taken else moved
    total = 0.0 if isinstance(shown.deltas, LazyDeltas) or not len(moved) else shown.norm() ** 2
    if not total:
        return {}
    shares: dict[str, dict[str, float]] = {"moved": {}, "stayed": {}}
    for name, delta in shown.deltas.items():
        role = split_path(name)[2] or name
        place = ".".join(part for part in role.removesuffix(".weight").split(".") if not part.isdigit())
        found = shares["stayed" if taken and name not in taken else "moved"]
        found[place] = found.get(place, 0.0) + TaskVector({name: delta}).norm() ** 2 / total
    ordered = {kind: dict(sorted(found.items(), key=lambda item: -item[1])) for kind, found in shares.items()}
    return {"of": "source" if taken else "target", **ordered}


def what_moved(moved: TaskVector, scale: float) -> str:
    """A sentence on the share of the target's weights."""
    covered = moved.coverage
    share = f"{100 * covered.share():.3g} % of the target's weights" if covered else f"{len(moved)} weight matrices"
    return f"{share} moved at scale {scale:.3g}."


def stayed_behind(change: Mapping[str, Any]) -> list[str]:
    """A sentence where half a per cent of the change or more found no place; a count of parameters would hide it."""
    stayed = change.get("stayed", {})
    if sum(stayed.values()) < 0.005:
        return []
    share = 100 * sum(stayed.values())
    return [f"{share:.0f} % of the change (‖τ‖²) has no place in the target, most of it in {next(iter(stayed))}."]


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= LONGEST else f"…{text[1 - LONGEST :]}"
