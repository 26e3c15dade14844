"""What an adapter's configuration says of its factors, and what of it is not understood.

    >>> config = read_config(Path("my-lora"))     # refuses what would make the factors another change than s B A

PEFT grows a setting with every new kind of LoRA. One that is not known here may change what the adapter computes, so it
is refused unless it is switched off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from taskferry.disk.files import read_json
from taskferry.errors import TaskferryError
from taskferry.models.patterns import is_positive

CONFIG = "adapter_config.json"
REBASING = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that rewrite the base
_MERGE = "merge it into its base with PEFT and move the full fine-tune"

# Read where the change is made, or refused by a sentence of their own; bias and modules_to_save leave listed tensors.
_UNDERSTOOD = frozenset((
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "init_lora_weights", "loftq_config", "bias", "modules_to_save", "target_parameters",
))  # fmt: skip
# They say where the factors stand, how they were trained or how they are run; the change is the same with any value.
# megatron_core and qalora_group_size mean nothing on their own; merge_weights is of PEFT's first releases.
_HARMLESS = frozenset((
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying",
    "lora_dropout", "runtime_config", "velora_config", "eva_config", "corda_config", "lora_ga_config",
    "megatron_core", "qalora_group_size", "merge_weights",
))  # fmt: skip
_EFFECTS = {
    "alora_invocation_tokens": (
        "the adapter acts only behind its invocation tokens, which no plain LoRA does",
        "train it as a plain LoRA",
    ),
    "layer_replication": (
        "its layers stand in a stack that repeats the base's, so one weight has several changes",
        "write the repeated model out as a base of its own and give that",
    ),
    "lora_bias": ("its factors have a bias, which is no change of a weight", _MERGE),
    "trainable_token_indices": ("it trained rows of the embeddings as well", _MERGE),
    "megatron_config": ("its layers are Megatron's, split over devices", "convert it to a LoRA of transformers"),
    "use_qalora": ("its factors read groups of inputs, not the inputs", _MERGE),
    "use_bdlora": ("its factors are blocks of a diagonal", _MERGE),
    "kasa_config": ("it changes the base's own weights", _MERGE),
    "arrow_config": ("it is a router between other adapters", "move each of those adapters"),
}


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a LoRA whose change is s B A at every module."""
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise TaskferryError(
            f"{folder} is an adapter of type {config.get('peft_type')}, and only a LoRA can be moved without its base "
            "in memory: convert it with PEFT (save_as_lora), or merge it into its base and give the merged model"
        )
    if config.get("use_dora"):
        raise TaskferryError(
            f"{folder} is a DoRA adapter: its magnitudes rescale the base's own weights, so it is no low-rank change; "
            "merge it into its base and move the full fine-tune"
        )
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(REBASING) or config.get("loftq_config"):
        raise TaskferryError(
            f"{folder} was initialised with {start}, which changes the base's own weights, so its factors are no "
            "change of the base; convert it to a plain LoRA with PEFT, or merge it and move the full fine-tune"
        )
    for key, value in config.items():
        if value and key not in _UNDERSTOOD | _HARMLESS:
            effect, way = _EFFECTS.get(
                key,
                (
                    "which is not known here and may change what the adapter computes",
                    f"{_MERGE}, or set it to null if it does not",
                ),
            )
            raise TaskferryError(f"{folder / CONFIG} sets {key[:80]}: {effect}; {way}")
    for name, kinds in (("r", int), ("lora_alpha", (int, float))):
        if not is_positive(config.get(name), kinds):
            raise TaskferryError(f"{folder / CONFIG}: {name} is {config.get(name)!r}, a positive number is needed")
    return config
