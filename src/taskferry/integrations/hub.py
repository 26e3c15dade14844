"""What hubs read at the head of a model card, and sending an output to one.

>>> card = read_card(folder)                        # card.data: base_model, library_name, pipeline_tag, tags …
>>> card.data["license"] = "mit"
>>> card.save(folder / "README.md")
>>> push(folder, "me/my-lora-on-b", base_model="org/b")      # nothing is sent by anything else
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from taskferry.choices import WRITTEN
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


def push(
    folder: Path, repo: str, *, base_model: str | None = None, private: bool = True, revision: str | None = None
) -> str:
    """Send an output folder to a hub repository, which is made where it is not there; returns its address.

    Others must find the base by its name, so what was made on a base of this machine needs `base_model`. The folder
    itself stays as it is: the name is put into what is sent. The record tells the command as it was typed.
    """
    if not (folder / "taskferry.json").is_file():
        raise TaskferryError(f"{folder} has no taskferry.json: only what taskferry has written is sent")
    if not _HUB_ID.fullmatch(repo):
        raise TaskferryError(f"'{repo}' is no name of a repository: give OWNER/NAME")
    base = base_model or read_card(folder).data["base_model"]
    if base is None or not _HUB_ID.fullmatch(str(base)):
        raise TaskferryError(
            f"{folder} was made on a base of this machine, which others cannot find: "
            "give its hub name, --base-model ORG/NAME"
        )
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        with tempfile.TemporaryDirectory(prefix="taskferry-push-") as temporary:
            copy = _with_base(folder, Path(temporary) / "output", str(base))
            address = huggingface_hub.create_repo(repo, private=private, exist_ok=True)
            huggingface_hub.upload_folder(
                repo_id=repo,
                folder_path=copy,
                commit_message="Upload a fine-tune moved with taskferry",
                revision=revision,
            )
    except LocalTokenNotFoundError as error:
        raise TaskferryError("the hub does not know you: run `hf auth login`, or set HF_TOKEN") from error
    except OfflineModeIsEnabled as error:
        raise TaskferryError("HF_HUB_OFFLINE is set, so nothing can be sent: unset it") from error
    except (HfHubHTTPError, ValueError) as error:  # a ValueError is the hub's word on the card
        raise TaskferryError(f"the hub refused {repo}: {str(error).splitlines()[0]}") from error
    return str(address)


def _with_base(folder: Path, copy: Path, base: str) -> Path:
    """The folder with the base's name in card and adapter; weights are linked, not copied.

    Generated samples stay here: a fine-tune may write down what it was tuned on.
    """

    def take(source: str, target: str) -> None:
        if source.endswith((".safetensors", ".bin")):
            Path(target).symlink_to(Path(source).resolve())
        else:
            shutil.copyfile(source, target)

    shutil.copytree(folder, copy, copy_function=take, ignore=shutil.ignore_patterns(WRITTEN))
    adapter = copy / "adapter_config.json"
    card = read_card(copy)
    card.data["base_model"] = base
    if "base_model_relation" not in card.data:
        card.data["base_model_relation"] = "adapter" if adapter.is_file() else "finetune"
    card.save(copy / CARD)
    if adapter.is_file():
        config = json.loads(adapter.read_text(encoding="utf-8"))
        adapter.write_text(json.dumps({**config, "base_model_name_or_path": base}, indent=2) + "\n", encoding="utf-8")
    return copy
