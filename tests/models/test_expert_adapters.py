"""LoRAs of experts: as PEFT writes them, as older releases named them, and what PEFT makes of those written here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from taskferry.errors import TaskferryError
from taskferry.models import Skeleton, read_adapter, write_adapter
from taskferry.taskvector import LowRank
from tests.helpers.mixtures import mixture
from tests.helpers.tiny import relative

peft = pytest.importorskip("peft")
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def merged(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What an adapter changes, by PEFT's own loader; the model is used up."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    after = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    changes = {name: parameter.detach() - before[name] for name, parameter in after.named_parameters()}
    return {name: change for name, change in changes.items() if change.any()}


def trained(name: str, out: Path, **more: object) -> Path:
    model = mixture(name)
    torch.manual_seed(1)
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": BOTH, **more}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(out)
    return out


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_target_parameters_in_and_out(name: str, tmp_path: Path) -> None:
    folder = trained(name, tmp_path / "in", target_parameters=[*BOTH, "mlp.gate.weight", "mlp.router.weight"])
    base = Skeleton.of(mixture(name))
    adapter = read_adapter(folder, base)
    meant = merged(mixture(name), folder)
    assert set(adapter.tau.deltas) == set(meant)
    assert len(meant) == 8
    assert all(isinstance(delta, LowRank) and delta.rank == 3 for delta in adapter.tau.deltas.values())
    for key, delta in adapter.tau.dense().deltas.items():
        assert relative(delta, meant[key]) < 1e-5
    (tmp_path / "out").mkdir()
    write_adapter(tmp_path / "out", adapter.tau, base, base_name="B", like=adapter)
    found = merged(mixture(name), tmp_path / "out")
    assert set(found) == set(meant)
    assert all(relative(found[key], meant[key]) < 1e-5 for key in meant)


def test_one_of_the_two_parameters_alone(tmp_path: Path) -> None:
    folder = trained("Mixtral", tmp_path / "in", target_modules=[], target_parameters=BOTH[:1])
    base = Skeleton.of(mixture())
    adapter = read_adapter(folder, base)
    assert [key.rsplit(".", 1)[-1] for key in adapter.tau.deltas] == ["gate_up_proj"] * 2
    (tmp_path / "out").mkdir()
    write_adapter(tmp_path / "out", adapter.tau, base, base_name="B", like=adapter)
    found = merged(mixture(), tmp_path / "out")
    assert all(relative(found[key], delta) < 1e-5 for key, delta in adapter.tau.dense().deltas.items())


def old(folder: Path, name: str, experts: str, leaves: tuple[str, str, str]) -> Path:
    """An adapter as it was saved when every expert was a module."""
    model, tensors = mixture(name), {}
    hidden, width = model.get_parameter("model.layers.0.mlp.experts.down_proj").shape[2:0:-1]
    g = torch.Generator().manual_seed(0)
    for layer in range(2):
        for expert in range(4):
            for leaf in leaves:
                out, in_ = (width, hidden) if leaf == leaves[2] else (hidden, width)
                path = f"base_model.model.model.layers.{layer}.{experts}.{expert}.{leaf}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(2, in_, generator=g)
                tensors[f"{path}.lora_B.weight"] = torch.randn(out, 2, generator=g)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": list(leaves), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "experts", "leaves"),
    [
        ("Mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2")),
        ("Qwen3Moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_that_were_modules(name: str, experts: str, leaves: tuple[str, str, str], tmp_path: Path) -> None:
    folder = old(tmp_path / "old", name, experts, leaves)
    adapter = read_adapter(folder, Skeleton.of(mixture(name)))
    meant = merged(mixture(name), folder)
    assert set(adapter.tau.deltas) == set(meant)
    assert all(relative(delta, meant[key]) < 1e-5 for key, delta in adapter.tau.dense().deltas.items())


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = trained("Mixtral", tmp_path / "in")
    with pytest.raises(TaskferryError, match=r"do not have the rank 3 of its adapter_config\.json for 6 experts"):
        read_adapter(folder, Skeleton.of(mixture(experts=6)))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_parameters": "mlp"}))
    with pytest.raises(TaskferryError, match="no list of names"):
        read_adapter(folder, Skeleton.of(mixture()))
