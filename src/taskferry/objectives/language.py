"""What a language model is asked for: which positions predict a token that counts, and their scores alone.

>>> counted = expected(model, batch) != IGNORED            # [n, L]
>>> logits_at(model, batch, counted)                       # [counted.sum(), words]
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from taskferry.choices import is_language_class
from taskferry.data.batch import IGNORED, Batch
from taskferry.errors import TaskferryError
from taskferry.layers import family_of


def is_language_model(model: nn.Module) -> bool:
    """Whether the model predicts tokens."""
    return is_language_class(type(model).__name__)


def is_sequence_to_sequence(model: nn.Module) -> bool:
    """Whether an encoder reads and a decoder answers."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def longest_text(asked: int, *models: nn.Module) -> int:
    """In tokens: no more than each of the models has a table of positions for."""
    return min(asked, *(positions(model) if _tables(model) else sys.maxsize for model in models))


def positions(model: nn.Module) -> int:
    """As many as a model says that it has, whether or not it could go on."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        return sys.maxsize
    # Models of RoBERTa's kind count positions from behind that of the padding.
    return found - max((t.padding_idx + 1 for t in _tables(model) if t.padding_idx is not None), default=0)


def _tables(model: nn.Module) -> list[nn.Embedding]:
    """Of learned positions."""
    ends = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
    return [module for name, module in model.named_modules()
            if name.endswith(ends) and isinstance(module, nn.Embedding)]  # fmt: skip


def expected(model: nn.Module, batch: Batch) -> Tensor:
    """[n, L] the token that each position is to predict; IGNORED where none counts.

    A causal model predicts label t + 1 at position t, an encoder-decoder label t.
    """
    labels = batch.inputs.get("labels")
    if labels is None:
        raise TaskferryError("a language model needs inputs['labels']: text_calibration(…, causal=True)")
    return labels if is_sequence_to_sequence(model) else batch.following


def predicted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token that counts: the scores of the words [m, words], the token [m], and its sample's row [m]."""
    labels = expected(model, batch)
    counted = labels != IGNORED
    scores = logits_at(model, batch, counted)
    wide = scores.float() if scores.dtype.itemsize < 4 else scores
    return wide, labels[counted].to(scores.device), counted.nonzero()[:, 0].to(scores.device)


def logits_at(model: nn.Module, batch: Batch, where: Tensor) -> Tensor:
    """[m, words] the scores of the words at the positions of `where` [n, L], in the order of a mask.

    The last layer of a language model has a row for each word, many more than the model is wide: it is given the
    positions that are asked for, and no others.
    """
    given = dict(family_of(model).arguments(model, batch))
    output = head_of(model)
    if not is_sequence_to_sequence(model):
        given.pop("labels", None)  # causal models would compute a mean loss of their own from them
    else:
        output = None  # a decoder reads its labels, and computes that loss from every position; its answers all count
    if not isinstance(output, nn.Module):
        scores = logits_of(model(**given, use_cache=False))  # a cache would keep memory
        return scores[where.to(scores.device)]

    def choose(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = inputs
        return (hidden[where.to(hidden.device)], *rest) if hidden.shape[:2] == where.shape else inputs

    handle = output.register_forward_pre_hook(choose)
    try:
        scores = logits_of(model(**given, use_cache=False))
    finally:
        handle.remove()
    return scores if scores.ndim == 2 else scores[where.to(scores.device)]


def head_of(model: nn.Module) -> Any:
    """Its last layer, which scores the words; None where it has none or does not say."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def words_of(model: nn.Module) -> int:
    """How many words it scores, where its last layer says so."""
    output = head_of(model)
    return int(output.weight.shape[0]) if isinstance(output, nn.Linear) else sys.maxsize


def logits_of(output: Any) -> Tensor:
    """Of what a model returns."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TaskferryError(f"the model returns {type(output).__name__} without logits: pass your own objective")
    return logits
