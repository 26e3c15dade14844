"""Recipes: a table as a YAML file, with its models, tasks, sample counts, seeds and rows.

    >>> recipe = load_recipe("paper/table1")
    >>> recipe.pairs, recipe.tasks, recipe.cells()

The package brings the paper's tables under `paper/` and the same tables with small models under `zoo/`; any file may be
given instead. Unknown keys fail, all together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from taskferry.bench.rows import rows
from taskferry.choices import ObjectiveName, Sampler
from taskferry.errors import TaskferryError
from taskferry.settings import Settings, Templates, load_settings, read_yaml
from taskferry.training.finetuning import FineTuning

SHARED = "shared"  # the folder of pieces that several recipes name


class Given(Settings):
    """Something that a recipe names."""

    given: str = Field(description="a folder below --models or --data, any other path, or a hub id")

    def find(self, root: Path) -> str:
        """The folder below `root` where there is one, else what was given."""
        local = root / self.given
        return str(local) if local.is_dir() else self.given


class ModelSpec(Given):
    """Where a model comes from, and its shape, so that a plan needs no download."""

    architecture: str | None = Field(None, description="a class of transformers, where it is not the folder's own")
    image_size: int | None = Field(None, description="of a timm model, where it is not its own")
    openclip: str | None = Field(None, description="the name of its OpenCLIP configuration")
    t5: dict[str, int] | None = Field(None, description="its shape as a T5 encoder")


class TaskSpec(Given):
    """A data set with a train and a test part."""

    config: str | None = Field(None, description="the hub's name of a part of it")
    test: str = Field("test", description="the part to score on")
    columns: dict[str, str] = Field({}, description="its columns that are text, text_pair, image or label")
    templates: Templates = Field(["a photo of a {}."], description="prompts of a zero-shot head")
    classes: int = Field(10, description="how many, for the plan and stand-ins")
    max_length: int = Field(128, description="longest text in tokens")


class Recipe(Settings):
    """One table."""

    title: str
    kind: Literal["zero-shot", "probe", "prototypes"] = Field("zero-shot", description="the head that scores")
    objective: ObjectiveName = Field("auto", description="the loss whose gradient is taken")
    models: dict[str, ModelSpec]
    pairs: list[tuple[str, str]]
    tasks: dict[str, TaskSpec]
    samples: list[int] = Field([], description="sizes of the calibration set")
    per_class: list[int] = Field([], description="the same as samples of each class")
    samplers: list[Sampler] = Field(["random"], description="how calibration samples are drawn")
    seeds: int = Field(1, ge=1)
    rows: list[str]
    costly_seeds: int = Field(1, ge=0, description="seeds for rows that train")
    costly_at: list[int] = Field([], description="counts at which rows that train are run; all where empty")
    costly_tasks: list[str] = Field([], description="tasks on which rows that train are run; all where empty")
    finetune: FineTuning = FineTuning()
    test_samples: int = Field(1000, ge=2)
    micro_batch: int = Field(32, ge=1)

    @model_validator(mode="after")
    def _complete(self) -> Recipe:
        wrong = [f"no model '{name}'" for pair in self.pairs for name in pair if name not in self.models]
        wrong += [f"no task '{task}'" for task in self.costly_tasks if task not in self.tasks]
        wrong += [f"no row '{row}': one of {', '.join(rows())}" for row in self.rows if row not in rows()]
        if bool(self.samples) == bool(self.per_class):
            wrong.append("give samples or per_class, not both")
        if wrong:
            raise ValueError("; ".join(dict.fromkeys(wrong)))
        return self

    def cells(self) -> Iterator[Cell]:
        """Every combination that is run, cheap ones first."""
        counts = self.samples or self.per_class
        for pair in self.pairs:
            for task in self.tasks:
                for sampler in self.samplers:
                    for seed in range(self.seeds):
                        for count in counts:
                            costly = seed < self.costly_seeds and (not self.costly_at or count in self.costly_at)
                            costly = costly and (not self.costly_tasks or task in self.costly_tasks)
                            chosen = tuple(row for row in self.rows if costly or not rows()[row].costly)
                            yield Cell(pair[0], pair[1], task, sampler, count, bool(self.per_class), seed, chosen)


@dataclass(frozen=True)
class Cell:
    """One draw of the calibration set, on one pair and task."""

    source: str
    target: str
    task: str
    sampler: Sampler
    count: int
    per_class: bool
    seed: int
    rows: tuple[str, ...]

    def key(self) -> dict[str, Any]:
        """What identifies it in results."""
        counted = "per_class" if self.per_class else "samples"
        return {
            "source": self.source,
            "target": self.target,
            "task": self.task,
            "sampler": self.sampler,
            counted: self.count,
            "seed": self.seed,
        }


def recipe_names() -> list[str]:
    """The recipes that the package brings."""
    return sorted(str(p.relative_to(_root()).with_suffix("")) for p in _root().glob("*/*.yaml") if _is_recipe(p))


def load_recipe(given: str) -> Recipe:
    """A recipe by name, or from a YAML file; `models`, `tasks` and `finetune` may name a shared file."""
    own = _root() / f"{given}.yaml"
    path = own if given in recipe_names() else Path(given)
    if not path.is_file():
        raise TaskferryError(f"no recipe '{given}': a YAML file, or one of {', '.join(recipe_names())}")
    values = read_yaml(path)
    for key in ("models", "tasks", "finetune"):
        shared = values.get(key)
        if isinstance(shared, str):
            file = _root() / SHARED / f"{Path(shared).name}.yaml"
            if not file.is_file():
                raise TaskferryError(f"{path}: no {key} '{shared}': give them as a mapping")
            values[key] = read_yaml(file)
    return load_settings(Recipe, None, values)


def _root() -> Path:
    return Path(str(files("taskferry.bench") / "recipes"))


def _is_recipe(path: Path) -> bool:
    return path.parent.name != SHARED
