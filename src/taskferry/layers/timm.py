"""timm vision transformers, with q, k and v packed in one matrix.

timm itself is never imported: a model brings its classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from taskferry.data.batch import Batch
from taskferry.layers.family import Family, image_grid
from taskferry.layers.registry import register
from taskferry.layers.tokens import Layout


@register
class Timm(Family):
    """`timm.models.VisionTransformer` and models built like it."""

    name = "timm"
    roles = (
        (r"attn\.qkv", "attn.qkv"),
        (r"attn\.proj", "attn.o"),
        (r"mlp\.fc1", "mlp.up"),
        (r"mlp\.fc2", "mlp.down"),
        (r"patch_embed\.proj", "patch"),
    )
    stacks = ((r"blocks", "blocks"),)
    heads = (r"^(?:head|head_dist|fc|classifier)(?:\.|$)",)

    def owns(self, model: nn.Module) -> bool:
        """Classes of the timm package that cut images into patches."""
        return type(model).__module__.split(".")[0] == "timm" and hasattr(model, "patch_embed")

    def parts(self, model: nn.Module, path: str, rows: int, columns: int) -> tuple[tuple[str, int], ...]:  # noqa: ARG002
        """q, k and v."""
        return (("q", rows // 3), ("k", rows // 3), ("v", rows // 3)) if path.endswith("attn.qkv") else ()

    def layouts(self, model: nn.Module, batch: Batch) -> dict[str, Layout]:
        """Class and register tokens, then the grid."""
        net: Any = model
        grid = image_grid(batch.inputs["x"], net.patch_embed.patch_size)
        return {"tokens": Layout(prefix=net.num_prefix_tokens, grid=grid), "patches": Layout(grid=grid)}

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        """What goes into the classifier."""
        net: Any = model
        features: Tensor = net.forward_head(net.forward_features(batch.inputs["x"]), pre_logits=True)
        return features
