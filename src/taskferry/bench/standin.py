"""Tiny stand-ins for a recipe's models and data: the whole run in seconds, to see that nothing is amiss.

    >>> recipe, places = stand_in(load_recipe("paper/table1"), folder)

Widths and depths keep their order, so narrow stays narrower than wide. Weights and samples are random: scores mean
nothing.
"""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from typing import Any

import torch

from taskferry.bench.planning import openclip_tower
from taskferry.bench.recipe import ModelSpec, Recipe, TaskSpec
from taskferry.bench.running import Places
from taskferry.disk.files import write_plain_safetensors
from taskferry.errors import TaskferryError
from taskferry.training import FineTuning

CLASSES, TRAIN, TEST = 4, 48, 16
WORDS = ("a", "the", "cat", "dog", "sat", "ran", "on", "mat", "red", "big")


def stand_in(recipe: Recipe, folder: Path) -> tuple[Recipe, Places]:
    """The recipe with tiny models and data in `folder`, two tasks, short training and few draws.

    Rows that train are run at one number of samples alone: they are most of the time.
    """
    torch.manual_seed(0)
    if recipe.kind != "zero-shot" and any(recipe.models[name].t5 is None for pair in recipe.pairs for name in pair):
        raise TaskferryError("stand-ins are made for zero-shot recipes and for T5 encoders: run this one as it is")
    places = Places(folder / "models", folder / "data", folder / "work")
    used = {name for pair in recipe.pairs for name in pair}
    models, tasks = {}, {}
    for name in sorted(used):
        _model(recipe.models[name], places.models / name)
        models[name] = recipe.models[name].model_copy(update={"given": name, "image_size": None})
    for name, task in list(recipe.tasks.items())[:2]:
        _task(task, recipe.kind == "zero-shot", places.data / name)
        tasks[name] = task.model_copy(update={"given": name, "config": None, "max_length": 16})
    samples = [min(count, 8 + i) for i, count in enumerate(recipe.samples[-2:])]
    per_class = [min(count, 1 + i) for i, count in enumerate(recipe.per_class[-2:])]
    changes = {
        "models": models,
        "tasks": tasks,
        "samples": samples,
        "per_class": per_class,
        "costly_at": (samples or per_class)[-1:],
        "costly_tasks": [],
        "seeds": 1,
        "finetune": FineTuning(steps=2, batch=8, warmup=1, every=2),
        "test_samples": TEST,
        "micro_batch": 8,
    }
    return recipe.model_copy(update=changes), places


def _model(spec: ModelSpec, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if spec.t5 is not None:
        _t5(spec.t5, folder)
        return
    import open_clip

    width, blocks, embedding = 32, 2, 16
    if spec.openclip is not None:
        real: Any = openclip_tower(spec.openclip)
        width = 16 * (real.conv1.out_channels // 256)
        blocks, embedding = len(real.transformer.resblocks) // 6, real.proj.shape[1] // 32
    patch = 8 if width <= 48 else 16
    vision = {"image_size": 32, "patch_size": patch, "width": width, "layers": blocks, "head_width": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    config = {"model_cfg": {"embed_dim": embedding, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    model = open_clip.CLIP(**config["model_cfg"])
    write_plain_safetensors(folder / "open_clip_model.safetensors", model.state_dict())
    (folder / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")


def _t5(shape: dict[str, int], folder: Path) -> None:
    transformers: Any = importlib.import_module("transformers")  # lax: its configurations are typed by each field
    from tokenizers import Tokenizer, models, pre_tokenizers

    tiny = {"d_model": 32, "d_ff": shape["d_ff"] // 256, "d_kv": 8, "num_heads": shape["num_heads"] // 8}
    config = transformers.T5Config(**tiny, num_layers=2, vocab_size=16, decoder_start_token_id=0)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder)


def _task(task: TaskSpec, images: bool, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    classes = min(CLASSES, task.classes)
    back = {new: old for old, new in task.columns.items()}  # in the data set's own words
    for split, n in (("train", TRAIN), (task.test, TEST)):
        rows: list[dict[str, Any]] = []
        for i in range(n):
            row: dict[str, Any] = {back.get("label", "label"): i % classes}
            if images:
                row[back.get("image", "image")] = _picture(i % classes)
            else:
                for column in ("text", "text_pair"):
                    row[back.get(column, column)] = " ".join(WORDS[int(k)] for k in torch.randint(len(WORDS), (6,)))
            rows.append(row)
        _write(rows, folder / f"{split}.parquet")
    (folder / "classes.json").write_text(json.dumps([f"thing {i}" for i in range(classes)]), encoding="utf-8")


def _picture(label: int) -> bytes:
    from PIL import Image

    pixels = torch.randint(0, 100, (32, 32, 3)) + 40 * label
    out = io.BytesIO()
    Image.fromarray(pixels.clamp(0, 255).to(torch.uint8).numpy()).save(out, "PNG")
    return out.getvalue()


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(path))
