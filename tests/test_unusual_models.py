"""Models that write in place, tie, reuse, route or rename: the same result, or a reason in the coverage."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from taskferry import Alignment, Batch, Calibration, LowRank, TaskferryError, TaskVector, fit
from taskferry.finding import find_sites
from taskferry.pairing import nearest_block, pair_sites
from taskferry.recorder import Recorder
from taskferry.solving import UNREACHED
from tests.test_families import double
from tests.tiny import TINY, hf, relative, tuned


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(**batch.inputs) - 1).square().sum()


def sequences(n: int = 12, length: int = 5, d: int = 6) -> Calibration:
    batch = Batch({"x": torch.randn(n, length, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)})
    return Calibration([(batch, batch)])


class Residual(nn.Module):
    def __init__(self, d: int, in_place: bool, relu_in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(d)
        self.start = nn.Linear(6, d)
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.in_place, self.relu = in_place, nn.ReLU(inplace=relu_in_place)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            if self.in_place:
                x += self.relu(layer(x))
            else:
                x = x + self.relu(layer(x))
        return x


@pytest.mark.parametrize("side", ["source", "target"])
def test_writing_in_place_changes_nothing(side: str) -> None:
    A, B = Residual(7, False).double(), Residual(9, False).double()
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    expected = fit(A, B, sequences(), squares).apply(tau)
    (A if side == "source" else B).in_place = True
    for relu in (False, True):
        (A if side == "source" else B).relu.inplace = relu
        other = fit(A, B, sequences(), squares).apply(tau)
        assert other.deltas.keys() == expected.deltas.keys()
        assert all(relative(other.deltas[n], d) < 1e-9 for n, d in expected.deltas.items())


@pytest.mark.parametrize("size", [5, 17])
def test_as_many_samples_as_tokens(size: int) -> None:
    """nn.MultiheadAttention works on [L, n, d]: 5 samples of 5 tokens, or 17 of 17, are not mixed."""
    import open_clip

    tiny = TINY["openclip"]
    words = {"context_length": 8, "vocab_size": 40, "width": 16, "heads": 4, "layers": 1}
    vision = {"image_size": 32, "patch_size": 16, "width": 16, "head_width": 4, "layers": 2}
    A = open_clip.CLIP(embed_dim=8, vision_cfg=vision, text_cfg=words).double()  # 5 tokens; B has 17
    B = tiny.model(24, 2, 2).double()
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))

    def moved(micro_batch: int) -> TaskVector:
        pairs = [(double(a), double(b)) for a, b in tiny.calibration(34, micro_batch)]
        return fit(A, B, Calibration(pairs), tiny.objective).apply(tau)

    expected, other = moved(34), moved(size)
    assert all(relative(other.deltas[n], d) < 1e-6 for n, d in expected.deltas.items())


class Twice(nn.Module):
    """a and b read x, and b is used again on something else."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, d), nn.Linear(6, d)
        self.back = nn.Linear(d, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) + self.b(torch.tanh(self.back(self.a(x))))


def test_a_weight_used_again_does_not_disturb_what_it_shares() -> None:
    A, B = Twice(7).double(), Twice(8).double()
    alignment = fit(A, B, sequences(), squares)
    by_name = {pair.target.name: alignment.quality_in[pair.reads].rows for pair in alignment.pairs}
    assert by_name == {"a": 60, "b": 120, "back": 60}


class Shared(nn.Module):
    """A tied autoencoder: x Wᵀ, then W again the other way round, and as a transposed view."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.linear, self.plain = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(input=torch.tanh(self.linear(x)), other=self.linear.weight) + x @ self.plain.weight.T


def test_the_way_a_weight_is_used_counts() -> None:
    """x @ W.T is this site's own map; x @ W of the same weight is another one and is not recorded as it."""
    model = Shared().double()
    batch = sequences().pairs[0][0]
    seen: list[tuple[str, str, Tensor]] = []
    expected = torch.autograd.grad(squares(model, batch), model.plain.weight)[0]
    with Recorder(
        model,
        find_sites(model),
        samples=12,
        on_forward=lambda call, x, y: seen.append((call.site.name, "x", x)),
        on_gradient=lambda call, g: seen.append((call.site.name, "g", g)),
    ):
        loss = squares(model, batch)
    loss.backward()
    assert sorted((name, kind) for name, kind, _ in seen) == [
        ("linear", "g"), ("linear", "x"), ("plain", "g"), ("plain", "x")
    ]  # fmt: skip
    rows = {(name, kind): value for name, kind, value in seen}
    assert torch.allclose(torch.einsum("nlo,nli->oi", rows["plain", "g"], rows["plain", "x"]), expected)


class Routed(nn.Module):
    """An expert sees some of the tokens of all samples, flattened."""

    def __init__(self, d: int, keep: int) -> None:
        super().__init__()
        self.start, self.expert, self.keep = nn.Linear(6, d), nn.Linear(d, d), keep

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.start(x)
        flat = x.flatten(0, 1)
        update = torch.zeros_like(flat).index_add(0, torch.arange(self.keep), self.expert(flat[: self.keep]))
        return x + update.view_as(x)


