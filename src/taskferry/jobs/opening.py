"""Opening a pair of models for a job, on the engine that was asked for: models, fine-tune, samples, heads, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from taskferry.choices import is_language_class
from taskferry.data.batch import Calibration
from taskferry.data.data import Samples, load_samples
from taskferry.disk.files import read_json, writing
from taskferry.disk.inputs import Inputs
from taskferry.disk.staging import finished_groups
from taskferry.disk.temporary import sweep, temporary_folder
from taskferry.engines.blocks import BlockPair
from taskferry.engines.lazy import Difference, LazyModel
from taskferry.engines.pair import ModelPair, Work
from taskferry.engines.whole import WholePair
from taskferry.errors import TaskferryError
from taskferry.jobs.record import Reporter
from taskferry.jobs.settings import FitSettings, MethodSettings, TransferSettings
from taskferry.jobs.source import base_doubts
from taskferry.models import Loaded, Skeleton, Tuned, is_adapter, load_pair, load_tuned, read_adapter
from taskferry.models.huggingface import owns
from taskferry.models.loaded import device_named
from taskferry.models.models import resolve
from taskferry.objectives.generation import Drawn, adapters_in, draw
from taskferry.objectives.heads import has_text_tower
from taskferry.objectives.preparation import Prepared, check_samples, prepare
from taskferry.taskvector import TaskVector

Settings = TransferSettings | FitSettings


@dataclass(frozen=True)
class Opened:
    """A pair of models, and where everything about it came from."""

    pair: ModelPair
    target: Loaded | LazyModel
    tuned: Tuned  # nothing, where no fine-tune was given
    prepared: Prepared
    inputs: Inputs
    models: tuple[Loaded, ...] = ()  # in memory
    drawn: Drawn | None = None  # samples that were not given
    doubts: tuple[str, ...] = ()  # of the source base
    held_out: Calibration | None = None  # samples that make nothing, where a scale is chosen


@contextmanager
def opened(settings: Settings, reporter: Reporter, out: Path | None, *, dry_run: bool = False) -> Iterator[Opened]:
    """What is finished is stored beside `out`, so that a job that was killed goes on; it goes when the job is done."""
    engine = settings.engine_name
    given = {name: getattr(settings, name) for name in ("source_base", "source_tuned", "target_base")}
    found = {name: _resolved(name, value) for name, value in given.items() if value is not None}
    inputs = Inputs(**found, **settings.data)
    doubts = tuple(base_doubts(settings, found))
    for doubt in doubts:
        reporter.warning(doubt)
    with ExitStack() as stack, _room(engine):
        resume = stack.enter_context(finished_groups(out)) if out is not None and not dry_run else None
        samples = None if settings.generates else _samples(settings, found["source_base"], reporter)
        work = Work(int(settings.statistics_memory * 2**30), reporter.step, resume)
        if engine == BlockPair.engine:
            if out is None:
                raise ValueError("block by block needs a place beside its output")
            reporter.note(f"reading {settings.source_base} and {settings.target_base}")
            models = _on_disk(settings, stack.enter_context(_scratch(out)), work, inputs, samples)
        else:
            models = _in_memory(settings, work, inputs, reporter, samples, trial=dry_run or out is None)
        yield replace(models, doubts=doubts)


@contextmanager
def _room(engine: str) -> Iterator[None]:
    """Memory of a device that is too small for a stage, as one sentence with what takes less of it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        less = (
            "give a smaller --micro-batch, or put the models on two devices with --source-device and --target-device"
            if engine == BlockPair.engine
            else "give a smaller --statistics-memory, --dtype bfloat16, or transfer with --engine blockwise, which "
            "needs one block of each model at a time"
        )
        raise TaskferryError(f"the memory of the device does not hold this: {less}") from error


def _resolved(name: str, given: str) -> str:
    """Where it lies; a mistake names its option."""
    try:
        return resolve(given)
    except TaskferryError as error:
        raise TaskferryError(f"--{name.replace('_', '-')}: {error}") from error


def _samples(settings: Settings, source: str, reporter: Reporter) -> Samples:
    """Read and check the samples before any model is loaded, which may take minutes, by the source's configuration."""
    reporter.note(f"reading the samples of {settings.calibration}")
    samples = load_samples(settings.calibration, label_column=settings.label_column)
    config = read_json(Path(source) / "config.json") if owns(source) else {}
    named = config.get("architectures")
    causal = isinstance(named, list) and any(is_language_class(str(name)) for name in named)
    # Of encoders and encoder-decoders the loaded models say more: that they read sound, or are not the adapter's base.
    if causal and not config.get("is_encoder_decoder"):
        check_samples(settings, samples)
    return samples


