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
from safetensors import SafetensorError, safe_open
from torch import nn

from taskferry.choices import WRITTEN
from taskferry.disk.files import read_json
from taskferry.errors import TaskferryError, first_line
from taskferry.models.loaded import Loaded, as_stored
from taskferry.models.states import check_folder, check_inside
from taskferry.taskvector import TaskVector

ORIGINAL = "give the 16-bit model that it was made from"
MOST_LAYERS = 1000
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.index.json", "*.gguf")
_TEXT = ("*.json", "*.txt", "*.model", "*.jinja")
_OURS = ("README.md", "taskferry.json", "taskferry.yaml", WRITTEN)  # of an output
# By quant_method: forms that transformers makes plain weights of while it loads, on any machine.
_DEQUANTISED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
_EIGHT_BITS = ("F8", "F4", "I8", "U8")  # how such kinds of numbers begin in safetensors


def owns(where: str) -> bool:
    """Tell a folder whose config.json names a model type."""
    config = Path(where) / "config.json"
    return config.is_file() and "model_type" in read_json(config)


def download(given: str) -> str:
    """Get the local folder of a hub id, with `@revision` where one is given; safetensors where the hub has them."""
    from huggingface_hub import snapshot_download

    name, _, revision = given.partition("@")
    try:
        for weights in ("*.safetensors", "*.bin"):
            folder = snapshot_download(name, revision=revision or None, allow_patterns=[*_TEXT, weights])
            if any(Path(folder).glob(weights)):
                return folder
    except Exception as error:  # the hub client raises many kinds; all mean that the model cannot be had
        raise TaskferryError(
            f"{given} is neither a folder nor a model that the hub gives: {first_line(error)}"
        ) from error
    raise TaskferryError(f"{given} has no weights as safetensors or .bin: {ORIGINAL}")


def load(
    where: str, like: nn.Module | None, dtype: str, architecture: str | None = None
) -> tuple[nn.Module, Path, set[str], dict[str, Any]]:
    """Load the model of the class that its configuration names, with the names of parameters in none of its files."""
    folder = Path(where)
    named, stored = _class_and_precision(folder, architecture)
    form = quantised(folder)
    wanted: Any = named if like is None else type(like)
    try:
        model, info = _from_pretrained(wanted, folder, dtype if form is None else as_stored(dtype, stored))
    except TaskferryError as error:
        if like is None or getattr(named, "config_class", None) in (None, wanted.config_class):
            raise
        # A class that reads another family's configuration fails by whatever setting it misses first.
        raise TaskferryError(
            f"{folder} is a {named.__name__}, the base a {wanted.__name__}: give the base model that was tuned"
        ) from error
    extra = {"unexpected": sorted(info["unexpected_keys"]), "dtype": stored, "quantised": form}
    return model, folder, set(info["missing_keys"]), extra


def skeleton(folder: Path, *, weights: bool = True) -> tuple[nn.Module, torch.dtype]:
    """Make the model of a folder's class without memory for its parameters, and name their stored precision.

    Without `weights` nothing but its configuration need be there.
    """
    import accelerate
    import transformers

    cls, stored = _class_and_precision(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        _check_size(cls, config, folder, weights)
        if weights:
            _check_stored(folder)
        with accelerate.init_empty_weights(include_buffers=False):  # rotary tables are buffers
            model = cls._from_config(_plain(config))
        model.tie_weights()
    except TaskferryError:
        raise
    except Exception as error:  # as in loading
        raise TaskferryError(f"{folder} does not load as {cls.__name__}: {first_line(error)}") from error
    return model.float().eval().requires_grad_(False), stored


def older_names(model: nn.Module) -> Callable[[str], str] | None:
    """Rename parameters of files of older releases of transformers to those of this model, as it loads them.

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
    """Rename by a class's name alone; the class is looked up when the first name is asked for."""

    @cache
    def known() -> Callable[[str], str]:
        import transformers

        try:
            cls = getattr(transformers, kind)
            with torch.device("meta"):
                return older_names(cls._from_config(cls.config_class())) or str
        except Exception:  # no class of this release: names are what they are
            return str

    return lambda name: known()(name)


def write(target: Loaded, tau: TaskVector, folder: Path) -> None:
    """Write the target with τ added: its precision, shard size, configuration, tokenizer, processor."""
    if target.folder is None:
        raise ValueError("a Hugging Face model has a folder")
    form = quantised(target.folder)
    model, _ = _from_pretrained(type(target.model), target.folder, "auto" if form is None else torch.float32)
    tau.add_to(model)
    if form is not None:  # rounded once, with the change
        model.to(target.extra["dtype"])
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in target.absent}
    shards = sorted(target.folder.glob("*-of-*.safetensors")) or sorted(target.folder.glob("*-of-*.bin"))
    size = max(file.stat().st_size for file in shards) if shards else 50 * 10**9
    # The original format of a quantised model is quantised.
    model.save_pretrained(folder, state_dict=state, max_shard_size=size, save_original_format=form is None)
    copy_side_files(target.folder, folder)
    if form is not None:
        model.config.save_pretrained(folder)  # without a word on how the target is stored


