"""Which output spaces a matrix of transformers' models packs, in which order, and whether they repeat head by head.

A name that is not listed here is one space. Sizes come from the layer that holds the matrix, or from its configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Parts = tuple[tuple[str, int], ...]  # (name, rows) in order; parts that fill only a share of the rows repeat
Layout = Callable[[Any, Any, int, int], Parts]  # of the layer, its configuration, rows and columns


def parts_of(model: nn.Module, path: str, rows: int, columns: int) -> Parts:
    """The parts of the linear layer at a path; empty for one space."""
    inside, _, leaf = path.rpartition(".")
    layout = _LAYOUTS.get(leaf)
    if layout is None:
        return ()
    layer: Any = model.get_submodule(inside)
    try:
        parts = layout(layer, getattr(layer, "config", model.config), rows, columns)
    except AttributeError:
        return ()  # a layer of this name in an architecture that is not known
    total = sum(size for _, size in parts)
    return parts if total and rows % total == 0 else ()


def _equal(names: str, rows: int, runs: int = 1) -> Parts:
    """Parts of one size, in so many runs of rows."""
    letters = names.split()
    return tuple((name, rows // len(letters) // runs) for name in letters)


def _thirds(layer: Any, config: Any, rows: int, columns: int) -> Parts:  # noqa: ARG001
    return _equal("q k v", rows) if rows == 3 * columns else ()


def _heads(layer: Any, config: Any) -> int:
    names = ("num_heads", "num_attention_heads", "n_heads")
    found = (getattr(holder, name, None) for holder in (layer, config) for name in names)
    return next((heads for heads in found if isinstance(heads, int)), 1)


def _grouped(layer: Any, config: Any, rows: int, columns: int) -> Parts:
    """All queries, then all keys, then all values; fewer of the last two where heads share them."""
    groups = getattr(layer, "num_key_value_heads", getattr(config, "num_key_value_heads", None))
    if groups is None:
        return _thirds(layer, config, rows, columns)
    heads = _heads(layer, config)
    head = rows // (heads + 2 * groups)
    return (("q", heads * head), ("k", groups * head), ("v", groups * head))


def _per_head(layer: Any, config: Any, rows: int, columns: int) -> Parts:  # noqa: ARG001
    """q, k and v of the first head, of the second, … (GPT-NeoX, Bloom, Persimmon, DeBERTa)."""
    return _equal("q k v", rows, _heads(layer, config))


def _query_key_value(layer: Any, config: Any, rows: int, columns: int) -> Parts:
    """Falcon has three layouts: queries by groups of heads, one key and value for all heads, or head by head."""
    if getattr(layer, "new_decoder_architecture", False):
        groups = layer.num_kv_heads
        return (("q", _heads(layer, config) // groups * layer.head_dim), ("k", layer.head_dim), ("v", layer.head_dim))
    if getattr(layer, "multi_query", False):
        return (("q", rows - 2 * layer.head_dim), ("k", layer.head_dim), ("v", layer.head_dim))
    return _per_head(layer, config, rows, columns)


def _c_attn(layer: Any, config: Any, rows: int, columns: int) -> Parts:
    """GPT-2; GPT-BigCode with one key and value for all heads, or head by head."""
    multi_query = getattr(layer, "multi_query", None)
    if multi_query is None or rows == 2 * columns:  # keys and values of cross-attention
        return _thirds(layer, config, rows, columns)
    return _query_key_value(layer, config, rows, columns)


def _qkv_proj(layer: Any, config: Any, rows: int, columns: int) -> Parts:
    """Phi-3; CodeGen in four runs with values before keys; the linear attention of MiniMax head by head."""
    kind = _model_type(config)
    if kind == "codegen":
        return _equal("q v k", rows, 4)
    return (_per_head if kind.startswith("minimax") else _grouped)(layer, config, rows, columns)


def _model_type(config: Any) -> str:
    return str(getattr(config, "model_type", ""))


def _in_proj(layer: Any, config: Any, rows: int, columns: int) -> Parts:
    """DeBERTa's; others of this name belong to state-space models."""
    return _per_head(layer, config, rows, columns) if rows == 3 * getattr(layer, "all_head_size", 0) else ()


def _q_proj(layer: Any, config: Any, rows: int, columns: int) -> Parts:  # noqa: ARG001
    """Qwen3-Next and Qwen3.5: each head's query, then the gate of its output."""
    after = getattr(layer, "o_proj", None)
    gated = _model_type(config).startswith("qwen3") and after is not None and rows == 2 * after.weight.shape[1]
    return _equal("q gate", rows, rows // (2 * layer.head_dim)) if gated else ()


def _qkvz(layer: Any, config: Any, rows: int, columns: int) -> Parts:  # noqa: ARG001
    """The linear attention of Qwen3-Next: one run for every head of the keys."""
    value = layer.head_v_dim * layer.num_v_heads // layer.num_k_heads
    return (("q", layer.head_k_dim), ("k", layer.head_k_dim), ("v", value), ("z", value))


def _qkv_linear(layer: Any, config: Any, rows: int, columns: int) -> Parts:  # noqa: ARG001
    return (("q", layer.key_dim), ("k", layer.key_dim), ("v", layer.value_dim))


def _ba(layer: Any, config: Any, rows: int, columns: int) -> Parts:  # noqa: ARG001
    return _equal("b a", rows, layer.num_k_heads)


def _gate_up(layer: Any, config: Any, rows: int, columns: int) -> Parts:  # noqa: ARG001
    """What goes through the activation, then what it is multiplied with."""
    return _equal("gate up", rows)


_LAYOUTS: dict[str, Layout] = {
    "c_attn": _c_attn,
    "qkv_proj": _qkv_proj,
    "qkv": _thirds,
    "Wqkv": _grouped,
    "query_key_value": _query_key_value,
    "in_proj": _in_proj,
    "q_proj": _q_proj,
    "gate_up_proj": _gate_up,
    "Wi": _gate_up,
    "in_proj_qkvz": _qkvz,
    "in_proj_qkv": _qkv_linear,
    "in_proj_ba": _ba,
}