def _in_memory(
    settings: Settings,
    work: Work,
    inputs: Inputs,
    reporter: Reporter,
    samples: Samples | None,
    *,
    trial: bool,
) -> Opened:
    """With `trial` no more samples are generated than a plan needs."""
    reporter.note(f"loading {settings.source_base} and {settings.target_base}")
    source, target = load_pair(settings.source_base, settings.target_base, settings.devices, settings.dtype)
    if settings.source_tuned is not None:
        reporter.note(f"loading {settings.source_tuned}")
    tuned = _tuned(settings.source_tuned, source)
    reference = tuned if settings.source_tuned is not None else None
    drawn = None
    if samples is None:
        folder = settings.data.get("adapters")
        drawn = draw(
            settings, source, target, reference, trial=trial, progress=work.progress,
            adapters=adapters_in(Path(folder)) if folder else (),
        )  # fmt: skip
    prepared = _prepared(settings, source, target, reference, samples, drawn)
    fit, held_out = _split(settings, prepared.calibration)
    pair = WholePair(source.model, target.model, fit, prepared.objectives, work=work)
    return Opened(pair, target, tuned, prepared, inputs, (source, target), drawn, held_out=held_out)


def _split(settings: MethodSettings, calibration: Calibration) -> tuple[Calibration, Calibration | None]:
    """Samples that make the change, and others that choose its scale; all make it where the scale is given."""
    if isinstance(settings, TransferSettings) and settings.scale == "auto":
        return calibration.split(settings.seed)
    return calibration, None


def _prepared(
    settings: Settings,
    source: Loaded,
    target: Loaded,
    tuned: Tuned | None,
    samples: Samples | None,
    drawn: Drawn | None,
) -> Prepared:
    if drawn is None:
        return prepare(settings, source, target, tuned, samples=samples)
    answered = settings.model_copy(update={"labels": "auto"})  # by the tuned source, when it wrote them
    return replace(prepare(answered, source, target, tuned, samples=drawn.samples), labels=drawn.labels)


def _tuned(given: str | None, source: Loaded) -> Tuned:
    if given is None:
        return Tuned(TaskVector({}))
    tuned = load_tuned(given, source)
    if not len(tuned.tau):
        raise _unchanged(given, source.given)
    return tuned


def _unchanged(given: str, base: str) -> TaskferryError:
    return TaskferryError(f"{given} does not differ from {base}: nothing to move")


def _on_disk(settings: MethodSettings, scratch: Path, work: Work, inputs: Inputs, samples: Samples | None) -> Opened:
    bases = zip((settings.source_base, settings.target_base), settings.devices, strict=True)
    source, target = (_lazy(given, device, settings.dtype) for given, device in bases)
    given = str(getattr(settings, "source_tuned", ""))
    folder = Path(resolve(given))
    if is_adapter(folder):
        adapter = read_adapter(folder, Skeleton.of(source.model))
        tuned = Tuned(adapter.tau, adapter, adapter.ignored, given)
    else:
        difference = Difference(source, _lazy(given, "cpu", "float32"))
        if not any(map(difference.changed, difference)):
            raise _unchanged(given, source.given)
        tuned = Tuned(TaskVector(difference), ignored=difference.left_out, given=given)
    prepared = prepare(settings, source.loaded(), target.loaded(), None, samples=samples)
    fit, held_out = _split(settings, prepared.calibration)
    pair = BlockPair(source, target, fit, prepared.objectives, scratch=scratch, work=work)
    return Opened(pair, target, tuned, prepared, inputs, held_out=held_out)


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder beside the output for what a run block by block keeps on disk; a full disk is said as such."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out.parent, out.name[:80])
        with temporary_folder(out.parent, f"{out.name[:80]}.blocks") as scratch:
            yield scratch


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


def sample_lines(models: Opened) -> dict[str, str]:
    """Say how many samples there are, who labelled them, and how many texts were cut."""
    prepared = models.prepared
    lines = {"labels": prepared.labels}
    if models.drawn is not None:
        return {**lines, "samples": models.drawn.told}
    longest = prepared.longest
    cut, of = prepared.calibration.filled(longest), prepared.calibration.samples
    lines["samples"] = str(of)
    if cut:
        lines["cut"] = f"{cut} of {of} samples fill all {longest} tokens; what is longer is left out (max_length)"
    return lines
