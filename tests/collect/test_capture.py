"""Models that write in place, reuse, tie or route: the same rows, or a reason in the coverage."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from taskferry import Batch, Calibration, TaskferryError, TaskVector, fit
from taskferry.collect.maps import UNREACHED
from taskferry.collect.recorder import Recorder
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import nearest_block
from tests.helpers.tiny import TINY, double, relative, tuned


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


class SequenceFirst(nn.Module):
    """Layers on [L, n, d], as fairseq's and Longformer's queries are, between layers on [n, L, d]."""

    def __init__(self, d: int, turned: bool = True) -> None:
        super().__init__()
        torch.manual_seed(d)
        self.start, self.turned = nn.Linear(6, d), turned
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(3))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.start(x)
        seen = torch.ones(x.shape[:2], dtype=x.dtype) if attention_mask is None else attention_mask.to(x)
        for i, layer in enumerate(self.layers):
            x = x + (seen[..., None] * x).cumsum(1) / x.shape[1]  # tokens of a sample meet
            turn = self.turned and i != 1
            x = x + torch.tanh(layer(x.transpose(0, 1)).transpose(0, 1) if turn else layer(x))
        return x * seen[..., None]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("turned", [(True, False), (False, True), (True, True)])
def test_as_many_samples_as_tokens_on_any_layout(turned: tuple[bool, bool], masked: bool) -> None:
    """A layer on [L, n, d] is known by it from one sample, so 5 samples of 5 tokens are not mixed up."""
    A, B = SequenceFirst(7, turned[0]).double(), SequenceFirst(9, turned[1]).double()
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    whole = {"x": sequences(15).pairs[0][0].inputs["x"]}
    if masked:
        whole["attention_mask"] = (torch.arange(5) <= torch.arange(15)[:, None] % 5).long()

    def moved(micro_batch: int) -> TaskVector:
        cut = [Batch({k: v[i : i + micro_batch] for k, v in whole.items()}) for i in range(0, 15, micro_batch)]
        return fit(A, B, Calibration((b, b) for b in cut), squares).apply(tau)

    expected, other = moved(3), moved(5)
    assert all(relative(other.deltas[n], d) < 1e-9 for n, d in expected.deltas.items())
    assert all(relative(moved(15).deltas[n], d) < 1e-9 for n, d in expected.deltas.items())


def test_one_sample_is_looked_at_only_where_the_layout_is_in_doubt() -> None:
    """A family that knows its length tells that no micro-batch is as long."""
    seen: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        seen.append(len(batch))
        return squares(model, batch)

    A = SequenceFirst(7).double()
    for length, expected in ((5, [4, 4]), (4, [1, 1, 4, 4])):
        x = sequences(4, length).pairs[0][0].inputs["x"]
        batch = Batch({"x": x, "attention_mask": torch.ones(4, length)})
        seen.clear()
        fit(A, A, Calibration([(batch, batch)]), loss)
        assert seen == expected


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
