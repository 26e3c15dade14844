"""What was moved learns on, in its form: LoRA by its factors, the rest by its weights; judged on samples kept aside."""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from taskferry import LowRank, TaskferryError, TaskVector, load_model
from taskferry.cli import main
from taskferry.cli.screen import Screen
from taskferry.collect.scale import moved_by
from taskferry.data.augmentation import Views
from taskferry.disk.records import as_json
from taskferry.jobs.record import Reporter
from taskferry.jobs.settings import TransferSettings
from taskferry.jobs.transfer import transfer
from taskferry.layers.discovery import find_sites
from taskferry.methods import Job, run
from taskferry.models.lowrank import compress
from taskferry.objectives.answers import Written
from taskferry.taskvector import as_dense
from taskferry.training.lessons import lesson_of
from taskferry.training.refinement import Refinement, kept_aside, refine, usual_rate
from taskferry.training.students import learning
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


# Not bert with whole weights: the likeness of random models teaches nothing of other samples there.
TAUGHT = [(name, form) for name in ("llama", "bert-classifier", "bert", "vit", "t5") for form in ("lora", "dense")]


@pytest.mark.parametrize(("name", "form"), [each for each in TAUGHT if each != ("bert", "dense")])
def test_refining_lowers_the_loss_on_samples_kept_aside(name: str, form: str) -> None:
    given = job(name, (16, 2), (24, 3))
    given = with_low_rank(given) if form == "lora" else given
    start = run("cold", given).tau
    rate = 2e-4 if name == "bert" else 2e-3  # likeness of five samples: a small loss
    refined = refine(given.pair, given.tau, start, Refinement(steps=12, learning_rate=rate, views=1))
    losses = dict(refined.evaluations)
    assert refined.kept == 12
    assert losses[12] < losses[0]
    assert refined.samples == 5
    assert set(refined.tau.deltas) == set(start.deltas)
    if form == "lora":
        assert refined.tau.low_rank
        assert {d.rank for d in refined.tau.deltas.values() if isinstance(d, LowRank)} == {2}


def test_a_refinement_that_only_harms_is_dropped() -> None:
    """A target that is the tuned source already has nothing to learn: every step leads away."""
    given = with_low_rank(job("llama"))
    same, start = rebuilt(given, target=given.source), given.tau
    refined = refine(same.pair, given.tau, start, Refinement(steps=6, learning_rate=0.1))
    assert refined.kept == 0
    assert refined.tau is start
    assert "was dropped" in refined.sentence
    assert " per token before, " in refined.sentence


def test_a_refinement_that_breaks_is_dropped_with_its_reason() -> None:
    given = with_low_rank(job("llama"))
    start = run("cold", given).tau
    refined = refine(given.pair, given.tau, start, Refinement(steps=6, learning_rate=1e30))
    assert refined.kept == 0
    assert refined.tau is start
    assert "no number at step" in refined.sentence
    assert "--refine-rate" in refined.sentence


def test_what_was_moved_is_judged_by_changes_that_did_not_see_the_sample() -> None:
    """The start's loss is that of the other fold's change, on samples of the fold; they never train."""
    given = job("bert-classifier").in_folds()
    start = run("bico", given)
    assert len(start.without) == given.calibration.folds == 2
    without = [100.0 * start.without[0], 0.0 * start.without[1]]  # so that each tells itself
    settings = Refinement(steps=1, learning_rate=1e-9)
    refined = refine(given.pair, given.tau, start.tau, settings, without=without)
    lesson = lesson_of(given.pair, given.tau, views=0)
    parts = kept_aside(given.calibration, 2, settings)
    folds = [B.fold for _, B in given.calibration for _ in range(len(B))]
    assert [{folds[i] for i in part} for part in parts] == [{0}, {1}]
    by_hand = 0.0
    for part, change in zip(parts, without, strict=True):
        with moved_by(given.target, change) as set_scale, torch.no_grad():
            set_scale(1.0)
            by_hand += float(lesson.loss(lesson.batch(part)))
    assert refined.evaluations[0][1] == pytest.approx(by_hand / sum(map(len, parts)), rel=1e-5)
    plain = refine(given.pair, given.tau, start.tau, settings)
    assert plain.evaluations[0][1] != pytest.approx(refined.evaluations[0][1], rel=1e-2)
    assert plain.evaluations[0][1] == pytest.approx(plain.evaluations[1][1], rel=1e-4)


