"""Bases whose weights are quantised: dequantised by transformers, or refused by name; never read as if plain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry.engines.lazy import LazyModel
from taskferry.errors import TaskferryError
from taskferry.models import load_model
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.quantised import PROJECTIONS, WEIGHTS, configured, fp8, is_layer, same, transfer, words
from tests.helpers.tiny import relative

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

ORIGINAL = "give the 16-bit model that it was made from"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases, a LoRA and a full fine-tune; each base in FP8, and as the numbers that FP8 stands for."""
    root = tmp_path_factory.mktemp("world")
    folders.causal(root / "a", "LlamaForCausalLM", 32, 2, 1)
    folders.causal(root / "b", "LlamaForCausalLM", 48, 3, 2)
    folders.lora(root / "a", root / "lora", PROJECTIONS)
    folders.shifted(root / "a", root / "tuned")
    for name in ("a", "b", "tuned"):
        fp8(root / name, root / f"{name}-fp8", (8, 16))
    folders.prompts(root / "prompts.jsonl")
    return root


def test_a_lora_between_fp8_models_moves_as_between_the_numbers_that_they_stand_for(
    world: Path, tmp_path: Path
) -> None:
    for name, end in (("fp8", "fp8"), ("plain", "fp8-plain")):
        transfer(world, world / f"a-{end}", world / "lora", world / f"b-{end}", tmp_path / name)
    same(tmp_path / "fp8" / "adapter_model.safetensors", tmp_path / "plain" / "adapter_model.safetensors")


def test_a_model_on_an_fp8_target_is_written_dequantised_and_says_so(world: Path, tmp_path: Path) -> None:
    for name, end in (("fp8", "fp8"), ("plain", "fp8-plain")):
        ran = transfer(world, world / f"a-{end}", world / f"tuned-{end}", world / f"b-{end}", tmp_path / name)
        assert ("written dequantised, in float32" in words(ran)) == (name == "fp8")
    one, two = (transformers.LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("fp8", "plain"))
    assert "quantization_config" not in json.loads((tmp_path / "fp8" / "config.json").read_text())
    after = dict(two.named_parameters())
    assert all(relative(value, after[name]) < 1e-5 for name, value in one.named_parameters())


def test_mxfp4(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("method", ["gptq", "awq", "torchao", "compressed-tensors", "bitsandbytes", "a-new-one"])
def test_others_are_refused_by_name(method: str, world: Path, tmp_path: Path) -> None:
    form = {"load_in_4bit": True} if method == "bitsandbytes" else {"quant_method": method}
    folder = configured(world / "a", tmp_path / "q", form, load_file(world / "a" / WEIGHTS))
    for load in (load_model, lambda given: LazyModel(given, Path(given))):
        with pytest.raises(TaskferryError, match=f"is quantised with {method}, which cannot be read here: {ORIGINAL}"):
            load(str(folder))


@pytest.mark.parametrize("ending", ["_weight_qdata", "weight._data", "qweight"])
def test_files_that_do_not_say_that_they_are_quantised(ending: str, world: Path, tmp_path: Path) -> None:
    """Their weights have other names: a loader that goes by names would leave random numbers in their place."""
    state = {}
    for name, value in load_file(world / "a" / WEIGHTS).items():
        start, part = name.rsplit(".", 1)
        state[f"{start}.{ending if is_layer(name) else part}"] = value.to(torch.int32) if is_layer(name) else value
    with pytest.raises(TaskferryError, match=f"{ending}.*{ORIGINAL}"):
        load_model(str(configured(world / "a", tmp_path / "q", None, state)))


@pytest.mark.parametrize("what", ["scale", "shape", "block", "cut", "silent", "settings"])
def test_damaged_and_unexplained_scales(what: str, world: Path, tmp_path: Path) -> None:
    state = load_file(world / "a-fp8" / WEIGHTS)
    form: Any = json.loads((world / "a-fp8" / "config.json").read_text())["quantization_config"]
    scale = "model.layers.0.mlp.up_proj.weight_scale_inv"
    if what == "scale":
        del state[scale]
    if what == "shape":
        state[scale] = torch.ones(3, 5)
    form |= {"block": {"weight_block_size": [8, 0]}, "cut": {"weight_block_size": [48, 16]}}.get(what, {})
    folder = configured(world / "a", tmp_path / "q", {"silent": None, "settings": ["fp8"]}.get(what, form), state)
    with pytest.raises(TaskferryError, match=r"give the 16-bit model|damaged|not divisible"):
        load_model(str(folder))


def test_block_by_block_reads_plain_weights_alone(world: Path, tmp_path: Path) -> None:
    ran = transfer(
        world, world / "a", world / "lora", world / "b-fp8", tmp_path / "out", "--engine", "blockwise", code=2
    )
    assert f"stored in fp8, which block by block does not read: use --engine whole, or {ORIGINAL}" in words(ran)
    silent = configured(world / "b-fp8", tmp_path / "silent", None, load_file(world / "b-fp8" / WEIGHTS))
    with pytest.raises(TaskferryError, match=ORIGINAL):
        LazyModel(str(silent), silent)


def test_the_rounding_of_one_of_two_is_no_fine_tune(world: Path, tmp_path: Path) -> None:
    ran = transfer(world, world / "a", world / "tuned-fp8", world / "b", tmp_path / "out", code=2)
    assert "their difference would be rounding, not a fine-tune" in words(ran)
    save_file(load_file(world / "tuned-fp8" / WEIGHTS), tmp_path / "state.safetensors")
    ran = transfer(world, world / "a", tmp_path / "state.safetensors", world / "b", tmp_path / "out", code=2)
    assert "a file of weights does not say how" in words(ran)


def test_an_adapter_that_names_a_quantised_base_moves_from_the_original(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "lora", tmp_path / "qlora")
    config = json.loads((tmp_path / "qlora" / "adapter_config.json").read_text())
    (tmp_path / "qlora" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "unsloth/some-model-bnb-4bit"})
    )
    ran = taskferry("transfer", "--source-tuned", tmp_path / "qlora", "--target-base", world / "b", "--calibration",
                    world / "prompts.jsonl", "--out", tmp_path / "out", code=2)  # fmt: skip
    assert "names unsloth/some-model-bnb-4bit, a quantised copy; give the 16-bit original of it" in words(ran)
    for name in ("lora", "qlora"):
        transfer(
            world, world / "a", (world if name == "lora" else tmp_path) / name, world / "b", tmp_path / f"o-{name}"
        )
    same(tmp_path / "o-lora" / "adapter_model.safetensors", tmp_path / "o-qlora" / "adapter_model.safetensors")
