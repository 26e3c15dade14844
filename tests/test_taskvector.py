"""Arithmetic, names, files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from taskferry import LowRank, TaskferryError, TaskVector
from taskferry.taskvector import LazyDeltas, match_names
from tests.helpers.tiny import TINY, tuned


def low(seed: int = 0) -> LowRank:
    g = torch.Generator().manual_seed(seed)
    return LowRank(torch.randn(5, 2, generator=g), torch.randn(2, 4, generator=g))


def test_arithmetic_of_dense_and_low_rank() -> None:
    a, b = TaskVector({"w": low(0), "b": torch.ones(3)}), TaskVector({"w": low(1), "c": torch.ones(2)})
    total = 2 * a - b
    assert isinstance(total.deltas["w"], LowRank)
    assert total.deltas["w"].rank == 4
    assert torch.allclose(total.deltas["w"].dense(), 2 * low(0).dense() - low(1).dense(), atol=1e-6)
    assert torch.equal(total.deltas["b"], torch.full((3,), 2.0))
    assert torch.equal(total.deltas["c"], torch.full((2,), -1.0))
    mixed = a + TaskVector({"w": torch.ones(5, 4)})
    assert torch.allclose(mixed.deltas["w"], low(0).dense() + 1)
    assert a.norm() == pytest.approx(a.dense().norm(), rel=1e-6)
    assert (a - a).norm() == pytest.approx(0, abs=1e-6)
    assert (-a).norm() == pytest.approx(a.norm())
    with pytest.raises(TaskferryError, match=r"w.*\(5, 4\).*\(4, 5\)"):
        a + TaskVector({"w": low().T})


def test_a_multiple_keeps_the_form_and_leaves_the_original() -> None:
    tau = TaskVector({"w": low(), "b": torch.ones(3)})
    scaled = tau * -2.0
    assert isinstance(scaled.deltas["w"], LowRank)
    assert torch.allclose(scaled.deltas["w"].dense(), -2 * low().dense())
    assert torch.equal(scaled.deltas["b"], torch.full((3,), -2.0))
    assert torch.equal(tau.deltas["b"], torch.ones(3))


class Counted(LazyDeltas):
    """Changes that write down when they are read."""

    def __init__(self, deltas: dict[str, torch.Tensor]) -> None:
        self.deltas, self.read = deltas, []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.deltas[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.deltas)

    def __len__(self) -> int:
        return len(self.deltas)


def test_changes_on_disk_are_read_when_they_are_asked_for() -> None:
    lazy = Counted({"w": torch.ones(2, 2), "b": torch.ones(3), "same": torch.zeros(4)})
    tau = 3.0 * (TaskVector(lazy) * 2.0)
    assert len(tau) == 3
    assert not tau.low_rank
    assert lazy.read == []
    assert torch.equal(tau.deltas["w"], torch.full((2, 2), 6.0))
    assert lazy.read == ["w"]
    some = tau.take(["b", "same", "absent"])
    assert list(some.deltas) == ["b"]  # in memory, and without what does not change
    assert torch.equal(some.deltas["b"], torch.full((3,), 6.0))
    assert sorted(lazy.read) == ["b", "same", "w"]
    assert len(some) == 1
    assert sorted(lazy.read) == ["b", "same", "w"]


def test_some_changes() -> None:
    tau = TaskVector({"w": low(), "b": torch.ones(3), "z": torch.zeros(2)})
    assert list(tau.take(["z", "b", "w"]).deltas) == ["b", "w"]
    assert tau.take([]).norm() == 0


def test_changes_meet_the_parameters_of_a_model() -> None:
    """By the names of the task vector, each parameter once."""
    model = TINY["gpt2"].model(16, 1, 0)
    name = "h.0.mlp.c_fc.weight"
    tied = torch.zeros_like(model.lm_head.weight)
    deltas = {name: torch.ones_like(model.transformer.h[0].mlp.c_fc.weight), "lm_head.weight": tied}
    met = TaskVector({**deltas, "transformer.wte.weight": tied}).on(model)
    assert [(given, id(parameter)) for given, parameter, _ in met] == [
        (name, id(model.transformer.h[0].mlp.c_fc.weight)),
        ("lm_head.weight", id(model.lm_head.weight)),
    ]
    assert met[0][2] is deltas[name]


def test_between_and_add_to_are_inverse() -> None:
    tiny = TINY["gpt2"]
    base = tiny.model(16, 2, 0)
    target = tuned(base)
    tau = TaskVector.between(dict(base.named_parameters()), target)
    tau.add_to(base)
    assert all(torch.allclose(p, target[name], atol=1e-6) for name, p in base.named_parameters())
    assert base.lm_head.weight is base.transformer.wte.weight  # still tied


def test_half_precision_is_subtracted_in_float32_and_keeps_its_type() -> None:
    base, after = nn.Linear(3, 3).to(torch.bfloat16), nn.Linear(3, 3).to(torch.bfloat16)
    tau = TaskVector.between(base, after)
    assert all(delta.dtype == torch.float32 for delta in tau.deltas.values())
    tau.add_to(base)
    assert base.weight.dtype == torch.bfloat16
    assert torch.equal(base.weight, after.weight)


def test_unchanged_parameters_are_left_out() -> None:
    base = nn.Linear(3, 3)
    after = {"weight": base.weight.detach() + 1, "bias": base.bias.detach()}
    assert list(TaskVector.between(base, after).deltas) == ["weight"]


def test_another_base_is_refused() -> None:
    with pytest.raises(TaskferryError, match=r"weight is \(3, 3\) in the base and \(4, 3\)"):
        TaskVector.between(nn.Linear(3, 3), nn.Linear(3, 4))
    with pytest.raises(TaskferryError, match=r"differ in 1 parameters \(bias"):
        TaskVector.between(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    with pytest.raises(TaskferryError, match="a change of shape"):
        TaskVector({"weight": torch.ones(2, 2)}).add_to(nn.Linear(3, 3))


def test_save_and_load(tmp_path: Path) -> None:
    shared = torch.randn(2, 4)
    tau = TaskVector({"w": low(), "v": LowRank(torch.randn(3, 2), shared), "u": LowRank(torch.randn(3, 2), shared),
                      "b": torch.randn(6)[::2]})  # fmt: skip
    tau.save(tmp_path / "deep" / "tau.safetensors")
    again = TaskVector.load(tmp_path / "deep" / "tau.safetensors")
    assert again.deltas.keys() == tau.deltas.keys()
    for name, delta in tau.deltas.items():
        other = again.deltas[name]
        assert isinstance(other, LowRank) == isinstance(delta, LowRank)
        one, two = (d.dense() if isinstance(d, LowRank) else d for d in (delta, other))
        assert torch.equal(one, two)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["tau.safetensors"]  # nothing half-written


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(TaskferryError, match="is no taskferry task vector"):
        TaskVector.load(tmp_path / "other.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"\x80\x04junk")
    with pytest.raises(TaskferryError, match="no readable safetensors file"):
        TaskVector.load(tmp_path / "junk.safetensors")
    with pytest.raises(TaskferryError, match="does not exist"):
        TaskVector.load(tmp_path / "absent.safetensors")


def test_names_with_and_without_a_prefix() -> None:
    known = ["bert.encoder.layer.0.w", "bert.encoder.layer.1.w", "classifier.w"]
    assert match_names(["encoder.layer.1.w"], known) == {"encoder.layer.1.w": "bert.encoder.layer.1.w"}
    assert match_names(["model.classifier.w"], known) == {"model.classifier.w": "classifier.w"}
    with pytest.raises(TaskferryError, match="not a parameter here"):
        match_names(["encoder.layer.2.w"], known)
    with pytest.raises(TaskferryError, match="ambiguous"):
        match_names(["layer.0.w"], ["a.layer.0.w", "b.layer.0.w"])


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
