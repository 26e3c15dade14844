"""Settings of the jobs that move by a method: transfer and fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from taskferry.errors import TaskferryError
from taskferry.settings import (
    GenerationSettings,
    MapSettings,
    OutputSettings,
    PairPlaceSettings,
    Scale,
    Writing,
    parse,
)

if TYPE_CHECKING:  # imported on use: `--help` shows these settings and needs no torch
    from taskferry.methods import Method

DEFAULT_METHOD = "bico"
_PAIR = ("source_base", "source_tuned", "target_base", "calibration")
_SHARED = ("map_rank", "tolerance")  # settings of the command that a method may have too


class MethodSettings(GenerationSettings, MapSettings, PairPlaceSettings):
    """What is moved from where to where, and how."""

    panel: ClassVar[str] = "Method"

    source_base: str = Field("", description="the base model that was tuned (default: the one that an adapter names)")
    target_base: str = Field(description="the base model to move to")
    method: str = Field(DEFAULT_METHOD, description="how to move")
    method_settings: dict[str, Any] = Field({}, description="settings of the method, such as inputs=gradients")

    @field_validator("method_settings", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """`name=value` words of the command line as a YAML mapping would give them."""
        if not isinstance(value, list):
            return value
        pairs = [str(word).partition("=") for word in value]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError("give each as name=value")
        found = {}
        for name, _, text in pairs:
            try:
                found[name] = parse(text)
            except ValueError as error:
                raise ValueError(f"{name}={text} cannot be read: {error}") from error
        return found

    @property
    def engine_name(self) -> str:
        """Where the pair of models will live."""
        return "whole"

    def chosen(self) -> tuple[Method, dict[str, Any]]:
        """The method and its settings: those given for it, and the general ones that it has."""
        from taskferry.methods import find

        method = find(self.method)
        own = dict(self.method_settings)
        for name in _SHARED:
            value = getattr(self, name)
            if value == type(self).model_fields[name].default:
                continue
            if name not in method.settings:
                raise TaskferryError(f"the method {self.method} has no {name}: leave --{name.replace('_', '-')} out")
            own.setdefault(name, value)
        method.checked(own)
        return method, own

    def trains(self, what: str) -> None:
        """Refuse to take training steps in half precision, where most of them would round to nothing."""
        if self.dtype != "float32":
            raise TaskferryError(
                f"{what} trains, which needs weights in float32: give --dtype float32, or leave it out"
            )


class RefineSettings(MethodSettings):
    """How what was moved is trained further, where that is asked for."""

    refine: int = Field(
        0,
        ge=0,
        description="training steps after the move, towards the tuned source, without labels",
    )
    refine_rate: float | None = Field(
        None, gt=0, description="learning rate of --refine; by the width of the layers unless given"
    )

    def check_refine(self) -> None:
        """Refuse settings of a refinement that cannot be."""
        if self.refine:
            self.trains("a refinement")
        elif self.refine_rate is not None:
            raise TaskferryError("refine_rate is of a refinement: give --refine STEPS beside it, or leave it out")


def _same(given: Any, fixed: Any) -> bool:
    """Whether a word of a command line or a file means what is fixed."""
    try:
        return bool(given == fixed or parse(str(given)) == fixed)
    except ValueError:
        return False


class FitSettings(MethodSettings, Writing):
    """taskferry fit."""

    command: ClassVar[str] = "fit"
    first: ClassVar[tuple[str, ...]] = (*_PAIR, "out", "samples")

    source_tuned: str | None = Field(None, description="a fine-tune for reference: it labels samples")
    adapters: str | None = Field(
        None, description="a folder of adapters of the source base: each writes its share of generated samples"
    )

    @property
    def data(self) -> dict[str, str]:
        """With the adapters that write samples."""
        return super().data if self.adapters is None else {**super().data, "adapters": self.adapters}

    @model_validator(mode="after")
    def _authors(self) -> FitSettings:
        if self.adapters is not None and not self.generates:
            raise ValueError("adapters write samples: give --calibration generate, or leave --adapters out")
        return self


class TransferSettings(RefineSettings, OutputSettings, Writing):
    """taskferry transfer."""

    command: ClassVar[str] = "transfer"
    first: ClassVar[tuple[str, ...]] = (*_PAIR, "out", "samples", "refine")

    source_tuned: str = Field(description="the tuned source: a model, a PEFT LoRA, a state file or a task vector")
    scale: Scale | Literal["auto"] = Field(
        "auto", description="multiplies the moved change; auto: what the calibration loss says; --paper takes 1"
    )
    engine: Literal["whole", "blockwise"] = Field(
        "whole", description="models in memory, or one block of each at a time (larger than memory)"
    )
    force: bool = Field(
        False, description="go on where the fine-tune does nothing on the samples, and write what does harm"
    )
    paper: bool = Field(False, strict=True, description="exactly as in the paper: BiCo, maps of full rank, scale 1")

    @model_validator(mode="before")
    @classmethod
    def _published(cls, given: Any) -> Any:
        """Fills in what the paper fixes; anything else asked for beside it is a contradiction."""
        if not isinstance(given, dict) or given.get("paper") is not True:
            return given
        from taskferry.methods import published

        method = published()
        fixed = {"method": method.name, **(method.paper or {})}
        other = [name for name, value in fixed.items() if name in given and not _same(given[name], value)]
        own = {name: cls.default_of(name) for name in ("method_settings", "tolerance")}
        other += [name for name, default in own.items() if not _same(given.get(name, default), default)]
        if other:
            raise ValueError(f"paper fixes {', '.join(other)}: give one or the other")
        return {**given, **fixed}

    @property
    def engine_name(self) -> str:
        """Where the pair of models will live."""
        if self.refine and self.engine != "whole":
            raise TaskferryError("refining trains the target whole: leave --refine out, or --engine blockwise")
        if self.engine == "whole":
            return super().engine_name
        wrong = []
        if self.labels == "teacher":
            wrong.append("the tuned source cannot label the samples: give labels or completions")
        if self.generates:
            wrong.append(
                "the tuned source cannot write samples: give --calibration a file, such as the calibration.jsonl of a "
                "transfer with whole models"
            )
        if self.sampler.startswith("centroid"):
            wrong.append("samples are not chosen by features: give another --sampler")
        if self.as_task_vector or self.as_lora or self.as_model:
            wrong.append("it writes a LoRA for a LoRA, and a full model for a full fine-tune")
        if wrong:
            raise TaskferryError("engine blockwise: " + "; ".join(wrong))
        return self.engine
