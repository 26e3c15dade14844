"""The measurements of the figures against their definitions, on rows and on models with a planted answer."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from taskferry import Batch, Calibration, FineTuning, TaskferryError, TaskVector, finetune, fit
from taskferry.analysis import Moments, Trajectory, agreement, isometries, output_similarity, similarity, transfer_cost
from taskferry.analysis.cost import Matrix
from taskferry.analysis.outputs import AS_IT_IS
from taskferry.analysis.similarity import by_block
from taskferry.linalg.procrustes import Map
from taskferry.objectives.objectives import NewHead, Prototypes
from tests.helpers.tiny import TINY, tuned

PLAIN = TINY["plain"]


def rows(n: int, d: int, seed: int, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) @ mix + mean


def rotation(d_A: int, d_B: int, seed: int) -> Tensor:
    """Orthonormal rows (d_A ≤ d_B)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d_B, d_A, generator=generator, dtype=torch.float64))[0].T


def dense_cka(X: Tensor, Y: Tensor) -> float:
    """By the M × M kernels of its definition: HSIC(K, L) / √(HSIC(K, K) HSIC(L, L))."""
    n = X.shape[0]
    H = torch.eye(n, dtype=X.dtype) - 1 / n
    K, L = X @ X.T, Y @ Y.T

    def hsic(P: Tensor, Q: Tensor) -> Tensor:
        return (P @ H @ Q @ H).trace()

    return float(hsic(K, L) / (hsic(K, K) * hsic(L, L)).sqrt())


def streamed(X: Tensor, Y: Tensor, parts: int) -> Moments:
    moments = None
    for A, B in zip(X.tensor_split(parts), Y.tensor_split(parts), strict=True):
        found = Moments.of(A, B)
        if moments is None:
            moments = found
        else:
            moments.merge(found)
    assert moments is not None
    return moments


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(4, 40), d_A=st.integers(1, 9), d_B=st.integers(1, 9), parts=st.integers(1, 4),
    seed=st.integers(0, 10_000), mean=st.sampled_from([0.0, 3.0, 1e4]),
)  # fmt: skip
def test_streaming_cka_is_the_dense_formula(n: int, d_A: int, d_B: int, parts: int, seed: int, mean: float) -> None:
    X, Y = rows(n, d_A, seed, mean), rows(n, d_B, seed + 1)
    Y = Y + X[:, :1]
    centred = X - X.mean(0)  # the definition itself loses its digits to a mean of 1e4
    assert streamed(X, Y, parts).cka() == pytest.approx(dense_cka(centred, Y - Y.mean(0)), abs=1e-9)


def test_a_large_mean_costs_single_precision_nothing() -> None:
    X, Y = rows(300, 6, 0), rows(300, 5, 1)
    Y[:, 0] += X[:, 0]
    assert streamed((X + 1000).float(), Y.float(), 3).cka() == pytest.approx(streamed(X, Y, 1).cka(), abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(d=st.integers(2, 8), wider=st.integers(0, 5), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 10_000))
def test_cka_sees_no_rotation_scale_or_shift(d: int, wider: int, scale: float, seed: int) -> None:
    X = rows(30, d, seed)
    turned = scale * X @ rotation(d, d + wider, seed) + 5.0
    assert streamed(X, turned, 2).cka() == pytest.approx(1.0, abs=1e-9)
    Y = rows(30, 4, seed + 7)
    assert streamed(turned, Y, 2).cka() == pytest.approx(streamed(X, Y, 3).cka(), abs=1e-9)
    assert streamed(X, Y, 2).cka() < 0.999


def test_cka_after_a_map_is_that_of_the_mapped_rows() -> None:
    X, Y = rows(40, 5, 0), rows(40, 7, 1)
    R = rotation(5, 7, 2)
    R[0] = 0  # a direction that the map does not know
    assert streamed(X, Y, 3).cka(Map(R=R)) == pytest.approx(dense_cka(X @ R, Y), abs=1e-9)


