"""The pretended devices are as strict as real ones: what the other tests of this folder rest on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.devices import pretend


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x)))


@pytest.mark.parametrize("device", ["pretend", "pretend:0", "pretend:1"])
def test_the_arithmetic_is_that_of_the_cpu(device: str) -> None:
    model, x = Tied(), torch.randn(3, 4)
    there = copy.deepcopy(model).to(device)
    assert there.into.weight is there.out.weight
    assert {p.device for p in there.parameters()} == {torch.device("pretend", int(device[-1] == "1"))}
    y, y_there = model(x), there(x.to(device))
    assert torch.equal(y, y_there.cpu())
    y.square().sum().backward()
    y_there.square().sum().backward()
    for mine, its in zip(model.parameters(), there.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert its.grad.device == its.device
        assert torch.equal(mine.grad, its.grad.cpu())
    twin = copy.deepcopy(there)
    assert twin.into.weight is twin.out.weight
    assert isinstance(twin.into.weight, nn.Parameter)
    assert twin.to("cpu").into.weight.device.type == "cpu"


@pytest.mark.parametrize("other", ["cpu", "pretend:0"])
def test_devices_do_not_mix(other: str) -> None:
    a, b = torch.ones(2, 2, device="pretend:1"), torch.ones(2, 2, device=other)
    for operation in (torch.add, torch.mm, lambda x, y: torch.cat([x, y]), lambda x, y: x.index_select(0, y[0].long())):
        with pytest.raises(RuntimeError, match="same device"):
            operation(a, b)
    assert torch.equal((a + torch.tensor(2.0)).cpu(), torch.full((2, 2), 3.0))  # a number of the host may come along
    assert torch.equal(b.to(a).cpu(), a.cpu())
    assert b.to(a).device == a.device


def test_a_budget_ends_in_the_error_of_real_devices() -> None:
    before = pretend.DEVICES[0].used
    with pretend.limited(before + 1000, 0):
        x = torch.zeros(200, device="pretend:0")
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 800 bytes"):
            x + 1
        torch.zeros(1000, device="pretend:1")
        y = x.view(10, 20)[:, 1:]  # shares its memory
        assert pretend.DEVICES[0].used == before + 800
        del x
        assert pretend.DEVICES[0].used == before + 800
        del y
        assert pretend.DEVICES[0].used == before
        assert torch.zeros(100, device="pretend:0").add(1).shape == (100,)
