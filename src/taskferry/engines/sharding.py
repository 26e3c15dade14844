"""Weights of blocks spread over ranks by FSDP2: each rank holds its part, and a block whole only while it runs.

    torchrun --nproc-per-node 4 -m taskferry fit --shard …

Embeddings, norms and heads, which stand outside the blocks, stay whole on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from taskferry.errors import TaskferryError
from taskferry.layers.discovery import block_paths, find_sites


def shard_blocks(model: nn.Module) -> dict[str, Tensor]:
    """Shard every block in place; returns, by name, the tensors that the blocks compute with.

    They are empty between uses, but stay the same objects: by them a pass recognises its sites.
    """
    blocks = block_paths(find_sites(model))
    if not blocks:
        raise TaskferryError(f"{type(model).__name__} has no blocks to shard: leave --shard out")
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (torch.distributed.get_world_size(),))
    model.requires_grad_(False)
    whole: dict[str, Tensor] = {}
    for path in blocks.values():
        block = model.get_submodule(path)
        sharded = fully_shard(block, mesh=mesh)
        sharded.unshard()
        whole |= {f"{path}.{name}": parameter for name, parameter in block.named_parameters()}
        sharded.reshard()
    return whole
