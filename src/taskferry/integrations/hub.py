"""What hubs read at the head of a model card.

>>> card = read_card(folder)                        # card.data: base_model, library_name, pipeline_tag, tags …
>>> card.data["license"] = "mit"
>>> card.save(folder / "README.md")
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from taskferry.errors import TaskferryError

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

CARD = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a hub calls the task of a model, by the end of its class's name.
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
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
_LIBRARIES = {"open_clip_config.json": "open_clip", "adapter_config.json": "peft"}


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
    for file, library in _LIBRARIES.items():
        if (folder / file).is_file():
            return library
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "transformers"
    return "transformers" if "model_type" in config else "timm"


def read_card(folder: Path) -> ModelCard:
    """A folder's model card, whose fields are complete whoever wrote them."""
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        text = (folder / CARD).read_text(encoding="utf-8")
        head = REGEX_YAML_BLOCK.match(text)
        if head and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(head[2], yaml.SafeLoader)):
            raise ValueError("an alias (*), which can stand for more than any memory holds")
        card = ModelCard(str(ModelCard(text))) if head else None  # what would be written can be read again
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, OverflowError, yaml.YAMLError) as error:
        reason = (str(error).partition(". Pass ")[0].splitlines() or [type(error).__name__])[0]
        raise TaskferryError(f"{folder / CARD} cannot be read as a model card: {reason}") from error
    if card is None or str(card.data) == "{}":
        raise TaskferryError(f"{folder / CARD} has no fields at its head: is {folder} an output of taskferry?")
    return card


def add_score(folder: Path, *, data: str, metric: str, value: float, samples: int, how: str) -> None:
    """A score on held-out data as a result of the card's model index; an earlier one on the same data goes."""
    from huggingface_hub import EvalResult

    card, name = read_card(folder), Path(data).name
    task, told = str(card.data["pipeline_tag"] or "other"), f"{metric} on {samples} samples, by {how}"
    new = EvalResult(task, hub_id(data) or name, name, metric, round(value, 6), metric_name=told)
    old = [found for found in card.data["eval_results"] or () if found.unique_identifier != new.unique_identifier]
    card.data["eval_results"] = [*old, new]
    card.data["model_name"] = card.data["model_name"] or folder.resolve().name
    card.save(folder / CARD)
