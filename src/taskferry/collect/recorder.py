"""Seeing the input and the output gradient of every site, whatever calls its weight.

    >>> with Recorder(model, sites, samples=n, on_forward=..., on_gradient=...):
    ...     loss(batch).backward()

Module hooks miss weights that are read directly: `nn.MultiheadAttention` never calls its `out_proj`, OpenCLIP's
attention applies slices of one matrix, CLIP's `proj` is a bare parameter. A torch function mode sees the linear
operation itself, finds the site by the weight it is given, and hooks the output *tensor* for its gradient.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from taskferry.errors import TaskferryError
from taskferry.layers.site import Site

OnForward = Callable[["Call", Tensor, Tensor], None]
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
    """Calls `on_forward(call, x, y)` in the forward pass and `on_gradient(call, g)` in the backward pass.

    x: [n, L, in], y and g: [n, L, out] are views of what torch computed, copies only where a site's rows lie in runs:
    keep no reference longer than the micro-batch. Only what is recorded needs a gradient, so frozen parameters stay
    frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Iterable[Site],
        *,
        samples: int,
        on_forward: OnForward,
        on_gradient: OnGradient,
        lengths: Mapping[str, int] | None = None,  # tokens of a sample in each stream, where known
        turned: dict[str, bool] | None = None,  # site -> whether it works on [L, n, d]: what is known, and is learned
    ) -> None:
        super().__init__()
        self.samples = samples
        self.turned = {} if turned is None else turned
        self.lengths = lengths or {}
        self.on_forward = on_forward
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
        if func is F.linear or func is torch.conv2d:
            x, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
            return self._record(func, x, weight, args, kwargs)
        if func in _MATMULS:
            x, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "other", "mat2")
            return self._record(func, x, weight, args, kwargs, transposed=True)
        if func is torch.addmm:
            x, weight = _argument(args, kwargs, 1, "mat1"), _argument(args, kwargs, 2, "mat2")
            return self._record(func, x, weight, args, kwargs, transposed=True)
        if func is F.multi_head_attention_forward:
            bound = _MHA_SIGNATURE.bind(*args, **kwargs)
            bound.apply_defaults()
            if self._find(bound.arguments["in_proj_weight"], False)[0]:
                with self:  # torch leaves the mode while it calls us; the parts must be seen
                    return _attention_in_parts(**bound.arguments)
        return func(*args, **kwargs)

    def _find(self, weight: Any, transposed: bool) -> tuple[list[Site], int]:
        """The sites of a weight used as x Wᵀ, or as x W where `transposed`; and its first row where it is a slice."""
        if not isinstance(weight, Tensor):
            return [], 0
        first, last = 0, None
        base = weight._base
        if id(weight) not in self._sites and base is not None and id(base) in self._sites and base.ndim == 2:
            if weight.stride() == base.stride()[::-1] and weight.shape == base.shape[::-1]:
                transposed = not transposed  # x @ W.T
            elif weight.stride() == base.stride():
                first = (weight.storage_offset() - base.storage_offset()) // base.stride(0)
                last = first + weight.shape[0]
            else:
                return [], 0
            weight = base
        sites = [site for site in self._sites.get(id(weight), ()) if site.transposed == transposed]
        if last is not None:
            whole = [(site, site.rows) for site in sites if site.rows is not None and len(site.rows) == 2]
            sites = [site for site, (start, stop) in whole if first <= start and stop <= last]
        return sites, first

    def _record(
        self,
        func: Any,
        x: Any,
        weight: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        transposed: bool = False,
    ) -> Any:
        sites, first_row = self._find(weight, transposed)
        y = func(*args, **kwargs)
        if not sites:
            return y
        patches = func is torch.conv2d
        hooked, y = _hook_point(y)
        rows, outputs = x.detach(), y.detach()
        if patches:
            rows = F.unfold(rows, weight.shape[2:], stride=weight.shape[2:]).mT
            outputs = outputs.flatten(2).mT
        calls = []
        for site in sites:
            inside, outside = self._as_tokens(site, rows), self._as_tokens(site, site.own(outputs, -1, first_row))
            if inside is None or outside is None:
                continue
            calls.append(self._call(site, x))
            self.on_forward(calls[-1], inside, outside)
        hooked.register_hook(  # type: ignore[no-untyped-call]
            lambda g: self._gradient(calls, first_row, g.flatten(2).mT if patches else g)
        )
        return y

    def _gradient(self, calls: list[Call], first_row: int, g: Tensor) -> None:
        for call in calls:
            tokens = self._as_tokens(call.site, call.site.own(g, -1, first_row))
            if tokens is not None:
                self.on_gradient(call, tokens)

    def _call(self, site: Site, x: Tensor) -> Call:
        """One more use of a site, which reads x."""
        self._calls[site.name] += 1
        return Call(site, self._calls[site.name] - 1, self._number(x))

    def _number(self, x: Tensor) -> int:
        """One number for one tensor, as long as it lives unchanged; its address may be used again later."""
        key = (id(x), x._version)
        known = self._inputs.get(key)
        if known is not None and known[0]() is x:
            return known[1]
        self._input_count += 1
        self._inputs[key] = (weakref.ref(x), self._input_count)
        return self._input_count

    def _as_tokens(self, site: Site, x: Tensor) -> Tensor | None:
        """[n, L, d] from [n, d], [n, L, d], [n, H, W, d], [L, n, d] or [n · L, d].

        As many samples as tokens lie as the site's other calls have shown. None for rows that are no tokens of the
        samples: an expert's routed tokens, a layer that mixes samples.
        """
        n = self.samples
        if x.ndim == 3 and n in x.shape[:2] and x.shape[0] != x.shape[1]:
            self.turned[site.name] = x.shape[0] != n
        if x.ndim == 3 and x.shape[1] == n and self.turned.get(site.name):
            return x.transpose(0, 1)
        if x.shape[0] == n:
            return x.reshape(n, -1, x.shape[-1])
        length, rest = divmod(x.shape[:-1].numel(), n)
        expected = self.lengths.get(site.stream)
        if rest or (expected is not None and length not in (1, expected)):
            return None
        return x.reshape(n, length, x.shape[-1])


