"""The fields that hubs read at the head of a model card: base, library, task, data and tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

CARD = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a hub calls the task of a model, by the end of its class's name.
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "CLIPModel": "zero-shot-image-classification",
    "CLIP": "zero-shot-image-classification",
    "CustomTextCLIP": "zero-shot-image-classification",
    "WhisperForConditionalGeneration": "automatic-speech-recognition",
    "VisionTransformer": "image-feature-extraction",
    "ViTModel": "image-feature-extraction",
    "BertModel": "feature-extraction",
    "RobertaModel": "feature-extraction",
    "T5EncoderModel": "feature-extraction",
}


def hub_id(given: object) -> str | None:
    """`org/name` where something is called so on a hub and is no folder here; without its revision."""
    name = str(given or "").partition("@")[0]
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def card_fields(folder: Path, record: Mapping[str, Any], *, adapter: bool) -> ModelCardData:
    """The fields that hubs read. A base that lies on this machine has no name there, and is left out."""
    from huggingface_hub import ModelCardData

    settings, target = record["settings"], record.get("provenance", {}).get("target", {})
    base, data = hub_id(settings.get("target_base")), hub_id(settings.get("calibration"))
    return ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        library_name=_library(folder, adapter),
        pipeline_tag=pipeline_of(str(target.get("class", ""))),
        datasets=[data] if data else None,
        tags=["taskferry", "task-vector-transfer", *["lora"] * adapter],
    )


def pipeline_of(kind: str) -> str | None:
    """The hub's name for the task of a model class, where it has one."""
    fits = [end for end in _PIPELINES if kind.endswith(end)]
    return _PIPELINES[max(fits, key=len)] if fits else None


def _library(folder: Path, adapter: bool) -> str:
    if adapter:
        return "peft"
    if (folder / "open_clip_config.json").is_file():
        return "open_clip"
    config = folder / "config.json"
    is_timm = config.is_file() and "model_type" not in json.loads(config.read_text(encoding="utf-8"))
    return "timm" if is_timm else "transformers"
