"""The interface of a family, and its plain form: any `nn.Module` with linear layers."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from taskferry.data.batch import Batch
from taskferry.errors import TaskferryError
from taskferry.layers.site import LinearParameter, Site
from taskferry.layers.tokens import Layout

HEAD = "a task head: its outputs are the task's classes or the vocabulary, not a space of the model"
EXPERT = "an expert of a mixture: which tokens it sees is this model's own, so it stays"
ROUTER = "a router of a mixture: its outputs are this model's own experts, so it stays"
_EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.")  # one module each, as releases of transformers before 5 keep them


class Family:
    """Everything that differs between model libraries, and nothing else.

    The plain form reads a site's place from its path: in `encoder.layer.3.attention.self.query` the stack is
    `encoder.layer`, the block 3 and the role `attention.self.query`.
    """

    name = "plain"
    roles: tuple[tuple[str, str], ...] = ()  # (pattern on the end of the path in its block, role)
    stacks: tuple[tuple[str, str], ...] = ()  # (pattern on the path of the blocks, stack)
    heads: tuple[str, ...] = ()  # patterns of whole paths
    bare_projections: tuple[str, ...] = ()  # parameters used as x @ parameter

    def owns(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Whether this family knows the model."""
        return True

    def name_site(self, model: nn.Module, linear: LinearParameter) -> Site:
        """The whole of a linear parameter as one site: stack, block, role and stream."""
        prefix, block, inside = split_path(linear.path)
        path = inside if block is not None else linear.path
        role = _first(self.roles, path) or path
        stack = _first(self.stacks, prefix)
        fixed = HEAD if self.is_head(linear.path) else None
        if role == "router":
            fixed = ROUTER
        elif _EXPERT.search(linear.path):
            fixed = EXPERT
        return Site(
            name=linear.path,
            weight=linear.weight,
            bias=linear.bias,
            shape=(linear.out_features, linear.in_features),
            role=role,
            stack=prefix if stack is None else stack,
            block=block,
            stream=self.stream(model, linear.path, role),
            transposed=linear.transposed,
            fixed=fixed,
        )

    def is_head(self, path: str) -> bool:
        """Whether a module or parameter outside the blocks belongs to a task head."""
        return split_path(path)[1] is None and any(re.search(head, path) for head in self.heads)

    def parts(self, model: nn.Module, path: str, rows: int, columns: int) -> tuple[tuple[str, int], ...]:  # noqa: ARG002
        """(name, rows) of each output space packed in one matrix, in order; empty for a plain one.

        Where they add up to a share of all rows, they repeat: q, k and v of one head, then of the next.
        """
        return ()

    def kind(self, model: nn.Module, block: str) -> str:  # noqa: ARG002
        """What a block (by its path) is among the blocks of its stack, where a model says so: "sliding attention"."""
        return ""

    def stream(self, model: nn.Module, path: str, role: str) -> str:  # noqa: ARG002
        """Which tokens flow through a site."""
        return "patches" if role == "patch" else "tokens"

    def layouts(self, model: nn.Module, batch: Batch) -> dict[str, Layout]:  # noqa: ARG002
        """How the tokens of each stream lie, in this micro-batch. A stream not named has no structure."""
        return {
            "tokens": Layout(
                mask=batch.inputs.get("attention_mask"),
                ids=batch.inputs.get("input_ids"),
                spans=batch.spans.get("tokens"),
            )
        }

    def arguments(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:  # noqa: ARG002
        """What the model is called with for a micro-batch."""
        return dict(batch.inputs)

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        """One vector a sample, [n, d], for a probe or prototypes."""
        output = model(**self.arguments(model, batch))
        if not isinstance(output, Tensor):
            raise TaskferryError(
                f"{type(model).__name__} returns {type(output).__name__}, not a tensor of features: "
                "pass your own objective, a function of (model, batch) that returns the summed loss"
            )
        return output.flatten(1) if output.ndim == 2 else output.mean(dim=tuple(range(1, output.ndim - 1)))

    def text_features(self, model: nn.Module, tokens: Any) -> Tensor:  # noqa: ARG002
        """Text embeddings [n, d] of an image-text model."""
        raise TaskferryError(f"{type(model).__name__} has no text tower for a zero-shot head")

    def logit_scale(self, model: nn.Module) -> float:
        """The temperature of an image-text model's similarities."""
        scale = getattr(model, "logit_scale", None)
        return float(scale.detach().exp()) if isinstance(scale, Tensor) else 100.0


def split_path(path: str) -> tuple[str, int | None, str]:
    """(before the first number, the number, after it)."""
    components = path.split(".")
    for i, component in enumerate(components):
        if component.isdigit():
            return ".".join(components[:i]), int(component), ".".join(components[i + 1 :])
    return "", None, ""


def image_grid(pixels: Tensor, patch: int | tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches in images [n, 3, height, width]."""
    height, width = (patch, patch) if isinstance(patch, int) else patch
    return pixels.shape[-2] // height, pixels.shape[-1] // width


def _first(table: tuple[tuple[str, str], ...], path: str) -> str | None:
    return next((name for pattern, name in table if re.search(rf"(^|\.)(?:{pattern})$", path)), None)
