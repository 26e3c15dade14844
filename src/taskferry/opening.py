"""Open a pair of models for a job: models, fine-tune, samples (split in two), and the engine that they live on.

>>> with opened(config, out, None, reporter) as models:
...     models.pair, models.tuned, models.held_out
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from taskferry.choices import TEMPLATE, WRITTEN, is_language_class
from taskferry.config import FitSettings, TransferSettings
from taskferry.data.batch import Calibration
from taskferry.data.samples import Samples, load_samples
from taskferry.disk.files import read_json
from taskferry.disk.inputs import Inputs
from taskferry.disk.staging import finished_groups, scratch_beside
from taskferry.engines.blocks import BlockPair
from taskferry.engines.lazy import Difference, LazyModel
from taskferry.engines.pair import ModelPair, Work
from taskferry.engines.whole import WholePair
from taskferry.errors import TaskferryError
from taskferry.estimate import Estimate
from taskferry.models import Loaded, Skeleton, Tuned, is_adapter, load_model, load_tuned, read_adapter
from taskferry.models.huggingface import owns
from taskferry.models.loaded import device_named
from taskferry.models.models import resolve
from taskferry.objectives.generation import Drawn, adapters_in, draw
from taskferry.objectives.heads import has_text_tower
from taskferry.objectives.objectives import Classifier
from taskferry.objectives.preparation import Prepared, check_samples, prepare
from taskferry.output.verdict import HeldOutAnswers, held_out_answers
from taskferry.source import base_doubts, resolved
from taskferry.taskvector import TaskVector

Both = TransferSettings | FitSettings


class Reporter:
    """Told what happens; the silent one does nothing."""

    def say(self, lines: Mapping[str, str], estimate: Estimate | None = None) -> None:
        """Say what will be done, and, of a dry run, what it takes."""

    def step(self, what: str, done: int, total: int) -> None:
        """Move a bar."""

    def note(self, what: str) -> None:
        """Say what takes a while and has no steps: loading, measuring."""

    def warning(self, what: str) -> None:
        """Say before the work what nobody should overlook."""


@dataclass(frozen=True)
class Opened:
    """A pair of models, and where everything about it came from."""

    pair: ModelPair  # its samples make the change
    target: Loaded | LazyModel
    tuned: Tuned  # nothing, where no fine-tune was given
    prepared: Prepared
    inputs: Inputs
    held_out: Calibration | None = None  # samples that judge; those of the pair where a scale is given
    both: tuple[Loaded, Loaded] | None = None  # source and target, in memory
    drawn: Drawn | None = None  # samples that the tuned source wrote
    doubts: tuple[str, ...] = ()  # of the source base

    def lines(self) -> dict[str, str]:
        """Say what models and samples have shown: labels, texts that were cut, the loss."""
        prepared, objective = self.prepared, self.prepared.objectives[1]
        lines = {"labels": prepared.labels}
        cut, of = prepared.calibration.filled(prepared.longest), prepared.calibration.samples
        if self.drawn is not None:
            lines["samples"] = self.drawn.told
        elif cut:
            longest = f"{prepared.longest} tokens; what is longer is left out (--set max_length=…)"
            lines["cut"] = f"{cut} of {of} samples fill all {longest}"
        lines["loss"] = f"{objective.words}, {objective.unit}"
        return lines

    def answers(self, moved: TaskVector, reporter: Reporter) -> HeldOutAnswers | None:
        """Answers before and after; None where there are no prompts, or no models to ask."""
        questions = self.prepared.questions
        if questions is None or self.both is None:
            return None
        judging = self.held_out or self.pair.calibration
        numbers = [i for batch in judging.side(1) for i in batch.ids]
        held_out = self.held_out is not None
        return held_out_answers(
            *self.both, self.tuned, questions, numbers, moved, held_out=held_out, progress=reporter.step
        )

    def samples_record(self) -> dict[str, Any]:
        """For the record."""
        head, drawn = self.prepared.objectives[1], self.drawn
        return {
            "indices": self.prepared.indices,
            "labels": self.prepared.labels,
            "head_made_from_samples": isinstance(head, Classifier) and head.fitted,
            "generated": None if drawn is None else dict(drawn.how),
        }

    def texts(self) -> dict[str, str]:
        """Files beside an output: samples that were generated, a chat template that the target does not have."""
        questions = self.prepared.questions
        found = {} if self.drawn is None else {WRITTEN: self.drawn.lines()}
        if questions is not None and questions.template is not None:
            found[TEMPLATE] = questions.template
        return found


@contextmanager
def opened(config: Both, out: Path, data: Any, reporter: Reporter, *, trial: bool = False) -> Iterator[Opened]:
    """Open everything; what is finished is kept beside `out` while the job runs, so that one that was killed goes on.

    A `trial` generates no more samples than are needed to estimate.
    """
    given = {name: getattr(config, name) for name in ("source_base", "source_tuned", "target_base")}
    found = {name: resolved(name, value) for name, value in given.items() if value is not None}
    inputs = Inputs(**found, **({} if data is not None else config.data))
    doubts = tuple(base_doubts(config, found))
    for doubt in doubts:
        reporter.warning(doubt)
    blockwise = isinstance(config, TransferSettings) and config.engine == "blockwise"
    with ExitStack() as stack, _room(blockwise):
        resume = None if trial else stack.enter_context(finished_groups(out))
        work = Work(int(config.statistics_memory * 2**30), reporter.step, resume)
        samples = None if config.generates and data is None else _samples(config, data, found["source_base"], reporter)
        reporter.note(f"loading {config.source_base} and {config.target_base}")
        if blockwise:
            models = _on_disk(config, stack.enter_context(scratch_beside(out)), work, inputs, samples)
        else:
            models = _in_memory(config, work, inputs, reporter, samples, trial=trial)
        yield replace(models, doubts=doubts)


@contextmanager
def _room(blockwise: bool) -> Iterator[None]:
    """Memory of a device that is too small, as one sentence with what takes less of it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        other = "" if blockwise else ", --dtype bfloat16, or --engine blockwise"
        less = f"a smaller micro_batch{other}"
        raise TaskferryError(f"the memory of the device does not hold this: give {less}") from error


