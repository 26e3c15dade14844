"""The trajectory of real Trainer runs of tiny models, against the same numbers from plain state dictionaries."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.tiny import hf

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install 'taskferry[large]'")

from taskferry.integrations.trainer import TrajectoryCallback, block_of  # noqa: E402

PROBE = {"input_ids": torch.arange(24).reshape(3, 8) % 19, "attention_mask": torch.ones(3, 8, dtype=torch.long)}
PROBE["attention_mask"][1, 5:] = 0


class Keep(transformers.TrainerCallback):
    """A second witness: the model at every step."""

    def __init__(self) -> None:
        self.models: dict[int, nn.Module] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self.models[state.global_step] = copy.deepcopy(model)


def run(model: nn.Module, folder: Path, steps: int = 5) -> tuple[dict[str, Any], Keep]:
    keep = Keep()
    rows = [
        {"input_ids": (torch.arange(8) * k + k) % 19, "labels": (torch.arange(8) * k + k) % 19} for k in range(1, 9)
    ]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=5e-3, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trajectory = TrajectoryCallback(folder / "trajectory.json", every=2, probe=PROBE)
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[trajectory, keep]).train()
    return json.loads((folder / "trajectory.json").read_text()), keep


def flat(model: nn.Module, base: nn.Module, block: str | None = None) -> Tensor:
    before = dict(base.named_parameters())
    parts = [(p - before[n]).flatten() for n, p in model.named_parameters() if block is None or block_of(n) == block]
    return torch.cat(parts).detach().double()


def test_a_full_fine_tune(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf("LlamaForCausalLM", 16, 2, vocab_size=32, num_key_value_heads=2)
    base = copy.deepcopy(model)
    told, keep = run(model, tmp_path)
    assert [measurement["step"] for measurement in told["measurements"]] == [2, 4, 5]
    end = flat(keep.models[5], base)
    for measurement in told["measurements"]:
        then = flat(keep.models[measurement["step"]], base)
        assert measurement["norm"] == pytest.approx(float(then.norm()), rel=1e-5)
        assert measurement["cosine"] == pytest.approx(float(F.cosine_similarity(then, end, dim=0)), abs=1e-6)
        for block, part in measurement["blocks"].items():
            assert part["norm"] == pytest.approx(
                float(flat(keep.models[measurement["step"]], base, block).norm()), rel=1e-5
            )
    assert told["measurements"][-1]["cosine"] == pytest.approx(1)
    assert told["measurements"][0]["cosine"] < 0.99
    assert set(told["measurements"][0]["blocks"]) == {"model.layers.0", "model.layers.1", "other"}
    assert not [f for f in tmp_path.iterdir() if f.name.startswith(".")], "measurements were left behind"


def test_the_inputs_of_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf("LlamaForCausalLM", 16, 2, vocab_size=32, num_key_value_heads=2)
    base = copy.deepcopy(model)
    told, keep = run(model, tmp_path)

    def inputs(m: nn.Module, name: str) -> Tensor:
        seen: list[Tensor] = []
        handle = m.get_submodule(name).register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
        with torch.no_grad():
            m.eval()(**PROBE)
        handle.remove()
        return seen[0][PROBE["attention_mask"].bool()]

    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        before, after = inputs(base, name), inputs(keep.models[4], name)
        found = next(measurement for measurement in told["measurements"] if measurement["step"] == 4)["inputs"][name]
        assert found["direction"] == pytest.approx(
            float((1 - F.cosine_similarity(before, after, dim=-1)).mean()), abs=1e-5
        )
        size = before.norm(dim=-1)
        assert found["magnitude"] == pytest.approx(float(((after.norm(dim=-1) - size).abs() / size).mean()), rel=1e-3)
        assert found["direction"] > 1e-5


def test_a_lora(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = hf("LlamaForCausalLM", 16, 2, vocab_size=32, num_key_value_heads=2)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "down_proj"]))
    told, keep = run(model, tmp_path)

    def products(m: nn.Module) -> Tensor:
        p = dict(m.named_parameters())
        return torch.cat(
            [(p[n.replace("lora_A", "lora_B")] @ p[n]).flatten() for n in p if "lora_A" in n]
        ).detach().double()  # fmt: skip

    first, end = products(keep.models[2]), products(keep.models[5])
    assert told["measurements"][0]["norm"] == pytest.approx(float(first.norm()), rel=1e-4)
    assert told["measurements"][0]["cosine"] == pytest.approx(float(F.cosine_similarity(first, end, dim=0)), abs=1e-5)
    inputs = told["measurements"][-1]["inputs"]
    assert not any("lora_" in name for name in inputs)
    assert any("down_proj" in name and site["direction"] > 0 for name, site in inputs.items())
