"""`--calibration generate` as a user types it: what is written, what is told, and what is refused."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from taskferry import Alignment
from taskferry.example import write_example
from taskferry.models import load_model
from tests.helpers import folders
from tests.helpers.command import Ran, taskferry

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world") / "example"
    write_example(root)
    return root


def words(world: Path, *more: object) -> list[object]:
    given = ["--source-base", world / "base-a", "--source-tuned", world / "my-lora", "--target-base", world / "base-b"]
    return [*given, "--method", "bico", "--samples", 20, "--set", "max_length=40", *more]


def made(world: Path, out: Path, *more: object) -> Ran:
    return taskferry("transfer", *words(world, "--calibration", "generate", "--out", out, "--json", *more))


@pytest.mark.every
def test_maps_of_a_fleet_on_texts_that_its_adapters_write(world: Path, tmp_path: Path) -> None:
    """One file for all of them; what each wrote lies beside it, and the file says whose it is."""
    for name in ("one", "two"):
        shutil.copytree(world / "my-lora", tmp_path / "adapters" / name)
    given = ["--source-base", world / "base-a", "--target-base", world / "base-b", "--calibration", "generate"]
    given += ["--adapters", tmp_path / "adapters", "--samples", 20, "--set", "max_length=40"]
    plan = taskferry("fit", *given, "--out", tmp_path / "maps", "--dry-run").out
    assert "written by 2 adapters in turn" in plan
    told = taskferry("fit", *given, "--out", tmp_path / "maps", "--json").json
    how = told["provenance"]["calibration"]["generated"]
    assert how["adapters"] == ["one", "two"]
    assert how["distinct"] == 20  # one adapter under two names writes from other numbers
    text = (tmp_path / "maps.calibration.jsonl").read_bytes()
    assert how["sha256"] == hashlib.sha256(text).hexdigest()
    moved = taskferry("apply", tmp_path / "maps", tmp_path / "adapters" / "two", "--target-base", world / "base-b",
                      "--out", tmp_path / "moved", "--json").json  # fmt: skip
    losses = [
        taskferry("evaluate", world / "base-b", *added, "--test", world / "test.jsonl", "--json").json["loss"]
        for added in ([], ["--add", tmp_path / "moved"])
    ]
    assert losses[1] < losses[0] - 0.03, moved
    (tmp_path / "none").mkdir()
    told = taskferry("fit", *given, "--adapters", tmp_path / "none", "--out", tmp_path / "other", code=None)
    assert "has no folders of PEFT adapters in it" in told.err


def test_a_transfer_without_any_data(world: Path, tmp_path: Path) -> None:
    """The loss of real text falls; the samples lie beside the adapter, and give it again."""
    record = made(world, tmp_path / "moved", "--set", "temperature=0.9", "--seed", 3).json
    text = (tmp_path / "moved" / "calibration.jsonl").read_bytes()
    told = record["calibration"]["generated"]
    assert told == {"prompts": "none", "temperature": 0.9, "seed": 3, "samples": 20, "distinct": 20, "length": 38,
                    "sha256": hashlib.sha256(text).hexdigest()}  # fmt: skip
    assert len(text.decode().splitlines()) == 20
    assert "calibration" not in record["inputs"]
    told = next(note for note in record["verdict"]["notes"] if "no evidence on real ones: evaluate it" in note)
    best = min(record["scale_curve"], key=lambda point: point[1])
    assert record["verdict"]["scale"] == pytest.approx(best[0] / 2)
    assert [record["verdict"]["scale"], record["verdict"]["loss_after"]] in record["scale_curve"]
    assert told in (tmp_path / "moved" / "README.md").read_text()
    taskferry("report", tmp_path / "moved", "--out", tmp_path / "report.html")
    assert told in (tmp_path / "report.html").read_text()
    again = words(world, "--calibration", tmp_path / "moved" / "calibration.jsonl", "--seed", 3, "--json")
    same = taskferry("transfer", *again, "--out", tmp_path / "again").json
    assert same["calibration"]["sha256"] == record["calibration"]["sha256"]
    assert same["calibration"]["generated"] is None
    # As data they get the whole of the best scale; half of it is exact, up to the smallest numbers of float16.
    half, whole = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("moved", "again"))
    assert set(half) == set(whole)
    for name, factor in whole.items():
        torch.testing.assert_close(half[name] * (2 if "lora_B" in name else 1), factor, rtol=0.0, atol=2e-7)
    losses = [
        taskferry("evaluate", world / "base-b", *added, "--test", world / "test.jsonl", "--json").json["loss"]
        for added in ([], ["--add", tmp_path / "moved"])
    ]
    assert losses[1] < losses[0] - 0.03


def test_a_plan_draws_few_and_writes_nothing(world: Path, tmp_path: Path) -> None:
    given = words(world, "--calibration", "generate", "--json", "--set", "prompts=own")
    dry = taskferry("transfer", *given, "--samples", 200, "--out", tmp_path / "never", "--dry-run").json["plan"]
    assert dry["samples"] == (
        "200, written by the tuned source: prompts own, temperature 1, seed 0, up to 38 tokens each"
    )
    assert dry["labels"] == "written by the tuned source"
    assert not list(tmp_path.iterdir())


def test_maps_of_generated_samples(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "maps.alignment"
    taskferry("fit", *words(world, "--calibration", "generate", "--out", out))
    beside = tmp_path / "maps.alignment.calibration.jsonl"
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, beside.name]
    told = Alignment.load(out).provenance["calibration"]["generated"]
    assert told["sha256"] == hashlib.sha256(beside.read_bytes()).hexdigest()
    out.unlink()
    ran = taskferry("fit", *words(world, "--calibration", "generate", "--out", out), code=2)
    assert f"{beside.name} exists" in ran.err.replace("\n", "")


def test_what_was_drawn_can_be_learned_from(world: Path, tmp_path: Path) -> None:
    record = made(world, tmp_path / "learned", "--method", "distil", "--set", "steps=2").json
    assert record["provenance"]["distilled"]["losses"][-1][0] == 2
    assert "no evidence on real ones" in " ".join(record["verdict"]["notes"])


def test_samples_are_neither_sent_nor_copied_on(world: Path, tmp_path: Path) -> None:
    """A fine-tune may write down what it was tuned on."""
    from taskferry.taskvector import TaskVector

    made(world, tmp_path / "moved", "--as", "model")
    assert (tmp_path / "moved" / "calibration.jsonl").is_file()
    (tmp_path / "next").mkdir()
    moved = load_model(tmp_path / "moved")
    moved.format.write(moved, TaskVector({}), tmp_path / "next")
    assert not (tmp_path / "next" / "calibration.jsonl").exists()


@pytest.mark.parametrize(
    ("verb", "options", "sentence"),
    [
        ("transfer", ["--engine", "blockwise"], "--calibration generate needs whole models in memory"),
        ("transfer", ["--set", "per_class=2"], "generated samples have no labels but the tuned source's"),
        ("transfer", ["--labels", "data"], "generated samples have no labels but the tuned source's"),
        ("transfer", ["--set", "temperature=0"], "temperature: Input should be greater than 0"),
        ("transfer", ["--calibration", "data.jsonl", "--set", "temperature=2"], "temperature is of generated samples"),
        ("fit", ["--set", "prompts=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        ("compare", ["--test", "test.jsonl"], "only transfer and fit generate samples"),
    ],
)
def test_what_cannot_be_is_refused(
    verb: str, options: list[object], sentence: str, world: Path, tmp_path: Path
) -> None:
    given = words(world)[:6]
    calibration = [] if "--calibration" in options else ["--calibration", "generate"]
    ran = taskferry(*verb.split(), *given, *calibration, *options, "--out", tmp_path / "out", code=2)
    assert sentence in ran.err.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_maps_without_a_fine_tune_have_nobody_to_write(world: Path, tmp_path: Path) -> None:
    bases = ["--source-base", world / "base-a", "--target-base", world / "base-b", "--calibration", "generate"]
    ran = taskferry("fit", *bases, "--out", tmp_path / "x.alignment", code=2)
    assert "the tuned source writes the samples: give --source-tuned" in ran.err.replace("\n", " ")


def test_where_samples_are_missing_the_next_command_is_told(world: Path, tmp_path: Path) -> None:
    ran = taskferry("transfer", *words(world), "--out", tmp_path / "out", code=2)
    sentence = ran.err.replace("\n", " ").strip()
    assert "--calibration is missing: give JSONL, CSV, Parquet, an image folder or a hub dataset, or" in sentence
    assert sentence.endswith(f"--out {tmp_path / 'out'} --calibration generate")
    done = sentence[sentence.index("taskferry transfer") :].split()[1:]
    taskferry(*done, "--dry-run")
    folders.encoder(tmp_path / "bert", 16, 1, 1)
    given = ["--source-base", tmp_path / "bert", "--source-tuned", "x", "--target-base", "y", "--out", "z"]
    ran = taskferry("transfer", *given, code=2)
    assert ran.err.strip().endswith("--calibration my-samples --labels teacher")
