"""Whole jobs, file to file, on two devices: what is written is what the CPU writes, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from taskferry import Alignment
from taskferry.config import ApplySettings, EvaluateSettings, FitSettings, TransferSettings
from taskferry.evaluation.command import evaluate_command
from taskferry.jobs import apply as apply_alignment
from taskferry.jobs import fit as fit_alignment
from taskferry.jobs import transfer
from tests.devices import pretend
from tests.helpers import folders
from tests.helpers.tiny import relative

pytest.importorskip("transformers")
pytest.importorskip("peft")

CPU = {"device": "cpu"}
APART = {"device": "pretend:0,pretend:1"}


@pytest.fixture(autouse=True)
def _plain_attention() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two decoders with a LoRA, two encoders with a full fine-tune."""
    root = tmp_path_factory.mktemp("devices")
    folders.causal(root / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "b", "Qwen3ForCausalLM", 24, 3, 2)
    folders.lora(root / "a", root / "lora", ["q_proj", "v_proj", "down_proj"], seed=1, task_type="CAUSAL_LM")
    # By chance one whose move lowers the loss: along others no maps are saved.
    folders.lora(root / "a", root / "helps", ["q_proj", "v_proj"], seed=4, task_type="CAUSAL_LM")
    folders.passages(root / "passages.jsonl")
    folders.encoder(root / "one", 16, 2, 3)
    folders.encoder(root / "other", 24, 3, 4)
    folders.shifted(root / "one", root / "tuned")
    folders.texts(root / "texts.jsonl")
    return root


def language(world: Path, **more: Any) -> dict[str, Any]:
    given = {"source_base": world / "a", "target_base": world / "b", "source_tuned": world / "lora"}
    return {**{name: str(path) for name, path in given.items()}, "calibration": str(world / "passages.jsonl"), **more}


def texts(world: Path, **more: Any) -> dict[str, Any]:
    given = {"source_base": world / "one", "target_base": world / "other", "source_tuned": world / "tuned"}
    return {**{name: str(path) for name, path in given.items()}, "calibration": str(world / "texts.jsonl"), **more}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("language", {"method": "bico"}),
        pytest.param("language", {"engine": "blockwise", "method": "bico"}, marks=pytest.mark.every),
        pytest.param("language", {"method": "bico", "scale": 1.0}, marks=pytest.mark.every),
        pytest.param("texts", {}, marks=pytest.mark.every),
        pytest.param("texts", {"engine": "blockwise", "method": "bico"}, marks=pytest.mark.every),
        pytest.param("texts", {"as": "lora", "rank": 2, "method": "bico", "scale": 1.0}, marks=pytest.mark.every),
    ],
)
def test_a_transfer_writes_the_same_bytes(world: Path, tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    given = {"language": language, "texts": texts}[kind](world, micro_batch=5, **more)
    records = []
    for name, places in (("here", CPU), ("there", APART)):
        settings = TransferSettings(**given, **places, out=tmp_path / name, force=True)
        outcome = transfer(settings, command="test")
        assert outcome is not None
        records.append(outcome.record)
    here, there = records
    assert there["placement"]["source"] == {"device": "pretend:0", "dtype": "float32"}
    assert there["placement"]["target"] == {"device": "pretend:1", "dtype": "float32"}
    assert here["placement"]["target"]["device"] == "cpu"
    exact = kind == "texts"  # attention of decoders adds up in another order
    for part in ("verdict", "scale_curve", "sites", "coverage", "provenance") if exact else ("coverage", "provenance"):
        assert json.dumps(here[part], default=str) == json.dumps(there[part], default=str), part
    assert (tmp_path / "here").exists() == (tmp_path / "there").exists()
    if (tmp_path / "here").exists():
        before, after = weights(tmp_path / "here"), weights(tmp_path / "there")
        assert set(before) == set(after)
        assert before
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor) or (not exact and relative(after[name], tensor) < 1e-2), name


def test_fit_and_apply(world: Path, tmp_path: Path) -> None:
    for name, places in (("here", CPU), ("there", APART)):
        given = {**language(world), "source_tuned": str(world / "helps"), **places}
        fit_alignment(FitSettings(**given, out=tmp_path / f"{name}.alignment"))
    # Maps that are read from a file are in the host's memory, wherever they were made.
    maps = [Alignment.load(tmp_path / f"{name}.alignment") for name in ("here", "there")]
    for key, R in maps[0].R_out.items():
        assert maps[1].R_out[key].device.type == "cpu"
        assert relative(maps[1].R_out[key].dense(), R.dense()) < 1e-2
    apply_alignment(
        ApplySettings(
            alignment=tmp_path / "there.alignment",
            source_tuned=str(world / "lora"),
            target_base=str(world / "b"),
            out=tmp_path / "out",
        ),
        command="test",
    )
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_evaluate(world: Path) -> None:
    found = []
    for device in ("cpu", "pretend:1"):
        test = EvaluateSettings(model=str(world / "b"), test=str(world / "passages.jsonl"), device=device)
        texts_test = EvaluateSettings(
            model=str(world / "one"), add=str(world / "tuned"), test=str(world / "texts.jsonl"),
            shots=str(world / "texts.jsonl"), objective="probe", device=device,
        )  # fmt: skip
        found.append((evaluate_command(test)[0], evaluate_command(texts_test)[0]))
    assert found[0] == found[1]


def test_a_device_that_is_not_there_is_named(world: Path, tmp_path: Path) -> None:
    for wrong in ({"device": "nowhere"}, {"device": "cpu,cuda:7"}, {"device": "nowhere", "engine": "blockwise"}):
        with pytest.raises(ValueError, match=r"no device '(nowhere|cuda:7)' here: .*; give --device cpu"):
            transfer(TransferSettings(**language(world), **wrong, out=tmp_path / "out"), command="test")
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_says_what_does(world: Path, tmp_path: Path) -> None:
    settings = TransferSettings(**language(world), **APART, out=tmp_path / "out")
    with (
        pretend.limited(10_000, 0),
        pytest.raises(ValueError, match=r"(does not fit on pretend:0|memory of the device).*--engine blockwise"),
    ):
        transfer(settings, command="test")
