"""How near two bases are: differences that were planted are found, whatever the files look like."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from taskferry import TaskferryError
from taskferry.nearness import change_norms, figures, nearness

State = dict[str, Tensor]
NAMES = [f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in ("q_proj", "down_proj")]


def state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(48, 32, generator=generator).to(dtype) for name in NAMES}
    found["model.embed_tokens.weight"] = torch.randn(64, 32, generator=generator).to(dtype)
    found["model.norm.weight"] = torch.ones(32, dtype=dtype)
    return found


def folder(path: Path, tensors: State, shards: int = 1) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    parts = [dict(list(tensors.items())[i::shards]) for i in range(shards)]
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, path / (name if shards > 1 else "model.safetensors"), {"format": "pt"})
    if shards > 1:
        where = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def planted(before: State, distance: float) -> State:
    """Every matrix of a block that far from where it was, at a right angle."""
    after = dict(before)
    for name in NAMES:
        weight = before[name].double()
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)).double()
        noise -= weight * (noise * weight).sum() / weight.square().sum()
        after[name] = (weight + noise * distance * weight.norm() / noise.norm()).to(before[name].dtype)
    return after


@pytest.mark.parametrize("distance", [0.001, 0.04, 0.5])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_planted_difference_is_recovered(tmp_path: Path, distance: float, shards: int) -> None:
    before = state(0)
    A, B = folder(tmp_path / "a", before), folder(tmp_path / "b", planted(before, distance), shards)
    near = nearness(A, B)
    assert near.total["distance"] == pytest.approx(distance, rel=1e-4)
    assert near.total["cosine"] == pytest.approx(1 / math.sqrt(1 + distance**2), rel=1e-6)
    for name in NAMES:
        assert figures([near.layers[name]])["distance"] == pytest.approx(distance, rel=1e-4)
    assert figures([near.layers["model.norm.weight"]])["distance"] == 0
    assert near.relation == ("distant relative" if distance == 0.5 else "close relative")
    assert not near.differ


def test_a_base_is_itself_and_none_of_another_training(tmp_path: Path) -> None:
    A, same = folder(tmp_path / "a", state(0)), folder(tmp_path / "same", state(0), shards=2)
    other = folder(tmp_path / "other", state(1))
    assert nearness(A, same).sentence == "same base"
    assert nearness(A, other).relation == "unrelated"
    assert nearness(A, other).total["distance"] == pytest.approx(math.sqrt(2), rel=0.05)


def test_half_precision_and_full_are_compared_by_their_values(tmp_path: Path) -> None:
    half, full = state(0, torch.bfloat16), {name: tensor.float() for name, tensor in state(0, torch.bfloat16).items()}
    A, B = folder(tmp_path / "a", half), folder(tmp_path / "b", full)
    assert nearness(A, B).relation == "same base"
    rounded = nearness(folder(tmp_path / "c", state(0)), A)  # eight bits of mantissa
    assert 0.0005 < (rounded.total["distance"] or 0) < 0.004


def test_the_first_rows_of_large_tensors_tell_as_much(tmp_path: Path) -> None:
    before = state(0)
    A, B = folder(tmp_path / "a", before), folder(tmp_path / "b", planted(before, 0.04))
    near = nearness(A, B, {NAMES[0]: 1.0}, most=24 * 32)
    assert near.total["distance"] == pytest.approx(0.04, rel=0.1)
    assert near.layers[NAMES[0]][0] == pytest.approx(float(before[NAMES[0]].square().sum()), rel=0.2)


def test_other_shapes_names_and_packed_weights_are_said(tmp_path: Path) -> None:
    before, after = state(0), state(0)
    after["model.embed_tokens.weight"] = torch.randn(70, 32)
    after["model.layers.2.q_proj.weight"] = torch.randn(48, 32)
    after[NAMES[0]] = torch.zeros(48, 32, dtype=torch.uint8)
    near = nearness(folder(tmp_path / "a", before), folder(tmp_path / "b", after))
    assert near.differ == {
        "model.embed_tokens.weight": "[64, 32] in F32, and [70, 32] in F32",
        NAMES[0]: "[48, 32] in F32, and [48, 32] in U8",
        "model.layers.2.q_proj.weight": "b alone has it",
    }
    assert "3 tensors cannot be compared" in near.sentence
    wide = {name: torch.randn(8, 8) for name in before}
    assert nearness(tmp_path / "a", folder(tmp_path / "wide", wide)).relation == "not comparable"


def test_an_output_layer_that_one_file_leaves_to_the_embedding_is_no_difference(tmp_path: Path) -> None:
    tied = state(0)
    untied = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"].clone()}
    near = nearness(folder(tmp_path / "a", untied), folder(tmp_path / "b", tied))
    assert near.relation == "same base"
    assert not near.differ


def test_a_model_and_its_body_are_compared(tmp_path: Path) -> None:
    body = {name.removeprefix("model."): tensor for name, tensor in state(0).items()}
    whole = {**state(0), "score.weight": torch.randn(2, 32)}
    for A, B in ((whole, body), (body, whole)):
        near = nearness(folder(tmp_path / f"a{len(A)}", A), folder(tmp_path / f"b{len(B)}", B))
        assert near.relation == "same base"
        assert list(near.differ) == ["score.weight"]


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(TaskferryError, match="no weights as safetensors"):
        nearness(tmp_path / "a", tmp_path / "a")


@pytest.mark.parametrize("as_adapter", [True, False])
def test_the_distance_is_held_against_the_change_of_a_fine_tune(tmp_path: Path, as_adapter: bool) -> None:
    before, after = state(0), planted(state(0), 0.04)
    base, other, tuned = folder(tmp_path / "a", before), folder(tmp_path / "b", after), tmp_path / "tuned"
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(48, 2, generator=generator), torch.randn(2, 32, generator=generator)
    name = NAMES[1]
    if as_adapter:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        factors = {f"{path}.lora_A.weight": right, f"{path}.lora_B.weight": left / 2}
        tuned.mkdir()
        save_file(factors, tuned / "adapter_model.safetensors")
        (tuned / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    else:
        folder(tuned, {**before, name: before[name] + left @ right})
    near = nearness(base, other, change_norms(tuned, base))
    wanted = float((after[name] - before[name]).norm() / (left @ right).norm())
    assert near.total["to_change"] == pytest.approx(wanted, rel=1e-4)
    assert figures([near.layers[NAMES[0]]])["to_change"] is None
    assert f"{wanted:.2g} times the fine-tune's change" in near.sentence


def test_memory_is_bounded_by_parts_of_a_tensor(tmp_path: Path) -> None:
    """Two files of 384 MB, most of it one tensor: less than 200 MB come on top of what the imports take."""
    large = torch.zeros(3 * 2**20, 32)
    save_file({"model.layers.0.w.weight": large}, tmp_path / "model.safetensors")
    code = (
        "import resource, sys; from pathlib import Path; from taskferry.nearness import nearness\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before, near = peak(), nearness(Path(sys.argv[1]), Path(sys.argv[1]))\n"
        "print(peak() - before, 'transformers' in sys.modules, near.relation)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    more, transformers, *relation = found.stdout.split()
    assert int(more) < 200
    assert transformers == "False"
    assert relation == ["not", "comparable"]  # to zeros nothing has an angle
