"""Adapters of other kinds (LoHa, LoKr, VeRA …) as a LoRA of the same change, where PEFT has a conversion.

>>> adapter = read_converted(Path("my-loha"), base)     # as `read_adapter` gives a LoRA

PEFT multiplies the change of every module out and keeps the leading directions, so the base must be in memory. DoRA is
refused before: PEFT's conversion would leave its magnitudes out without a word.
"""

from __future__ import annotations

import importlib
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from taskferry.disk.files import read_json
from taskferry.errors import TaskferryError, first_line
from taskferry.models.adapter_config import CONFIG
from taskferry.models.adapters import Adapter, Skeleton, read_adapter

KEPT = 1 - 1e-6  # of the energy of each module's change: at most a thousandth of its norm is lost
_MERGE = "merge it into its base with PEFT (merge_and_unload) and give the merged model"
_NAMES = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
_PLAIN = re.compile(r"[\w.-]+")


def is_lora(folder: Path) -> bool:
    """Whether an adapter is a LoRA, or says nothing that could be converted."""
    return read_json(folder / CONFIG).get("peft_type") in ("LORA", None)


def read_converted(folder: Path, base: nn.Module) -> Adapter:
    """The adapter as a LoRA on its base, which is as it was afterwards."""
    config = read_json(folder / CONFIG)
    peft = peft_for(f"convert {folder} to a LoRA", f", or {_MERGE}")
    kind = str(config["peft_type"])
    known = peft.PEFT_TYPE_TO_CONFIG_MAPPING.get(kind)
    if known is not None and issubclass(known, peft.PromptLearningConfig):
        raise TaskferryError(
            f"{folder} is an adapter of type {kind}: it has learned inputs of its base and changes no weight, so there "
            "is nothing to move; train it on the new base, or train a LoRA"
        )
    _check(folder, config, known)
    with tempfile.TemporaryDirectory(prefix="taskferry-lora-") as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Weights come from the file alone: the sizes of a configuration take no memory.
            wrapped = peft.PeftModel.from_pretrained(base, str(folder), low_cpu_mem_usage=True)
            try:
                if not wrapped.supports_lora_conversion():
                    raise TaskferryError(f"{folder} is an adapter of type {kind}, which PEFT cannot convert: {_MERGE}")
                peft.save_as_lora(place, wrapped, rank=KEPT)
            finally:
                wrapped.unload()
        except TaskferryError:
            raise
        except Exception as error:  # whatever stands in its files, on whatever base
            raise TaskferryError(
                f"{folder}: PEFT does not convert this adapter of type {kind} on the base that was given "
                f"({first_line(error)}): give the base that was tuned, or {_MERGE}"
            ) from error
        try:
            adapter = read_adapter(Path(place), Skeleton.of(base))
        except TaskferryError as error:
            raise TaskferryError(str(error).replace(place, str(folder))) from error
    return replace(adapter, config={**adapter.config, "task_type": config.get("task_type")})


def peft_for(purpose: str, otherwise: str = "") -> Any:
    """The library, which is an extra."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise TaskferryError(f"peft is needed to {purpose}: pip install 'taskferry[peft]'{otherwise}") from error


def _check(folder: Path, config: Mapping[str, Any], known: Any) -> None:
    """Nothing that PEFT would drop without a word, or match for ever."""
    if known is None:
        raise TaskferryError(f"{folder} is an adapter of type {config['peft_type']}, unknown to this PEFT: {_MERGE}")
    strange = [key for key, value in config.items() if value and key not in known.__dataclass_fields__]
    if strange:
        raise TaskferryError(f"{folder / CONFIG} sets {strange[0][:80]}, which this PEFT does not know: {_MERGE}")
    for key in _NAMES:
        value = config.get(key) or ()
        if isinstance(value, str) or not all(isinstance(name, str) and _PLAIN.fullmatch(name) for name in value):
            raise TaskferryError(f"{folder / CONFIG}: {key} holds an expression, names are needed: {_MERGE}")
