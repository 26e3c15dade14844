"""Hugging Face folders and hub ids, through transformers: sharded or not, any precision, tied weights stay tied."""

from __future__ import annotations

import importlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taskferry.choices import WRITTEN
from taskferry.disk.files import read_json
from taskferry.errors import TaskferryError, first_line
from taskferry.models.folders import check_folder, check_inside
from taskferry.models.loaded import Loaded, as_stored
from taskferry.models.quantised import (
    ORIGINAL,
    Form,
    check_names,
    check_plain,
    form_of,
    traces,
    without_form,
    write_plain,
)
from taskferry.models.quantised_libraries import plain_skeleton, state_by_library
from taskferry.models.scales import restored_state
from taskferry.taskvector import TaskVector

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.index.json", "*.gguf")
_OURS = ("README.md", "taskferry.json", "taskferry.yaml", WRITTEN)  # of an output
MOST_LAYERS = 1000
_DEPTHS = ("layer", "layers")  # how settings that count layers end: n_layer, num_hidden_layers
_TEXT = ("*.json", "*.txt", "*.model", "*.jinja")


def owns(where: str) -> bool:
    """A folder whose config.json names a model type."""
    config = Path(where) / "config.json"
    return config.is_file() and "model_type" in read_json(config)


def download(given: str) -> str:
    """The local folder of a hub id, with `@revision` where one is given; safetensors where the hub has them."""
    hub = imported("huggingface_hub")
    name, _, revision = given.partition("@")
    try:
        for weights in ("*.safetensors", "*.bin"):
            folder = str(hub.snapshot_download(name, revision=revision or None, allow_patterns=[*_TEXT, weights]))
            if any(Path(folder).glob(weights)):
                return folder
    except Exception as error:  # the hub client raises many kinds; all mean that the model cannot be had
        reason = str(error).strip().splitlines()[0]
        raise TaskferryError(f"{given} is neither a folder nor a model that the hub gives: {reason}") from error
    raise TaskferryError(
        f"{given} has no weights as safetensors or .bin; of GGUF files, download one and give its path"
    )


def load(
    where: str, like: nn.Module | None, architecture: str | None = None, dtype: str = "float32"
) -> tuple[nn.Module, Path, set[str], dict[str, Any]]:
    """The model of the class its configuration names; missing parameters are told."""
    transformers = imported("transformers")
    quiet(transformers)
    folder = Path(where)
    if architecture is not None and not hasattr(transformers, architecture):
        raise TaskferryError(f"transformers has no class '{architecture}'")
    named, stored = _class_and_precision(transformers, folder, architecture)
    form = form_of(folder)
    precision = dtype if form is None else as_stored(dtype, stored)
    wanted: Any = named if like is None else type(like)
    try:
        model, info = _from_pretrained(wanted, folder, precision)
    except TaskferryError as error:
        if like is None or getattr(named, "config_class", None) in (None, wanted.config_class):
            raise
        # A class that reads another family's configuration fails by whatever setting it misses first.
        raise TaskferryError(
            f"{folder} is a {named.__name__}, the base a {wanted.__name__}: give the base model that was tuned"
        ) from error
    extra = {"unexpected": sorted(info["unexpected_keys"]), "dtype": stored, "quantised": form and form.says}
    return model, folder, set(info["missing_keys"]), extra


def skeleton(folder: Path, *, weights: bool = True) -> tuple[nn.Module, torch.dtype]:
    """The model of the folder's class without memory for its parameters, and the precision they are stored in.

    `weights`: whether they lie beside its configuration.
    """
    transformers, accelerate = imported("transformers"), imported("accelerate")
    quiet(transformers)
    cls, stored = _class_and_precision(transformers, folder)
    try:
        _check_folder_size(cls, folder, weights)
        with accelerate.init_empty_weights(include_buffers=False):  # rotary tables are buffers
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model = cls._from_config(without_form(config))
        model.tie_weights()
    except TaskferryError:
        raise
    except Exception as error:  # as in loading
        raise TaskferryError(f"{folder} does not load as {cls.__name__}: {first_line(error)}") from error
    return model.float().eval().requires_grad_(False), stored


def older_names(model: nn.Module) -> Callable[[str], str] | None:
    """From a parameter's name in files of older releases of transformers to the name in this model, as it loads them.

    None where transformers has no such table, or the model is not its own.
    """
    if not hasattr(model, "config"):
        return None
    try:
        transforms = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        loading = importlib.import_module("transformers.core_model_loading")
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        rename = loading.rename_source_key
    except (ImportError, AttributeError):
        return None
    return lambda name: str(rename(name, renamings, [])[0])


