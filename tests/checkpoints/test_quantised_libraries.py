"""Weights that only their own library can read, as bases: the numbers that the library makes of them, or what to do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from taskferry.checkpoints import load_model
from taskferry.errors import TaskferryError
from tests.helpers import folders
from tests.helpers.quantised import PROJECTIONS, WEIGHTS, compressed, configured, is_layer, same, transfer, words
from tests.helpers.tiny import relative

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.causal(root / "a", "LlamaForCausalLM", 32, 2, 1)
    folders.causal(root / "b", "LlamaForCausalLM", 64, 2, 2)
    folders.lora(root / "a", root / "lora", PROJECTIONS)
    folders.shifted(root / "a", root / "tuned")
    folders.prompts(root / "prompts.jsonl")
    return root


def by_bitsandbytes(folder: Path, out: Path, bits: int) -> Path:
    """Quantised and saved by the library, and the plain numbers as it dequantises them (`out-plain`)."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    form = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model = cls.from_pretrained(folder, quantization_config=form, dtype=torch.float32)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(out)
    again = cls.from_pretrained(out, dtype=torch.float32).dequantize(torch.float32)
    state = {name: value.contiguous() for name, value in again.state_dict().items() if "lm_head" not in name}
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    head = {} if tied else {"lm_head.weight": again.lm_head.weight.detach()}
    configured(folder, out.with_name(f"{out.name}-plain"), None, state | head)
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits: int, world: Path, tmp_path: Path) -> None:
    target = by_bitsandbytes(world / "b", tmp_path / "bnb", bits)
    kinds = {value.dtype for name, value in load_file(target / WEIGHTS).items() if is_layer(name)}
    assert kinds <= {torch.uint8, torch.int8}
    for name in ("bnb", "bnb-plain"):
        ran = transfer(world, world / "a", world / "lora", tmp_path / name, tmp_path / f"lora-{name}")
        transfer(world, world / "a", world / "tuned", tmp_path / name, tmp_path / f"full-{name}")
    same(tmp_path / "lora-bnb" / "adapter_model.safetensors", tmp_path / "lora-bnb-plain" / "adapter_model.safetensors")
    same(tmp_path / "full-bnb" / WEIGHTS, tmp_path / "full-bnb-plain" / WEIGHTS)
    assert f"{bits} bits (bitsandbytes): the model is written" in (tmp_path / "full-bnb" / "README.md").read_text()
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "full-bnb")
    ran = transfer(world, world / "a", world / "lora", target, tmp_path / "out", "--engine", "blockwise", code=2)
    assert "use --engine whole" in words(ran)


def test_bitsandbytes_turns_the_layers_of_gpt2(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2}
    config = transformers.GptOssConfig(**sizes, **heads, num_local_experts=2, num_experts_per_tok=1)
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path / "plain")
    state, meant = load_file(tmp_path / "plain" / WEIGHTS), {}
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat((levels, -levels))
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        power = torch.randint(118, 124, (experts, rows, width // 32), dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": power}
        values = levels[torch.stack((blocks % 16, blocks // 16), -1).long()].reshape(experts, rows, -1, 32)
        meant[name] = (values * (power.float() - 127).exp2()[..., None]).reshape(experts, rows, width).transpose(1, 2)
    form = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    model = load_model(str(configured(tmp_path / "plain", tmp_path / "q", form, state))).model
    after = dict(model.named_parameters())
    assert len(meant) == 2
    assert all(torch.equal(after[name], value) for name, value in meant.items())
