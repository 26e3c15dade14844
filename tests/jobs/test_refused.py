"""What would make a target worse is not saved by `fit`, and no training is called good that ends above the target."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskferry.errors import DoesNotHelp, TaskferryError
from taskferry.example import FILES
from taskferry.jobs.fit import fit_alignment
from taskferry.jobs.settings import FitSettings, TransferSettings
from taskferry.jobs.transfer import transfer
from taskferry.settings import load_settings
from tests.helpers import folders
from tests.helpers.command import taskferry

pytest.importorskip("peft")
PAIR = {"source_base": str(FILES / "base-a"), "target_base": str(FILES / "base-b"),
        "calibration": str(FILES / "data.jsonl"), "samples": 16, "max_length": 32}  # fmt: skip


@pytest.fixture(scope="module")
def backwards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of the example, which unlearns what that has learned."""
    return folders.times(FILES / "my-lora", tmp_path_factory.mktemp("backwards") / "lora", -4)


def test_maps_along_a_reference_that_does_not_help_are_not_saved(backwards: Path, tmp_path: Path) -> None:
    settings = FitSettings(**PAIR, effort="fast", source_tuned=str(backwards), out=tmp_path / "maps")
    with pytest.raises(DoesNotHelp, match=r"no scale up to 1 of .* lowers the calibration loss .* give another ref"):
        fit_alignment(settings)
    assert not settings.out.exists()


def test_the_command_says_so_by_its_exit_code(backwards: Path, tmp_path: Path) -> None:
    words = [word for name, value in PAIR.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = taskferry("fit", *words, "--effort", "fast", "--source-tuned", backwards, "--out", tmp_path / "maps", code=3)
    assert "are not saved" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_refinement_that_ends_above_the_target_is_not_called_good(backwards: Path, tmp_path: Path) -> None:
    given = {**PAIR, "method": "bico", "source_tuned": str(FILES / "my-lora"), "refine": 2}
    outcome = transfer(
        TransferSettings(**{**given, "source_tuned": str(backwards)}, scale=3.0, force=True, out=tmp_path / "bad"),
        command="test",
    )
    assert outcome is not None
    told, refined = outcome.record["verdict"], outcome.record["refined"]
    assert refined["kept"] == 2
    assert refined["evaluations"][0][1] > refined["evaluations"][-1][1] > refined["untouched"]
    assert told["state"] == "harms"
    assert any("no better than the untouched one" in warning for warning in told["warnings"])
    good = transfer(TransferSettings(**given, out=tmp_path / "good"), command="test")
    assert good is not None
    assert good.record["verdict"]["state"] == "helps"


def test_a_start_is_judged_by_maps_of_other_samples_at_a_given_scale_too(tmp_path: Path) -> None:
    """As at an automatic scale: what a refinement begins with has not seen the samples kept aside."""
    given = {**PAIR, "method": "bico", "source_tuned": str(FILES / "my-lora"), "refine": 1}
    chosen = transfer(TransferSettings(**given, out=tmp_path / "chosen"), command="test")
    assert chosen is not None
    scale = chosen.record["verdict"]["scale"]
    same = transfer(TransferSettings(**given, scale=scale, out=tmp_path / "given"), command="test")
    assert same is not None
    starts = [each.record["refined"]["evaluations"][0][1] for each in (chosen, same)]
    assert starts[0] == pytest.approx(starts[1], rel=1e-4)
    for loss in ("loss_before", "loss_after"):
        assert chosen.record["verdict"][loss] == pytest.approx(same.record["verdict"][loss], rel=1e-4)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [({"method_settings": {"map_rank": "range"}}, "method_settings"), ({"tolerance": 0.5}, "tolerance"),
     ({"scale": 2}, "scale"), ({"method": "theseus"}, "method")],
)  # fmt: skip
def test_nothing_is_asked_for_beside_the_paper(given: dict[str, object], wrong: str, tmp_path: Path) -> None:
    rest = {**PAIR, "source_tuned": "tuned", "out": tmp_path / "out", "paper": True}
    with pytest.raises(TaskferryError, match=f"paper fixes {wrong}"):
        load_settings(TransferSettings, None, {**rest, **given})
    for same in ("1", "1.0", 1, 1.0):
        assert load_settings(TransferSettings, None, {**rest, "scale": same}).scale == 1.0


@pytest.mark.parametrize("words", ["few-shot steps=-2", "few-shot learning_rate=-1", "few-shot folds=0",
                                   "distil steps=0", "distil labels=2"])  # fmt: skip
def test_settings_of_methods_have_bounds(words: str, tmp_path: Path) -> None:
    method, setting = words.split()
    name, _, value = setting.partition("=")
    given = {**PAIR, "source_tuned": "tuned", "out": tmp_path / "out", "method": method}
    with pytest.raises(TaskferryError, match=rf"{name}[^;]*: Input should be"):
        TransferSettings(**given, method_settings={name: float(value)}).chosen()


def test_a_card_takes_the_score_of_its_own_folder(tmp_path: Path) -> None:
    folders.causal(tmp_path / "b", "LlamaForCausalLM", 16, 2, 1)
    folders.prompts(tmp_path / "data.jsonl")
    score = ("evaluate", "b", "--test", "data.jsonl", "--card")
    assert "would take the score of something else" in taskferry(*score, "other", cwd=tmp_path, code=2).err
    gone = taskferry(*score, "b", cwd=tmp_path, code=2)  # it has no card: said before the work
    assert "cannot be read as a model card" in gone.err
    scaled = taskferry("evaluate", "b", "--test", "data.jsonl", "--scale", 2, cwd=tmp_path, code=2)
    assert "give --add, or leave --scale out" in scaled.err


def test_texts_that_are_cut_are_told(tmp_path: Path) -> None:
    folders.causal(tmp_path / "b", "LlamaForCausalLM", 16, 2, 1)
    folders.prompts(tmp_path / "data.jsonl")
    cut = taskferry("evaluate", "b", "--test", "data.jsonl", "--max-length", 4, "--json", cwd=tmp_path).json
    assert f"{cut['samples']} of {cut['samples']} samples fill all 4 tokens" in cut["warnings"][0]
    whole = taskferry("evaluate", "b", "--test", "data.jsonl", "--max-length", 100, "--json", cwd=tmp_path).json
    assert whole["warnings"] == []
