"""Fine-tunes that added tokens to the vocabulary: which parameters have other rows than the base for that alone.

>>> resized(base, {"model.embed_tokens.weight": (408, 16), ...})
{'model.embed_tokens.weight': 'the embedding of 408 tokens, 400 in the base: …'}
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def resized(base: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Names of the base's tables of tokens that have another number of rows in `shapes`, each with the reason to stay.

    Only these: rows of any other parameter are no tokens, and another shape there means another base.
    """
    found = {}
    for side in ("get_input_embeddings", "get_output_embeddings"):
        try:
            table = getattr(base, side, lambda: None)()
        except (NotImplementedError, AttributeError):  # a model without one of them
            continue
        ours = {id(parameter) for parameter in table.parameters()} if isinstance(table, nn.Module) else set()
        for name, parameter in base.named_parameters(remove_duplicate=False):
            before, after = tuple(parameter.shape), shapes.get(name)
            if id(parameter) in ours and after is not None and after != before and after[1:] == before[1:]:
                found[name] = (
                    f"the table of {after[0]} tokens, {before[0]} in the base: its rows are tokens, not a space of "
                    "activations, and the target has tokens of its own"
                )
    return found
