"""Settings of the commands, each declared once: its option, its key in YAML, its check and its help.

>>> config = load_settings(TransferSettings, yaml_path, {"samples": "50"})       # what the command line gives wins
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from taskferry.choices import FREE, GENERATE, OWN, LabelSource, ObjectiveName, template
from taskferry.errors import MissingSettings, TaskferryError, first_line

S = TypeVar("S", bound="Settings")
DEFAULT_METHOD = "distil"
BLOCK_METHOD = "bico"  # of maps: one block of each model at a time, and what `fit` saves
LEARNING = ("distil", "natural")  # methods that ask the tuned source
PAPER: dict[str, Any] = {"method": "bico", "set": {"map_rank": "full"}, "scale": 1.0}  # what --paper fixes
MOST_YAML = 2**20  # bytes
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Form = Literal["lora", "model", "task-vector"]
Templates = Annotated[list[Annotated[str, AfterValidator(template)]], Field(min_length=1)]
Precision = Literal["float32", "bfloat16", "float16", "auto"]
MICRO_BATCH: Any = Field(
    16, ge=1, description="samples at once; changes memory, not the result (of pairs of texts it is part of the loss)"
)


class Settings(BaseModel):
    """Settings; unknown keys fail."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), defer_build=True, populate_by_name=True
    )
    command: ClassVar[str] = ""  # the verb that takes them
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # heading of the help -> options; all others: YAML alone

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        return cls.filled(given) if isinstance(given, dict) else given

    @classmethod
    def filled(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Take `set` apart: a name that is a setting of the run is one, all others are of the method."""
        words, values = given.get("set"), dict(given)
        if isinstance(words, list):  # of the command line
            pairs = [str(word).partition("=") for word in words]
            if any(not equals for _, equals, _ in pairs):
                raise ValueError("set: give each as name=value")
            words = {name: _parsed(name, text) for name, _, text in pairs}
        if not isinstance(words, dict) or "set" not in cls.model_fields:
            return given
        known = {name.replace("-", "_"): value for name, value in words.items()}
        values |= {name: value for name, value in known.items() if name in cls.model_fields}
        return {**values, "set": {name: value for name, value in known.items() if name not in cls.model_fields}}


class CalibrationSettings(Settings):
    """Which samples both models are shown, and the loss whose gradient is taken."""

    calibration: str = Field(description="samples: JSONL, CSV, Parquet, image folder, or hub dataset id")
    samples: int = Field(100, ge=2, description="how many of them to use")
    per_class: int | None = Field(None, ge=1, description="samples of each class instead of a total number")
    seed: int = Field(0, ge=0, lt=2**32, description="for choosing, splitting and generating samples")
    labels: LabelSource = Field("auto", description="from the data, or from the tuned source (teacher)")
    label_column: str = Field("label", description="the column with the class")
    objective: ObjectiveName = Field("auto", description="the loss whose gradient is taken")
    templates: Templates = Field(["a photo of a {}."], description="prompts of a zero-shot head; {} is the class")
    max_length: int = Field(128, ge=2, description="longest text in tokens; longer ones are cut")
    micro_batch: int = MICRO_BATCH


class GenerationSettings(CalibrationSettings):
    """How the tuned source writes samples where there are none."""

    calibration: str = Field(
        description=f"samples: JSONL, CSV, Parquet, image folder, hub dataset id, or {GENERATE}: the tuned source "
        "writes them"
    )
    prompts: str = Field(FREE, description=f"what generated samples begin with: {FREE}, {OWN}, or a file with prompts")
    temperature: float = Field(1.0, gt=0, le=10, description="of drawing their tokens")

    @property
    def generates(self) -> bool:
        """True where the tuned source writes the samples."""
        return self.calibration == GENERATE

    @property
    def data(self) -> dict[str, str]:
        """The files or datasets that samples come from, by setting."""
        if not self.generates:
            return {"calibration": self.calibration}
        return {} if self.prompts in (FREE, OWN) else {"prompts": self.prompts}

    @model_validator(mode="after")
    def _generated(self) -> GenerationSettings:
        if not self.generates:
            asked = [n for n in ("prompts", "temperature") if getattr(self, n) != type(self).model_fields[n].default]
            if asked:
                raise ValueError(f"{asked[0]} is of generated samples: give --calibration {GENERATE}, or leave it out")
        elif self.labels == "data" or self.per_class is not None:
            raise ValueError("generated samples have no labels but the tuned source's: leave labels and per_class out")
        elif getattr(self, "source_tuned", None) is None and getattr(self, "adapters", None) is None:
            raise ValueError(f"--calibration {GENERATE}: the tuned source writes the samples: give --source-tuned")
        return self


class PlaceSettings(Settings):
    """Where a model lies, and in which precision."""

    device: str = Field("auto", description="cpu, cuda, cuda:1, or auto")
    dtype: Precision = Field("float32", description="precision of the weights (auto: as stored; sums stay in float32)")


class PairSettings(GenerationSettings, PlaceSettings):
    """What is moved from where to where, and how."""

    source_base: str = Field("", description="the base model that was tuned (default: the one that an adapter names)")
    target_base: str = Field(description="the base model to move to")
    method: str = Field(DEFAULT_METHOD, description="distil, natural, bico, theseus, gradfix, transfusion or naive")
    set: dict[str, Any] = Field({}, description="a setting of the method, such as map_rank=full, or a key of --config")
    device: str = Field("auto", description="cpu, cuda or auto; of the source and the target: cuda:0,cuda:1")
    statistics_memory: float = Field(4.0, gt=0, description="GiB of statistics in memory at once")

    @property
    def devices(self) -> tuple[str, str]:
        """The devices of the source and of the target."""
        source, comma, target = self.device.partition(",")
        return source.strip(), target.strip() if comma else source.strip()


_WHAT = ("source_tuned", "source_base", "target_base", "calibration", "out")
_HOW = ("method", "set", "samples", "seed", "labels")


class TransferSettings(PairSettings):
    """taskferry transfer."""

    command: ClassVar[str] = "transfer"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "What to move": _WHAT,
        "How": ("method", "set", "samples", "scale", "seed", "labels", "paper"),
        "Where, and in what form": ("as_", "rank", "device", "dtype", "engine", "force"),
    }

    source_tuned: str = Field(description="the tuned source: a PEFT LoRA, a model, a state file or a task vector")
    out: Path | None = Field(None, description="a new folder (default: NAME-on-TARGET in the current folder)")
    scale: Scale | Literal["auto"] = Field(
        "auto", description="multiplies the moved change; auto: what helps most on held-out samples"
    )
    paper: bool = Field(False, strict=True, description="exactly as in the paper: BiCo, maps of full rank, scale 1")
    as_: Form | None = Field(None, alias="as", description="what to write (default: a LoRA for a LoRA, else a model)")
    rank: int | None = Field(None, ge=1, description="rank of the LoRA that is written (default: that of the LoRA)")
    engine: Literal["whole", "blockwise"] = Field(
        "whole", description="models in memory, or one block of each at a time (larger than memory)"
    )
    force: bool = Field(
        False, description="go on where the fine-tune does nothing on the samples, and write what does harm"
    )

    @classmethod
    def filled(cls, given: dict[str, Any]) -> dict[str, Any]:
        """With what the paper fixes; anything else asked for beside it is a contradiction."""
        given = super().filled(given)
        if given.get("paper") is not True:
            return given
        other = [name for name, fixed in PAPER.items() if given.get(name) and _plain(given[name]) != fixed]
        if other:
            raise ValueError(f"paper fixes {', '.join(other)}: give one or the other")
        return {**given, **PAPER}

    @model_validator(mode="before")
    @classmethod
    def _of_maps(cls, given: Any) -> Any:
        """Block by block the default is the method of maps."""
        if isinstance(given, dict) and given.get("engine") == "blockwise":
            return {"method": BLOCK_METHOD, **given}
        return given

    @model_validator(mode="after")
    def _together(self) -> TransferSettings:
        """Refuse what contradicts itself, all in one sentence."""
        wrong = []
        if self.rank is not None and self.as_ in ("model", "task-vector"):
            wrong.append(f"rank is of a LoRA: leave it out, or --as {self.as_}")
        if self.method == "distil" and self.dtype != "float32":
            wrong.append("distil trains, which needs weights in float32: leave dtype out, or --method natural")
        if self.engine == "blockwise":
            asked = {
                "--labels teacher": self.labels == "teacher",
                f"--calibration {GENERATE}": self.generates,
                "--as": self.as_,
            }
            for name in (name for name, value in asked.items() if value):
                wrong.append(f"{name} needs whole models in memory: leave it out, or --engine blockwise")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class FitSettings(PairSettings):
    """taskferry fit."""

    command: ClassVar[str] = "fit"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "What to fit": ("source_base", "target_base", "calibration", "out", "source_tuned", "adapters"),
        "How": _HOW,
        "Where": ("device", "dtype"),
    }

    method: str = Field(BLOCK_METHOD, description="how to make the maps: bico or theseus")
    out: Path = Field(description="the alignment file to write; must not exist yet")
    source_tuned: str | None = Field(None, description="a fine-tune for reference: it labels or writes samples")
    adapters: str | None = Field(None, description="a folder of adapters: each writes its share of generated samples")

    @property
    def data(self) -> dict[str, str]:
        """With the adapters that write samples."""
        return super().data if self.adapters is None else {**super().data, "adapters": self.adapters}

    @model_validator(mode="after")
    def _authors(self) -> FitSettings:
        if self.adapters is not None and not self.generates:
            raise ValueError(f"adapters write samples: give --calibration {GENERATE}, or leave --adapters out")
        return self


class ApplySettings(Settings):
    """taskferry apply."""

    command: ClassVar[str] = "apply"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "What to move": ("alignment", "source_tuned", "source_base", "target_base", "out"),
        "In what form": ("scale", "as_", "rank"),
    }

    alignment: Path = Field(description="what `taskferry fit` wrote")
    source_tuned: str = Field(description="a PEFT LoRA, a task vector, or a tuned model")
    source_base: str | None = Field(None, description="its base; not needed for a LoRA or a task vector")
    target_base: str | None = Field(None, description="to write a full model, and named in an adapter")
    out: Path = Field(description="a new folder")
    scale: Scale = Field(1.0, description="multiplies the moved change")
    as_: Form | None = Field(None, alias="as", description="what to write (default: a LoRA for a LoRA, else a model)")
    rank: int | None = Field(None, ge=1, description="rank of a LoRA made from a full fine-tune")


class EvaluateSettings(PlaceSettings):
    """taskferry evaluate."""

    command: ClassVar[str] = "evaluate"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "What to score": ("model", "add", "scale", "test", "test_samples", "shots", "label_column"),
        "How": ("objective", "templates", "max_length", "micro_batch", "quick", "device", "dtype"),
    }

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
    quick: bool = Field(False, description="one pass in place of generating: the likeliest token at each place")

    @model_validator(mode="after")
    def _of_one(self) -> EvaluateSettings:
        """A scale multiplies what is added."""
        if self.add is None and self.scale != 1:
            raise ValueError("scale multiplies what is added: give --add, or leave --scale out")
        return self


class CompareSettings(CalibrationSettings):
    """taskferry compare."""

    command: ClassVar[str] = "compare"
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "What to compare": ("source_base", "source_tuned", "target_base", "calibration", "test", "methods", "out"),
        "How": ("samples", "test_samples", "seed", "seeds", "labels", "label_column", "max_length", "micro_batch"),
    }

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
        """Refuse outputs that would take the place of one another, or of an adapter."""
        names = [move.name for move in self.moves]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two moves are called {', '.join(twice)}: their outputs would overwrite each other")
        out, adapters = Path(self.out).resolve(), Path(self.adapters).resolve()
        if out == adapters or adapters in out.parents:
            raise ValueError("out is the folder of the adapters, or lies in it: give another one for what is moved")
        return self


def load_settings(cls: type[S], file: Path | None, given: Mapping[str, Any]) -> S:
    """Read a YAML file, overridden by what is given; every error of both is told at once."""
    values: dict[str, Any] = {} if file is None else read_yaml(file)
    for name, value in given.items():
        if name == "set" and isinstance(value, list) and isinstance(values.get("set"), dict):
            value = [*(f"{key}={yaml.safe_dump(known)}" for key, known in values["set"].items()), *value]
        values[cls.model_fields[name].alias or name if name in cls.model_fields else name] = value
    try:
        return cls(**values)
    except ValidationError as error:
        raise _all_errors(cls, error, file) from error


def dump_settings(config: Settings) -> str:
    """As YAML, for the file that is written beside an output."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False)


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
        loaded = yaml.load(file.read_text("utf-8"), _Plain) if size <= MOST_YAML else None  # noqa: S506  (a safe one)
    except (OSError, ValueError, RecursionError, OverflowError, yaml.YAMLError) as error:
        raise TaskferryError(f"{file} cannot be read as YAML: {first_line(error)}") from error
    if size > MOST_YAML:
        raise TaskferryError(f"{file} has {size} bytes: settings have {MOST_YAML} at most")
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise TaskferryError(f"{file} holds no settings: lines such as `samples: 100` are needed")
    return loaded


def _parsed(name: str, text: str) -> Any:
    """A value of the command line, as YAML would read it."""
    try:
        return yaml.load(text, _Plain)  # noqa: S506  (a safe loader)
    except (RecursionError, OverflowError, yaml.YAMLError) as error:
        raise ValueError(f"set: {name}={text} cannot be read: {first_line(error)}") from error


def _plain(value: Any) -> Any:
    """A number that was typed as one."""
    try:
        return float(value) if isinstance(value, str | int) else value
    except ValueError:
        return value


def _all_errors(cls: type[Settings], error: ValidationError, file: Path | None) -> TaskferryError:
    lines, missing = [], []
    for item in error.errors():
        *place, name = _place(item["loc"])
        inside = f"{'.'.join(place)}: " if place else ""
        if item["type"] == "missing":
            missing.append(name)
            lines.append(f"{inside}{name} is missing" if inside else f"{_option(name)} is missing")
        elif item["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, _fields_at(cls, place), 1)
            lines.append(f"{inside}unknown setting '{name}'" + (f", did you mean {close[0]}?" if close else ""))
        else:
            option = _option(name) if name and not place and file is None else name
            lines.append(f"{inside}{option}: {item['msg'].removeprefix('Value error, ')}".removeprefix(": "))
    where = f" in {file}" if file else ""
    sentence, more = f"settings{where}: " + "; ".join(dict.fromkeys(lines)), ""
    if cls.command:
        more = f"; `taskferry {cls.command} --help` lists all"
    return MissingSettings(sentence, more, missing) if len(missing) == len(lines) else TaskferryError(sentence + more)


def _option(name: str) -> str:
    return f"--{name.strip('_').replace('_', '-')}"


def _place(loc: Sequence[int | str]) -> list[str]:
    """Where an error is: a setting, or one inside a list of them; not which kind of a choice was tried."""
    parts = list(loc[:1]) or [""]
    for part in loc[1:]:
        if not isinstance(part, int) and not isinstance(parts[-1], int):
            break
        parts.append(part)
    if len(parts) == 2 and isinstance(parts[1], int):  # one of several words
        parts.pop()
    return list(map(str, parts))


def _fields_at(cls: type[BaseModel], place: Sequence[str]) -> list[str]:
    """Of the settings themselves, or of those in a list of them (the moves of a fleet)."""
    if not place:
        return list(cls.model_fields)
    held = [each for each in get_args(cls.model_fields[place[0]].annotation) if isinstance(each, type)]
    return [name for each in held if issubclass(each, BaseModel) for name in each.model_fields]