def test_routed_tokens_are_no_tokens_of_the_samples() -> None:
    x = torch.randn(4, 5, 6)
    batch = Batch({"x": x, "attention_mask": torch.ones(4, 5)})
    for keep in (8, 9):  # two tokens a sample on average, and a number that does not divide
        A, B = Routed(6, keep), Routed(6, keep)
        moved = fit(A, B, Calibration([(batch, batch)]), squares).apply(TaskVector.between(A, tuned(A)))
        assert set(moved.deltas) == {"start.weight", "start.bias"}
        assert moved.coverage.kept()["expert.weight"] == UNREACHED  # type: ignore[union-attr]


class Grouped(nn.Module):
    """Two inner layers of one role in every block."""

    def __init__(self, d: int) -> None:
        super().__init__()
        inner = [nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(d, d), nn.Linear(d, d)])}) for _ in range(2)]
        self.blocks = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for layer in block["inner"]:  # type: ignore[index]
                x = x + torch.tanh(layer(x))
        return x


def test_inner_layers_keep_their_order() -> None:
    pairs, unpaired = pair_sites(find_sites(Grouped(6)), find_sites(Grouped(8)))
    assert not unpaired
    assert all(pair.source.name == pair.target.name for pair in pairs)


def test_wrappers_do_not_hide_heads() -> None:
    wrapped = nn.ModuleDict({"module": TINY["llama"].model(16, 1, 0)})
    wrapped.config = wrapped["module"].config  # type: ignore[assignment]
    head = next(site for site in find_sites(wrapped) if site.name.endswith("lm_head"))
    assert head.fixed is not None


def test_multi_query_attention_is_not_cut_in_thirds() -> None:
    model = hf("GPTBigCodeForCausalLM", 24, 1, n_embd=24, n_head=4, n_layer=1, vocab_size=40)
    packed = [site for site in find_sites(model) if "c_attn" in site.name]
    assert [site.rows for site in packed] == [None]
    phi = hf("Phi3ForCausalLM", 16, 1, vocab_size=40, num_key_value_heads=2, pad_token_id=0)
    assert {s.role: s.rows for s in find_sites(phi) if s.block is not None} == {
        "attn.q": (0, 16), "attn.k": (16, 24), "attn.v": (24, 32), "attn.o": None,
        "mlp.gate": (0, 32), "mlp.up": (32, 64), "mlp.down": None,
    }  # fmt: skip


def test_a_half_precision_lora_does_not_round_the_target() -> None:
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    half = LowRank(torch.randn(4, 2, dtype=torch.bfloat16), torch.randn(2, 4, dtype=torch.bfloat16))
    TaskVector({"weight": half}).add_to(layer, scale=0.0)
    assert torch.equal(layer.weight, before)


def test_tied_weights_in_state_dictionaries_change_once() -> None:
    model = TINY["gpt2"].model(16, 1, 0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.transformer.wte.weight.add_(0.1)
    start = model.transformer.wte.weight.detach().clone()
    tau = TaskVector.between(model.state_dict(), other.state_dict())
    assert list(tau.deltas) == ["transformer.wte.weight"]
    both = TaskVector({**tau.deltas, "lm_head.weight": tau.deltas["transformer.wte.weight"]})
    both.add_to(model)
    assert torch.allclose(model.transformer.wte.weight, start + 0.1)


def test_a_change_below_the_base_s_precision_is_kept() -> None:
    base = {"w": torch.ones(4, dtype=torch.bfloat16)}
    tau = TaskVector.between(base, {"w": torch.full((4,), 1.0007)})
    assert torch.allclose(tau.deltas["w"], torch.full((4,), 0.0007), atol=1e-6)


def test_a_refused_change_leaves_the_model_alone() -> None:
    layer = nn.Linear(3, 3)
    before = layer.weight.detach().clone()
    with pytest.raises(TaskferryError, match="a change of shape"):
        TaskVector({"weight": torch.ones(3, 3), "bias": torch.ones(4)}).add_to(layer)
    assert torch.equal(layer.weight, before)


def test_models_of_two_precisions_and_a_partial_rule() -> None:
    A, B = Residual(7, False), Residual(9, False).double()
    single, exact = (Batch({"x": sequences().pairs[0][0].inputs["x"].to(t)}) for t in (torch.float32, torch.float64))
    with torch.inference_mode():
        alignment = fit(A, B, Calibration([(single, exact)]), squares, depth_rule=partial(nearest_block))
    assert alignment.R_in["start"].dense().dtype == torch.float64


def test_not_finite_rows_name_the_site() -> None:
    A = Residual(7, False).double()
    with torch.no_grad():
        A.layers[1].weight.fill_(torch.inf)

    def finite(model: nn.Module, batch: Batch) -> Tensor:
        return torch.nan_to_num(model(**batch.inputs), nan=0.0, posinf=1.0, neginf=-1.0).square().sum()

    with pytest.raises(TaskferryError, match=r"(start|layers\.\d): activations or gradients are not finite"):
        fit(A, Residual(9, False).double(), sequences(), finite)


def test_statistics_of_two_groups_never_exist_together() -> None:
    import gc
    import weakref

    from taskferry.capture import collect

    alive: list[weakref.ref] = []

    def watched(*arguments, **more):
        gc.collect()
        assert all(reference() is None for reference in alive)
        statistics = collect(*arguments, **more)
        alive.append(weakref.ref(next(iter(statistics.inputs.values()))))
        return statistics

    A = Residual(7, False).double()
    assert isinstance(fit(A, A, sequences(), squares, statistics_memory=1, capture=watched), Alignment)
    assert len(alive) == 4