class Turned(nn.Module):
    """A plain model in other coordinates: the same function of the same inputs, every width rotated."""

    def __init__(self, inner: nn.Linear, outer: nn.Linear, Q: Tensor, P: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, P.shape[1]), nn.Linear(P.shape[1], Q.shape[1])]).double()
        with torch.no_grad():
            self.layers[0].weight.copy_(P.T @ inner.weight)
            self.layers[0].bias.copy_(P.T @ inner.bias)
            self.layers[1].weight.copy_(Q.T @ outer.weight @ P)
            self.layers[1].bias.copy_(Q.T @ outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


def turned_pair(wider: int) -> tuple[nn.Module, nn.Module, Calibration]:
    torch.manual_seed(0)
    inner, outer = nn.Linear(10, 6).double(), nn.Linear(6, 4).double()
    A = Turned(inner, outer, torch.eye(4).double(), torch.eye(6).double())
    B = Turned(inner, outer, rotation(4, 4 + wider, 1), rotation(6, 6 + wider, 2))
    x = torch.randn(24, 3, 10, dtype=torch.float64)
    batches = [Batch({"x": x[i : i + 8]}, torch.arange(8) % 3, tuple(range(i, i + 8))) for i in (0, 8, 16)]
    return A, B, Calibration([(b, b) for b in batches])


@pytest.mark.parametrize("wider", [0, 3])
def test_a_planted_rotation_is_undone(wider: int) -> None:
    A, B, calibration = turned_pair(wider)
    alignment = fit(A, B, calibration, Prototypes())
    found = similarity(A, B, alignment, calibration, (Prototypes(), Prototypes()))
    assert {(row.side, row.site) for row in found} == {(s, f"layers.{i}") for s in ("in", "out") for i in (0, 1)}
    for row in found:
        assert row.cosine_after == pytest.approx(1.0, abs=1e-6), row
        assert row.cka == pytest.approx(1.0, abs=1e-6), row
        assert row.norms_kept == pytest.approx(1.0, abs=1e-6), row
        assert row.angles_error < 1e-6, row
        assert (row.cosine is None) == (row.widths[0] != row.widths[1])
    turned = [row for row in found if (row.side, row.site) != ("in", "layers.0")]  # both models read the same data
    if not wider:
        assert all(row.cosine is not None and abs(row.cosine) < 0.9 for row in turned)
    (first, second) = by_block(found, "cosine_after").items()
    assert first[0] == ("layers", 0)
    assert second[1] == pytest.approx(1.0, abs=1e-6)


def test_what_a_map_forgets_is_measured() -> None:
    """Half of the directions cut from every map: lengths and angles of the tokens are lost by what lay there."""
    A, B, calibration = turned_pair(0)
    alignment = fit(A, B, calibration, Prototypes())
    R = alignment.R_in["layers.1"].dense().clone()
    P = torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=torch.float64))
    alignment.R_in["layers.1"] = Map(R=P @ R)  # type: ignore[index]
    (row,) = [r for r in similarity(A, B, alignment, calibration, (Prototypes(), Prototypes()))
              if (r.side, r.site) == ("in", "layers.1")]  # fmt: skip
    X = torch.cat([A.layers[0](b.inputs["x"]).flatten(0, 1) for b in calibration.side(0)]).detach()  # type: ignore[index]
    assert row.norms_kept == pytest.approx(float((X @ P).square().sum() / X.square().sum()), rel=1e-9)
    error = torch.linalg.norm(X @ P @ X.T - X @ X.T) / torch.linalg.norm(X @ X.T)
    assert row.angles_error == pytest.approx(float(error), rel=1e-9)
    (cut,) = [r for r in isometries(alignment) if (r.side, r.site) == ("in", "layers.1")]
    assert (cut.rank, cut.whole) == (3, False)
    assert cut.error < 1e-9  # still a partial isometry
    alignment.R_in["layers.1"] = Map(R=1.1 * R)  # type: ignore[index]
    (stretched,) = [r for r in isometries(alignment) if (r.side, r.site) == ("in", "layers.1")]
    assert stretched.error == pytest.approx(0.21, abs=1e-6)


def test_agreement_is_that_of_the_definitions() -> None:
    A, _, calibration = turned_pair(0)
    B = copy.deepcopy(A)
    with torch.no_grad():
        B.layers[0].weight.mul_(2)  # type: ignore[index]
        B.layers[0].bias.mul_(2)  # type: ignore[index]
    batches = calibration.side(0)
    first, second = agreement(A, B, batches)
    assert (first.inputs.direction, first.inputs.magnitude) == (pytest.approx(0, abs=1e-12), 0)
    assert first.outputs.direction == pytest.approx(0, abs=1e-12)
    assert first.outputs.magnitude == pytest.approx(1.0)
    assert second.inputs.magnitude == pytest.approx(1.0)
    x = torch.cat([b.inputs["x"] for b in batches])
    with torch.no_grad():
        y, z = A(x).flatten(0, 1), B(x).flatten(0, 1)
    cosine = torch.nn.functional.cosine_similarity(y, z).mean()
    assert second.outputs.direction == pytest.approx(1 - float(cosine), abs=1e-12)
    assert second.outputs.direction > 0.001


