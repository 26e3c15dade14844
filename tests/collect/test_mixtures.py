"""Experts of a mixture: seen one by one, matched by what they do, moved to where their partner stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from taskferry import Alignment, Calibration, LanguageModel, TaskVector, fit
from taskferry.collect.capture import Side, watch
from taskferry.layers.discovery import find_sites
from taskferry.layers.routed import Routed, paired_rows
from taskferry.layers.tokens import TokenMatch
from taskferry.linalg.assignment import assign
from taskferry.methods import Job, run
from tests.helpers.mixtures import Planted, flat_norms, mixture
from tests.helpers.tiny import TINY, VOCABULARY, hf, relative, tuned

CLASSES = ("Mixtral", "Qwen3Moe", "Qwen2Moe", "Olmoe", "DeepseekV3", "GptOss")


def change(model: nn.Module) -> TaskVector:
    return TaskVector.between(dict(model.named_parameters()), tuned(model))


def samples(count: int = 24) -> Calibration:
    return TINY["llama"].calibration(count, 8)


@pytest.mark.parametrize("name", CLASSES)
def test_rows_and_gradients_of_every_expert(name: str) -> None:
    """What the recorder sees gives the gradient of the weights that autograd has, and leaves the loss as it is."""
    model = mixture(name).double()
    batch = samples(8).pairs[0][0]
    loss = LanguageModel().bind(model, [batch])
    model.requires_grad_(False)
    experts = [site for site in find_sites(model) if site.expert is not None]
    weights = {site.weight for site in experts}
    for weight in weights:
        model.get_parameter(weight).requires_grad_(True)
    plain = loss(batch)
    plain.backward()
    expected = {weight: model.get_parameter(weight).grad for weight in weights}
    model.requires_grad_(False)

    inputs, found = {}, {name: torch.zeros_like(g) for name, g in expected.items()}

    def gradient(call, g):
        x = inputs[call.site.name]
        rows = x.rows if isinstance(x, Routed) else x.reshape(-1, x.shape[-1])[g.tokens]
        call.site.read(found[call.site.weight]).add_(g.rows.T @ rows)

    value = watch(
        Side(model, loss), batch, experts, lambda call, x, y: inputs.update({call.site.name: x}), gradient,
        Side(model, loss).family.layouts(model, batch),
    )  # fmt: skip
    value.backward()
    assert torch.allclose(value, plain, rtol=1e-6)
    assert weights
    assert all(relative(found[name], expected[name]) < 1e-5 for name in weights)
    assert not any("forward" in vars(module) for module in model.modules())  # as it was


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_permuted_and_rotated_experts_are_recovered(name: str) -> None:
    """Planted truth: the moved change is the change, in the other order and bases; the router's too."""
    A = flat_norms(mixture(name)).double()
    planted = Planted(A, seed=3)
    B = planted.model(A)
    alignment = fit(A, B, samples(64), LanguageModel())
    tau = change(A)
    moved, truth = alignment.apply(tau), planted.tau(tau)
    assert [list(order) for order in planted.experts] != [list(range(4))] * 2
    assert {k: v["source"] for k, v in alignment.provenance["experts"].items()} == {
        f"blocks.{i}": order.tolist() for i, order in enumerate(planted.experts)
    }
    of_mlps = [n for n in moved.deltas if ".mlp." in n]
    assert len(of_mlps) == 6
    assert all(relative(moved.deltas[n], truth.deltas[n]) < 1e-5 for n in of_mlps)
    assert all(moved.coverage[n].status == "moved" for n in of_mlps)

    kept = [n for n, row in ((row.parameter, row) for row in moved.coverage) if row.status == "kept" and not row.reason]
    assert not kept
    in_order = replace(alignment, pairs=tuple(replace(p, source=_same_number(p)) for p in alignment.pairs))
    assert relative(in_order.apply(tau).deltas[of_mlps[1]], truth.deltas[of_mlps[1]]) > 0.5  # matching matters


