"""Packed matrices: their parts are what they are called, and move as separate layers would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from taskferry import TaskVector, fit
from taskferry.collect.recorder import Call, Recorder
from taskferry.data.batch import Calibration
from taskferry.layers.discovery import find_sites
from taskferry.layers.site import Site
from taskferry.taskvector import LowRank
from tests.helpers.architectures import PACKED
from tests.helpers.tiny import TINY, Tiny, double, relative, tuned

LAYER = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down")


@pytest.fixture(params=PACKED.values(), ids=PACKED.keys())
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return request.param


def hidden(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output: Any = model(**{k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")})
    return output.logits if "logits" in output else output.last_hidden_state


def gradients(model: nn.Module, tiny: Tiny, sites: list[Site]) -> dict[str, Tensor]:
    """At the outputs of every site, of a loss that looks at the last token alone."""
    inputs = {k: v[:1] for k, v in tiny.batch(0, 1).inputs.items()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    found: dict[str, Tensor] = {}

    def on_gradient(call: Call, g: Tensor) -> None:
        found[call.site.role] = g

    model.requires_grad_(False)
    with Recorder(model, sites, samples=1, on_forward=lambda *_: None, on_gradient=on_gradient):
        last = hidden(model, inputs)[:, -1]
        value = (last * torch.randn(last.shape, generator=torch.Generator().manual_seed(3)).to(last)).sum()
    value.backward()
    return found


def test_every_layer_of_a_block_has_its_role(tiny: Tiny) -> None:
    sites = [site for site in find_sites(tiny.model(16, 2, 0)) if site.block is not None]
    for block in (0, 1):
        roles = [site.role for site in sites if site.block == block]
        extra = {"mlp.gate", "attn.gate", "attention.self.pos_proj", "attention.self.pos_q_proj"}
        assert len(roles) == len(set(roles))
        assert set(LAYER) <= set(roles) <= set(LAYER) | extra, roles


def test_queries_keys_and_values_are_what_they_are_called(tiny: Tiny) -> None:
    """In one block, a loss of the last token reaches the queries of that token alone, keys and values of all."""
    model = tiny.model(16, 1, 0).double()
    sites = [site for site in find_sites(model) if site.block is not None and site.role in LAYER[:3]]
    found = gradients(model, tiny, sites)
    earlier = {role: float(g[:, :-1].abs().max()) for role, g in found.items()}
    size = {role: float(g.abs().max()) for role, g in found.items()}
    assert earlier["attn.q"] < 1e-12 * size["attn.q"]
    assert earlier["attn.k"] > 1e-3 * size["attn.k"]
    assert earlier["attn.v"] > 1e-3 * size["attn.v"]
    for role in LAYER[:3]:  # every unit of a part is one: none belongs to another
        assert bool((found[role].abs().amax((0, 1)) > 0).all()), role


@torch.no_grad()
def scaled(model: nn.Module, tiny: Tiny, up: str, down: str) -> float:
    """How far the output moves when one layer is doubled and the next halved."""
    inputs = tiny.batch(0, 4).inputs
    before = hidden(model, inputs)
    parameters = dict(model.named_parameters())
    for site in find_sites(model):
        if site.block is not None and site.role in (up, down):
            weight = parameters[site.weight]
            factor = 2.0 if site.role == up else 0.5
            site.put(factor * site.read(weight), site.oriented(weight))
            if site.bias is not None and site.role == up:
                site.put(2 * site.read(parameters[site.bias]), parameters[site.bias])
    for name, parameter in parameters.items():
        if name.endswith("v_bias") and up == "attn.v":  # DeBERTa keeps it apart
            parameter.mul_(2)
    return relative(hidden(model, inputs), before)


def test_values_are_linear_to_the_output_and_so_is_up_beside_a_gate(tiny: Tiny) -> None:
    assert scaled(tiny.model(16, 2, 0).double(), tiny, "attn.v", "attn.o") < 1e-9
    assert scaled(tiny.model(16, 2, 0).double(), tiny, "attn.k", "attn.o") > 1e-6
    if any(site.role == "mlp.gate" for site in find_sites(tiny.model(16, 2, 0))):
        assert scaled(tiny.model(16, 2, 0).double(), tiny, "mlp.up", "mlp.down") < 1e-9
        assert scaled(tiny.model(16, 2, 0).double(), tiny, "mlp.gate", "mlp.down") > 1e-6


def test_parts_record_what_autograd_says(tiny: Tiny) -> None:
    """Σ gᵀ x of a part is its rows of the weight's gradient."""
    model = tiny.model(16, 2, 0).double()
    batch = double(tiny.batch(0, 4))
    sites = [site for site in find_sites(model) if site.block is not None]
    loss = tiny.objective.bind(model, [batch])
    loss(batch).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.requires_grad_(False)
    rows: dict[str, Tensor] = {}
    products: dict[str, Tensor] = {}

    def on_gradient(call: Call, g: Tensor) -> None:
        product = torch.einsum("nlo,nli->oi", g, rows[call.site.name])
        products[call.site.name] = products.get(call.site.name, 0) + product

    def on_forward(call: Call, x: Tensor, y: Tensor) -> None:
        rows[call.site.name] = x

    with Recorder(model, sites, samples=4, on_forward=on_forward, on_gradient=on_gradient):
        value = loss(batch)
    value.backward()
    for site in sites:
        weight = site.read(expected[site.weight])
        assert products[site.name].shape == site.shape == weight.shape
        assert torch.allclose(products[site.name], weight, rtol=1e-8, atol=1e-10 * float(weight.abs().max())), site


