"""Adapters that are no LoRA: converted where PEFT can, refused with the way where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry.models import load_model, load_tuned
from tests.helpers import folders
from tests.helpers.command import Ran, taskferry
from tests.helpers.tiny import relative

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")

MODULES = ["q_proj", "v_proj"]
CONVERTED: dict[str, Any] = {
    "LoHa": {"r": 2},
    "LoKr": {"r": 2},
    "Vera": {"r": 8, "projection_prng_key": 1},
    "Miss": {"r": 2},
}
REFUSED: dict[str, Any] = {
    "OFT": {"oft_block_size": 4},
    "AdaLora": {"init_r": 4, "target_r": 2, "total_step": 10},
    "Lora": {"use_dora": True},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    for name, seed in (("a", 1), ("b", 2)):
        folders.causal(root / name, "LlamaForCausalLM", 16, 2, seed)
    for kind, settings in {**CONVERTED, **REFUSED}.items():
        adapter(root / "a", root / kind, kind, settings)
    folders.prompts(root / "prompts.jsonl")
    return root


def adapter(base: Path, out: Path, kind: str, settings: dict[str, Any]) -> None:
    """Of random numbers, written by PEFT."""
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    config = getattr(peft, f"{kind}Config")(target_modules=MODULES, task_type="CAUSAL_LM", **settings)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(out)


def moved(world: Path, kind: str, out: Path, *more: object, code: int = 0) -> Ran:
    return taskferry("transfer", "--source-base", world / "a", "--source-tuned", world / kind, "--target-base",
                     world / "b", "--calibration", world / "prompts.jsonl", "--samples", 8, "--scale", 0.5,
                     "--force", "--out", out, *more, code=code)  # fmt: skip


@pytest.mark.parametrize("kind", CONVERTED)
def test_what_peft_converts_moves_as_a_lora(kind: str, world: Path, tmp_path: Path) -> None:
    base = load_model(str(world / "a"))
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    tau = load_tuned(str(world / kind), base).tau
    after = base.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    fresh = transformers.LlamaForCausalLM.from_pretrained(world / "a")
    merged = peft.PeftModel.from_pretrained(fresh, world / kind).merge_and_unload()
    assert len(tau) == 4
    for name, delta in tau.dense().deltas.items():
        assert relative(torch.as_tensor(delta), merged.get_parameter(name) - before[name]) < 1e-3
    moved(world, kind, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(world / "b"), tmp_path / "out")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_cannot_convert_is_refused_with_the_way(kind: str, world: Path, tmp_path: Path) -> None:
    told = moved(world, kind, tmp_path / "out", code=2).err
    assert "Traceback" not in told
    assert "merge it into its base" in told
    assert "PEFT cannot convert" in told or kind == "Lora"


def test_without_the_base_in_memory_the_way_is_named(world: Path, tmp_path: Path) -> None:
    told = moved(world, "LoHa", tmp_path / "out", "--engine", "blockwise", code=2).err
    assert "save_as_lora" in told


@pytest.mark.parametrize("change", [{"target_modules": "(x|xx)*y"}, {"setting_of_tomorrow": 1}, {"r": 3}])
def test_damaged_ones_are_refused(change: dict[str, Any], world: Path, tmp_path: Path) -> None:
    adapter(world / "a", tmp_path / "bad", "LoHa", {"r": 2})
    config = json.loads((tmp_path / "bad" / "adapter_config.json").read_text())
    (tmp_path / "bad" / "adapter_config.json").write_text(json.dumps({**config, **change}))
    told = moved(world, str(tmp_path / "bad"), tmp_path / "out", code=2).err
    assert "Traceback" not in told
    assert "merge it into its base" in told
