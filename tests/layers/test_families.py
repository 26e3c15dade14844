"""Every family: sites found, hooks equal to autograd, fit and apply across width and depth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from taskferry import TaskVector, fit
from taskferry.collect.recorder import Call, Recorder
from taskferry.layers import family_of
from taskferry.layers.discovery import find_sites
from taskferry.layers.site import Site
from tests.helpers.tiny import TINY, Tiny, double, relative, tuned

FAMILIES = {
    "plain": "plain",
    "timm": "timm",
    "openclip": "openclip",
    "openclip-own-attention": "openclip",
}


@pytest.fixture(params=TINY.values(), ids=TINY.keys())
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return request.param


def reached(tiny: Tiny, site: Site) -> bool:
    """Image objectives never run a text tower or its projection; nothing else is out of reach."""
    if tiny.name in ("clip", "openclip", "openclip-own-attention"):
        return site.stream != "text"
    return site.role != "pooler" or tiny.name == "bert-classifier"  # prototypes read tokens, not the pooler


def test_the_family_knows_its_model(tiny: Tiny) -> None:
    assert family_of(tiny.model(16, 2, 0)).name == FAMILIES.get(tiny.name, "huggingface")


def test_every_matrix_of_the_blocks_is_a_site_with_a_common_role(tiny: Tiny) -> None:
    model = tiny.model(16, 2, 0)
    sites = find_sites(model)
    assert len({site.name for site in sites}) == len(sites)
    weights = {site.weight for site in sites}
    skipped = ("embed", "relative_attention_bias", "positional", "wte", "wpe", "norm", "shared", ".conv")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and not any(word in name for word in skipped):
            assert name in weights, name
    if tiny.name != "plain":
        for site in sites:
            if site.block is not None:
                assert site.role.split(".")[0] in ("attn", "cross", "mlp"), site
                assert site.role.split(".")[1] in ("q", "k", "v", "o", "gate", "up", "down"), site


def test_recorded_inputs_and_gradients_are_autograds(tiny: Tiny) -> None:
    """Σ gᵀ x over tokens is the weight's gradient (equation 4), Σ g the bias's: for every site."""
    model = tiny.model(16, 2, 0).double()
    batch = double(tiny.batch(0, 4))
    sites = [site for site in find_sites(model) if site.fixed is None]
    loss = tiny.objective.bind(model, [batch])
    inputs: dict[tuple[str, int], Tensor] = {}
    gradients: dict[tuple[str, int], Tensor] = {}

    outputs: dict[tuple[str, int], Tensor] = {}

    def on_forward(call: Call, x: Tensor, y: Tensor) -> None:
        inputs[call.site.name, call.index] = x
        outputs[call.site.name, call.index] = y

    def on_gradient(call: Call, g: Tensor) -> None:
        gradients[call.site.name, call.index] = g

    model.zero_grad()
    plain = loss(batch)
    plain.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.requires_grad_(False)
    with Recorder(model, sites, samples=4, on_forward=on_forward, on_gradient=on_gradient):
        value = loss(batch)
    value.backward()
    assert torch.allclose(value, plain, rtol=1e-12)
    assert all(p.grad is None or not p.requires_grad for p in model.parameters())
    for site in sites:
        uses = [key for key in gradients if key[0] == site.name]
        assert bool(uses) == reached(tiny, site), site
        if not uses:
            continue
        product = sum(torch.einsum("nlo,nli->oi", gradients[use], inputs[use]) for use in uses)
        assert product.shape == site.shape
        parameters = dict(model.named_parameters())
        recomputed = inputs[uses[0]] @ site.read(parameters[site.weight]).T
        if site.bias is not None:
            recomputed = recomputed + site.read(parameters[site.bias])
        assert torch.allclose(outputs[uses[0]], recomputed, rtol=1e-9, atol=1e-11), site  # y = x Wᵀ + b
        weight = site.read(expected[site.weight])
        scale = float(expected[site.weight].abs().max())
        assert torch.allclose(product, weight, rtol=1e-8, atol=1e-10 * scale), site
        if site.bias is not None:
            bias = sum(gradients[use].sum((0, 1)) for use in uses)
            assert torch.allclose(bias, site.read(expected[site.bias]), rtol=1e-8, atol=1e-10), site


@pytest.mark.parametrize(("source", "target"), [((16, 2), (24, 3)), ((24, 3), (16, 2))])
def test_fit_and_apply_across_width_and_depth(tiny: Tiny, source: tuple[int, int], target: tuple[int, int]) -> None:
    A, B = tiny.model(*source, seed=1), tiny.model(*target, seed=2)
    before = {name: p.detach().clone() for name, p in B.named_parameters()}
    moved = fit(A, B, tiny.calibration(), tiny.objective).apply(
        TaskVector.between(dict(A.named_parameters()), tuned(A))
    )
    coverage = moved.coverage
    assert coverage is not None
    assert [row.parameter for row in coverage] == list(before)
    for site in find_sites(B):
        row = coverage[site.weight]
        if site.fixed is None and reached(tiny, site):
            assert row.status == "moved", row
            assert site.bias is None or coverage[site.bias].status == "moved"
        else:
            assert row.status == "kept"
            assert row.reason
    assert all(row.reason for row in coverage if row.status != "moved")
    for name, delta in moved.deltas.items():
        assert isinstance(delta, Tensor)
        assert delta.shape == before[name].shape
        assert bool(torch.isfinite(delta).all())
        assert float(delta.abs().max()) > 0, name
    batch = tiny.batch(100, 4)
    loss = tiny.objective.bind(B, [batch])
    start = float(loss(batch).detach())
    moved.add_to(B)
    assert float(loss(batch).detach()) != start
    for name, parameter in B.named_parameters():
        assert torch.equal(parameter, before[name]) == (coverage[name].status == "kept")


def test_the_models_are_left_as_they_were(tiny: Tiny) -> None:
    A, B = tiny.model(16, 2, 1).train(), tiny.model(16, 2, 2).train()
    next(A.parameters()).requires_grad_(False)
    state = {name: p.detach().clone() for name, p in B.named_parameters()}
    trainable = [p.requires_grad for p in A.parameters()]
    fit(A, B, tiny.calibration(8), tiny.objective)
    assert A.training
    assert all(module.training for module in B.modules())
    assert [p.requires_grad for p in A.parameters()] == trainable
    assert all(p.grad is None for model in (A, B) for p in model.parameters())
    assert all(torch.equal(p, state[name]) for name, p in B.named_parameters())


class Sliced(nn.Module):
    """Newer OpenCLIP: an attention of its own that applies slices of in_proj_weight to query, key and value."""

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = packed.in_proj_weight, packed.in_proj_bias
        self.out_proj, self.heads = packed.out_proj, packed.num_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> tuple[Tensor, None]:
        n, length, d = query.shape
        parts = zip((query, key, value), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        q, k, v = (
            nn.functional.linear(x, W, b).reshape(n, length, self.heads, -1).transpose(1, 2) for x, W, b in parts
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(attended.transpose(1, 2).reshape(n, length, d)), None


def replace_attention(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    for block in model.visual.transformer.resblocks:  # type: ignore[union-attr]
        block.attn = kind(block.attn)
    return model


def moved_openclip(change: str | type[nn.Module]) -> tuple[TaskVector, nn.Module]:
    """A → B with B's attention of one of four kinds, all with the same weights."""
    tiny = TINY["openclip"]
    A, B = tiny.model(16, 2, 1).double(), tiny.model(24, 2, 2).double()
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    if isinstance(change, type):
        B = replace_attention(B, change)
    elif change == "custom":
        custom = TINY["openclip-own-attention"].model(24, 2, 2).double()
        custom.load_state_dict(B.state_dict())
        B = custom
    calibration = tiny.calibration()
    pairs = [(double(a), double(b)) for a, b in calibration]
    return fit(A, B, type(calibration)(pairs), tiny.objective).apply(tau), B