@pytest.mark.parametrize("form", ["lora", "dense"])
def test_the_end_is_judged_by_what_was_learned_on_those_changes(form: str) -> None:
    """A start whose own loss is far below theirs is not taken for a lesson learned."""
    given = job("llama").in_folds()
    given = with_low_rank(given) if form == "lora" else given
    start = run("bico", given).tau
    without = [0.0 * start, 0.5 * start]
    settings = Refinement(steps=12, learning_rate=2e-3)
    refined = refine(given.pair, given.tau, start, settings, without=without)
    learned = refined.tau.dense() + -1.0 * start.dense()
    assert refined.kept == 12
    lesson, parts = lesson_of(given.pair, given.tau), kept_aside(given.calibration, 2, settings)
    by_hand = 0.0
    for part, change in zip(parts, without, strict=True):
        with moved_by(given.target, change.dense() + learned) as set_scale, torch.no_grad():
            set_scale(1.0)
            by_hand += float(lesson.loss(lesson.batch(part)))
    assert refined.evaluations[-1][1] == pytest.approx(by_hand / sum(map(len, parts)), rel=1e-5)
    idle = refine(given.pair, given.tau, start, Refinement(steps=4, learning_rate=1e-12), without=without)
    assert idle.evaluations[-1][1] == pytest.approx(idle.evaluations[0][1], rel=1e-6)


def test_what_gives_no_number_is_dropped_and_written_as_none(tmp_path: Path) -> None:
    given = job("llama")
    refined = refine(given.pair, given.tau, math.nan * run("cold", given).tau, Refinement(steps=2))
    assert refined.kept == 0
    assert "what was moved is no number before the first step" in refined.sentence
    assert "rate" not in refined.sentence
    written = json.loads(as_json(refined.record()), parse_constant=pytest.fail)
    assert written["evaluations"] == [[0, None]]


def test_a_sample_alone_is_like_itself_whatever_was_learned() -> None:
    """So a fold has two of them or none, of encoders without a head."""
    given = job("bert").in_folds()
    for held_out in (0.05, 0.1, 0.2, 0.4):
        settings = Refinement(steps=1, held_out=held_out)
        assert all(len(part) != 1 for part in kept_aside(given.calibration, 2, settings, 2))
    assert any(len(part) == 1 for part in kept_aside(given.calibration, 2, Refinement(steps=1, held_out=0.05)))
    start = run("bico", given)
    refined = refine(given.pair, given.tau, start.tau, Refinement(steps=1, held_out=0.05), without=start.without)
    assert refined.samples >= 2
    assert refined.evaluations[0][1] > 1e-9


@pytest.mark.parametrize("count", [4, 5, 6])
def test_some_samples_are_left_to_learn_from(count: int) -> None:
    given = job("bert")
    A, B = next(iter(given.calibration))
    few = rebuilt(given, calibration=type(given.calibration)([(A.take(range(count)), B.take(range(count)))])).in_folds()
    for seed in range(4):
        parts = kept_aside(few.calibration, 2, Refinement(steps=1, seed=seed), 2)
        assert sum(map(len, parts)) in range(2, count - 1)
    start = run("bico", few)
    assert refine(few.pair, few.tau, start.tau, Refinement(steps=1), without=start.without).samples >= 2


def test_a_run_that_was_judged_otherwise_is_not_gone_on_with(tmp_path: Path) -> None:
    given = job("llama").in_folds()
    start = run("bico", given).tau
    settings = Refinement(steps=4, learning_rate=1e-9)
    refine(given.pair, given.tau, start, settings, folder=tmp_path)
    without = [0.0 * start, 0.5 * start]
    again = refine(given.pair, given.tau, start, settings, without=without, folder=tmp_path)
    assert again.evaluations[-1][1] == pytest.approx(again.evaluations[0][1], rel=1e-5)


