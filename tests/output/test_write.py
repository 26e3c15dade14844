"""What a job writes is what it says, and belongs to the models that it says."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

from taskferry import Prototypes, TaskferryError, TaskVector, text_calibration
from taskferry.collect.scale import calibration_loss
from taskferry.config import ApplySettings, FitSettings, TransferSettings
from taskferry.jobs import apply as apply_alignment
from taskferry.jobs import fit as fit_alignment
from taskferry.jobs import transfer
from taskferry.models import Skeleton, load_model, read_adapter
from taskferry.output.write import check_written
from tests.helpers import folders
from tests.helpers.command import taskferry

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "wide", 24, 3, 2)
    folders.shifted(root / "bert", root / "tuned")
    folders.texts(root / "texts.jsonl")
    return root


def test_apply_knows_the_models_it_was_fitted_on(world: Path, tmp_path: Path) -> None:
    folders.encoder(tmp_path / "twin", 24, 3, 7)
    data = ["--calibration", world / "texts.jsonl", "--samples", 12]
    taskferry(
        "fit",
        "--source-base",
        world / "bert",
        "--target-base",
        world / "wide",
        *data,
        "--out",
        tmp_path / "x.alignment",
    )
    ran = taskferry("apply", tmp_path / "x.alignment", world / "tuned", "--source-base", world / "bert",
                    "--target-base", tmp_path / "twin", "--out", tmp_path / "y", code=2)  # fmt: skip
    assert "is not the target that this alignment was fitted on" in ran.err
    assert not (tmp_path / "y").exists()


def test_the_check_of_an_output_sees_a_small_error(world: Path, tmp_path: Path) -> None:
    target = load_model(str(world / "wide"))
    tau = TaskVector({"encoder.layer.0.output.dense.weight": torch.full((24, 48), 1e-3)})
    folder = shutil.copytree(world / "wide", tmp_path / "unchanged")
    with pytest.raises(TaskferryError, match="was written with an error"):
        check_written(folder, "model", tau, target)
    right = copy.deepcopy(target.model)
    tau.add_to(right)
    right.save_pretrained(tmp_path / "right")
    check_written(tmp_path / "right", "model", tau, target)


def test_the_verdict_is_that_of_what_is_written(world: Path, tmp_path: Path) -> None:
    """Cut to rank 1 before the scale is chosen: the loss in the record is the written LoRA's."""
    ran = taskferry("transfer", "--source-base", world / "bert", "--source-tuned", world / "tuned", "--target-base",
                    world / "wide", "--calibration", world / "texts.jsonl", "--samples", 12, "--method", "bico",
                            "--scale", 1, "--as",
                    "lora", "--rank", 1, "--out", tmp_path / "low", "--json")  # fmt: skip
    rows = [json.loads(line) for line in (world / "texts.jsonl").read_text().splitlines()]
    chosen = [rows[i] for i in ran.json["calibration"]["indices"]]
    target = load_model(str(world / "wide"))
    tokenizer = target.tokenizer()
    shots = text_calibration(
        [r["text"] for r in chosen],
        tokenizer,
        pairs=[r["text_pair"] for r in chosen],
        labels=[r["label"] for r in chosen],
    ).side(1)
    loss = Prototypes().bind(target.model, shots)
    assert calibration_loss(target.model, loss, shots) == pytest.approx(ran.json["verdict"]["loss_before"], rel=1e-4)
    read_adapter(tmp_path / "low", Skeleton.of(target.model)).tau.add_to(target.model)
    assert calibration_loss(target.model, loss, shots) == pytest.approx(ran.json["verdict"]["loss_after"], rel=1e-4)


@pytest.mark.parametrize(("engine", "size", "told"), [("whole", 1e-4, True), ("blockwise", 0.05, False)])
def test_a_change_that_the_digits_have_no_room_for_is_told(
    world: Path, tmp_path: Path, engine: str, size: float, told: bool
) -> None:
    """A full model in bfloat16: what is lost is what the file shows."""
    half = folders.save(load_model(str(world / "wide")).model, tmp_path / "half", dtype=torch.bfloat16)
    tuned = folders.shifted(world / "bert", tmp_path / "tuned", size=size)
    given = ["--source-base", world / "bert", "--source-tuned", tuned, "--calibration", world / "texts.jsonl"]
    more = ["--target-base", half, "--method", "bico", "--scale", 1]
    said = taskferry("transfer", *given, *more, "--engine", engine, "--out", tmp_path / "out", "--json").json
    said = " ".join(said["verdict"]["notes"])
    assert ("Rounding to bfloat16" in said) == told
    if told:
        taskferry("transfer", *given, *more, "--as", "task-vector", "--out", tmp_path / "exact")
        exact = TaskVector.load(tmp_path / "exact" / "task_vector.safetensors").dense()
        before, after = (dict(load_model(str(tmp_path / name)).model.named_parameters()) for name in ("half", "out"))
        lost = sum(float((after[n] - before[n] - d).square().sum()) for n, d in exact.deltas.items())
        share = min(1.0, lost / exact.norm() ** 2)
        assert f"loses {share:.0%} of the change" in said


def test_a_job_from_python_says_how_to_repeat_it(world: Path, tmp_path: Path) -> None:
    """No command was typed: the settings beside the output are one."""
    pair = {"source_base": str(world / "bert"), "target_base": str(world / "wide"), "method": "bico",
            "calibration": str(world / "texts.jsonl"), "samples": 12, "out": tmp_path / "moved"}  # fmt: skip
    transfer(TransferSettings(**pair, source_tuned=str(world / "tuned"), scale=1.0))
    fit_alignment(FitSettings(**{**pair, "out": tmp_path / "maps"}))
    TaskVector({"encoder.layer.0.output.dense.weight": torch.ones(16, 32)}).save(tmp_path / "change")
    apply_alignment(
        ApplySettings(
            alignment=tmp_path / "maps",
            source_tuned=str(tmp_path / "change"),
            as_="task-vector",
            out=tmp_path / "applied",
        )
    )
    for name in ("moved", "applied"):
        verb, *words = json.loads((tmp_path / name / "taskferry.json").read_text())["command"].split()[1:]
        assert words[-2:] == ["--out", "ANOTHER"]
        taskferry(verb, *words[:-1], tmp_path / f"{name}-again")
        one, two = (sorted((tmp_path / each).glob("*.safetensors")) for each in (name, f"{name}-again"))
        assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
