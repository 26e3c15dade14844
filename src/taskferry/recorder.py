"""Seeing the input and the output gradient of every site, whatever calls its weight.

    >>> with Recorder(model, sites, samples=n, on_input=..., on_gradient=...):
    ...     loss(batch).backward()

Module hooks miss weights that are read directly: `nn.MultiheadAttention` never calls its `out_proj`, OpenCLIP's
attention applies slices of one matrix, CLIP's `proj` is a bare parameter. A torch function mode sees the linear
operation itself, finds the site by the weight it is given, and hooks the output *tensor* for its gradient.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from taskferry.errors import TaskferryError
from taskferry.sites import Site

OnInput = Callable[["Call", Tensor], None]
OnGradient = Callable[["Call", Tensor], None]

_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
_MHA_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@dataclass(frozen=True)
class Call:
    """One use of a site in a forward pass."""

    site: Site
    index: int  # 0 for the first use; more where a weight is shared or a module called again
    input: int  # the number of the tensor read: equal for sites that read the same one (q, k and v)


class Recorder(TorchFunctionMode):
    """Calls `on_input(call, x)` in the forward pass and `on_gradient(call, g)` in the backward pass.

    x: [n, L, in] and g: [n, L, out] are views of what torch computed, never copies: keep no reference
    longer than the micro-batch. Only what is recorded needs a gradient, so frozen parameters stay frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Iterable[Site],
        *,
        samples: int,
        on_input: OnInput,
        on_gradient: OnGradient,
    ) -> None:
        super().__init__()
        self.samples = samples
        self.on_input = on_input
        self.on_gradient = on_gradient
        self._calls: Counter[str] = Counter()
        self._inputs: dict[tuple[int, int], tuple[weakref.ref[Tensor], int]] = {}
        self._input_count = 0
        self._sites: dict[int, list[Site]] = {}
        for site in sites:
            self._sites.setdefault(id(model.get_parameter(site.weight)), []).append(site)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["weight"]
            return self._record(func, x, weight, args, kwargs)
        if func in _MATMULS:
            return self._record(func, args[0], args[1] if len(args) > 1 else None, args, kwargs)
        if func is torch.addmm:
            return self._record(func, args[1], args[2], args, kwargs)
        if func is torch.conv2d and len(args) > 1:
            return self._record(func, args[0], args[1], args, kwargs, patches=True)
        if func is F.multi_head_attention_forward:
            bound = _MHA_SIGNATURE.bind(*args, **kwargs)
            bound.apply_defaults()
            if self._find(bound.arguments["in_proj_weight"])[0]:
                with self:  # torch leaves the mode while it calls us; the parts must be seen
                    return _attention_in_parts(**bound.arguments)
        return func(*args, **kwargs)

    def _find(self, weight: Any) -> tuple[list[Site], int]:
        """The sites of a weight, and its first row where it is a slice of the rows of a packed matrix."""
        if not isinstance(weight, Tensor):
            return [], 0
        if (sites := self._sites.get(id(weight))) is not None:
            return sites, 0
        base = weight._base
        if base is None or id(base) not in self._sites or weight.stride() != base.stride():
            return [], 0
        first = (weight.storage_offset() - base.storage_offset()) // base.stride(0)
        last = first + weight.shape[0]
        return [s for s in self._sites[id(base)] if s.rows and first <= s.rows[0] and s.rows[1] <= last], first

    def _record(
        self,
        func: Any,
        x: Any,
        weight: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        patches: bool = False,
    ) -> Any:
        sites, first_row = self._find(weight)
        y = func(*args, **kwargs)
        if not sites:
            return y
        hooked = y
        if not y.requires_grad:
            # Nothing below needs a gradient: the graph starts here, at a leaf. The model gets a copy,
            # because it may write in place and torch forbids that on leaves.
            hooked = y.detach().requires_grad_()
            y = hooked.clone()
        rows = x.detach()
        if patches:
            rows = F.unfold(rows, weight.shape[2:], stride=weight.shape[2:]).mT
        number = self._number(x)
        calls = []
        for site in sites:
            calls.append(Call(site, self._calls[site.name], number))
            self._calls[site.name] += 1
            self.on_input(calls[-1], self._as_tokens(site, rows))
        hooked.register_hook(lambda g: self._gradient(calls, first_row, g, patches))
        return y

    def _gradient(self, calls: list[Call], first_row: int, g: Tensor, patches: bool) -> None:
        if patches:
            g = g.flatten(2).mT
        for call in calls:
            part, rows = g, call.site.rows
            if rows is not None:
                part = g[..., rows[0] - first_row : rows[1] - first_row]
            self.on_gradient(call, self._as_tokens(call.site, part))

    def _number(self, x: Tensor) -> int:
        """One number for one tensor, as long as it lives unchanged; its address may be used again later."""
        key = (id(x), x._version)
        known = self._inputs.get(key)
        if known is not None and known[0]() is x:
            return known[1]
        self._input_count += 1
        self._inputs[key] = (weakref.ref(x), self._input_count)
        return self._input_count

    def _as_tokens(self, site: Site, x: Tensor) -> Tensor:
        """[n, L, d] from [n, d], [n, L, d], [n, H, W, d], [L, n, d] or [n · L, d]."""
        n = self.samples
        if x.shape[0] == n:
            return x.reshape(n, -1, x.shape[-1])
        if x.ndim == 3 and x.shape[1] == n:
            return x.transpose(0, 1)
        if x.shape[:-1].numel() % n == 0:
            return x.reshape(n, -1, x.shape[-1])
        raise TaskferryError(
            f"{site.name}: activations of shape {tuple(x.shape)} are not tokens of {n} samples; "
            "a layer that mixes or routes samples cannot be paired: leave it out"
        )


def _attention_in_parts(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    static_k: Tensor | None,
    static_v: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `F.multi_head_attention_forward` computes in eval mode, each projection as one visible operation.

    Tensors are [L, n, d], as that function takes them.
    """
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise TaskferryError("nn.MultiheadAttention with bias_k, bias_v, add_zero_attn or static keys is not supported")
    d, n, head = query.shape[-1], query.shape[1], query.shape[-1] // num_heads
    if query is key and key is value:
        q, k, v = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        W_q, W_k, W_v = in_proj_weight.chunk(3)
        q, k, v = (F.linear(x, W, b) for x, W, b in zip((query, key, value), (W_q, W_k, W_v), biases, strict=True))
    q, k, v = (t.reshape(-1, n, num_heads, head).permute(1, 2, 0, 3) for t in (q, k, v))  # [n, heads, L, head]
    mask = _merge_masks(attn_mask, key_padding_mask, n, num_heads, q)
    if mask is None and is_causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    attended = attended.permute(2, 0, 1, 3).reshape(-1, n, d)
    output = F.linear(attended, out_proj_weight, out_proj_bias)
    if not need_weights:
        return output, None
    scores = q @ k.mT / head**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    return output, weights.mean(1) if average_attn_weights else weights


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, n: int, heads: int, like: Tensor
) -> Tensor | None:
    """One mask to add to the scores. In `nn.MultiheadAttention` a true entry of a boolean mask forbids."""

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(like)
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)

    merged = None
    if attn_mask is not None:
        merged = additive(attn_mask)
        merged = merged.reshape(n, heads, *merged.shape[1:]) if merged.ndim == 3 else merged
    if key_padding_mask is not None:
        padding = additive(key_padding_mask)[:, None, None]
        merged = padding if merged is None else merged + padding
    return merged
