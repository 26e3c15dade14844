"""Heads that score classes of whole samples: which models have one, what it calls its classes, what it reads."""

from __future__ import annotations

import copy
import re

from torch import nn

from taskferry.models.loaded import Loaded

# One answer for each sample.
_SCORING = ("ForSequenceClassification", "ForImageClassification", "ForImageClassificationWithTeacher")
_COUNTED = re.compile(r"(?:LABEL_)?([0-9]{1,9})", re.ASCII)


def has_own_head(model: nn.Module) -> bool:
    """Tell whether a model scores classes of whole samples by itself."""
    if hasattr(model, "pretrained_cfg"):  # of timm
        return bool(getattr(model, "num_classes", 0))
    return type(model).__name__.endswith(_SCORING)


def class_names(model: nn.Module) -> tuple[str, ...]:
    """Name the classes of a head; () where it only counts them (LABEL_0, LABEL_1 …)."""
    known = getattr(getattr(model, "config", None), "id2label", None) or {}
    if not has_own_head(model) or set(known) != set(range(len(known))):
        return ()
    names = tuple(str(known[i]) for i in range(len(known)))
    return () if all(counted(name) is not None for name in names) else names


def class_count(model: nn.Module) -> int:
    """Count the rows of a head; 0 where there is none."""
    own = getattr(model, "num_classes", 0)  # of timm
    return int(getattr(getattr(model, "config", None), "num_labels", own))


def counted(name: str) -> int | None:
    """Read the number in a name that only counts: LABEL_3, 003."""
    found = _COUNTED.fullmatch(name.strip())
    return None if found is None else int(found[1])


def classifier_around(loaded: Loaded, head: str, classes: int) -> nn.Module | None:
    """Put transformers' classifier around a base, without its layer `head`: its logits are what that layer reads.

    None where its kind has no such layer, or where another layer of it is in no file.
    """
    import accelerate
    import transformers

    config = copy.deepcopy(getattr(loaded.model, "config", None))
    kinds = (transformers.AutoModelForSequenceClassification, transformers.AutoModelForImageClassification)
    kind = next((each for each in kinds if type(config) in each._model_mapping), None)
    if config is None or kind is None:
        return None
    config.num_labels = classes
    if kind is kinds[0] and config.pad_token_id is None:
        config.pad_token_id = loaded.tokenizer().pad_token_id  # the token before it is scored
    with accelerate.init_empty_weights():
        model = kind.from_config(config)  # type: ignore[no-untyped-call]
    body = getattr(loaded.model, "base_model", None)
    if type(getattr(model, model.base_model_prefix, None)) is not type(body):
        return None
    needed = {name for name, _ in model.named_parameters()} - {f"{head}.weight", f"{head}.bias"}
    setattr(model, model.base_model_prefix, body)
    untrained = {id(p) for name, p in loaded.model.named_parameters() if name in loaded.absent}
    known = {name for name, p in model.named_parameters() if not p.is_meta and id(p) not in untrained}
    if not isinstance(getattr(model, head, None), nn.Linear) or not needed <= known:
        return None
    setattr(model, head, nn.Identity())
    found: nn.Module = model.eval()
    return found
