"""What was moved learns on, in its form: LoRA by its factors, the rest by its weights; judged on held-out samples."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from taskferry import LowRank, TaskVector, load_model
from taskferry.collect.scale import moved_by
from taskferry.disk.files import as_json
from taskferry.layers.discovery import find_sites
from taskferry.methods import Job
from taskferry.models.lowrank import compress
from taskferry.objectives.teacher import lesson_of
from taskferry.taskvector import as_dense
from taskferry.training.refine import Refined, learning, refine, usual_rate
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.tiny import job, rebuilt


def low_rank(model: nn.Module, rank: int = 2, size: float = 0.1) -> TaskVector:
    generator = torch.Generator().manual_seed(3)
    deltas = {}
    for site in find_sites(model):
        weight = model.get_parameter(site.weight)
        if site.fixed is None and site.weight not in deltas and weight.ndim == 2:
            rows, columns = weight.shape
            left = size * torch.randn(rows, rank, generator=generator)
            deltas[site.weight] = LowRank(left, torch.randn(rank, columns, generator=generator))
    return TaskVector(deltas)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-classifier", "t5"])
@pytest.mark.parametrize("form", ["lora", "dense"])
def test_a_student_stands_at_the_change_and_leaves_no_trace(name: str, form: str) -> None:
    given = job(name)
    target, batch = given.target, next(iter(given.calibration))[1]
    start = low_rank(target) if form == "lora" else low_rank(target).dense()
    before, flags = copy.deepcopy(target.state_dict()), [p.requires_grad for p in target.parameters()]
    with moved_by(target, start) as set_scale, torch.no_grad():
        set_scale(1.0)
        meant = target(**batch.inputs)[1 if "labels" in batch.inputs else 0]
    with learning(target, start) as result:
        found = target(**batch.inputs)[1 if "labels" in batch.inputs else 0]
        assert torch.allclose(found.double(), meant.double(), atol=1e-4)
        learns = [p for p in target.parameters() if p.requires_grad]
        assert sum(p.numel() for p in learns) == sum(
            d.left.numel() + d.right.numel() if isinstance(d, LowRank) else d.numel() for d in start.deltas.values()
        )
        same = result()
        with torch.no_grad():
            for parameter in learns:
                parameter.mul_(1.5)
        other = result()
    for change, again in zip(start.deltas.values(), same.deltas.values(), strict=True):
        assert type(change) is type(again)
        assert torch.allclose(*(as_dense(d).double() for d in (change, again)), atol=1e-6)
    assert all(d.rank == 2 for d in other.deltas.values() if isinstance(d, LowRank))
    assert other.norm() > 1.2 * start.norm()
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())
    assert list(target.state_dict()) == list(before)
    assert [p.requires_grad for p in target.parameters()] == flags


def with_low_rank(given: Job) -> Job:
    return rebuilt(given, tau=low_rank(given.source))


def nothing(given: Job) -> TaskVector:
    """A start in the form of what was tuned: zeros, or a LoRA that adds nothing."""
    return 0.0 * low_rank(given.target) if given.tau.low_rank else 0.0 * low_rank(given.target).dense()


def refined(given: Job, start: TaskVector, steps: int, rate: float | None = None, seen: bool = False) -> Refined:
    parts = (given.calibration, given.calibration) if seen else given.calibration.split()
    models = given.source, given.target
    fit, held_out = (lesson_of(models, given.tau, part, given.pair.objectives) for part in parts)
    return refine(given.target, start, fit, held_out, steps, learning_rate=rate)


TAUGHT = [(name, form) for name in ("llama", "bert-classifier", "bert", "t5") for form in ("lora", "dense")]


@pytest.mark.parametrize(("name", "form"), TAUGHT)
def test_refining_lowers_the_loss_on_held_out_samples(name: str, form: str) -> None:
    given = job(name, (16, 2), (24, 3))
    given = with_low_rank(given) if form == "lora" else given
    start = nothing(given)
    likeness = name == "bert"  # of random models: it teaches nothing of other samples
    found = refined(given, start, 12, 2e-4 if likeness else 2e-3, seen=likeness)
    losses = dict(found.losses)
    assert found.better
    assert losses[found.kept] == min(losses.values()) < losses[0] == pytest.approx(found.untouched, rel=1e-5)
    assert found.samples == (24 if likeness else 5)
    assert set(found.change.deltas) == set(start.deltas)
    if form == "lora":
        assert {d.rank for d in found.change.deltas.values() if isinstance(d, LowRank)} == {2}


def test_a_refinement_that_only_harms_is_dropped() -> None:
    """A target that is the tuned source already has nothing to learn: every step leads away."""
    given = with_low_rank(job("llama"))
    same, start = rebuilt(given, target=given.source), given.tau
    found = refined(same, start, 6, 0.1)
    assert found.kept == 0
    assert found.change is start
    assert "was dropped" in found.sentence
    assert " per token before, " in found.sentence


def test_a_refinement_that_breaks_is_dropped_with_its_reason() -> None:
    given = with_low_rank(job("llama"))
    start = nothing(given)
    found = refined(given, start, 6, 1e30)
    assert found.kept == 0
    assert found.change is start
    assert "no number after" in found.sentence
    broken = refined(given, math.nan * start.dense(), 2)
    assert "what was moved is no number" in broken.sentence
    written = json.loads(as_json(broken.record()), parse_constant=pytest.fail)
    assert written["losses"][0] == [0, None]


def test_the_same_seed_gives_the_same_bytes() -> None:
    given = with_low_rank(job("llama"))
    first, second = (refined(given, nothing(given), 5, 2e-3).change for _ in range(2))
    for name, delta in first.deltas.items():
        assert torch.equal(as_dense(delta), as_dense(second.deltas[name]))


def test_a_new_lora_in_place_of_a_full_fine_tune_learns() -> None:
    given = job("llama", (16, 2), (24, 3))
    start, errors, _ = compress(nothing(given), rank=2)
    assert set(errors.values()) == {0.0}
    found = refined(given, start, 12, 2e-3)
    assert found.kept > 0
    assert all(delta.rank == 2 and delta.dense().any() for delta in found.change.deltas.values())


def test_the_rate_falls_with_the_width_of_whole_weights_and_with_its_root_of_factors() -> None:
    narrow, wide = ({"w": torch.zeros(2048, width)} for width in (128, 512))
    factors = [TaskVector({"w": LowRank(torch.zeros(2048, 1), each["w"][:1])}) for each in (narrow, wide)]
    assert usual_rate(TaskVector(narrow)) == pytest.approx(4 * usual_rate(TaskVector(wide)), rel=0.05)
    assert usual_rate(factors[0]) == pytest.approx(2 * usual_rate(factors[1]), rel=0.05)
    assert usual_rate(TaskVector({"w": narrow["w"].T})) == usual_rate(TaskVector(narrow))  # stored [in, out]
    assert usual_rate(TaskVector({"bias": torch.zeros(3)})) < 1e-3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pair")
    A = folders.causal(folder / "a", "LlamaForCausalLM", 16, 2, 1)
    B = folders.causal(folder / "b", "Qwen2ForCausalLM", 24, 3, 2, kind="bytes")
    modules = ["q_proj", "v_proj", "down_proj"]
    return {
        "source_base": A,
        "source_tuned": folders.lora(A, folder / "lora", modules, r=3, lora_alpha=6, use_rslora=True),
        "target_base": B,
        "calibration": folders.texts(folder / "data.jsonl", labels=False),
    }


def words(pair: dict[str, Any]) -> list[str]:
    return [word for name, value in pair.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_a_lora_stays_a_lora_of_its_rank_that_peft_loads(pair: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    taskferry("transfer", *words(pair), "--samples", 12, "--set", "steps=4", "--force", "--out", out)
    record = json.loads((out / "taskferry.json").read_text())
    assert [step for step, _ in record["provenance"]["distilled"]["losses"]] == [0, 1, 2, 3, 4]
    import transformers

    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(pair["target_base"]), out)
    ranks = {p.shape[0] for n, p in model.named_parameters() if "lora_A" in n}
    assert ranks == {3}
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 3


def test_what_cannot_be_learned_is_refused_before_any_work(pair: dict[str, Any], tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out", "--samples", 12]
    refused = taskferry("transfer", *words(pair), *out, "--method", "distil", "--engine", "blockwise", code=2).err
    assert "whole in one process" in refused
    lora = tmp_path / "more"
    shutil.copytree(pair["source_tuned"], lora)
    tensors = load_file(lora / "adapter_model.safetensors")
    base = load_model(str(pair["source_base"])).model
    saved = base.get_parameter("model.embed_tokens.weight").detach() + 1
    save_file({**tensors, "base_model.model.model.embed_tokens.weight": saved}, lora / "adapter_model.safetensors")
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["embed_tokens"]}))
    whole = taskferry("transfer", *words({**pair, "source_tuned": lora}), *out, "--dry-run", code=2)
    assert "embed_tokens.weight, which is not in its change" in whole.err
