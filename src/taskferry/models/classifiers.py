"""The classifier that a base model becomes under a head: transformers' own class around the weights that are there.

>>> headed(loaded, "classifier", classes=3)        # a BertForSequenceClassification whose body is loaded.model
"""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn

from taskferry.errors import TaskferryError
from taskferry.models.huggingface import imported
from taskferry.models.loaded import Loaded

# One answer for each sample.
_SCORING = ("ForSequenceClassification", "ForImageClassification", "ForImageClassificationWithTeacher")
_COUNTED = re.compile(r"(?:LABEL_)?([0-9]{1,9})", re.ASCII)


def headed(loaded: Loaded, head: str, classes: int) -> nn.Module:
    """The model with a layer `head` on top; the layer itself may have no memory, it is there to be looked at.

    Refused where its class has no such layer, where other layers stand between, or where some are in no file.
    """
    model: Any = loaded.model
    config = _config(loaded)
    if config is not None and has_own_head(model):
        if config.num_labels != classes:
            raise TaskferryError(
                f"{loaded.given} has {config.num_labels} classes, the head of the adapter {classes}: the head cannot "
                "move; give a base without a head, or --head keep"
            )
    else:
        model = _around(loaded, classes)
    inside, here = f"{model.base_model_prefix}.", (f"{head}.weight", f"{head}.bias")
    unknown = {n for n, p in model.named_parameters() if p.is_meta or {n, n.removeprefix(inside)} & loaded.absent}
    lost = sorted(unknown.difference(here))
    if lost or not isinstance(getattr(model, head, None), nn.Linear):
        why = f"{lost[0]} is in none of its files" if lost else f"a {type(model).__name__} has no layer '{head}'"
        raise TaskferryError(f"{loaded.given}: {why}, so nothing is known of what a head reads there: give --head keep")
    found: nn.Module = model
    return found


def has_own_head(model: nn.Module) -> bool:
    """Whether a model scores classes of whole samples by itself."""
    if hasattr(model, "pretrained_cfg"):  # of timm
        return bool(getattr(model, "num_classes", 0))
    return type(model).__name__.endswith(_SCORING)


def class_names(model: nn.Module) -> tuple[str, ...]:
    """What a head calls its classes; () where it only counts them (LABEL_0, LABEL_1 …)."""
    known = getattr(getattr(model, "config", None), "id2label", None) or {}
    if not has_own_head(model) or set(known) != set(range(len(known))):
        return ()
    names = tuple(str(known[i]) for i in range(len(known)))
    return () if all(counted(name) is not None for name in names) else names


def class_count(model: nn.Module) -> int:
    """How many rows a head has; 0 where there is none."""
    own = getattr(model, "num_classes", 0)  # of timm
    return int(getattr(getattr(model, "config", None), "num_labels", own))


def counted(name: str) -> int | None:
    """The number in a name that only counts: LABEL_3, 003."""
    found = _COUNTED.fullmatch(name.strip())
    return None if found is None else int(found[1])


def same_labels(source: Loaded, target: Loaded) -> None:
    """Refuse a target that calls its classes otherwise than the source."""
    A, B = class_names(source.model), class_names(target.model)
    if has_own_head(source.model) and B and A != B:
        raise TaskferryError(
            f"{source.given} calls its classes {', '.join(A) or 'nothing'}, {target.given} {', '.join(B)}: the head "
            "cannot move; give --head keep"
        )


def _config(loaded: Loaded) -> Any:
    return getattr(loaded.model, "config", None)


def _around(loaded: Loaded, classes: int) -> Any:
    """transformers' classifier of the model's kind, with the model in place of its body."""
    transformers, accelerate = imported("transformers"), imported("accelerate")
    config = copy.deepcopy(_config(loaded))
    kinds = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    known = next((kind for kind in kinds if type(config) in kind), None)
    if config is None or known is None:
        raise TaskferryError(
            f"transformers has no classifier of the kind of {loaded.given}, a {type(loaded.model).__name__}: give "
            "--head keep"
        )
    config.num_labels = classes
    with accelerate.init_empty_weights():
        kind = known[type(config)]
        model = (kind[0] if isinstance(kind, tuple) else kind)._from_config(config)  # DeiT has a second, with a teacher
    body = getattr(model, model.base_model_prefix, None)
    if not isinstance(body, nn.Module) or type(body) is not type(loaded.model):
        raise TaskferryError(
            f"{loaded.given} is a {type(loaded.model).__name__}, no body of a {type(model).__name__}: give --head keep"
        )
    setattr(model, model.base_model_prefix, loaded.model)
    return model.eval()