def test_a_new_lora_in_place_of_a_full_fine_tune_learns() -> None:
    given = job("llama", (16, 2), (24, 3))
    cold = run("cold", given).tau
    start, errors, _ = compress(TaskVector({name: d for name, d in cold.deltas.items() if len(d.shape) == 2}), rank=2)
    assert set(errors.values()) == {0.0}
    assert start.norm() == 0
    refined = refine(given.pair, given.tau, start, Refinement(steps=12, learning_rate=2e-3))
    assert refined.kept == 12
    rights = [delta.right for delta in start.deltas.values() if isinstance(delta, LowRank)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(rights, 2) if a.shape == b.shape)
    assert all(delta.rank == 2 and delta.dense().any() for delta in refined.tau.deltas.values())


def test_a_fold_without_a_sample_kept_aside_says_nothing() -> None:
    """One sample is kept aside of six: it lies in one of the two folds."""
    given = job("bert-classifier")
    A, B = next(iter(given.calibration))
    six = type(given.calibration)([(A.take(range(6)), B.take(range(6)))])
    few = rebuilt(given, calibration=six).in_folds()
    start = run("bico", few)
    assert len(start.without) == 2
    refined = refine(few.pair, few.tau, start.tau, Refinement(steps=1, held_out=0.1), without=start.without)
    assert refined.samples == 1
    assert refined.evaluations[0][1] > 0


def test_views_that_show_a_sample_kept_aside_do_not_train() -> None:
    views = Views(job("vit").calibration, 3)
    shown = [views.samples_in(i) for i in range(len(views))]
    assert all(i % views.samples in samples for i, samples in enumerate(shown))
    assert all(samples == {i} for i, samples in enumerate(shown[: views.samples]))
    blended = [i for i, samples in enumerate(shown) if len(samples) > 1]
    assert len(blended) > views.samples
    values = torch.eye(views.samples)
    for i in blended[:5]:
        assert set(views.blend(values, [i])[0].nonzero()[:, 0].tolist()) == shown[i]


@pytest.mark.parametrize(("steps", "views"), [(1, 2), (2, 4), (100, 15)])
def test_views_are_about_as_many_as_the_steps_show(steps: int, views: int) -> None:
    pictures, texts = job("vit"), job("bert-classifier")
    classes, settings = texts.pair.objectives, Refinement(steps=steps, batch=2 * 24)
    assert settings.views_of(pictures.calibration, classes) == views
    taught = settings.model_copy(update={"labels": 1.0})
    assert taught.views_of(pictures.calibration, classes) == 0
    assert settings.views_of(pictures.calibration, pictures.pair.objectives) == 0  # taught by likeness
    assert settings.views_of(texts.calibration, classes) == 0


def test_passes_count_the_steps_the_teacher_and_the_samples_kept_aside() -> None:
    """In passes with gradients over 24 samples: two steps of 48, the teacher's with 4 views each, four looks."""
    pictures, texts = job("vit"), job("bert-classifier")
    settings = Refinement(steps=2, batch=48, held_out=0.3)
    found = settings.passes(pictures.calibration, texts.pair.objectives)
    assert found == pytest.approx(2 * 48 / 24 + (1 + 4) / 3 + 4 * 0.3 / 3)


def test_the_rate_falls_with_the_width_of_whole_weights_and_with_its_root_of_factors() -> None:
    narrow, wide = ({"w": torch.zeros(2048, width)} for width in (128, 512))
    factors = [TaskVector({"w": LowRank(torch.zeros(2048, 1), each["w"][:1])}) for each in (narrow, wide)]
    assert usual_rate(TaskVector(narrow), 100) == pytest.approx(4 * usual_rate(TaskVector(wide), 100), rel=0.05)
    assert usual_rate(factors[0], 100) == pytest.approx(2 * usual_rate(factors[1], 100), rel=0.05)
    assert usual_rate(TaskVector(narrow), 10) == pytest.approx(usual_rate(TaskVector(narrow), 100) / 2)
    moved = TaskVector({"w": torch.ones(2048, 128)})  # already on its way: short runs go half as far
    assert usual_rate(moved, 100) == usual_rate(TaskVector(narrow), 100)
    assert usual_rate(moved, 10) == pytest.approx(usual_rate(TaskVector(narrow), 10) / 2, rel=0.05)
    assert usual_rate(factors[0], 10) == usual_rate(factors[0], 100)
    assert usual_rate(TaskVector({"w": narrow["w"].T}), 100) == usual_rate(TaskVector(narrow), 100)  # stored [in, out]
    assert usual_rate(TaskVector({"bias": torch.zeros(3)}), 100) < 1e-3