def test_packed_equals_split_and_old_attention_equals_new() -> None:
    old, _ = moved_openclip("default")
    for kind in ("custom", Sliced):
        new, _ = moved_openclip(kind)
        assert new.deltas.keys() == old.deltas.keys()
        for name, delta in old.deltas.items():
            assert relative(new.deltas[name], delta) < 1e-9, (kind, name)


def test_packed_equals_split_by_layers() -> None:
    """timm's packed qkv against the same model with three layers, as source and as target."""
    tiny = TINY["timm"]
    A, B = tiny.model(16, 2, 1).double(), tiny.model(24, 2, 2).double()
    A_tuned = tiny.model(16, 2, 1).double()
    A_tuned.load_state_dict(tuned(A))
    calibration = tiny.calibration()
    calibration = type(calibration)([(double(a), double(b)) for a, b in calibration])
    packed = fit(A, B, calibration, tiny.objective).apply(TaskVector.between(A, A_tuned))
    for model in (A, A_tuned, B):
        for block in model.blocks:  # type: ignore[union-attr]
            block.attn = SplitTimm(block.attn)
    split = fit(A, B, calibration, tiny.objective).apply(TaskVector.between(A, A_tuned))
    assert split.coverage is not None
    for i in range(2):
        parts = [f"blocks.{i}.attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        assert all(split.coverage[f"{part}.weight"].status == "moved" for part in parts)
        for kind in ("weight", "bias"):
            joined = torch.cat([split.deltas[f"{part}.{kind}"] for part in parts])
            assert relative(joined, packed.deltas[f"blocks.{i}.attn.qkv.{kind}"]) < 1e-9
    assert relative(split.deltas["blocks.1.mlp.fc2.weight"], packed.deltas["blocks.1.mlp.fc2.weight"]) < 1e-9


class SplitTimm(nn.Module):
    def __init__(self, packed: nn.Module) -> None:
        super().__init__()
        self.heads, self.proj = packed.num_heads, packed.proj
        d = packed.qkv.weight.shape[1]  # type: ignore[union-attr]
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            layer = nn.Linear(d, d, dtype=packed.qkv.weight.dtype)  # type: ignore[union-attr]
            with torch.no_grad():
                layer.weight.copy_(packed.qkv.weight[i * d : (i + 1) * d])  # type: ignore[index, union-attr]
                layer.bias.copy_(packed.qkv.bias[i * d : (i + 1) * d])  # type: ignore[index, union-attr]
            setattr(self, name, layer)

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        n, length, d = x.shape
        q, k, v = (
            layer(x).view(n, length, self.heads, -1).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, d))
