"""Settings of the commands, each declared once: the option, the YAML key, its check and its help.

>>> settings = load_settings(TransferSettings, yaml_path, given_on_the_command_line)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from taskferry.choices import DEFAULT_TOLERANCE, FREE, GENERATE, OWN, LabelSource, ObjectiveName, Sampler, template
from taskferry.errors import MissingSettings, TaskferryError, first_line

S = TypeVar("S", bound="Settings")
MOST_YAML = 2**20  # bytes
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Templates = Annotated[list[Annotated[str, AfterValidator(template)]], Field(min_length=1)]
Precision = Literal["float32", "bfloat16", "float16", "auto"]
MICRO_BATCH: Any = Field(
    16, ge=1, description="samples at once; changes memory, not the result (of pairs of texts it is part of the loss)"
)


class Settings(BaseModel):
    """Unknown keys fail."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), defer_build=True)
    command: ClassVar[str] = ""  # the verb that takes them
    panel: ClassVar[str] = "More"  # where the help shows them
    first: ClassVar[tuple[str, ...]] = ()  # what most need, shown before all others

    @classmethod
    def default_of(cls, name: str) -> Any:
        """What a setting is where nobody says."""
        return cls.model_fields[name].get_default(call_default_factory=True)


class Writing(Settings):
    """What every command that writes something takes."""

    out: Path = Field(description="where to write; must not exist yet")


class CalibrationSettings(Settings):
    """Which samples both models are shown, and the loss whose gradient is taken."""

    panel: ClassVar[str] = "Calibration"

    calibration: str = Field(description="JSONL, CSV, Parquet, image folder, or hub dataset id")
    samples: int = Field(100, ge=2, description="how many samples to use")
    per_class: int | None = Field(None, ge=1, description="samples of each class instead of a total number")
    sampler: Sampler = Field("random", description="how samples are chosen")
    seed: int = Field(0, ge=0, lt=2**32, description="for choosing or generating samples")
    labels: LabelSource = Field("auto", description="from the data, or from the tuned source (teacher)")
    label_column: str = Field("label", description="the column with the class")
    objective: ObjectiveName = Field("auto", description="the loss whose gradient is taken")
    templates: Templates = Field(["a photo of a {}."], description="prompts of a zero-shot head; {} is the class")
    max_length: int = Field(128, ge=2, description="longest text in tokens; longer ones are cut")
    micro_batch: int = MICRO_BATCH


class PlaceSettings(Settings):
    """Where a model lies, and in which precision."""

    panel: ClassVar[str] = "Devices"

    device: str = Field("auto", description="cpu, cuda, cuda:1, or auto")
    dtype: Precision = Field("float32", description="precision of the weights (auto: as stored; sums stay in float32)")


class PairPlaceSettings(PlaceSettings):
    """The same of two models."""

    panel: ClassVar[str] = "Devices"

    source_device: str | None = Field(None, description="of the source; --device where none is given")
    target_device: str | None = Field(None, description="of the target; --device where none is given")

    @property
    def devices(self) -> tuple[str, str]:
        """Of the source and of the target."""
        return self.source_device or self.device, self.target_device or self.device


class GenerationSettings(CalibrationSettings):
    """How the tuned source writes samples where there are none."""

    panel: ClassVar[str] = "Generated samples"

    calibration: str = Field(
        description=f"JSONL, CSV, Parquet, image folder, hub dataset id, or {GENERATE}: the tuned source writes samples"
    )
    prompts: str = Field(
        FREE,
        description=f"what they begin with: {FREE}, {OWN} (a prompt that it makes up), or a file with a column prompt",
    )
    temperature: float = Field(1.0, gt=0, le=10, description="of drawing their tokens; 1 is the model's own")

    @property
    def generates(self) -> bool:
        """Whether samples are written."""
        return self.calibration == GENERATE

    @property
    def data(self) -> dict[str, str]:
        """The files or datasets that samples come from, by setting."""
        if not self.generates:
            return {"calibration": self.calibration}
        return {} if self.prompts in (FREE, OWN) else {"prompts": self.prompts}

    @model_validator(mode="after")
    def _generated(self) -> GenerationSettings:
        defaults = type(self).model_fields
        if not self.generates:
            asked = [name for name in ("prompts", "temperature") if getattr(self, name) != defaults[name].default]
            if asked:
                raise ValueError(f"{asked[0]} is of generated samples: give --calibration {GENERATE}, or leave it out")
        elif self.labels == "data" or self.per_class is not None or self.sampler != "random":
            raise ValueError(
                "generated samples have no labels but the tuned source's: leave labels, per_class and sampler out"
            )
        elif getattr(self, "source_tuned", None) is None and getattr(self, "adapters", None) is None:
            raise ValueError(f"--calibration {GENERATE}: the tuned source writes the samples: give --source-tuned")
        return self