def _samples(config: Both, data: Any, source: str, reporter: Reporter) -> Samples:
    """Read and check the samples before any model is loaded, which may take minutes, by the source's configuration."""
    reporter.note(f"reading the samples of {config.calibration}")
    samples = load_samples(config.calibration if data is None else data, label_column=config.label_column)
    known = read_json(Path(source) / "config.json") if owns(source) else {}
    named = known.get("architectures")
    causal = isinstance(named, list) and any(is_language_class(str(name)) for name in named)
    # Of encoders and encoder-decoders the loaded models say more: that they read sound, or are not the adapter's base.
    if causal and not known.get("is_encoder_decoder"):
        check_samples(config, samples)
    return samples


def _in_memory(
    config: Both, work: Work, inputs: Inputs, reporter: Reporter, samples: Samples | None, *, trial: bool
) -> Opened:
    source = load_model(config.source_base, dtype=config.dtype).to(config.devices[0])
    target = load_model(config.target_base, dtype=config.dtype).to(config.devices[1])
    tuned = None
    if config.source_tuned is not None:
        reporter.note(f"loading {config.source_tuned}")
        tuned = load_tuned(config.source_tuned, source)
        if not len(tuned.tau):
            raise _unchanged(config.source_tuned, source.given)
    drawn = None
    if samples is None:
        folder = config.data.get("adapters")
        adapters = adapters_in(Path(folder)) if folder else ()
        drawn = draw(config, source, target, tuned, trial=trial, progress=work.progress, adapters=adapters)
        answered = config.model_copy(update={"labels": "auto"})  # by the tuned source, when it wrote them
        prepared = prepare(answered, source, target, tuned, samples=drawn.samples)
        prepared = replace(prepared, labels=drawn.labels)
    else:
        prepared = prepare(config, source, target, tuned, samples=samples)
    fit, held_out = _split(config, prepared.calibration)
    pair = WholePair(source.model, target.model, fit, prepared.objectives, work=work)
    known = tuned or Tuned(TaskVector({}))
    return Opened(pair, target, known, prepared, inputs, held_out, (source, target), drawn)


def _split(config: Both, calibration: Calibration) -> tuple[Calibration, Calibration | None]:
    """Samples that make the change, and others that judge it; all make it where nothing is judged."""
    if isinstance(config, TransferSettings) and config.scale == "auto":
        return calibration.split(config.seed)
    return calibration, None


def _unchanged(given: str, base: str) -> TaskferryError:
    return TaskferryError(f"{given} does not differ from {base}: nothing to move")


def _on_disk(config: Both, scratch: Path, work: Work, inputs: Inputs, samples: Samples | None) -> Opened:
    bases = zip((config.source_base, config.target_base), config.devices, strict=True)
    source, target = (_lazy(given, device, config.dtype) for given, device in bases)
    given = str(config.source_tuned)
    folder = Path(resolve(given))
    if is_adapter(folder):
        adapter = read_adapter(folder, Skeleton.of(source.model))
        tuned = Tuned(adapter.tau, adapter, adapter.ignored, given)
    else:
        difference = Difference(source, _lazy(given, "cpu", "float32"))
        if not any(map(difference.changed, difference)):
            raise _unchanged(given, source.given)
        tuned = Tuned(TaskVector(difference), ignored=difference.left_out, given=given)
    prepared = prepare(config, source.loaded(), target.loaded(), None, samples=samples)
    fit, held_out = _split(config, prepared.calibration)
    pair = BlockPair(source, target, fit, prepared.objectives, scratch=scratch, work=work)
    return Opened(pair, target, tuned, prepared, inputs, held_out)


def _lazy(given: str, device: str, dtype: str) -> LazyModel:
    folder = resolve(given)
    if not owns(folder):
        raise TaskferryError(f"{given} is no Hugging Face folder: block by block needs one; use the engine 'whole'")
    lazy = LazyModel(given, Path(folder), device_named(device), dtype)
    if has_text_tower(lazy.loaded()):
        raise TaskferryError(
            f"{given} is a {type(lazy.model).__name__}, whose two towers do not follow one another: block by block "
            "needs one stack of blocks; use the engine 'whole'"
        )
    return lazy
