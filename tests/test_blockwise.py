"""Block by block gives what the whole models give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from taskferry import fit
from taskferry.calibration.batch import Calibration
from taskferry.checkpoints import Skeleton, load_model, read_adapter
from taskferry.engines.blockwise import align_blocks
from taskferry.engines.lazy import LazyModel
from taskferry.engines.walk import Walk
from taskferry.errors import TaskferryError
from taskferry.objectives import LanguageModel, Objective
from taskferry.pairing import pair_sites
from taskferry.solving import MapOptions
from tests import folders
from tests.command import taskferry
from tests.tiny import TINY, relative

FAMILIES = ["llama", "qwen3", "gpt2", "bert", "roberta"]


def saved(name: str, width: int, depth: int, seed: int, folder: Path) -> torch.nn.Module:
    model = TINY[name].model(width, depth, seed)
    model.save_pretrained(folder, max_shard_size="100KB")  # type: ignore[operator]
    return model


def walks(tmp_path: Path, calibration: Calibration, objective: Objective) -> list[Walk]:
    found = []
    for side in (0, 1):
        scratch = tmp_path / f"scratch-{side}"
        scratch.mkdir()
        lazy = LazyModel("model", tmp_path / f"model-{side}")
        found.append(Walk(lazy, calibration.side(side), objective, scratch))
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("depths", [(2, 2), (2, 5), (5, 2)])
def test_blocks_give_the_maps_of_whole_models(name: str, depths: tuple[int, int], tmp_path: Path) -> None:
    A = saved(name, 32, depths[0], 0, tmp_path / "model-0")
    B = saved(name, 48, depths[1], 1, tmp_path / "model-1")
    calibration, objective = TINY[name].calibration(16), TINY[name].objective
    whole = fit(A, B, calibration, objective)
    source, target = walks(tmp_path, calibration, objective)
    source.forward()
    target.forward()
    bound = objective.bind(B, calibration.side(1))
    assert target.loss == pytest.approx(sum(float(bound(batch)) for batch in calibration.side(1)), rel=1e-5)
    pairs, _ = pair_sites(source.sites, target.sites)
    parts = list(align_blocks(source, target, calibration, pairs, MapOptions()))
    found = {pair.target.name: (part, pair) for part in parts for pair in part.pairs}
    assert set(found) == {pair.target.name for pair in whole.pairs}
    for pair in whole.pairs:
        part, mine = found[pair.target.name]
        assert mine.source == pair.source
        for R, reference in (
            (part.R_in[mine.reads], whole.R_in[pair.reads]),
            (part.R_out[pair.target.name], whole.R_out[pair.target.name]),
        ):
            quality = whole.quality_out[pair.target.name]
            assert R.shape == reference.shape
            # On the calibration's own directions: at the edge of the tolerance rounding decides.
            if quality.rank == min(R.shape):
                assert relative(R.dense(), reference.dense()) < 2e-3
        assert part.quality_out[pair.target.name].similarity == pytest.approx(
            whole.quality_out[pair.target.name].similarity, abs=1e-5
        )
        assert part.quality_in[mine.reads].similarity == pytest.approx(
            whole.quality_in[pair.reads].similarity, abs=1e-5
        )


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_no_weight_stays_in_memory(name: str, tmp_path: Path) -> None:
    saved(name, 32, 3, 0, tmp_path / "model-0")
    saved(name, 32, 3, 1, tmp_path / "model-1")
    source, _ = walks(tmp_path, TINY[name].calibration(4), TINY[name].objective)
    source.forward()
    assert all(p.device.type == "meta" for p in source.model.parameters())
    with source.block(1):
        real = {n for n, p in source.model.named_parameters() if p.device.type != "meta"}
    assert real == set(source.parameters(1))


def test_models_of_two_stacks_are_refused(tmp_path: Path) -> None:
    saved("t5", 32, 2, 0, tmp_path / "model-0")
    with pytest.raises(TaskferryError, match="2 stacks of blocks"):
        Walk(LazyModel("t5", tmp_path / "model-0"), TINY["t5"].calibration(4).side(0), LanguageModel(), tmp_path)


def test_files_with_other_names_are_refused(tmp_path: Path) -> None:
    saved("vit", 32, 2, 0, tmp_path / "model-0")
    with pytest.raises(TaskferryError, match="by another name"):
        LazyModel("vit", tmp_path / "model-0")


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "../model.safetensors"}}', "[]", '{"weight_map": 3}', "no"])
def test_a_hostile_index_is_refused(index: str, tmp_path: Path) -> None:
    saved("llama", 32, 2, 0, tmp_path / "model-0")
    (tmp_path / "model-0" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(TaskferryError, match="index"):
        LazyModel("llama", tmp_path / "model-0")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two decoders in shards and bfloat16, a full fine-tune and a LoRA."""
    root = tmp_path_factory.mktemp("world")
    half = {"dtype": torch.bfloat16, "max_shard_size": "30KB"}
    folders.causal(root / "small", "LlamaForCausalLM", 16, 2, 1, **half)
    folders.causal(root / "large", "Qwen3ForCausalLM", 24, 5, 2, **half)
    folders.shifted(root / "small", root / "full")
    folders.lora(root / "small", root / "lora", ["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    folders.prompts(root / "prompts.jsonl")
    return root


def both(world: Path, tuned: str, tmp_path: Path) -> dict[str, dict[str, object]]:
    records = {}
    for engine in ("whole", "blockwise"):
        out = tmp_path / engine
        arguments = [
            "--source-base",
            world / "small",
            "--source-tuned",
            world / tuned,
            "--target-base",
            world / "large",
        ]
        arguments += [
            "--calibration",
            world / "prompts.jsonl",
            "--samples",
            12,
            "--method",
            "bico",
            "--scale",
            1,
            "--engine",
            engine,
        ]
        records[engine] = taskferry("transfer", *arguments, "--out", out, "--json").json
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    return records


def test_a_full_fine_tune_moves_block_by_block(world: Path, tmp_path: Path) -> None:
    """The same weights, coverage and verdict; the output loads in transformers."""
    records = both(world, "full", tmp_path)
    whole, blocks = (dict(load_model(str(tmp_path / e)).model.named_parameters()) for e in ("whole", "blockwise"))
    base = dict(load_model(str(world / "large")).model.named_parameters())
    assert set(whole) == set(blocks) == set(base)
    for name, value in whole.items():
        assert relative(blocks[name], value) < 3e-3, name  # one rounding of bfloat16
    moved = [name for name in base if not torch.equal(base[name], blocks[name])]
    assert len(moved) == 5 * 7
    one, other = (records[e] for e in ("whole", "blockwise"))
    assert one["coverage"] == other["coverage"]
    assert one["verdict"]["loss_before"] == pytest.approx(other["verdict"]["loss_before"], rel=1e-4)  # type: ignore[index]
    assert one["verdict"]["loss_after"] == pytest.approx(other["verdict"]["loss_after"], rel=1e-2)  # type: ignore[index]
    index = json.loads((tmp_path / "blockwise" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 6


def test_a_lora_moves_block_by_block(world: Path, tmp_path: Path) -> None:
    records = both(world, "lora", tmp_path)
    skeleton = Skeleton.of(load_model(str(world / "large")).model)
    whole, blocks = (read_adapter(tmp_path / e, skeleton).tau.dense().deltas for e in ("whole", "blockwise"))
    assert set(whole) == set(blocks)
    for name, change in whole.items():
        assert relative(blocks[name], change) < 1e-5, name  # type: ignore[arg-type]
    assert records["whole"]["coverage"] == records["blockwise"]["coverage"]


def test_what_block_by_block_does_not_do_is_said_at_once(world: Path, tmp_path: Path) -> None:
    arguments = ["--source-base", world / "small", "--source-tuned", world / "full", "--target-base", world / "large"]
    arguments += ["--calibration", world / "prompts.jsonl", "--engine", "blockwise", "--out", tmp_path / "out"]
    told = taskferry("transfer", *arguments, "--labels", "teacher", "--method", "theseus", code=2).err
    assert "the method is bico" in told
    assert "--scale 1" in told
    assert "cannot label" in told
    plan = taskferry("transfer", *arguments, "--scale", 1, "--dry-run", "--json").json["plan"]
    assert plan["memory_bytes"] > 0
    assert not (tmp_path / "out").exists()
