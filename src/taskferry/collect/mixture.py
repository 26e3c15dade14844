"""A module of experts computed in parts that a recorder sees: each expert by itself, on the tokens routed to it.

    >>> with Recorder(…) as recorder, experts_in_parts(model, sites, recorder):
    ...     loss(batch)

transformers sends all tokens through one grouped product, or through a loop whose rows no longer say which tokens they
are. All experts of a module read one tensor, so their inputs are the rows of all tokens, and they share one input map;
what is inside an expert, and the gradients of what it writes, are rows of its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry.collect.recorder import Recorder, hook_point
from taskferry.layers.experts import Experts, experts_of
from taskferry.layers.routed import Routed, Rows
from taskferry.layers.site import Site


@contextmanager
def experts_in_parts(model: nn.Module, sites: Iterable[Site], recorder: Recorder) -> Iterator[None]:
    """Inside, the modules of these sites' experts run in parts."""
    modules: dict[str, dict[tuple[str, int], list[Site]]] = {}
    for site in sites:
        if site.expert is not None:
            path, _, name = site.weight.rpartition(".")
            modules.setdefault(path, {}).setdefault((name, site.expert), []).append(site)
    with ExitStack() as stack:
        for path, own in modules.items():
            module = model.get_submodule(path)
            kind = experts_of(module)
            if kind is None:
                raise ValueError(f"{path} has no experts")
            module.forward = _InParts(module, kind, own, recorder)
            stack.callback(module.__dict__.pop, "forward", None)
        yield


@dataclass
class _InParts:
    """What a module of experts computes, one expert after the other."""

    module: Any
    kind: Experts
    sites: dict[tuple[str, int], list[Site]]
    recorder: Recorder

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """`hidden`: [n · L, d]; `index` and `weights`: [n · L, k], the experts of each token and what each counts."""
        total, kind, module = torch.zeros_like(hidden), self.kind, self.module
        n = self.recorder.samples
        for expert in range(kind.count):
            tokens, place = torch.where(index == expert)
            share = weights[tokens, place]
            here = Routed(hidden[tokens], tokens, share.detach(), n, len(hidden) // n)
            h = self._linear(kind.up, expert, here, hidden)
            h = module._apply_gate(h) if kind.gated else module.act_fn(h)
            y = self._linear(kind.down, expert, replace(here, rows=h), h)
            if getattr(module, "has_post_expert_norm", False):
                y = module.post_expert_norm(y)
            total = total.index_add(0, tokens, (y * share[:, None]).to(total.dtype))
        return total

    def _linear(self, name: str, expert: int, here: Routed, read: Tensor) -> Tensor:
        """One linear map of one expert, and what it reads: its own rows, or those of all tokens."""
        W = getattr(self.module, name)[expert]
        b = getattr(self.module, f"{name}_bias")[expert] if self.kind.bias else None
        y = F.linear(here.rows, W.T if self.kind.transposed else W, b)
        sites = self.sites.get((name, expert), [])
        if not sites:
            return y
        inputs: Rows = replace(here, rows=read.detach())
        if read is not here.rows:
            inputs = read.detach().view(here.samples, here.length, -1)
        hooked, y = hook_point(y)
        calls = [self.recorder.call(site, read) for site in sites]
        for call in calls:
            self.recorder.on_forward(call, inputs, replace(here, rows=call.site.own(y.detach(), -1)))

        def gradient(g: Tensor) -> None:
            for call in calls:
                self.recorder.on_gradient(call, replace(here, rows=call.site.own(g, -1)))

        hooked.register_hook(gradient)  # type: ignore[no-untyped-call]
        return y