def test_one_sample_cannot_be_refined_on() -> None:
    given = job("llama", micro_batch=1)
    alone = rebuilt(given, calibration=type(given.calibration)(list(given.calibration)[:1]))
    with pytest.raises(TaskferryError, match="2 samples at least: 1 to learn from"):
        refine(alone.pair, given.tau, run("cold", given).tau, Refinement(steps=1))


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
    taskferry("transfer", *words(pair), "--samples", 12, "--scale", 1, "--refine", 4, "--refine-rate", 0.01,
              "--out", out)  # fmt: skip
    record = json.loads((out / "taskferry.json").read_text())
    assert record["refined"]["kept"] > 0
    assert record["refined"]["teacher"] == "tokens"
    assert "Refined for" in record["verdict"]["sentence"]
    assert "Refined for" in (out / "README.md").read_text()
    import transformers

    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(pair["target_base"]), out)
    ranks = {p.shape[0] for n, p in model.named_parameters() if "lora_A" in n}
    assert ranks == {3}
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 3
    plain = tmp_path / "plain"
    taskferry("transfer", *words(pair), "--samples", 12, "--scale", 1, "--out", plain)
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (out, plain))
    assert mine.keys() == theirs.keys()
    assert any(not torch.equal(mine[key], theirs[key]) for key in mine)


class Killed(Reporter):
    """Ends the job at a step of the refinement."""

    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, what: str, done: int, total: int) -> None:
        if what == "refine" and done == self.at:
            raise KeyboardInterrupt


