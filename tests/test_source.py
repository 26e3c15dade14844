"""The base of a fine-tune: one of other weights is told, one that is not given is read from the adapter."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry.config import TransferSettings
from taskferry.disk.inputs import hash_file
from taskferry.engines.whole import WholePair
from taskferry.example import FILES
from taskferry.models import Adapter, Tuned
from taskferry.objectives.objectives import Head, Prototypes
from taskferry.source import base_doubts, source_losses
from taskferry.taskvector import TaskVector
from tests.helpers.command import Ran, taskferry
from tests.helpers.tiny import TINY

transformers = pytest.importorskip("transformers")
DATA = ["--calibration", "data.jsonl", "--samples", 8, "--set", "max_length=32", "--method", "bico", "--scale", 0.5]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, a base of the same shape with random weights, and adapters that do nothing."""
    root = tmp_path_factory.mktemp("world")
    for name in ("base-a", "base-b", "my-lora"):
        shutil.copytree(FILES / name, root / name)
    shutil.copyfile(FILES / "data.jsonl", root / "data.jsonl")
    torch.manual_seed(0)
    shutil.copytree(FILES / "base-a", root / "random")
    config = transformers.AutoConfig.from_pretrained(root / "base-a")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / "random")
    adapter(root, "faint", lora_alpha=1e-4)
    return root


def adapter(root: Path, name: str, **config: Any) -> Path:
    """The adapter of the example with another configuration."""
    shutil.copytree(root / "my-lora", root / name)
    file = root / name / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return root / name


def moved(world: Path, out: Path, *more: object, code: int | None = 0, **changed: str | None) -> Ran:
    given = {"source-base": "base-a", "source-tuned": "my-lora", "target-base": "base-b"}
    words = [word for name, value in {**given, **changed}.items() if value for word in (f"--{name}", value)]
    return taskferry("transfer", *words, *DATA, "--out", out, *more, code=code, cwd=world)


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "taskferry.json").read_text())
    return found


def test_a_base_of_other_weights_is_told(world: Path, tmp_path: Path) -> None:
    wrong = {"source-base": "random"}
    ran = moved(world, tmp_path / "out", code=2, **wrong)
    named = "my-lora was made on base-a, as its adapter_config.json says, and --source-base is random"
    assert f"warning {named}: give the base that it was made on" in " ".join(ran.out.split())
    assert "my-lora does nothing on the samples: on 8 of them the loss of random is" in ran.err
    assert "check that --source-base is the model that was tuned" in ran.err
    assert ran.err.rstrip().endswith("--force goes on anyway")
    assert not (tmp_path / "out").exists()

    moved(world, tmp_path / "out", "--force", **wrong)
    first, second, *_ = record(tmp_path / "out")["verdict"]["warnings"]
    assert first.startswith(named)
    assert second.startswith("my-lora does nothing on the samples")
    losses = record(tmp_path / "out")["source"]
    assert losses["loss_tuned"] > 0.99 * losses["loss_base"]
    assert losses["unit"] == "per token"
    taskferry("report", tmp_path / "out", "--out", tmp_path / "page.html")
    for file in ("out/README.md", "page.html"):
        assert named in (tmp_path / file).read_text(), file


def test_losses_of_the_source_are_in_the_record(world: Path, tmp_path: Path) -> None:
    ran = moved(world, tmp_path / "out", "--json")
    losses = ran.json["source"]
    assert losses == record(tmp_path / "out")["source"]
    assert losses["loss_tuned"] < 0.95 * losses["loss_base"]
    assert ran.json["verdict"]["warnings"] == [w for w in ran.json["verdict"]["warnings"] if "samples" in w]


def test_an_adapter_that_does_nothing_is_refused(world: Path, tmp_path: Path) -> None:
    tuned = "faint"
    ran = moved(world, tmp_path / "out", code=2, **{"source-tuned": tuned})
    assert f"{tuned} does nothing on the samples" in ran.err
    assert "per token without it and" in ran.err
    assert not (tmp_path / "out").exists()
    ran = moved(world, tmp_path / "out", "--force", **{"source-tuned": tuned})
    assert f"{tuned} does nothing on the samples" in ran.out
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_swapped_bases_are_told(world: Path, tmp_path: Path) -> None:
    swap = {"source-base": "base-b", "target-base": "base-a"}
    ran = moved(world, tmp_path / "out", code=2, **swap)
    assert "which is --target-base here: --source-base and --target-base look swapped" in " ".join(ran.out.split())


