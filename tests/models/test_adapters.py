"""Adapters and tuned models of other classes, precisions and starts than their base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import TaskferryError
from taskferry.models import Skeleton, load_model, load_tuned, read_adapter
from tests.helpers import folders
from tests.helpers.command import Ran, taskferry
from tests.helpers.tiny import hf

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "masked", 24, 3, 2, "BertForMaskedLM")
    folders.encoder(root / "head", 16, 2, 1, "BertForSequenceClassification")
    folders.encoder(root / "wide", 24, 3, 2)
    folders.lora(root / "head", root / "lora", ["query"], task_type="SEQ_CLS")
    folders.texts(root / "texts.jsonl")
    return root


def test_an_adapter_s_prefix_is_not_doubled(world: Path, tmp_path: Path) -> None:
    """From a headless base to a target whose class has a head: PEFT must find every factor."""
    taskferry("transfer", "--source-base", world / "bert", "--source-tuned", world / "lora", "--scale", 1,
              "--target-base", world / "masked", "--calibration", world / "texts.jsonl",
              "--out", tmp_path / "moved")  # fmt: skip
    target = transformers.BertForMaskedLM.from_pretrained(world / "masked")
    loaded = peft.PeftModel.from_pretrained(target, tmp_path / "moved")
    factors = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(factors) == 3
    assert all(bool(factor.any()) for factor in factors)


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_4", "corda"])
def test_adapters_that_rewrite_the_base_are_refused(start: str, world: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(world / "lora", tmp_path / "bad")
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": start}))
    with pytest.raises(TaskferryError, match="changes the base's own weights"):
        read_adapter(bad, Skeleton.of(load_model(str(world / "bert")).model))


def test_half_precision_adapters_move(world: Path, tmp_path: Path) -> None:
    half = shutil.copytree(world / "lora", tmp_path / "half")
    state = load_file(half / "adapter_model.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in state.items()}, half / "adapter_model.safetensors")
    taskferry("transfer", "--source-base", world / "bert", "--source-tuned", half, "--target-base", world / "wide",
              "--calibration", world / "texts.jsonl", "--scale", 1, "--out", tmp_path / "moved")  # fmt: skip
    written = load_file(tmp_path / "moved" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in written.values())


def test_heads_of_the_tuned_model_may_differ(world: Path, tmp_path: Path) -> None:
    """A masked language model as base, a classifier as its fine-tune: the commonest case there is."""
    torch.manual_seed(1)
    folders.save(hf("BertForMaskedLM", 16, 2, vocab_size=400), tmp_path / "base")
    classifier = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        classifier.bert.encoder.layer[0].output.dense.weight.add_(0.1)
    classifier.save_pretrained(tmp_path / "tuned")
    found = load_tuned(str(tmp_path / "tuned"), load_model(str(tmp_path / "base")))
    assert list(found.tau.deltas) == ["bert.encoder.layer.0.output.dense.weight"]
    assert any("classifier" in name for name in found.ignored)


@pytest.mark.parametrize(
    ("key", "value", "way"),
    [
        ("alora_invocation_tokens", [5, 6], "train it as a plain LoRA"),
        ("layer_replication", [[0, 2], [1, 2]], "as a base of its own"),
        ("lora_bias", True, "merge it"),
        ("trainable_token_indices", [1, 2], "merge it"),
        ("megatron_config", {"hidden_size": 16}, "convert it"),
        ("arrow_config", {"top_k": 3}, "move each"),
        ("setting_of_tomorrow", {"way": "other"}, "set it to null if it does not"),
    ],
)
def test_settings_that_change_what_an_adapter_computes_are_refused(
    key: str, value: object, way: str, world: Path, tmp_path: Path
) -> None:
    bad = configured(world / "lora", tmp_path / "bad", **{key: value})
    ran = moved(world, bad, tmp_path / "out", code=2)
    assert f"adapter_config.json sets {key}" in ran.err
    assert way in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "out").exists()


def test_an_activated_lora_as_peft_writes_it_is_refused(tmp_path: Path, world: Path) -> None:
    """Always on, it would be another model."""
    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.lora(tmp_path / "a", tmp_path / "lora", ["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6])
    ran = taskferry("transfer", "--source-base", tmp_path / "a", "--source-tuned", tmp_path / "lora", "--target-base",
                    tmp_path / "a", "--calibration", world / "texts.jsonl", "--out", tmp_path / "out",
                    code=2)  # fmt: skip
    assert "sets alora_invocation_tokens" in ran.err


def test_settings_that_change_nothing_are_no_obstacle(world: Path, tmp_path: Path) -> None:
    more = {"exclude_modules": ["key"], "lora_dropout": 0.1, "velora_config": {"scale": 1.0}, "peft_version": "9.9",
            "eva_config": {"rho": 2.0}, "setting_of_tomorrow": None, "another_of_tomorrow": False}  # fmt: skip
    moved(world, configured(world / "lora", tmp_path / "good", **more), tmp_path / "out")


def configured(lora: Path, folder: Path, **more: object) -> Path:
    """The adapter with other settings."""
    shutil.copytree(lora, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **more}))
    return folder


def moved(
    world: Path, tuned: Path | str, out: Path, code: int = 0, more: tuple[object, ...] = (), **environment: str
) -> Ran:
    """The adapter from the small encoder to the wide one."""
    return taskferry("transfer", "--source-base", world / "bert", "--source-tuned", tuned, "--target-base",
                     world / "wide", "--calibration", world / "texts.jsonl", "--scale", 1, "--out", out, *more,
                     code=code, **environment)  # fmt: skip


@pytest.fixture(scope="module")
def hub(world: Path) -> dict[str, str]:
    """A cache as huggingface_hub lays it out: snapshots of links to blobs, and names of revisions."""
    other = folders.lora(world / "head", world / "other", ["query"], seed=3, task_type="SEQ_CLS")
    cached(world / "hub", "me/my-lora", {"main": world / "lora", "v2": other})
    return {"HF_HUB_CACHE": str(world / "hub")}


def test_the_hub_id_of_an_adapter(world: Path, hub: dict[str, str], tmp_path: Path) -> None:
    other, found = world / "other", {}
    for name, given in (("v2", "me/my-lora@v2"), ("folder", other)):
        moved(world, given, tmp_path / name, **(hub if name == "v2" else {}))
        found[name] = load_file(tmp_path / name / "adapter_model.safetensors")
        record = json.loads((tmp_path / name / "taskferry.json").read_text())
        assert record["settings"]["source_tuned"] == str(given)
        assert "adapter_model.safetensors" in record["inputs"]["source_tuned"]
    assert all(torch.equal(found["v2"][key], value) for key, value in found["folder"].items())
    second, main = (load_file(folder / "adapter_model.safetensors") for folder in (other, world / "lora"))
    assert not all(torch.equal(main[key], value) for key, value in second.items())  # the revision counts
    ran = taskferry("inspect", "me/my-lora", **hub)
    assert "LORA adapter of rank 4" in ran.out
    ran = moved(world, "me/nothing", tmp_path / "none", code=2, **hub)
    assert "me/nothing is neither a folder nor a model that the hub gives" in ran.err


def test_the_hub_id_of_an_adapter_through_saved_maps_and_block_by_block(
    world: Path, hub: dict[str, str], tmp_path: Path
) -> None:
    taskferry("fit", "--source-base", world / "bert", "--target-base", world / "wide", "--calibration",
              world / "texts.jsonl", "--method", "bico", "--out", tmp_path / "maps")  # fmt: skip
    for given, out in (("me/my-lora", "hub-applied"), (world / "lora", "applied")):
        taskferry("apply", tmp_path / "maps", given, "--target-base", world / "wide", "--out", tmp_path / out,
                  **(hub if out == "hub-applied" else {}))  # fmt: skip
    one, two = (load_file(tmp_path / out / "adapter_model.safetensors") for out in ("hub-applied", "applied"))
    assert all(torch.equal(one[key], value) for key, value in two.items())
    moved(world, "me/my-lora", tmp_path / "blocks", more=("--engine", "blockwise"), **hub)


def cached(cache: Path, name: str, revisions: dict[str, Path]) -> None:
    """Folders as revisions of a repository in a cache of the hub."""
    home = cache / f"models--{name.replace('/', '--')}"
    for number, (revision, folder) in enumerate(revisions.items()):
        commit = f"{number}" * 40
        snapshot = home / "snapshots" / commit
        for path in (snapshot, home / "blobs", home / "refs"):
            path.mkdir(parents=True, exist_ok=True)
        (home / "refs" / revision).write_text(commit)
        for file in folder.iterdir():
            shutil.copyfile(file, home / "blobs" / f"{number}-{file.name}")
            (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number}-{file.name}")