def test_other_architectures_are_refused() -> None:
    A, B, calibration = turned_pair(2)
    with pytest.raises(TaskferryError, match="one architecture"):
        agreement(A, B, calibration.side(0))


def test_the_targets_own_change_reaches_the_tuned_target_and_leaves_it_as_it_was() -> None:
    model, calibration = PLAIN.model(16, 3, 0), PLAIN.calibration()
    after = tuned(model, size=0.2)
    oracle = copy.deepcopy(model)
    oracle.load_state_dict(after)
    tau = TaskVector.between(dict(model.named_parameters()), after)
    before = {name: p.clone() for name, p in model.named_parameters()}
    curves = output_similarity(model, oracle, calibration.side(1), {"all": tau, "half": 0.5 * tau, "wrong": -tau})
    assert set(curves["all"]) > {("layers", 0), ("layers", 2), ("attention.out_proj", None)}
    for place in curves["all"]:
        assert curves["all"][place] == pytest.approx(1.0, abs=1e-5)
        assert curves["all"][place] > curves["half"][place] > curves[AS_IT_IS][place] > curves["wrong"][place]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Samples:
    def __init__(self, batch: Batch) -> None:
        self.all = batch

    def __len__(self) -> int:
        return len(self.all)

    def batch(self, indices: list[int]) -> Batch:
        return self.all.take(indices)


def test_a_trajectory_follows_a_run_and_does_not_disturb_it() -> None:
    samples = Samples(PLAIN.batch(0, 40))
    protocol = FineTuning(steps=6, batch=8, learning_rate=0.01, warmup=0, every=3)
    alone, followed = PLAIN.model(16, 2, 0), PLAIN.model(16, 2, 0)
    finetune(alone, samples, NewHead(3), protocol)
    trajectory = Trajectory(followed, PLAIN.calibration().side(0))
    trajectory.measure(followed, 0)
    finetune(followed, samples, NewHead(3), protocol, progress=trajectory.follow(followed, every=4))
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), followed.parameters(), strict=True))
    assert list(trajectory.measurements) == [0, 4, 6]
    assert all(shift.direction < 1e-6 and shift.magnitude < 1e-6 for shift in trajectory.measurements[0].values())
    last = list(trajectory.measurements[6].values())
    assert last[-1].direction > last[0].direction > 0  # deeper blocks see all that changed before them
    assert {(r["step"], r["block"]) for r in trajectory.to_json()} == {(s, b) for s in (0, 4, 6) for b in (0, 1)}


def test_the_cost_is_that_of_a_count_by_hand() -> None:
    # One matrix [4, 2] to [6, 3]; the input map has seen 10 tokens, the output map 5; 100 samples of 2 and 3 tokens.
    cost = transfer_cost(
        (8, 18), [Matrix((4, 2), (6, 3), (10, 5))], tokens=(200, 300), samples=100, steps=2000, batch=128
    )
    assert cost.passes == 6 * (8 * 200 + 18 * 300)
    assert cost.covariances == 2 * 10 * 2 * 3 + 2 * 5 * 4 * 6
    assert cost.decompositions == 2 * 2 * 3 + 4 * 4 * 6
    assert cost.applying == 2 * (4 * 2 * 3) + 2 * (4 * 3 * 6)  # [4, 2] @ [2, 3], then [6, 4] @ [4, 3]
    assert cost.align == 360 + 108 + 192
    assert cost.finetune == 2000 * (6 * 18 * 128 * 3 + 10 * 18)
    assert cost.paper_ratio == pytest.approx(32_000 * 18 / (6 * 8 + 6 * 18))
    same = transfer_cost((7, 7), [], tokens=(1, 1), samples=1)
    assert same.paper_ratio == pytest.approx(32_000 / 12)  # P_A = P_B: 12 P against 32,000 P