def copy_side_files(source: Path, folder: Path) -> None:
    """Copy configuration, tokenizer, processor and templates; weights and card are the output's own."""
    for file in sorted(source.iterdir()):
        if file.name.startswith(".") or file.name in _OURS or any(file.match(each) for each in _WEIGHTS):
            continue
        if file.is_symlink():
            check_inside(source, file)
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
        elif (file / "config.json").is_file():  # sentence-transformers keeps its pooling in such a folder
            (folder / file.name).mkdir()
            copy_side_files(file, folder / file.name)


def tokenizer(loaded: Loaded) -> Any:
    """Load the fast tokenizer of the folder."""
    import transformers

    copy = "copy the files of the tokenizer from the model that it was made of"
    try:
        found = transformers.AutoTokenizer.from_pretrained(loaded.folder, trust_remote_code=False)
    except Exception as error:  # whatever stands in its files
        raise TaskferryError(f"{loaded.given} has no tokenizer that loads ({first_line(error)}): {copy}") from error
    if not found("a word", add_special_tokens=False)["input_ids"]:  # of a folder without its files, for some families
        raise TaskferryError(f"{loaded.given} has a tokenizer without words: {copy}")
    try:
        table = getattr(loaded.model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # of two towers neither is the one
        table = None
    rows = getattr(table, "num_embeddings", None)
    if rows is not None and found.pad_token_id is not None and found.pad_token_id >= rows:
        found.pad_token = found.eos_token  # one was added, and the model has no row for it: it is masked in any case
    return found


def image_transform(loaded: Loaded) -> Any:
    """Load the folder's image processor as a function of one image."""
    import transformers

    try:
        processor = transformers.AutoImageProcessor.from_pretrained(loaded.folder, trust_remote_code=False)
    except Exception as error:  # whatever stands in its files
        raise TaskferryError(f"{loaded.given} has no image processor that loads: {first_line(error)}") from error
    return lambda image: processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]


def processor(loaded: Loaded) -> Any:
    """Load the folder's processor of texts with images; one that is a tokenizer alone is none."""
    import transformers

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


def quantised(folder: Path) -> str | None:
    """Read how the weights of a folder are quantised; None for plain weights, refused where they cannot be read."""
    found = _quantisation(folder)
    if not found:
        return None
    packed = found.get("load_in_4bit") or found.get("load_in_8bit")
    method = "bitsandbytes" if packed else str(found.get("quant_method"))[:60]
    if method not in _DEQUANTISED:
        raise TaskferryError(f"{folder} is quantised with {method}, which cannot be read here: {ORIGINAL}")
    return method


def _quantisation(folder: Path) -> dict[str, Any]:
    """Read what a configuration, or a part of it, says of quantised weights."""
    config = read_json(folder / "config.json")
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    found = [part[key] for part in parts for key in ("quantization_config", "compression_config") if part.get(key)]
    if found and not isinstance(found[0], dict):
        raise TaskferryError(f"{folder / 'config.json'}: its quantization_config is no table: it is damaged")
    return found[0] if found else {}


