"""OpenCLIP: image and text towers, with `nn.MultiheadAttention` or OpenCLIP's own attention.

open_clip itself is never imported: a model brings its classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from taskferry.data.batch import Batch
from taskferry.layers.family import Family, image_grid
from taskferry.layers.registry import register
from taskferry.layers.tokens import Layout


@register
class OpenCLIP(Family):
    """`open_clip.CLIP`, `CustomTextCLIP` and their bare image tower."""

    name = "openclip"
    roles = (
        (r"attn\.in_proj", "attn.qkv"),
        (r"attn\.(?:out_proj|proj)", "attn.o"),
        (r"attn\.qkv", "attn.qkv"),
        (r"mlp\.(?:c_fc|fc1)", "mlp.up"),
        (r"mlp\.(?:c_proj|fc2)", "mlp.down"),
        (r"(?:visual\.)?conv1|patch_embed\.proj", "patch"),
        (r"(?:visual|head)?\.?proj|text_projection", "proj"),
    )
    stacks = (
        (r"visual\.transformer\.resblocks|visual\.trunk\.blocks", "vision"),
        (r"transformer\.resblocks", "text"),
    )
    bare_projections = ("proj", "text_projection")

    def owns(self, model: nn.Module) -> bool:
        """Classes of the open_clip package."""
        return type(model).__module__.split(".")[0] == "open_clip"

    def parts(self, model: nn.Module, path: str, rows: int, columns: int) -> tuple[tuple[str, int], ...]:  # noqa: ARG002
        """The timm towers that OpenCLIP builds pack q, k and v."""
        return (("q", rows // 3), ("k", rows // 3), ("v", rows // 3)) if path.endswith("attn.qkv") else ()

    def stream(self, model: nn.Module, path: str, role: str) -> str:
        """Images through the image tower, text through the other."""
        if role == "patch":
            return "patches"
        return "vision" if path.startswith("visual.") or not hasattr(model, "visual") else "text"

    def layouts(self, model: nn.Module, batch: Batch) -> dict[str, Layout]:
        """A class token and a grid of patches; text at the model's own context length."""
        tower: Any = getattr(model, "visual", model)
        layouts = {}
        text = batch.inputs.get("text")
        if text is not None:
            # The end token has the highest id; what follows it is padding.
            places = torch.arange(text.shape[1], device=text.device)
            layouts["text"] = Layout(mask=places <= text.argmax(1, keepdim=True), ids=text)
        image = batch.inputs.get("image")
        if image is not None:
            trunk: Any = getattr(tower, "trunk", None)
            patch = trunk.patch_embed.patch_size if trunk is not None else tower.patch_size
            grid = image_grid(image, patch)
            prefix = trunk.num_prefix_tokens if trunk is not None else 1
            layouts["vision"] = Layout(prefix=prefix, grid=grid)
            layouts["patches"] = Layout(grid=grid)
        return layouts

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        """The image embedding."""
        tower: Any = getattr(model, "visual", model)
        output = tower(batch.inputs["image"])
        return output if isinstance(output, Tensor) else output[0]

    def text_features(self, model: nn.Module, tokens: Any) -> Tensor:
        """The text embedding."""
        return model.encode_text(tokens)  # type: ignore[operator, no-any-return]
