"""`taskferry evaluate`: the library's numbers from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from taskferry import LanguageModel, LinearProbe, Pool, TaskferryError, evaluate, load_model, load_samples, load_tuned
from taskferry.config import EvaluateSettings
from taskferry.display.bars import Bar
from taskferry.evaluation.command import evaluate_command
from tests.helpers import folders
from tests.helpers.command import taskferry


def test_a_language_model_with_and_without_an_adapter(tmp_path: Path) -> None:
    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.lora(tmp_path / "a", tmp_path / "lora", ["q_proj", "v_proj"], task_type="CAUSAL_LM")
    data = folders.prompts(tmp_path / "data.jsonl")
    given = ["evaluate", tmp_path / "a", "--test", data, "--json"]
    alone, added = taskferry(*given).json, taskferry(*given, "--add", tmp_path / "lora", "--scale", 3).json
    loaded = load_model(str(tmp_path / "a"))
    pool = Pool(load_samples(str(data)), loaded)
    batches = pool.batches(range(len(pool)), 5)
    assert alone["loss"] == pytest.approx(evaluate(loaded.model, batches, LanguageModel()).loss, rel=1e-5)
    load_tuned(str(tmp_path / "lora"), loaded).tau.add_to(loaded.model, scale=3.0)
    assert added["loss"] == pytest.approx(evaluate(loaded.model, batches, LanguageModel()).loss, rel=1e-5)
    assert added["loss"] != pytest.approx(alone["loss"], rel=1e-4)
    shown = taskferry("evaluate", tmp_path / "a", "--test", data).out
    assert f"{alone['loss']:.4f} per token" in shown


def test_an_encoder_by_a_probe_on_shots(tmp_path: Path) -> None:
    folders.encoder(tmp_path / "a", 16, 2, 1)
    folder = tmp_path / "data"
    folder.mkdir()
    folders.texts(folder / "train.jsonl")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:7]))
    base = {"model": str(tmp_path / "a"), "test": str(folder), "micro_batch": 4}
    with pytest.raises(TaskferryError, match="--shots"):
        evaluate_command(EvaluateSettings(**base))
    score, head, _ = evaluate_command(EvaluateSettings(**base, shots=str(folder / "train.jsonl")))
    assert score.samples == 7  # the folder's test part
    assert head == "a linear probe"
    loaded = load_model(str(tmp_path / "a"))
    shots = Pool(load_samples(str(folder)), loaded)
    test = Pool(load_samples(str(folder), split="test"), loaded)
    expected = evaluate(
        loaded.model, test.batches(range(7), 7), LinearProbe(), shots.batches(range(len(shots)), len(shots))
    )
    assert score.accuracy == expected.accuracy
    assert score.loss == pytest.approx(expected.loss, rel=1e-4)


def test_a_bar_starts_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("scoring")
    for done in (1, 2, 3):
        bar(done, 3, 0.5)
    assert bar._bars is None
    assert "3/3" in capsys.readouterr().out
    torch.manual_seed(0)