class MapSettings(Settings):
    """How maps are solved."""

    panel: ClassVar[str] = "Maps"

    map_rank: Literal["range", "full"] = Field(
        "range", description="keep the directions the samples show, or all (as in the paper)"
    )
    tolerance: float = Field(DEFAULT_TOLERANCE, gt=0, lt=1, description="smallest singular value kept, relative")
    statistics_memory: float = Field(4.0, gt=0, description="GiB of statistics in memory at once")


class OutputSettings(Settings):
    """In which form a moved task vector is written."""

    panel: ClassVar[str] = "Output"

    as_lora: bool = Field(False, description="write a LoRA adapter (a LoRA in gives one anyway)")
    as_model: bool = Field(False, description="write a full model, also for a LoRA in")
    as_task_vector: bool = Field(False, description="write the moved task vector alone")
    rank: int | None = Field(None, ge=1, description="rank of a LoRA made from a full fine-tune")

    @model_validator(mode="after")
    def _one_form(self) -> OutputSettings:
        forms = [name for name in ("as_lora", "as_model", "as_task_vector") if getattr(self, name)]
        if len(forms) > 1:
            raise ValueError(f"{' and '.join(forms)} exclude each other")
        if self.rank is not None and not self.as_lora:
            raise ValueError("rank is for as_lora")
        return self


class CompareSettings(CalibrationSettings):
    """taskferry compare."""

    command: ClassVar[str] = "compare"
    panel: ClassVar[str] = "What to compare"
    first: ClassVar[tuple[str, ...]] = ("source_base", "source_tuned", "target_base", "calibration", "test", "out")

    source_base: str = Field(description="the base model that was tuned")
    source_tuned: str = Field(description="the tuned source")
    target_base: str = Field(description="the base model to move to")
    test: str = Field(description="held-out data in the form of the calibration data")
    test_samples: int = Field(1000, ge=2, description="how many of them, at most")
    methods: list[str] = Field([], description="which methods; all where none is named")
    seeds: int = Field(1, ge=1, description="calibration sets drawn, from the seed on")
    out: Path | None = Field(None, description="write the table as JSON and Markdown here")


class Move(Settings):
    """One new base of a fleet."""

    name: str = Field(description="what its outputs are called")
    alignment: Path = Field(description="what `taskferry fit` wrote for this pair of bases")
    target_base: str = Field(description="the base that the moved adapters name")

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value) or "--" in value:
            raise ValueError("letters, digits, dots and single dashes alone")
        return value


class FleetSettings(Settings):
    """taskferry fleet."""

    command: ClassVar[str] = "fleet"

    adapters: str = Field(description="a folder of PEFT LoRA folders, or any fsspec address")
    out: str = Field(description="where the moved adapters go: a folder or any fsspec address")
    moves: list[Move] = Field(min_length=1, description="the new bases, each with its alignment")
    scale: Scale = Field(1.0, description="multiplies every moved adapter")
    batch: int = Field(16, ge=1, description="adapters in one task")
    retries: int = Field(5, ge=0, description="how often a batch is tried again when a node is lost")
    address: str | None = Field(None, description="a running Ray cluster; one on this machine otherwise")

    @model_validator(mode="after")
    def _apart(self) -> FleetSettings:
        """No output may take the place of another, nor of an adapter."""
        names = [move.name for move in self.moves]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two moves are called {', '.join(twice)}: their outputs would overwrite each other")
        out, adapters = Path(self.out).resolve(), Path(self.adapters).resolve()
        if out == adapters or adapters in out.parents:
            raise ValueError("out is the folder of the adapters, or lies in it: give another one for what is moved")
        return self