def _plain(config: Any) -> Any:
    """Take out of a configuration what says how weights are quantised."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def _class_and_precision(folder: Path, architecture: str | None = None) -> tuple[Any, torch.dtype]:
    """Find the class that a configuration names, or the given one, and the precision of its weights."""
    import transformers

    # No load reports and no progress bars of its own: ours say what matters.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    check_folder(folder)
    config = read_json(folder / "config.json")
    named = config.get("architectures") or ["AutoModel"]
    name = architecture or (named[0] if isinstance(named, list) else named)
    cls = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    if cls is None and architecture is not None:
        raise TaskferryError(f"transformers has no class '{architecture}'")
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
    if quantised(folder) is not None and stored not in (torch.float32, torch.float16):
        return cls, torch.bfloat16  # what quantised weights are computed in
    return cls, stored if isinstance(stored, torch.dtype) else torch.float32


def _from_pretrained(cls: Any, folder: Path, dtype: torch.dtype | str) -> tuple[Any, dict[str, Any]]:
    import transformers

    form, how = quantised(folder), {"local_files_only": True, "trust_remote_code": False}
    if form is not None:
        how["quantization_config"] = getattr(transformers, _DEQUANTISED[form])(dequantize=True)
    try:
        _check_stored(folder)
        _check_size(cls, transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False), folder)
        model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **how)
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
    # A block's weight that is missing beside others of its module is there in another form, quantised in some way.
    missing = [name for name in info["missing_keys"] if any(part.isdigit() for part in name.split("."))]
    modules = tuple(f"{name.rpartition('.')[0]}." for name in missing)
    other = [name for name in info["unexpected_keys"] if name.startswith(modules)]
    if other:
        raise TaskferryError(f"{folder} holds {other[0]} in place of plain weights: {ORIGINAL}")
    if all(name in info["missing_keys"] for name, _ in model.named_parameters()):
        raise TaskferryError(f"{folder} holds no parameter of a {cls.__name__}: its configuration is of another model")
    return model, info


def _check_stored(folder: Path) -> None:
    """Refuse weights of 8 bits without scales, and blocks cut at an edge, which transformers would spread wrongly."""
    kinds: dict[str, tuple[str, list[int]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                kinds |= {name: (str(each.get_dtype()), each.get_shape()) for name, each in slices.items()}
        except (SafetensorError, OSError):
            continue  # whoever reads it says what is wrong
    form, block = quantised(folder), _quantisation(folder).get("weight_block_size") or [1, 1]
    for name, (kind, shape) in kinds.items():
        if not kind.startswith(_EIGHT_BITS) or not name.endswith(("weight", "proj")):
            continue
        if form is None or f"{name}_scale_inv" not in kinds:
            raise TaskferryError(f"{folder} holds {name} in 8 bits without a scale that is explained: {ORIGINAL}")
        steps = zip(shape, block, strict=False) if isinstance(block, list) else [(1, 0)]
        if not all(isinstance(step, int) and step > 0 and size % step == 0 for size, step in steps):
            raise TaskferryError(f"{folder} holds {name} in blocks that its shape {shape} cuts: {ORIGINAL}")


def _check_size(cls: Any, config: Any, folder: Path, weights: bool = True) -> None:
    """Refuse a configuration of a model that its files cannot hold: no memory is taken for what they do not."""
    for name, value in _numbers(config.to_dict()):
        if name.endswith(("layer", "layers")) and value > MOST_LAYERS:  # n_layer, num_hidden_layers
            raise TaskferryError(
                f"{folder / 'config.json'}: {name} is beyond {MOST_LAYERS}: the configuration is damaged"
            )
    if not weights:
        return
    with torch.device("meta"):
        empty: nn.Module = (getattr(cls, "_from_config", None) or cls.from_config)(_plain(config))
    needed = sum(parameter.numel() for parameter in empty.parameters())
    held = sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern))
    if needed > 16 * held + 2**20:  # four-bit weights, a new head
        raise TaskferryError(
            f"{folder / 'config.json'} is of a model of {needed:,} numbers, its weights have {held:,} bytes: they do "
            "not belong together"
        )


def _numbers(config: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _numbers(value, str(key))
    elif isinstance(config, int | float):
        yield name, config
