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

from taskferry.errors import TaskferryError
from taskferry.models import load_model
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
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
    cls = transformers.GPT2LMHeadModel
    cls(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    form = transformers.BitsAndBytesConfig(load_in_8bit=True)
    cls.from_pretrained(tmp_path / "gpt2", quantization_config=form).save_pretrained(tmp_path / "bnb")
    after = dict(load_model(str(tmp_path / "bnb")).model.named_parameters())
    for name, value in cls.from_pretrained(tmp_path / "gpt2").named_parameters():
        assert bool(((after[name] - value).abs() <= 0.02 * value.abs().max() + 1e-6).all()), name


@pytest.mark.parametrize(("library", "form"), [
    ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ("compressed_tensors", compressed("pack-quantized", "group", "int")),
])  # fmt: skip
def test_without_its_library(
    library: str, form: dict[str, Any], world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    state = load_file(world / "a" / WEIGHTS)
    marks = {f"model.layers.0.mlp.up_proj.weight{end}": torch.ones(1) for end in (".absmax", "_packed")}
    folder = configured(world / "a", tmp_path / "q", form, state | marks)
    name = library.replace("_", "-")
    with pytest.raises(TaskferryError, match=f"{name} is needed to read .*: pip install {name}; or give the 16-bit"):
        load_model(str(folder))
    plain = configured(world / "a", tmp_path / "plain", form, state)
    with pytest.raises(TaskferryError, match="its files hold plain weights: take the quantization_config out"):
        load_model(str(plain))


def test_packed_weights_of_compressed_tensors(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    state, meant = {}, {}
    for name, value in load_file(world / "a" / WEIGHTS).items():
        state[name] = meant[name] = value
        if is_layer(name):
            parts = state.pop(name).reshape(len(value), -1, 16)
            scale = parts.abs().amax(2) / 7
            numbers = (parts / scale[..., None]).round().to(torch.int8)
            stem = name.removesuffix("weight")
            state[f"{stem}weight_packed"] = pack_to_int32(numbers.reshape(value.shape), 4)
            state[f"{stem}weight_scale"] = scale
            state[f"{stem}weight_shape"] = torch.tensor(value.shape)
            meant[name] = (numbers * scale[..., None]).reshape(value.shape)
    form = compressed("pack-quantized", "group", "int")
    form["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "group_size": 16, "symmetric": True}
    model = load_model(str(configured(world / "a", tmp_path / "q", form, state))).model
    for name, value in model.named_parameters():
        assert relative(value, meant[name]) < 1e-6, name
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_mxfp4(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
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