def test_a_base_by_another_path_is_the_same(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    given = {"source_base": "base-a", "source_tuned": "other", "target_base": "base-b", "calibration": "data.jsonl"}
    found = {name: str(world / given[name]) for name in ("source_base", "source_tuned", "target_base")}
    adapter(world, "other")
    for name, doubts in (("org/base-a-bnb-4bit", 0), ("/elsewhere/base-a/", 0), ("./base-a", 0), ("base-c", 1)):
        config = world / "other" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": name}))
        assert len(base_doubts(TransferSettings(**given), found)) == doubts, name
    shutil.rmtree(world / "other")


def test_the_base_is_read_from_the_adapter(world: Path, tmp_path: Path) -> None:
    moved(world, tmp_path / "given")
    ran = moved(world, tmp_path / "read", **{"source-base": None})
    assert "my-lora on base-a, the base that its adapter_config.json names" in " ".join(ran.out.split())
    weights = [(tmp_path / out / "adapter_model.safetensors").read_bytes() for out in ("given", "read")]
    assert weights[0] == weights[1]
    found = record(tmp_path / "read")
    assert found["settings"]["source_base"] == "base-a"
    assert found["inputs"]["source_base"]["model.safetensors"] == hash_file(world / "base-a" / "model.safetensors")
    assert found["inputs"]["target_base"]["model.safetensors"] == hash_file(world / "base-b" / "model.safetensors")
    config = json.loads((tmp_path / "read" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(world / "base-b")
    taskferry("transfer", "--config", tmp_path / "read" / "taskferry.yaml", "--out", tmp_path / "again", cwd=world)
    assert (tmp_path / "again" / "adapter_model.safetensors").read_bytes() == weights[0]

    pair = ["--target-base", "base-b", "--calibration", "data.jsonl", "--samples", 8, "--method", "bico"]
    taskferry("fit", *pair, "--source-tuned", "my-lora", "--out", tmp_path / "maps", cwd=world)
    assert "--source-base is missing: give the model" in taskferry("fit", *pair, "--out", "x", code=2, cwd=world).err


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"base_model_name_or_path": None}, "adapter_config.json names no base_model_name_or_path"),
        ({"base_model_name_or_path": "gone"}, "other names gone, which is not here (gone does not exist"),
        (
            {"base_model_name_or_path": "org/gone", "revision": "v1"},
            "other names org/gone@v1, which is not here (org/gone@v1 is neither a folder nor",
        ),
    ],
)
def test_a_base_that_no_adapter_names_is_asked_for(
    world: Path, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    adapter(world, "other", **config)
    try:
        ran = moved(world, tmp_path / "out", code=2, **{"source-base": None, "source-tuned": "other"})
    finally:
        shutil.rmtree(world / "other")
    assert "--source-base is missing" in ran.err
    assert told in ran.err
    assert "give the model that was tuned" in ran.err


def test_a_full_fine_tune_names_no_base(world: Path, tmp_path: Path) -> None:
    ran = moved(world, tmp_path / "out", code=2, **{"source-base": None, "source-tuned": "base-a"})
    assert "--source-base is missing: base-a is no adapter" in ran.err


def test_bases_of_a_hub_are_named_with_their_revision(world: Path, tmp_path: Path) -> None:
    """The source is the revision that the adapter names; the target is written with the commit that was read."""
    for name, reference, commit in (("base-a", "v1", "a" * 40), ("base-b", "main", "b" * 40)):
        cached = tmp_path / "hub" / f"models--org--{name}"
        shutil.copytree(world / name, cached / "snapshots" / commit)
        (cached / "refs").mkdir()
        (cached / "refs" / reference).write_text(commit)
    adapter(world, "other", base_model_name_or_path="org/base-a", revision="v1")
    changed = {"source-base": None, "source-tuned": "other", "target-base": "org/base-b"}
    words = [word for name, value in changed.items() if value for word in (f"--{name}", value)]
    try:
        taskferry("transfer", *words, *DATA, "--out", tmp_path / "out", cwd=world, HF_HUB_CACHE=str(tmp_path / "hub"))
    finally:
        shutil.rmtree(world / "other")
    assert record(tmp_path / "out")["settings"]["source_base"] == "org/base-a@v1"
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base-b", "b" * 40)


def test_a_head_that_was_trained_beside_an_adapter_scores_it() -> None:
    """A head of zeros gives every class the same score; heads of another shape, or made from samples, say nothing."""
    tiny = TINY["bert-classifier"]
    A, B = tiny.model(16, 2, seed=1), tiny.model(16, 2, seed=2)
    pair = WholePair(A, B, tiny.calibration(40, 12), Head())
    zeros = {name: torch.zeros_like(p) for name, p in A.named_parameters() if name.startswith("classifier")}

    def tuned(**saved: torch.Tensor) -> Tuned:
        return Tuned(TaskVector({}), Adapter(TaskVector({}), {}, saved=saved), dict.fromkeys(saved, "a head"))

    before = {name: parameter.clone() for name, parameter in A.named_parameters()}
    found = source_losses(pair, tuned(**zeros))
    assert found is not None
    assert (found.loss_tuned, found.samples) == (pytest.approx(math.log(3)), 32)
    assert found.loss_base != pytest.approx(math.log(3))
    assert all(torch.equal(parameter, before[name]) for name, parameter in A.named_parameters())
    assert source_losses(pair, tuned(**{"classifier.weight": torch.zeros(5, 16)})) is None
    assert source_losses(WholePair(A, B, tiny.calibration(40, 12), Prototypes()), tuned()) is None