def test_a_killed_refinement_resumes_to_the_same_bytes(pair: dict[str, Any], tmp_path: Path) -> None:
    def settings(out: str) -> TransferSettings:
        given = {name: str(value) for name, value in pair.items()}
        return TransferSettings(**given, samples=12, scale=1, refine=20, refine_rate=0.01, out=tmp_path / out)

    transfer(settings("whole"), command="")
    with pytest.raises(KeyboardInterrupt):
        transfer(settings("half"), command="", reporter=Killed(11))
    assert not (tmp_path / "half").exists()
    seen: list[int] = []

    class Seen(Reporter):
        def step(self, what: str, done: int, total: int) -> None:
            if what == "refine":
                seen.append(done)

    transfer(settings("half"), command="", reporter=Seen())
    assert seen[0] == 11
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "half" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(("at", "kept"), [(11, True), (1, False)])
def test_an_interrupt_says_where_to_go_on(
    pair: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: int,
    kept: bool,
) -> None:
    out = tmp_path / "out"
    command = ["taskferry", "transfer", *words(pair), "--samples", 12, "--scale", 1, "--refine", 20, "--out", out]
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the command sets
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    monkeypatch.setattr(Screen, "step", Killed(at).step)
    with pytest.raises(SystemExit, match="130"):
        main()
    said = capsys.readouterr().err
    assert "interrupted; nothing was written" in said
    folder = tmp_path / ".out.groups"
    assert (f"what is finished is kept in {folder}: the same command goes on from there" in said) == kept
    monkeypatch.undo()
    taskferry(*command[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_settings_of_a_refinement_need_one(pair: dict[str, Any], tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out"]
    assert "--refine STEPS" in taskferry("transfer", *words(pair), *out, "--refine-rate", 0.1, code=2).err
    refused = taskferry("transfer", *words(pair), *out, "--refine", 3, "--engine", "blockwise", code=2).err
    assert "whole in one process" in refused
    plan = taskferry("transfer", *words(pair), *out, "--refine", 3, "--dry-run", "--json").json["plan"]
    assert "3 training steps" in plan["method"]


def test_training_from_scratch_is_told_of_as_what_it_is(pair: dict[str, Any], tmp_path: Path) -> None:
    """Nothing was moved, and what was written is better: verdict, warnings, card and report say so."""
    out = tmp_path / "cold"
    ran = taskferry("transfer", *words(pair), "--samples", 12, "--method", "cold", "--refine", 4, "--refine-rate", 0.01,
                    "--out", out)  # fmt: skip
    assert "Nothing was moved: training began at the target" in " ".join(ran.out.split())
    assert "harm" not in ran.out
    assert "rm -r" not in ran.out
    record = json.loads((out / "taskferry.json").read_text())
    assert record["refined"]["kept"] == 4
    assert record["verdict"]["state"] == "helps"
    assert any("only 12 samples" in warning for warning in record["verdict"]["warnings"])
    assert not any("went UP" in warning for warning in record["verdict"]["warnings"])
    card = (out / "README.md").read_text()
    assert "scale: none, nothing was moved" in card
    assert "without labels" in card
    assert "nothing was trained" not in card
    assert max(record["spectrum"]["after"]) > 0  # of what is written
    taskferry("report", out, "--out", tmp_path / "cold.html")
    assert "It helps on the samples" in (tmp_path / "cold.html").read_text()
    cold = ["transfer", *words(pair), "--method", "cold", "--out", tmp_path / "none"]
    assert "add --refine STEPS" in taskferry(*cold, code=2).err
    assert "leave --scale out" in taskferry(*cold, "--refine", 2, "--scale", 1, code=2).err


def test_what_cannot_be_refined_is_refused_before_any_work(
    pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random source may answer with nothing, so its answers are given here."""
    monkeypatch.setattr(
        "taskferry.objectives.preparation.written", lambda _, __, asked, **___: [Written("dawn", True)] * len(asked)
    )
    out = ["--out", tmp_path / "out", "--samples", 12]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the ferry {i}"}) + "\n" for i in range(12)))
    given = {name: str(value) for name, value in {**pair, "calibration": prompts}.items()}
    how = {"samples": 12, "method": "cold", "refine": 3, "refine_labels": 0.5}
    with pytest.raises(TaskferryError, match="the tuned source's own"):
        transfer(TransferSettings(**given, **how, out=str(tmp_path / "own")), command="")
    dense = taskferry("transfer", *words(pair), *out, "--method", "few-shot", "--dry-run", code=2)
    assert "write it with --as-model" in dense.err
    lora = tmp_path / "more"
    shutil.copytree(pair["source_tuned"], lora)
    tensors = load_file(lora / "adapter_model.safetensors")
    base = load_model(str(pair["source_base"])).model
    saved = base.get_parameter("model.embed_tokens.weight").detach() + 1
    save_file({**tensors, "base_model.model.model.embed_tokens.weight": saved}, lora / "adapter_model.safetensors")
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["embed_tokens"]}))
    whole = taskferry("transfer", *words({**pair, "source_tuned": lora}), *out, "--refine", 3, "--dry-run", code=2)
    assert "embed_tokens.weight, which is not in its change" in whole.err


def test_another_lesson_is_another_training(pair: dict[str, Any], tmp_path: Path) -> None:
    """What a killed run has left is not taken for a run by other labels."""

    def settings(out: str, labels: float) -> TransferSettings:
        given = {name: str(value) for name, value in pair.items()}
        how = {"samples": 12, "method": "cold", "refine": 10, "refine_rate": 0.01, "refine_labels": labels}
        return TransferSettings(**given, **how, out=str(tmp_path / out))

    with pytest.raises(KeyboardInterrupt):
        transfer(settings("half", 0.0), command="", reporter=Killed(10))
    transfer(settings("half", 1.0), command="")
    transfer(settings("whole", 1.0), command="")
    found = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("half", "whole")]
    assert found[0] == found[1]
