"""Quantised weights that only their own library can read: bitsandbytes, packed compressed-tensors, mxfp4.

    >>> state = state_by_library(LlamaForCausalLM, folder, form)      # plain weights by name

transformers loads the model with the library and dequantises it. Only its weights are kept: a plain model is made of
them, without wrappers that round activations.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from taskferry.errors import TaskferryError
from taskferry.models.folders import tensor_files
from taskferry.models.quantised import CONFIG, ORIGINAL, Form, traces, without_form

_INSTALL = {"compressed_tensors": "compressed-tensors"}


def state_by_library(cls: Any, folder: Path, form: Form) -> dict[str, Tensor]:
    """Parameters and buffers of the model, dequantised, in float32."""
    transformers = importlib.import_module("transformers")
    files = tensor_files(folder)
    if files and not traces(files):
        raise TaskferryError(
            f"{folder / CONFIG} says {form.says}, and its files hold plain weights: take the quantization_config out"
        )
    needed(folder, form)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = cls.from_pretrained(
            folder,
            dtype=torch.float32,
            device_map={"": "cpu"},
            output_loading_info=True,
            trust_remote_code=False,
            local_files_only=True,
            **_wishes(transformers, form),
        )
        if form.method == "bitsandbytes":
            takes = inspect.signature(model.dequantize).parameters  # a precision, since transformers 5
            model = model.dequantize(*([torch.float32] if takes else []))
    plain = plain_skeleton(cls, config)
    state = _upright(model, plain)
    odd = next((n for n, tensor in state.items() if not _is_plain(tensor, plain, n)), None)
    if odd is not None:
        raise TaskferryError(f"{folder}: {odd} stays quantised, {form.says}, after it was read: {ORIGINAL}")
    return {name: tensor for name, tensor in state.items() if name not in info["missing_keys"]}


def plain_skeleton(cls: Any, config: Any) -> nn.Module:
    """The model of a configuration with plain layers, without memory."""
    with torch.device("meta"):
        model: nn.Module = (getattr(cls, "_from_config", None) or cls.from_config)(without_form(config))
    return model


def needed(place: Path, form: Form) -> None:
    """The library of a form, or what to install."""
    names = [name for name in (form.library, "accelerate") if name]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that is there may fail on this machine in its own way
            package = _INSTALL.get(name, name)
            raise TaskferryError(
                f"{package} is needed to read {place}, which is stored in {form.says}: pip install {package}; or "
                f"{ORIGINAL}"
            ) from error


def _wishes(transformers: Any, form: Form) -> dict[str, Any]:
    if form.method == "mxfp4":
        return {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    if form.method != "compressed-tensors":
        return {}
    fields = transformers.CompressedTensorsConfig.__init__.__annotations__
    how: dict[str, Any] = {"dequantize": True} if "dequantize" in fields else {"run_compressed": False}
    return {"quantization_config": transformers.CompressedTensorsConfig(**how)}


def _upright(model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    """Weights that lie as in the plain model: bitsandbytes keeps those of a Conv1D [in, out] as [out, in]."""
    wanted = {name for name, _ in plain.named_parameters()} | {name for name, _ in plain.named_buffers()}
    lying = {n for n, m in plain.named_modules() if type(m).__name__ == "Conv1D" and _is_linear(model, n)}
    state = {name: _precise(tensor.detach()) for name, tensor in model.state_dict().items() if name in wanted}
    for name in lying:
        state[f"{name}.weight"] = state[f"{name}.weight"].T.contiguous()
    return state


def _precise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _is_linear(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), nn.Linear)


def _is_plain(tensor: Tensor, plain: nn.Module, name: str) -> bool:
    """A tensor of torch's own class, of its shape, with floating-point numbers where the model has them."""
    there = dict(plain.named_parameters()) | dict(plain.named_buffers())
    same = tensor.shape == there[name].shape
    return type(tensor) is Tensor and same and tensor.is_floating_point() == there[name].is_floating_point()
