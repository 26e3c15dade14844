"""The classifier that a base model becomes under a head: transformers' own class around the weights that are there.

>>> headed(loaded, "classifier", classes=3)        # a BertForSequenceClassification whose body is loaded.model
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from taskferry.checkpoints.huggingface import imported
from taskferry.checkpoints.loaded import Loaded
from taskferry.errors import TaskferryError

KIND = "ForSequenceClassification"


def headed(loaded: Loaded, head: str, classes: int) -> nn.Module:
    """The model with a layer `head` on top; the layer itself may have no memory, it is there to be looked at.

    Refused where its class has no such layer, where other layers stand between, or where some are in no file.
    """
    model: Any = loaded.model
    config = _config(loaded)
    if type(model).__name__.endswith(KIND):
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


def same_labels(source: Loaded, target: Loaded) -> None:
    """Refuse two classifiers that call their classes differently."""
    names = [_config(loaded).id2label for loaded in (source, target) if type(loaded.model).__name__.endswith(KIND)]
    if len(names) == 2 and names[0] != names[1]:
        raise TaskferryError(
            f"{source.given} calls its classes {', '.join(map(str, names[0].values()))}, {target.given} "
            f"{', '.join(map(str, names[1].values()))}: the head cannot move; give --head keep"
        )


def _config(loaded: Loaded) -> Any:
    return getattr(loaded.model, "config", None)


def _around(loaded: Loaded, classes: int) -> Any:
    """transformers' classifier of the model's kind, with the model in place of its body."""
    transformers, accelerate = imported("transformers"), imported("accelerate")
    config = copy.deepcopy(_config(loaded))
    known = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if config is None or type(config) not in known:
        raise TaskferryError(
            f"transformers has no classifier of the kind of {loaded.given}, a {type(loaded.model).__name__}: give "
            "--head keep"
        )
    config.num_labels = classes
    with accelerate.init_empty_weights():
        model = known[type(config)]._from_config(config)
    body = getattr(model, model.base_model_prefix, None)
    if not isinstance(body, nn.Module) or type(body) is not type(loaded.model):
        raise TaskferryError(
            f"{loaded.given} is a {type(loaded.model).__name__}, no body of a {type(model).__name__}: give --head keep"
        )
    setattr(model, model.base_model_prefix, loaded.model)
    return model.eval()