class Split(nn.Module):
    """q, k and v as three layers whose outputs are packed as the model expects them."""

    def __init__(self, packed: nn.Linear, parts: tuple[Tensor, ...], pack: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attn = nn.ModuleDict()
        self.pack = pack
        for name, rows in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            layer = nn.Linear(packed.weight.shape[1], len(rows), packed.bias is not None, dtype=packed.weight.dtype)
            with torch.no_grad():
                layer.weight.copy_(packed.weight[rows])
                if packed.bias is not None:
                    layer.bias.copy_(packed.bias[rows])
            self.attn[name] = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.pack(*(layer(x) for layer in self.attn.values()))


def layout(name: str, width: int) -> Tensor:
    """[3 · width] or with fewer keys: the place in (q, k, v) of every row of the packed matrix, written out by hand."""
    head = width // 4
    q, k, v = (torch.arange(width) + i * width for i in range(3))
    if name == "falcon-groups":  # two groups: two heads of queries, then their key, then their value
        k, v = torch.arange(2 * head) + width, torch.arange(2 * head) + width + 2 * head
        runs = [torch.cat([q[g * 2 * head : (g + 1) * 2 * head], k[g * head : (g + 1) * head],
                           v[g * head : (g + 1) * head]]) for g in range(2)]  # fmt: skip
        return torch.cat(runs)
    if name == "modernbert":
        return torch.cat([q, k, v])
    return torch.cat([part[h * head : (h + 1) * head] for h in range(4) for part in (q, k, v)])


def split(model: nn.Module, name: str, leaf: str) -> nn.Module:
    for path, module in list(model.named_modules()):
        if path.endswith(leaf):
            rows, columns = module.weight.shape
            order = layout(name, columns)
            assert len(order) == rows
            back = order.argsort()  # rows of the packed matrix in the order q, k, v
            sizes = [columns, (rows - columns) // 2, (rows - columns) // 2]
            twin = Split(module, back.split(sizes), lambda *parts, order=order: torch.cat(parts, -1)[..., order])
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, twin)
    return model


LEAVES = {
    "neox": "query_key_value",
    "bloom": "query_key_value",
    "falcon-groups": "query_key_value",
    "modernbert": "Wqkv",
}


def calibration(tiny: Tiny) -> Calibration:
    return Calibration((double(a), double(b)) for a, b in tiny.calibration(24))


@pytest.mark.parametrize(("name", "leaf"), LEAVES.items())
def test_a_packed_model_moves_as_its_split_twin(name: str, leaf: str) -> None:
    tiny = PACKED[name]
    A, B = tiny.model(16, 2, 1).double(), tiny.model(24, 3, 2).double()
    after = tiny.model(16, 2, 1).double()
    after.load_state_dict({**after.state_dict(), **tuned(A)})
    data = calibration(tiny)
    packed = fit(A, B, data, tiny.objective).apply(TaskVector.between(A, after))
    before = hidden(B, data.side(1)[0].inputs)
    for model in (A, B, after):
        split(model, name, leaf)
    assert relative(hidden(B, data.side(1)[0].inputs), before) < 1e-12
    apart = fit(A, B, data, tiny.objective).apply(TaskVector.between(A, after))
    matrices = [key for key in packed.deltas if leaf in key]
    assert any(key.endswith("weight") for key in matrices)
    for key in packed.deltas:
        if key not in matrices:
            assert relative(apart.deltas[key], packed.deltas[key]) < 1e-9, key
    for key in matrices:
        path, kind = key.rsplit(".", 1)
        parts = torch.cat([apart.deltas[f"{path}.attn.{part}.{kind}"] for part in ("q_proj", "k_proj", "v_proj")])
        assert relative(packed.deltas[key], parts[layout(name, 24)]) < 1e-9, key


def as_llama(phi: nn.Module) -> nn.Module:
    """Phi-3's weights in Llama's separate layers: the same function."""
    transformers = pytest.importorskip("transformers")
    c: Any = phi.config
    sizes = {k: getattr(c, k) for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
                                        "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
                                        "rms_norm_eps", "pad_token_id")}  # fmt: skip
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double().eval()
    head = c.hidden_size // c.num_attention_heads
    q, k = c.hidden_size, c.num_key_value_heads * head
    state = {}
    for name, value in phi.state_dict().items():
        if "qkv_proj" in name:
            parts = value.split([q, k, k])
            state |= {name.replace("qkv_proj", f"{p}_proj"): v for p, v in zip("qkv", parts, strict=True)}
        elif "gate_up_proj" in name:
            state |= {name.replace("gate_up_proj", f"{p}_proj"): v
                      for p, v in zip(("gate", "up"), value.chunk(2), strict=True)}  # fmt: skip
        else:
            state[name] = value
    llama.load_state_dict(state)
    return llama