def _same_number(pair):
    return pair.source if pair.source.expert is None else replace(pair.source, expert=pair.target.expert)


def test_the_default_method_and_a_file(tmp_path) -> None:
    A = flat_norms(mixture()).double()
    planted = Planted(A, seed=5)
    tau = change(A)
    moved = run("twofold", Job.of(A, planted.model(A), tau, samples(48), LanguageModel()))
    truth = planted.tau(tau)
    name = "model.layers.1.mlp.experts.down_proj"
    direction = torch.nn.functional.cosine_similarity(*(t.deltas[name].flatten() for t in (moved.tau, truth)), dim=0)
    assert direction > 0.99
    moved.alignment.save(tmp_path / "x.alignment")
    again = Alignment.load(tmp_path / "x.alignment").apply(tau)
    assert all(torch.equal(again.deltas[n], moved.alignment.apply(tau).deltas[n]) for n in again.deltas)


@pytest.mark.parametrize("name", CLASSES)
def test_every_parameter_of_experts_moves_or_has_its_reason(name: str) -> None:
    A, B = mixture(name, width=16), mixture(name, width=32, depth=3, seed=1)
    moved = fit(A, B, samples(), LanguageModel()).apply(change(A))
    rows = [row for row in moved.coverage if ".experts." in row.parameter]
    assert rows
    assert all(row.status == "moved" or row.reason for row in rows)
    assert {row.status for row in rows} <= {"moved", "partly"}
    for row in rows:
        assert moved.deltas[row.parameter].shape == dict(B.named_parameters())[row.parameter].shape


def test_an_expert_that_no_token_reaches_stays_and_is_named() -> None:
    A = flat_norms(mixture()).double()
    with torch.no_grad():  # the first expert of the last block is never chosen
        A.get_parameter("model.layers.1.mlp.gate.weight")[0] = 0
        A.model.layers[1].mlp.gate.forward = _never_first(A.model.layers[1].mlp.gate)
    B = Planted(A, seed=3).model(A)
    B.model.layers[1].mlp.gate.forward = _never_first(B.model.layers[1].mlp.gate)
    moved = fit(A, B, samples(64), LanguageModel()).apply(change(A))
    row = moved.coverage["model.layers.1.mlp.experts.gate_up_proj"]
    assert row.status == "partly"
    assert row.reason.startswith("experts 0: the calibration pass does not reach it")
    assert not moved.deltas[row.parameter][0].any()
    assert moved.deltas[row.parameter][1:].flatten(1).any(1).all()


def _never_first(router):
    def forward(hidden):
        logits = nn.functional.linear(hidden, router.weight)
        logits = torch.cat([torch.full_like(logits[:, :1], -1e9), logits[:, 1:]], 1)
        value, index = logits.softmax(-1).topk(2)
        return logits, value / value.sum(-1, keepdim=True), index

    return forward


def test_other_numbers_of_experts_take_the_nearest() -> None:
    A, B = mixture(), mixture(seed=1, experts=6)
    alignment = fit(A, B, samples(), LanguageModel())
    facts = alignment.provenance["experts"]["blocks.0"]
    assert "nearest of 4 for each of 6" in facts["why"]
    assert len(facts["source"]) == 6
    moved = alignment.apply(change(A))
    assert moved.coverage["model.layers.0.mlp.experts.down_proj"].status == "moved"
    back = fit(B, A, samples(), LanguageModel())
    left = set(range(6)) - set(back.provenance["experts"]["blocks.0"]["source"])
    unused = back.apply(change(B)).coverage.unused
    assert left
    assert all(unused[f"model.layers.0.mlp.experts.down_proj#{e}"].startswith("no expert") for e in left)


