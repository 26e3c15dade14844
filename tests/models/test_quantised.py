"""Bases whose weights are quantised: dequantised on reading, or refused by name; never read as if they were weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from taskferry.engines.lazy import LazyModel
from taskferry.errors import TaskferryError
from taskferry.models import load_model
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.quantised import PROJECTIONS, WEIGHTS, compressed, configured, fp8, is_layer, same, transfer, words
from tests.helpers.tiny import relative

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")

ENGINES = ("whole", "blockwise")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases, a LoRA and a full fine-tune; each base in FP8, and as the numbers that FP8 stands for."""
    root = tmp_path_factory.mktemp("world")
    folders.causal(root / "a", "LlamaForCausalLM", 32, 2, 1)
    folders.causal(root / "b", "LlamaForCausalLM", 48, 3, 2)
    folders.lora(root / "a", root / "lora", PROJECTIONS)
    folders.shifted(root / "a", root / "tuned")
    # Blocks of 32 are cut at the edge of 48 rows.
    for name, block in (("a", (16, 16)), ("b", (32, 16)), ("tuned", (16, 16))):
        fp8(root / name, root / f"{name}-fp8", block)
    folders.prompts(root / "prompts.jsonl")
    return root


@pytest.mark.parametrize("engine", ENGINES)
def test_fp8_moves_as_the_numbers_that_it_stands_for(engine: str, world: Path, tmp_path: Path) -> None:
    for name, end in (("fp8", "fp8"), ("plain", "fp8-plain")):
        transfer(world, world / f"a-{end}", world / "lora", world / f"b-{end}", tmp_path / name, "--engine", engine)
    same(tmp_path / "fp8" / "adapter_model.safetensors", tmp_path / "plain" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "fp8" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(world / "b-fp8")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_on_an_fp8_target_is_written_dequantised_and_says_so(engine: str, world: Path, tmp_path: Path) -> None:
    for name, end in (("fp8", "fp8"), ("plain", "fp8-plain")):
        ran = transfer(world, world / f"a-{end}", world / f"tuned-{end}", world / f"b-{end}", tmp_path / name,
                       "--engine", engine)  # fmt: skip
        assert ("written dequantised, in float32" in words(ran)) == (name == "fp8")
    one, two = (transformers.LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("fp8", "plain"))
    assert "quantization_config" not in json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert "written dequantised" in (tmp_path / "fp8" / "README.md").read_text()
    after = dict(two.named_parameters())
    assert all(relative(value, after[name]) < 1e-5 for name, value in one.named_parameters())


def test_fit_apply_diff_and_inspect_read_fp8(world: Path, tmp_path: Path) -> None:
    taskferry("fit", "--source-base", world / "a-fp8", "--target-base", world / "b-fp8", "--calibration",
              world / "prompts.jsonl", "--samples", 8, "--method", "bico", "--out", tmp_path / "maps")  # fmt: skip
    ran = taskferry("apply", tmp_path / "maps", world / "tuned-fp8", "--source-base", world / "a-fp8", "--target-base",
                    world / "b-fp8", "--out", tmp_path / "out")  # fmt: skip
    assert "written dequantised" in words(ran)
    taskferry("diff", world / "a-fp8", world / "tuned-fp8", "--out", tmp_path / "one")
    taskferry("diff", world / "a-fp8-plain", world / "tuned-fp8-plain", "--out", tmp_path / "two")
    same(tmp_path / "one", tmp_path / "two")
    assert "stored in FP8 with scales (fp8)" in words(taskferry("inspect", world / "b-fp8"))


def test_fp8_is_what_transformers_makes_of_it(world: Path) -> None:
    ours = load_model(str(world / "a-fp8")).model
    theirs = dict(
        transformers.LlamaForCausalLM.from_pretrained(world / "a-fp8", dtype=torch.float32).named_parameters()
    )
    assert all(torch.equal(value, theirs[name]) for name, value in ours.named_parameters())


def channels(value: Tensor) -> dict[str, Tensor]:
    scale = value.abs().amax(1, keepdim=True) / 448
    return {"": (value / scale).to(torch.float8_e4m3fn), "_scale": scale}


def tensors(value: Tensor) -> dict[str, Tensor]:
    scale = value.abs().max().reshape(1) / 448
    return {"": (value / scale).to(torch.float8_e4m3fn), "_scale": scale, "@input_scale": torch.ones(1)}


def integers(value: Tensor) -> dict[str, Tensor]:
    low, high = value.amin(1, keepdim=True), value.amax(1, keepdim=True)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    return {"": (value / scale + zero).round().clamp(-128, 127).to(torch.int8), "_scale": scale,
            "_zero_point": zero.to(torch.int8)}  # fmt: skip


def exponents(value: Tensor) -> dict[str, Tensor]:
    """One for a row of eight columns, as a byte."""
    parts = value.reshape(value.shape[0], -1, 8)
    power = torch.log2(parts.abs().amax(2) / 448).ceil()
    stored = (parts / power.exp2()[..., None]).to(torch.float8_e4m3fn).reshape(value.shape)
    return {"": stored, "_scale_inv": (power + 127).to(torch.uint8)}


FORMS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "fbgemm": (channels, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "by-channel": (channels, compressed("float-quantized", "channel", "float")),
    "by-tensor": (tensors, compressed("float-quantized", "tensor", "float")),
    "integers": (integers, compressed("int-quantized", "channel", "int")),
    "exponents": (exponents, {"quant_method": "mxfp8", "weight_block_size": [1, 8]}),
}


def stored(world: Path, out: Path, form: str) -> tuple[Path, dict[str, Tensor]]:
    """A folder in a form, with its weights before."""
    make, config = FORMS[form]
    before, state = load_file(world / "a" / WEIGHTS), {}
    for name, value in before.items():
        parts = make(value) if is_layer(name) else {"": value}
        state |= {
            name.replace("weight", end[1:]) if end[:1] == "@" else name + end: part for end, part in parts.items()
        }
    return configured(world / "a", out, config, state), before


@pytest.mark.parametrize("form", FORMS)
def test_other_eight_bit_forms(form: str, world: Path, tmp_path: Path) -> None:
    folder, before = stored(world, tmp_path / form, form)
    whole = dict(load_model(str(folder)).model.named_parameters())
    lazy = LazyModel(str(folder), folder)
    blocks = dict(lazy.read(lazy.shapes))
    for name, value in before.items():
        assert torch.equal(whole[name], blocks[name])
        assert (relative(whole[name], value) < 0.05) if is_layer(name) else torch.equal(whole[name], value)
        assert not is_layer(name) or not torch.equal(whole[name], value)


@pytest.mark.parametrize("form", ["by-channel", "by-tensor"])
def test_they_are_what_compressed_tensors_makes_of_them(form: str, world: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    folder, _ = stored(world, tmp_path / form, form)
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    after = dict(theirs.named_parameters())
    ours = load_model(str(folder)).model
    assert all(relative(value, after[name].float()) < 1e-6 for name, value in ours.named_parameters())


@pytest.mark.parametrize(
    "method",
    ["gptq", "awq", "hqq", "quanto", "torchao", "aqlm", "eetq", "higgs", "bitnet", "spqr", "vptq", "quark",
     "auto-round", "nvfp4", "a-new-one"],
)  # fmt: skip
def test_others_are_refused_by_name(method: str, world: Path, tmp_path: Path) -> None:
    folder = configured(world / "a", tmp_path / "q", {"quant_method": method}, load_file(world / "a" / WEIGHTS))
    for load in (load_model, lambda given: LazyModel(given, Path(given))):
        with pytest.raises(TaskferryError, match=f"{method}.*give the 16-bit model that it was made from"):
            load(str(folder))


@pytest.mark.parametrize("ending", ["_weight_qdata", "weight._data"])
def test_files_of_torchao_and_quanto_that_do_not_say_so(ending: str, world: Path, tmp_path: Path) -> None:
    """Their weights have other names: a loader that goes by names would leave random numbers in their place."""
    state = {}
    for name, value in load_file(world / "a" / WEIGHTS).items():
        start, part = name.rsplit(".", 1)
        state[f"{start}.{ending if is_layer(name) else part}"] = value.to(torch.int8) if is_layer(name) else value
    folder = configured(world / "a", tmp_path / "q", None, state)
    with pytest.raises(TaskferryError, match=f"{ending}.*give the 16-bit model that it was made from"):
        load_model(str(folder))
    with pytest.raises(TaskferryError, match=r"its files call .* by another name"):
        LazyModel(str(folder), folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_command_refuses(engine: str, world: Path, tmp_path: Path) -> None:
    weights = load_file(world / "b" / WEIGHTS)
    folder = configured(world / "b", tmp_path / "q", {"quant_method": "gptq", "bits": 4}, weights)
    ran = transfer(world, world / "a", world / "lora", folder, tmp_path / "out", "--engine", engine, code=2)
    assert "quantised with GPTQ (quant_method gptq)" in words(ran)
    # Without a word on how they are stored, 8-bit numbers are no weights.
    silent = configured(world / "b-fp8", tmp_path / "silent", None, load_file(world / "b-fp8" / WEIGHTS))
    ran = transfer(world, world / "a", world / "lora", silent, tmp_path / "out", "--engine", engine, code=2)
    assert "give the 16-bit model that it was made from" in words(ran)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["scale", "shape", "block", "packed", "rotated", "order", "zero"])
def test_damaged_and_unknown_scales(what: str, world: Path, tmp_path: Path) -> None:
    state = load_file(world / "a-fp8" / WEIGHTS)
    form = json.loads((world / "a-fp8" / "config.json").read_text())["quantization_config"]
    name = "model.layers.0.mlp.up_proj.weight"
    if what == "scale":
        del state[f"{name}_scale_inv"]
    if what == "shape":
        state[f"{name}_scale_inv"] = torch.ones(3, 5)
    if what == "block":
        form["weight_block_size"] = [16, 0]
    if what == "packed":
        state[name] = torch.zeros(64, 16, dtype=torch.int8)
    if what == "rotated":
        form = {**compressed("float-quantized", "channel", "float"), "transform_config": {"config_groups": {"u": {}}}}
    if what == "zero":
        state[f"{name}_zero_point"] = torch.zeros(16, 1, dtype=torch.int32)
    if what == "order":
        state[f"{name}_g_idx"] = torch.arange(32)
    folder = configured(world / "a", tmp_path / "q", form, state)
    for load in (load_model, lambda given: dict(LazyModel(given, Path(given)).read([name]))):
        with pytest.raises(TaskferryError, match=r"give the 16-bit model|damaged"):
            load(str(folder))


def test_a_file_of_weights_does_not_say_how_they_are_stored(world: Path, tmp_path: Path) -> None:
    save_file(load_file(world / "tuned-fp8" / WEIGHTS), tmp_path / "state.safetensors")
    ran = transfer(world, world / "a", tmp_path / "state.safetensors", world / "b", tmp_path / "out", code=2)
    assert "a file of weights does not say how" in words(ran)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rounding_of_one_of_two_is_no_fine_tune(engine: str, world: Path, tmp_path: Path) -> None:
    ran = transfer(world, world / "a", world / "tuned-fp8", world / "b", tmp_path / "out", "--engine", engine, code=2)
    assert "their difference would be rounding, not a fine-tune" in words(ran)


def test_an_adapter_that_names_a_quantised_base_moves_from_the_original(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "lora", tmp_path / "qlora")
    config = json.loads((tmp_path / "qlora" / "adapter_config.json").read_text())
    (tmp_path / "qlora" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "unsloth/some-model-bnb-4bit"})
    )
    for name in ("lora", "qlora"):
        tuned = (world if name == "lora" else tmp_path) / name
        transfer(world, world / "a", tuned, world / "b", tmp_path / f"out-{name}")
    same(tmp_path / "out-lora" / "adapter_model.safetensors", tmp_path / "out-qlora" / "adapter_model.safetensors")