@pytest.mark.parametrize("low_rank", [False, True])
def test_phi_3_moves_as_the_llama_that_computes_the_same(low_rank: bool) -> None:
    tiny = PACKED["phi3"]
    A, B = tiny.model(16, 2, 1).double(), tiny.model(24, 3, 2).double()
    data = calibration(tiny)
    llama = as_llama(A)
    assert relative(hidden(llama, data.side(0)[0].inputs), hidden(A, data.side(0)[0].inputs)) < 1e-12
    generator = torch.Generator().manual_seed(7)
    changes: dict[str, Tensor | LowRank] = {}
    for name, p in llama.named_parameters():
        if name.endswith("proj.weight"):
            left, right = (
                torch.randn(s, generator=generator, dtype=p.dtype) for s in ((p.shape[0], 2), (2, p.shape[1]))
            )
            changes[name] = LowRank(left, right) if low_rank else left @ right
    from_llama = fit(llama, B, data, tiny.objective).apply(TaskVector(changes))  # into packed matrices
    twin = as_llama(B)
    plain = fit(llama, twin, data, tiny.objective).apply(TaskVector(changes))

    def dense(tau: TaskVector, name: str) -> Tensor:
        delta = tau.deltas[name]
        return delta.left @ delta.right if isinstance(delta, LowRank) else delta

    packs = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj": ("mlp.down_proj",),
    }
    for i in range(3):
        for packed, parts in packs.items():
            whole = dense(from_llama, f"model.layers.{i}.{packed}.weight")
            pieces = [dense(plain, f"model.layers.{i}.{part}.weight") for part in parts]
            assert relative(whole, torch.cat(pieces)) < 1e-9, packed


@pytest.mark.parametrize("name", ["neox", "falcon-heads"])  # not Bloom, whose heads weigh distances each in its own way
def test_planted_heads_are_found_again(name: str) -> None:
    """The target is the source with its heads in another order: the change comes out in that order."""
    tiny = PACKED[name]
    A, B = tiny.model(16, 2, 1).double(), tiny.model(16, 2, 1).double()
    after = tiny.model(16, 2, 1).double()
    after.load_state_dict({**after.state_dict(), **tuned(A)})
    order = torch.tensor([2, 0, 3, 1])
    units = (order[:, None] * 4 + torch.arange(4)).flatten()
    triples = (order[:, None] * 12 + torch.arange(12)).flatten()
    with torch.no_grad():
        for module_path, module in B.named_modules():
            if module_path.endswith("query_key_value"):
                module.weight.copy_(module.weight[triples])
                if module.bias is not None:
                    module.bias.copy_(module.bias[triples])
            elif module_path.endswith("attention.dense"):
                module.weight.copy_(module.weight[:, units])
    data = calibration(tiny)
    tau = TaskVector.between(A, after)
    moved, unmoved = (fit(A, target, data, tiny.objective).apply(tau) for target in (B, A))
    for key, delta in tau.deltas.items():  # maps are zero outside of what the samples reach: in both alike
        if "query_key_value" in key:
            assert relative(moved.deltas[key], unmoved.deltas[key][triples]) < 1e-5, key
            assert relative(unmoved.deltas[key], delta) < 0.5, key
        elif "attention.dense.weight" in key:
            assert relative(moved.deltas[key], unmoved.deltas[key][:, units]) < 1e-5, key


@pytest.mark.parametrize(
    ("source", "target", "roles"),
    [
        ("bert", "modernbert", 6),
        ("modernbert", "nomic", 7),
        ("bert", "nomic", 6),
        ("llama", "phi3", 7),
        ("llama", "neox", 6),
        ("neox", "phi3", 6),
        ("falcon-one-key", "llama", 6),
        ("gpt2", "mpt", 6),
    ],
)
def test_models_that_are_built_alike_pair_up(source: str, target: str, roles: int) -> None:
    """A gate that the source has not stands in the coverage with its reason; everything else moves."""
    known = {**TINY, **PACKED}
    A, B = known[source].model(16, 2, 1), known[target].model(24, 3, 2)
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    moved = fit(A, B, known[target].calibration(8), known[target].objective).apply(tau)
    assert moved.coverage is not None
    sites = [site for site in find_sites(B) if site.block is not None]
    gated = any(site.role == "mlp.gate" for site in sites)
    for site in sites:
        row = moved.coverage[site.weight]
        if site.role == "mlp.gate" and roles == 6:
            assert "no layer 'mlp.gate'" in row.reason
        assert row.status != "kept" or site.role == "mlp.gate", row
    assert gated or roles == 6
    for name, delta in moved.deltas.items():
        assert isinstance(delta, Tensor)
        assert bool(torch.isfinite(delta).all()), name