def test_common_tokens_of_two_experts() -> None:
    A = Routed(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 3, 4]), torch.ones(3), 2, 3)
    B = Routed(torch.tensor([[5.0], [6.0]]), torch.tensor([4, 0]), torch.ones(2), 2, 3)
    assert [x.tolist() for x in paired_rows(TokenMatch(), A, B)] == [[[1.0], [3.0]], [[6.0], [5.0]]]
    kept = TokenMatch(keep=torch.tensor([[True, True, True], [False, False, True]]))
    assert [x.tolist() for x in paired_rows(kept, A, B)] == [[[1.0]], [[6.0]]]
    every = torch.arange(6.0).view(2, 3, 1)
    assert [x.tolist() for x in paired_rows(TokenMatch(), every, B)] == [[[0.0], [4.0]], [[6.0], [5.0]]]
    # Two tokens of the source are one of the target: the mean of those that reach the expert.
    halves = TokenMatch(weights=torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
    assert [x.tolist() for x in paired_rows(halves, A, B)] == [[[1.0]], [[6.0]]]


def test_assignment() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    for seed in range(30):
        gain = torch.randn(7, 7, generator=torch.Generator().manual_seed(seed))
        assert assign(gain) == optimize.linear_sum_assignment(gain.numpy(), maximize=True)[1].tolist()
    with pytest.raises(ValueError, match="square"):
        assign(torch.zeros(2, 3))


def dense() -> nn.Module:
    """Built like the mixture, with one MLP in the place of its experts."""
    torch.manual_seed(1)
    config = mixture().config
    sizes = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "initializer_range": 0.3,
             "rms_norm_eps": config.rms_norm_eps, "rope_parameters": config.rope_parameters}  # fmt: skip
    return hf("LlamaForCausalLM", 16, 2, **sizes, intermediate_size=12).eval()


def as_mixture(B: nn.Module) -> nn.Module:
    """The same function with four experts, all of them the MLP that it had."""
    A = flat_norms(mixture()).double()
    state = A.state_dict()
    for name, value in B.state_dict().items():
        if ".mlp." not in name:
            state[name] = value
    for layer in range(2):
        gate, up, down = (B.get_parameter(f"model.layers.{layer}.mlp.{x}_proj.weight") for x in ("gate", "up", "down"))
        state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up]).expand(4, -1, -1)
        state[f"model.layers.{layer}.mlp.experts.down_proj"] = down.expand(4, -1, -1)
    A.load_state_dict(state)
    return A


def test_a_plain_mlp_gives_its_change_to_every_expert() -> None:
    A = flat_norms(dense()).double()
    B = as_mixture(A)
    tau = change(A)
    alignment = fit(A, B, samples(64), LanguageModel())
    moved = alignment.apply(tau)
    assert alignment.provenance["experts"]["blocks.0"]["why"] == "one change for all experts"
    gate, up, down = (tau.deltas[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
    for e in range(4):
        assert relative(moved.deltas["model.layers.0.mlp.experts.gate_up_proj"][e], torch.cat([gate, up])) < 1e-4
        assert relative(moved.deltas["model.layers.0.mlp.experts.down_proj"][e], down) < 1e-4
    assert moved.coverage["model.layers.0.mlp.gate.weight"].reason == "the source has no 'router' to take it from"


def test_experts_give_a_plain_mlp_their_mean_by_tokens() -> None:
    B = flat_norms(dense()).double()
    A = as_mixture(B)
    tau = change(A)
    alignment = fit(A, B, samples(64), LanguageModel())
    moved = alignment.apply(tau)
    shares = torch.tensor(alignment.provenance["experts"]["blocks.0"]["shares"], dtype=torch.float64)
    assert abs(float(shares.sum()) - 1) < 1e-3
    assert shares.max() - shares.min() > 0.01
    whole = tau.dense().deltas["model.layers.0.mlp.experts.down_proj"]
    name = "model.layers.0.mlp.down_proj.weight"
    assert relative(moved.dense().deltas[name], torch.einsum("e,eoi->oi", shares, whole)) < 1e-3
    assert moved.coverage[name].status == "moved"
