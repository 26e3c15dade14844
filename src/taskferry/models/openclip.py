"""OpenCLIP: `openclip:NAME:CHECKPOINT`, or a folder with open_clip_config.json and open_clip_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from taskferry.disk.files import read_json, write_plain_safetensors
from taskferry.errors import TaskferryError, first_line
from taskferry.models.loaded import Loaded, as_stored, library
from taskferry.models.states import add_to_state, check_folder, read_state
from taskferry.taskvector import TaskVector

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"


def owns(where: str) -> bool:
    """Tell an openclip: name, or a folder with OpenCLIP's configuration."""
    return where.startswith("openclip:") or (Path(where) / CONFIG).is_file()


def load(
    where: str,
    like: nn.Module | None,  # noqa: ARG001
    dtype: str,
) -> tuple[nn.Module, Path | None, set[str], dict[str, Any]]:
    """Load the model; its configuration and weights file are remembered."""
    open_clip = library("open_clip")
    folder = None
    try:
        if where.startswith("openclip:"):
            _, name, file = where.split(":", 2)
            weights = Path(file)
            model_config = open_clip.get_model_config(name)
            if model_config is None:
                raise TaskferryError(f"OpenCLIP knows no model '{name}': open_clip.list_models() has the names")
            config = {"model_cfg": model_config, "preprocess_cfg": {}}
            if not weights.is_file():
                raise TaskferryError(f"{weights} does not exist")
        else:
            folder = Path(where)
            weights, name = folder / WEIGHTS, f"local-dir:{folder}"
            check_folder(folder)
            config = read_json(folder / CONFIG)
        cls = open_clip.CustomTextCLIP if config["model_cfg"].get("custom_text") else open_clip.CLIP
        arguments = {k: v for k, v in config["model_cfg"].items() if k != "custom_text"}
        model = cls(**arguments)
        state = read_state(weights)
        missing = model.load_state_dict(state, strict=False)
    except TaskferryError:
        raise
    except Exception as error:  # the configuration goes into the model's constructors, which check nothing
        raise TaskferryError(f"{where} does not load with OpenCLIP: {first_line(error)}") from error
    lost = [key for key in missing.missing_keys if not key.endswith("attn_mask")]
    if lost:
        raise TaskferryError(f"{weights} lacks {len(lost)} parameters of {name} ({', '.join(lost[:3])} …)")
    stored = next(t.dtype for t in state.values() if t.is_floating_point())
    extra = {"config": config, "weights": weights, "name": name, "dtype": stored}
    return model.to(as_stored(dtype, stored)), folder, set(), extra


def write(target: Loaded, tau: TaskVector, folder: Path) -> None:
    """Write a folder that `open_clip.create_model("local-dir:…")` loads, in the target's precision."""
    state = add_to_state(read_state(target.extra["weights"]), tau)
    write_plain_safetensors(folder / WEIGHTS, state)
    (folder / CONFIG).write_text(json.dumps(target.extra["config"], indent=2), encoding="utf-8")


def tokenizer(loaded: Loaded) -> Any:
    """Make OpenCLIP's tokenizer for this model: a function from texts to token ids."""
    open_clip = library("open_clip")
    text = loaded.extra["config"]["model_cfg"]["text_cfg"]
    other = [key for key in ("hf_tokenizer_name", "tokenizer_kwargs") if text.get(key)]
    if other:
        raise TaskferryError(
            f"{loaded.given} has a tokenizer of its own ({other[0]}), which a zero-shot head cannot use yet"
        )
    length = int(loaded.extra["config"]["model_cfg"]["text_cfg"].get("context_length", 77))
    return open_clip.SimpleTokenizer(context_length=length)


def image_transform(loaded: Loaded) -> Any:
    """Make OpenCLIP's evaluation transform for this model."""
    open_clip = library("open_clip")
    known = ("mean", "std", "interpolation", "resize_mode", "fill_color")
    settings = {k: v for k, v in loaded.extra["config"].get("preprocess_cfg", {}).items() if k in known}
    model: Any = loaded.model
    return open_clip.image_transform(model.visual.image_size, is_train=False, **settings)
