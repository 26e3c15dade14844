"""Hugging Face folders and hub ids, through transformers: sharded or not, any precision, tied weights stay tied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taskferry.checkpoints.loaded import Loaded
from taskferry.errors import TaskferryError
from taskferry.taskvector import TaskVector

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.index.json", "*.gguf")
_TEXT = ("*.json", "*.txt", "*.model", "*.jinja")


def owns(where: str) -> bool:
    """A folder whose config.json names a model type."""
    config = Path(where) / "config.json"
    return config.is_file() and "model_type" in _read_json(config)


def download(given: str) -> str:
    """The local folder of a hub id, with `@revision` where one is given; safetensors where the hub has them."""
    hub = _import("huggingface_hub")
    name, _, revision = given.partition("@")
    try:
        for weights in ("*.safetensors", "*.bin"):
            folder = str(hub.snapshot_download(name, revision=revision or None, allow_patterns=[*_TEXT, weights]))
            if any(Path(folder).glob(weights)):
                return folder
    except Exception as error:  # the hub client raises many kinds; all mean that the model cannot be had
        reason = str(error).strip().splitlines()[0]
        raise TaskferryError(f"{given} is neither a folder nor a model that the hub gives: {reason}") from error
    raise TaskferryError(f"{given} has no weights as safetensors or .bin")


def load(
    where: str, like: nn.Module | None, architecture: str | None = None
) -> tuple[nn.Module, Path, set[str], dict[str, Any]]:
    """The model of the class its configuration names, in float32; missing parameters are told."""
    transformers = _import("transformers")
    quiet(transformers)
    folder = Path(where)
    if architecture is not None and not hasattr(transformers, architecture):
        raise TaskferryError(f"transformers has no class '{architecture}'")
    named, stored = _class_and_precision(transformers, folder, architecture)
    model, info = _from_pretrained(named if like is None else type(like), folder, "float32")
    extra = {"unexpected": sorted(info["unexpected_keys"]), "dtype": stored}
    return model, folder, set(info["missing_keys"]), extra


def skeleton(folder: Path) -> tuple[nn.Module, torch.dtype]:
    """The model of the folder's class without memory for its parameters, and the precision they are stored in."""
    transformers, accelerate = _import("transformers"), _import("accelerate")
    quiet(transformers)
    cls, stored = _class_and_precision(transformers, folder)
    with accelerate.init_empty_weights(include_buffers=False):  # rotary tables are buffers, and computed
        model = cls._from_config(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model.tie_weights()
    return model.float().eval().requires_grad_(False), stored


def write(target: Loaded, tau: TaskVector, scale: float, folder: Path) -> None:
    """Like the target's folder: its precision, shard size, configuration, tokenizer, processor."""
    if target.folder is None:
        raise ValueError("a Hugging Face model has a folder")
    model, _ = _from_pretrained(type(target.model), target.folder, "auto")
    tau.add_to(model, scale)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in target.absent}
    shards = sorted(target.folder.glob("*-of-*.safetensors")) or sorted(target.folder.glob("*-of-*.bin"))
    size = max(file.stat().st_size for file in shards) if shards else 50 * 10**9
    model.save_pretrained(folder, state_dict=state, max_shard_size=size)  # type: ignore[operator]
    copy_side_files(target.folder, folder)


def copy_side_files(source: Path, folder: Path) -> None:
    """Configuration, tokenizer, processor, templates; no weights and no card, those are this output's own."""
    for file in sorted(source.iterdir()):
        skip = file.name in ("README.md", "taskferry.json", "taskferry.yaml") or any(file.match(w) for w in _WEIGHTS)
        if file.name.startswith(".") or skip:
            continue
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
        elif (file / "config.json").is_file():  # sentence-transformers keeps its pooling in such a folder
            (folder / file.name).mkdir()
            copy_side_files(file, folder / file.name)


def tokenizer(loaded: Loaded) -> Any:
    """The fast tokenizer of the folder."""
    transformers = _import("transformers")
    try:
        return transformers.AutoTokenizer.from_pretrained(loaded.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise TaskferryError(f"{loaded.given} has no tokenizer that loads: {_line(error)}") from error


def image_transform(loaded: Loaded) -> Any:
    """The folder's image processor as a function of one image."""
    transformers = _import("transformers")
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(loaded.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise TaskferryError(f"{loaded.given} has no image processor that loads: {_line(error)}") from error
    return lambda image: processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]


def quiet(transformers: Any) -> None:
    """No load reports and no progress bars of its own: ours say what matters."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _class_and_precision(transformers: Any, folder: Path, architecture: str | None = None) -> tuple[Any, torch.dtype]:
    """The class that a configuration names, or the one asked for; and the precision of its weights."""
    config = _read_json(folder / "config.json")
    name = architecture or (config.get("architectures") or ["AutoModel"])[0]
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    return getattr(transformers, str(name), transformers.AutoModel), stored


def _from_pretrained(cls: Any, folder: Path, dtype: str) -> tuple[nn.Module, dict[str, Any]]:
    try:
        model, info = cls.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if "mismatch" in str(error):
            raise TaskferryError(
                f"{folder} does not have the shape of a {cls.__name__} of that base: give the base model that was tuned"
            ) from error
        raise TaskferryError(f"{folder} does not load as {cls.__name__}: {_line(error)}") from error
    return model, info


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskferryError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise TaskferryError(f"{path} is no JSON object")
    return data


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TaskferryError(f"{name} is needed for this model: pip install 'taskferry[hf]'") from error