def _hook_point(y: Tensor) -> tuple[Tensor, Tensor]:
    """(the tensor to hook, what the model goes on with) of a linear output."""
    if not y.requires_grad:
        # Nothing below needs a gradient: the graph starts here, at a leaf. The model gets a copy,
        # because it may write in place and torch forbids that on leaves.
        hooked = y.detach().requires_grad_()
        return hooked, hooked.clone()
    # A linear output can be a view of its flat form, and writing into a view in place would drop the hook.
    y = torch.ops.aten._unsafe_view.default(y, list(y.shape))
    return y, y


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, *names: str) -> Any:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _attention_in_parts(**given: Any) -> tuple[Tensor, Tensor | None]:
    """What `F.multi_head_attention_forward` computes in eval mode, each projection as one visible operation.

    That function takes [L, n, d]. The projections are done on [n, L, d], so that their rows are the samples' tokens.
    """
    unknown = ("bias_k", "bias_v", "static_k", "static_v")
    if given["add_zero_attn"] or any(given[name] is not None for name in unknown):
        raise TaskferryError("nn.MultiheadAttention with bias_k, bias_v, add_zero_attn or static keys is not supported")
    query, key, value, num_heads = given["query"], given["key"], given["value"], given["num_heads"]
    in_proj_weight, in_proj_bias = given["in_proj_weight"], given["in_proj_bias"]
    d, n, head = query.shape[-1], query.shape[1], query.shape[-1] // num_heads
    alone = query is key and key is value
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if alone:
        q, k, v = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        W_q, W_k, W_v = in_proj_weight.chunk(3)
        q, k, v = (F.linear(x, W, b) for x, W, b in zip((query, key, value), (W_q, W_k, W_v), biases, strict=True))
    q, k, v = (t.reshape(n, -1, num_heads, head).transpose(1, 2) for t in (q, k, v))  # [n, heads, L, head]
    mask = _merge_masks(given["attn_mask"], given["key_padding_mask"], n, num_heads, q)
    if mask is None and given["is_causal"]:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    attended = attended.transpose(1, 2).reshape(n, -1, d)
    output = F.linear(attended, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    if not given["need_weights"]:
        return output, None
    scores = q @ k.mT / head**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    return output, weights.mean(1) if given["average_attn_weights"] else weights


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
