"""Which form the weights of a Hugging Face folder are stored in, where that is fewer bits than they are computed in.

    >>> form = form_of(folder)                      # None for plain weights; refuses a form that cannot be read
    >>> form.says                                   # "FP8 with scales (fp8)"

Forms with a scale beside each 8-bit weight are read by `scales`, by both engines. Others are read by their library, for
whole models alone. What is left is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from taskferry.disk.files import read_json
from taskferry.errors import TaskferryError

CONFIG = "config.json"
KEYS = ("quantization_config", "compression_config")
ORIGINAL = "give the 16-bit model that it was made from, or dequantise it with its library and save that"
_SCALED = {"fp8": "FP8 with scales", "mxfp8": "FP8 with scales", "fbgemm_fp8": "FP8 with scales"}
_BY_LIBRARY = {"bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors", "mxfp4": ""}
_PLAIN_FORMATS = frozenset(("dense", "float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized"))
_NAMES = {
    "gptq": "GPTQ", "awq": "AWQ", "hqq": "HQQ", "quanto": "Quanto", "torchao": "torchao", "aqlm": "AQLM",
    "eetq": "EETQ", "higgs": "HIGGS", "bitnet": "BitNet", "spqr": "SpQR", "vptq": "VPTQ", "quark": "Quark",
    "auto-round": "AutoRound", "modelopt": "ModelOpt", "exl3": "ExLlama", "nvfp4": "NVFP4", "sinq": "SINQ",
}  # fmt: skip
# Names that only quantised checkpoints have: where a configuration says nothing of them, their weights are no weights.
_TRACES = (
    ".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight", ".qzeros", ".g_idx", ".absmax", ".quant_map",
    ".SCB", ".W_q", "._data", "._weight_qdata", "proj_blocks",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How weights are stored."""

    method: str  # as config.json calls it
    says: str
    block: tuple[int, int] | None = None  # rows and columns that share a scale, where that is told
    integers: bool = False  # whether an 8-bit integer is a weight of its own
    library: str | None = None  # the module that reads it; "" where transformers itself does; None: `scales`


def form_of(folder: Path) -> Form | None:
    """The form that a configuration names."""
    found = _settings(read_json(folder / CONFIG))
    if found is None:
        return None
    bits = next((n for n in (4, 8) if found.get(f"load_in_{n}bit") or found.get(f"_load_in_{n}bit")), None)
    method = "bitsandbytes" if bits else str(found.get("quant_method") or "an unknown method")
    if method in _SCALED:
        return Form(method, f"{_SCALED[method]} ({method})", _block(folder, found.get("weight_block_size")))
    if method == "bitsandbytes":
        return Form(method, f"{bits or 8} bits (bitsandbytes)", library="bitsandbytes")
    if method == "mxfp4":
        return Form(method, "4 bits (mxfp4)", library="")
    if method == "compressed-tensors":
        return _compressed(folder, found)
    name = _NAMES.get(method)
    called = f"{name} (quant_method {method})" if name else method[:60]
    raise TaskferryError(f"{folder} is quantised with {called}, whose weights cannot be read here: {ORIGINAL}")


def by_blocks(given: str, form: Form | None) -> None:
    """Refuse what the block engine does not read."""
    if form is not None and form.library is not None:
        raise TaskferryError(
            f"{given} is stored in {form.says}, which block by block does not read: use --engine whole, or {ORIGINAL}"
        )


def same_form(base: tuple[str, str | None], tuned: tuple[str, str | None]) -> None:
    """Refuse a difference that would be the rounding of one of the two: each is (what was given, how it is stored)."""
    if base[1] != tuned[1]:
        stored, plain = (base, tuned) if base[1] else (tuned, base)
        raise TaskferryError(
            f"{stored[0]} is stored in {stored[1]} and {plain[0]} {f'in {plain[1]}' if plain[1] else 'is not'}: their "
            "difference would be rounding, not a fine-tune; give both in 16 bits, or the LoRA by itself"
        )


def check_plain(folder: Path) -> None:
    """Files whose configuration says nothing must hold nothing quantised."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as file:
                names = list(file.keys())
                kinds = {name: file.get_slice(name).get_dtype() for name in names if name.endswith(("weight", "proj"))}
        except (SafetensorError, OSError):
            continue  # whoever reads it says what is wrong
        small = [name for name, kind in kinds.items() if str(kind).startswith(("F8", "F4", "I8", "U8"))]
        check_names(folder, [*small, *traces(names)])


def traces(names: Iterable[str]) -> list[str]:
    """The names that only quantised checkpoints have."""
    return [name for name in names if name.endswith(_TRACES)]


def check_names(folder: Path, quantised: Sequence[str]) -> None:
    """Refuse where something is quantised and the configuration says nothing of it."""
    if quantised:
        raise TaskferryError(
            f"{folder} holds quantised weights ({quantised[0]}), and its {CONFIG} has no quantization_config that says "
            f"how: take the {CONFIG} that belongs to them, or {ORIGINAL}"
        )


def without_form(config: Any) -> Any:
    """A configuration of transformers without what says how weights are stored, in its parts as well."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        for key in KEYS:
            if part is not None and hasattr(part, key):
                delattr(part, key)
    return config


def write_plain(folder: Path, dtype: torch.dtype) -> None:
    """The configuration in an output folder, for weights that are written dequantised."""
    path = folder / CONFIG
    config = read_json(path)
    if _settings(config) is None:
        return
    plain = {key: value for key, value in config.items() if key not in KEYS}
    parts = {k: {n: v for n, v in part.items() if n not in KEYS} for k, part in plain.items() if isinstance(part, dict)}
    text = json.dumps({**plain, **parts, "dtype": str(dtype).removeprefix("torch.")}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a configuration, or the part of it for text, says."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in KEYS:
            if isinstance(part.get(key), dict) and part[key]:
                return dict(part[key])
    return None


def _compressed(folder: Path, found: Mapping[str, Any]) -> Form:
    if found.get("transform_config"):
        raise TaskferryError(
            f"{folder} holds weights that compressed-tensors has rotated (transform_config): {ORIGINAL}"
        )
    groups = [group for group in (found.get("config_groups") or {}).values() if isinstance(group, dict)]
    formats = {str(group.get("format") or found.get("format") or "dense") for group in groups} or {"dense"}
    sparse = (found.get("sparsity_config") or {}).get("format", "dense")
    says = f"{', '.join(sorted(formats))} (compressed-tensors)"
    if sparse != "dense" or not formats <= _PLAIN_FORMATS:
        return Form("compressed-tensors", says, library="compressed_tensors")
    structures = [(group.get("weights") or {}).get("block_structure") for group in groups]
    block = next((each for each in structures if each), None)
    return Form("compressed-tensors", says, _block(folder, block), integers=True)


def _block(folder: Path, given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    numbers = isinstance(given, list) and len(given) == 2 and all(type(n) is int and n > 0 for n in given)
    if not numbers:
        raise TaskferryError(f"{folder / CONFIG}: the blocks that share a scale are {str(given)[:60]}: it is damaged")
    return given[0], given[1]
