"""GGUF files of llama.cpp, through transformers: dequantised on reading, written as a Hugging Face folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from taskferry.errors import TaskferryError, first_line
from taskferry.models import huggingface
from taskferry.models.loaded import Loaded, as_stored
from taskferry.models.quantised import Form, without_form
from taskferry.models.quantised_libraries import needed
from taskferry.taskvector import TaskVector

FORM = Form("gguf", "GGUF", library="gguf")
WRITTEN = torch.bfloat16


def owns(where: str) -> bool:
    """A file of that name; a folder of such files does not say which is meant."""
    path = Path(where)
    if path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf")):
        files = ", ".join(sorted(file.name for file in path.glob("*.gguf"))[:3])
        raise TaskferryError(f"{where} is a folder of GGUF files ({files}): give the path of one of them")
    return path.is_file() and path.suffix == ".gguf"


def load(
    where: str, like: nn.Module | None, dtype: str = "float32"
) -> tuple[nn.Module, Path, set[str], dict[str, Any]]:
    """The model of the class that transformers makes of the file."""
    path = Path(where)
    needed(path, FORM)
    transformers = huggingface.imported("transformers")
    huggingface.quiet(transformers)
    how = {"gguf_file": path.name, "trust_remote_code": False, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, **how)
        huggingface.check_size(transformers.AutoModelForCausalLM, config, path, path.stat().st_size)
        if hasattr(transformers, "GgufConfig"):  # before it, all was dequantised
            how["quantization_config"] = transformers.GgufConfig(dequantize=True)
        cls: Any = transformers.AutoModelForCausalLM if like is None else type(like)
        model, info = cls.from_pretrained(path.parent, dtype=as_stored(dtype, WRITTEN), output_loading_info=True, **how)
    except TaskferryError:
        raise
    except Exception as error:  # whatever stands in the file
        raise TaskferryError(
            f"{where} does not load through transformers: {first_line(error)}; give the Hugging Face folder of it"
        ) from error
    absent = set(info["missing_keys"])
    if absent - {name for name, _ in model.named_parameters() if "head" in name}:
        lost = ", ".join(sorted(absent)[:3])
        raise TaskferryError(f"{where} holds no {lost}: give the Hugging Face folder of the model")
    extra = {"unexpected": sorted(info["unexpected_keys"]), "dtype": WRITTEN, "quantised": _stored(path)}
    return model, path, absent, extra


def write(target: Loaded, tau: TaskVector, folder: Path) -> None:
    """A Hugging Face folder: transformers writes no GGUF. llama.cpp makes one of it again."""
    model, *_ = load(str(target.folder), target.model)
    tau.add_to(model)
    without_form(model.config)
    model.to(WRITTEN).save_pretrained(folder)  # type: ignore[operator]
    target.tokenizer().save_pretrained(folder)


def tokenizer(loaded: Loaded) -> Any:
    """The one in the file."""
    transformers = huggingface.imported("transformers")
    if loaded.folder is None:
        raise ValueError("a GGUF model has a file")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            loaded.folder.parent, gguf_file=loaded.folder.name, trust_remote_code=False
        )
    except Exception as error:  # whatever stands in the file
        raise TaskferryError(f"{loaded.given} has no tokenizer that loads: {first_line(error)}") from error


def image_transform(loaded: Loaded) -> Any:
    """There is none."""
    raise TaskferryError(f"{loaded.given} reads no images: a GGUF file holds the language model alone")


def _stored(path: Path) -> str:
    """With the types of its numbers: of two files with others the difference would be rounding."""
    gguf = importlib.import_module("gguf")
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors} - {"F32", "F16", "BF16"}
    return f"{FORM.says} ({', '.join(sorted(kinds))})" if kinds else FORM.says