def older_names_of(kind: str) -> Callable[[str], str]:
    """The same for a class by its name; the class is looked at when a name is asked for."""

    @cache
    def known() -> Callable[[str], str]:
        try:
            transformers, accelerate = imported("transformers"), imported("accelerate")
            cls = getattr(transformers, kind)
            with accelerate.init_empty_weights():
                found = older_names(cls._from_config(cls.config_class()))
        except Exception:  # no class of this release: names are what they are
            found = None
        return found or str

    return lambda name: known()(name)


def write(target: Loaded, tau: TaskVector, folder: Path) -> None:
    """Like the target's folder: its precision, shard size, configuration, tokenizer, processor."""
    if target.folder is None:
        raise ValueError("a Hugging Face model has a folder")
    quantised = form_of(target.folder) is not None
    model, _ = _from_pretrained(type(target.model), target.folder, torch.float32 if quantised else "auto")
    tau.add_to(model)
    if quantised:  # rounded once, with the change
        model.to(target.extra["dtype"])
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in target.absent}
    shards = sorted(target.folder.glob("*-of-*.safetensors")) or sorted(target.folder.glob("*-of-*.bin"))
    size = max(file.stat().st_size for file in shards) if shards else 50 * 10**9
    model.save_pretrained(folder, state_dict=state, max_shard_size=size)  # type: ignore[operator]
    copy_side_files(target.folder, folder)
    write_plain(folder, target.extra["dtype"])


def copy_side_files(source: Path, folder: Path) -> None:
    """Configuration, tokenizer, processor, templates; no weights and no card, those are this output's own."""
    for file in sorted(source.iterdir()):
        skip = file.name in _OURS or any(file.match(w) for w in _WEIGHTS)
        if file.name.startswith(".") or skip:
            continue
        if file.is_symlink():
            check_inside(source, file)
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
        elif (file / "config.json").is_file():  # sentence-transformers keeps its pooling in such a folder
            (folder / file.name).mkdir()
            copy_side_files(file, folder / file.name)


def tokenizer(loaded: Loaded) -> Any:
    """The fast tokenizer of the folder."""
    transformers = imported("transformers")
    copy = "copy the files of the tokenizer from the model that it was made of"
    try:
        found = transformers.AutoTokenizer.from_pretrained(loaded.folder, trust_remote_code=False)
    except Exception as error:  # whatever stands in its files
        raise TaskferryError(f"{loaded.given} has no tokenizer that loads ({first_line(error)}): {copy}") from error
    if not found("a word", add_special_tokens=False)["input_ids"]:  # of a folder without its files, for some families
        raise TaskferryError(f"{loaded.given} has a tokenizer without words: {copy}")
    rows = getattr(getattr(loaded.model, "get_input_embeddings", lambda: None)(), "num_embeddings", None)
    if rows is not None and found.pad_token_id is not None and found.pad_token_id >= rows:
        found.pad_token = found.eos_token  # one was added, and the model has no row for it: it is masked in any case
    return found


def image_transform(loaded: Loaded) -> Any:
    """The folder's image processor as a function of one image."""
    transformers = imported("transformers")
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(loaded.folder, trust_remote_code=False)
    except Exception as error:  # whatever stands in its files
        raise TaskferryError(f"{loaded.given} has no image processor that loads: {first_line(error)}") from error
    return lambda image: processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]


def processor(loaded: Loaded) -> Any:
    """The folder's processor of texts with images; one that is a tokenizer alone is none."""
    transformers = imported("transformers")
    model: Any = loaded.model
    if not hasattr(model.config, "vision_config"):
        raise TaskferryError(f"{loaded.given} is a {type(model).__name__}, which reads no images: give rows of text")
    try:
        made = transformers.AutoProcessor.from_pretrained(loaded.folder, trust_remote_code=False)
    except Exception as error:  # whatever stands in its files
        raise TaskferryError(f"{loaded.given} has no processor that loads: {first_line(error)}") from error
    if not hasattr(made, "tokenizer") or not hasattr(made, "image_processor"):
        raise TaskferryError(
            f"{loaded.given} has no processor of images beside its tokenizer: add it, or give rows of text"
        )
    if not getattr(made, "chat_template", None):
        raise TaskferryError(f"{loaded.given} has no chat template for rows with images: add one, or give rows of text")
    return made


