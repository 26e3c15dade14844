"""What a recipe would take, without running or downloading anything: names, sizes, cells, arithmetic.

>>> plan = plan_recipe(load_recipe("paper/table1"), models=Path("models"))
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taskferry.bench.recipe import ModelSpec, Recipe
from taskferry.bench.rows import rows as known_rows
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.models import load_model


@dataclass(frozen=True)
class ModelSize:
    """Parameters that a task's samples flow through, and tokens a sample."""

    given: str
    parameters: int
    tokens: int


@dataclass(frozen=True)
class RecipePlan:
    """Numbers for people and machines."""

    title: str
    models: dict[str, ModelSize]
    tasks: dict[str, str]
    pairs: tuple[tuple[str, str], ...]
    cells: int
    rows: int
    finetunes: int
    finetune_flops: float
    transfer_flops: float


def plan_recipe(recipe: Recipe, models: Path) -> RecipePlan:
    """Sizes of every model and the floating-point operations of fine-tunes and transfers."""
    longest = max(task.max_length for task in recipe.tasks.values())
    sizes = {name: model_size(recipe.models[name], models, longest) for pair in recipe.pairs for name in pair}
    cells = list(recipe.cells())
    tuned = {(name, task) for pair in recipe.pairs for name in pair for task in recipe.tasks}
    seen = recipe.finetune.steps * recipe.finetune.batch
    # Forward and backward take six operations for each parameter and token: two, and twice two.
    training = sum(6.0 * sizes[name].parameters * sizes[name].tokens * seen for name, _ in tuned)
    moving = 0.0
    for cell in cells:
        samples = cell.count * (recipe.tasks[cell.task].classes if cell.per_class else 1)
        for place, name in enumerate((cell.source, cell.target)):
            passes = sum(known_rows()[row].row.passes[place] for row in cell.rows)
            moving += 6.0 * sizes[name].parameters * sizes[name].tokens * samples * passes
    tasks = {n: t.given if t.config is None else f"{t.given} ({t.config})" for n, t in recipe.tasks.items()}
    pairs = tuple(recipe.pairs)
    rows = sum(len(cell.rows) for cell in cells)
    return RecipePlan(recipe.title, sizes, tasks, pairs, len(cells), rows, len(tuned), training, moving)


def model_size(spec: ModelSpec, models: Path, longest: int) -> ModelSize:
    """From a named configuration without memory for its weights, or from a local folder."""
    found = Path(spec.find(models))
    if spec.openclip is not None and not found.is_dir():
        tower: Any = openclip_tower(spec.openclip)
        return ModelSize(spec.given, _count(tower), _patches(tower))
    if spec.t5 is not None and not found.is_dir():
        return ModelSize(spec.given, _count(t5_encoder(spec.t5)), longest)
    if not found.is_dir():
        raise TaskferryError(f"{spec.given} is no folder in {models}: give the folder of models with --models")
    model = load_model(str(found), architecture=spec.architecture, image_size=spec.image_size).model
    tower = getattr(model, "visual", model)
    if family_of(model).name == "openclip":
        return ModelSize(spec.given, _count(tower), _patches(tower))
    if family_of(model).name == "timm":
        return ModelSize(spec.given, _count(tower), int(tower.patch_embed.num_patches + tower.num_prefix_tokens))
    return ModelSize(spec.given, _count(tower), longest)


def openclip_tower(name: str) -> torch.nn.Module:
    """The image tower of a named OpenCLIP configuration, without memory for its weights."""
    try:
        import open_clip
    except ImportError as error:
        raise TaskferryError("open_clip is needed for this recipe: pip install 'taskferry[openclip]'") from error
    config = open_clip.get_model_config(name)
    if config is None:
        raise TaskferryError(f"OpenCLIP has no configuration '{name}'")
    with torch.device("meta"):
        clip = open_clip.CLIP(**config)
    tower: torch.nn.Module = clip.visual
    return tower


def t5_encoder(shape: dict[str, int]) -> torch.nn.Module:
    """A T5 encoder of this shape, without memory for its weights."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise TaskferryError("transformers is needed for this recipe: pip install 'taskferry[hf]'") from error
    with torch.device("meta"):
        encoder: torch.nn.Module = transformers.T5EncoderModel(transformers.T5Config(**shape))
    return encoder


def _patches(tower: Any) -> int:
    """Tokens of an image: its patches and the class token."""
    return int((tower.image_size[0] // tower.patch_size[0]) * (tower.image_size[1] // tower.patch_size[1])) + 1


def _count(model: torch.nn.Module) -> int:
    """Parameters that tokens are multiplied with: embeddings are looked up."""
    embedded = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in embedded)