class EvaluateSettings(PlaceSettings):
    """taskferry evaluate."""

    command: ClassVar[str] = "evaluate"
    panel: ClassVar[str] = "How to score"
    first: ClassVar[tuple[str, ...]] = ("test", "add", "shots", "card")

    model: str = Field(description="a model folder or hub id")
    add: str | None = Field(None, description="a PEFT LoRA, state file or task vector to add to it first")
    scale: Scale = Field(1.0, description="multiplies what is added")
    test: str = Field(description="held-out samples: JSONL, CSV, Parquet, image folder, or hub dataset id")
    test_samples: int = Field(1000, ge=1, description="how many of them, at most, drawn once")
    shots: str | None = Field(None, description="samples that a probe or prototypes are made from; never the test data")
    label_column: str = Field("label", description="the column with the class")
    objective: ObjectiveName = Field("auto", description="what scores: a head, or the language model's loss")
    templates: Templates = Field(["a photo of a {}."], description="prompts of a zero-shot head; {} is the class")
    max_length: int = Field(128, ge=2, description="longest text in tokens; longer ones are cut")
    micro_batch: int = MICRO_BATCH
    quick: bool = Field(
        False, description="one pass over prompt and answer in place of generating: the likeliest token at each place"
    )
    card: Path | None = Field(None, description="an output folder whose model card takes the score")

    @model_validator(mode="after")
    def _of_one(self) -> EvaluateSettings:
        """What is scored is what is added, or the model; a card takes the score of its own folder alone."""
        wrong = []
        if self.add is None and self.scale != 1:
            wrong.append("scale multiplies what is added: give --add, or leave --scale out")
        if self.card is not None:
            scored = Path(self.model if self.add is None else self.add).resolve()
            if self.card.resolve() not in (scored, scored.parent if scored.is_file() else scored) or self.scale != 1:
                wrong.append(
                    f"card {self.card} would take the score of something else: give it the folder that is scored "
                    f"({self.model if self.add is None else self.add}), at scale 1"
                )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class ApplySettings(OutputSettings, Writing):
    """taskferry apply."""

    command: ClassVar[str] = "apply"
    panel: ClassVar[str] = "What to move"
    first: ClassVar[tuple[str, ...]] = ("out", "target_base", "scale")

    alignment: Path = Field(description="what `taskferry fit` wrote")
    source_tuned: str = Field(description="a PEFT LoRA, a task vector, or a tuned model")
    source_base: str | None = Field(None, description="its base; not needed for a LoRA or a task vector")
    target_base: str | None = Field(None, description="to write a full model, and named in an adapter")
    scale: Scale = Field(1.0, description="multiplies the moved task vector")


def load_settings(cls: type[S], file: Path | None, given: Mapping[str, Any]) -> S:
    """Settings of a YAML file, overridden by those given; every error of both at once."""
    values: dict[str, Any] = {} if file is None else read_yaml(file)
    values.update({name: value for name, value in given.items() if value is not None})
    try:
        return cls(**values)
    except ValidationError as error:
        raise _all_errors(cls, error, file) from error


class _Plain(yaml.SafeLoader):
    """Settings need no anchors; through them a few lines can stand for more than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*): write it out")
        return super().compose_node(parent, index)


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        size = file.stat().st_size
        loaded = parse(file.read_text(encoding="utf-8")) if size <= MOST_YAML else None
    except (OSError, ValueError) as error:
        raise TaskferryError(f"{file} cannot be read as YAML: {first_line(error)}") from error
    if size > MOST_YAML:
        raise TaskferryError(f"{file} has {size} bytes: settings have {MOST_YAML} at most")
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise TaskferryError(f"{file} holds no settings: lines such as `samples: 100` are needed")
    return loaded


def parse(text: str) -> Any:
    """YAML as plain data; what is none is a ValueError."""
    try:
        return yaml.load(text, _Plain)  # noqa: S506  (a safe loader)
    except (RecursionError, OverflowError, yaml.YAMLError) as error:
        raise ValueError(first_line(error)) from error


def dump_settings(settings: Settings) -> str:
    """As YAML, for the file that is written beside an output."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _place(loc: Sequence[int | str]) -> list[str]:
    """Where an error is: a setting, or one inside a list of them; not which kind of a choice was tried."""
    parts = list(loc[:1]) or [""]
    for part in loc[1:]:
        if not isinstance(part, int) and not isinstance(parts[-1], int):
            break
        parts.append(part)
    return list(map(str, parts))


def _fields_at(cls: type[BaseModel], place: Sequence[str]) -> list[str]:
    """Of the settings themselves, or of those in a list of them (the moves of a fleet)."""
    if not place:
        return list(cls.model_fields)
    held = [each for each in get_args(cls.model_fields[place[0]].annotation) if isinstance(each, type)]
    return [name for each in held if issubclass(each, BaseModel) for name in each.model_fields]


def _all_errors(cls: type[Settings], error: ValidationError, file: Path | None) -> TaskferryError:
    lines = []
    for item in error.errors():
        *place, name = _place(item["loc"])
        if len(place) == 1 and name.isdigit() and item["type"] == "value_error":  # one of several words
            name = place.pop()
        inside = f"{'.'.join(place)}: " if place else ""
        if item["type"] == "missing":
            lines.append(f"{inside}{name} is missing" if inside else f"--{name.replace('_', '-')} is missing")
        elif item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, _fields_at(cls, place), 1)
            lines.append(f"{inside}unknown setting '{name}'" + (f", did you mean {close[0]}?" if close else ""))
        else:
            option = f"--{name.replace('_', '-')}" if name and not place and file is None else name
            lines.append(f"{inside}{option}: {item['msg'].removeprefix('Value error, ')}".removeprefix(": "))
    where = f" in {file}" if file else ""
    more = f"; `taskferry {cls.command} --help` lists all" if cls.command else ""
    sentence = f"settings{where}: " + "; ".join(dict.fromkeys(lines))
    if all(item["type"] == "missing" and len(item["loc"]) == 1 for item in error.errors()):
        return MissingSettings(sentence, more, [str(item["loc"][0]) for item in error.errors()])
    return TaskferryError(sentence + more)