def quiet(transformers: Any) -> None:
    """No load reports and no progress bars of its own: ours say what matters."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _class_and_precision(transformers: Any, folder: Path, architecture: str | None = None) -> tuple[Any, torch.dtype]:
    """The class that a configuration names, or the one asked for; and the precision of its weights."""
    check_folder(folder)
    config = read_json(folder / "config.json")
    named = config.get("architectures") or ["AutoModel"]
    name = architecture or (named[0] if isinstance(named, list) else named)
    cls = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if cls is None and config.get("auto_map"):
        raise TaskferryError(
            f"{folder} brings code of its own ({', '.join(map(str, config['auto_map']))}), which is never run: give a "
            "model whose class is part of transformers"
        )
    cls = transformers.AutoModel if cls is None else cls
    if cls is not transformers.AutoModel and not (
        isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    ):
        raise TaskferryError(f"{folder} names the class {name!r}, which is not a model class of transformers")
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    if form_of(folder) is not None and stored not in (torch.float32, torch.float16):
        return cls, torch.bfloat16  # what quantised weights are computed in
    return cls, stored if isinstance(stored, torch.dtype) else torch.float32


def _from_pretrained(cls: Any, folder: Path, dtype: torch.dtype | str) -> tuple[nn.Module, dict[str, Any]]:
    try:
        _check_folder_size(cls, folder)
        form = form_of(folder)
        if form is None:
            check_plain(folder)
            where, more = folder, {"local_files_only": True, "trust_remote_code": False}
        else:
            where, more = None, _dequantised(cls, folder, form)
        model, info = cls.from_pretrained(where, dtype=dtype, output_loading_info=True, **more)
    except TaskferryError:
        raise
    except pickle.UnpicklingError as error:
        raise TaskferryError(
            f"{folder} holds a pickle that could run code on loading, so it is refused: save the model as safetensors"
        ) from error
    except Exception as error:  # the configuration goes into the model's constructors, which check nothing
        if "mismatch" in str(error):
            raise TaskferryError(
                f"{folder} does not have the shape of a {cls.__name__} of that base: give the base model that was tuned"
            ) from error
        raise TaskferryError(f"{folder} does not load as {cls.__name__}: {first_line(error)}") from error
    if form is None:
        check_names(folder, traces(info["unexpected_keys"]))
    elif lost := sorted(name for name in info["missing_keys"] if any(part.isdigit() for part in name.split("."))):
        raise TaskferryError(f"{folder}: nothing in its files, {form.says}, is the weight of {lost[0]}: {ORIGINAL}")
    if all(name in info["missing_keys"] for name, _ in model.named_parameters()):
        raise TaskferryError(f"{folder} holds no parameter of a {cls.__name__}: its configuration is of another model")
    return model, info


def _dequantised(cls: Any, folder: Path, form: Form) -> dict[str, Any]:
    """What a plain model of the class is made from."""
    config = imported("transformers").AutoConfig.from_pretrained(folder, trust_remote_code=False)
    state = restored_state(folder, form) if form.library is None else state_by_library(cls, folder, form)
    return {"config": without_form(config), "state_dict": state}


def check_size(cls: Any, config: Any, place: Path, held: int | None) -> None:
    """Whether a configuration is of a model that its files can hold: no memory is taken for what they do not."""
    deep = [name for name, value in _numbers(config.to_dict()) if name.endswith(_DEPTHS) and value > MOST_LAYERS]
    if deep:
        raise TaskferryError(f"{place}: {deep[0]} is beyond {MOST_LAYERS}: the configuration is damaged")
    if held is None:
        return
    needed = sum(parameter.numel() for parameter in plain_skeleton(cls, config).parameters())
    if needed > 16 * held + 2**20:  # four-bit weights, a new head
        raise TaskferryError(
            f"{place} is of a model of {needed:,} numbers, its weights have {held:,} bytes: they do not belong together"
        )


def _check_folder_size(cls: Any, folder: Path, weights: bool = True) -> None:
    config = imported("transformers").AutoConfig.from_pretrained(folder, trust_remote_code=False)
    held = sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern))
    check_size(cls, config, folder / "config.json", held if weights else None)


def _numbers(config: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _numbers(value, str(key))
    elif isinstance(config, int | float):
        yield name, config


def imported(name: str) -> Any:
    """A library of the extra `hf`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TaskferryError(f"{name} is needed for this model: pip install 'taskferry[hf]'") from error
