"""Block by block gives what the whole models give."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from taskferry import Prototypes, TaskVector
from taskferry.engines.blocks import BlockPair
from taskferry.engines.blockwise import BlockRun, forward
from taskferry.engines.lazy import LazyModel
from taskferry.engines.whole import WholePair
from taskferry.errors import TaskferryError
from taskferry.methods import Job, run
from taskferry.models import Skeleton, load_model, read_adapter
from tests.helpers import folders
from tests.helpers.architectures import MIXED
from tests.helpers.command import taskferry
from tests.helpers.tiny import TINY, VOCABULARY, Tiny, hf, relative

MASKED = Tiny(
    "masked", lambda w, d: hf("BertForMaskedLM", w, d, vocab_size=VOCABULARY), TINY["bert"].batch, Prototypes()
)
FAMILIES = ["llama", "qwen3", "gpt2", "bert", "roberta"]


def saved(name: str | Tiny, width: int, depth: int, seed: int, folder: Path) -> torch.nn.Module:
    tiny = TINY[name] if isinstance(name, str) else name
    model = tiny.model(width, depth, seed)
    model.save_pretrained(folder, max_shard_size="100KB")  # type: ignore[operator]
    return model


def pairs(name: str | Tiny, depths: tuple[int, int], tmp_path: Path) -> tuple[WholePair, BlockPair, TaskVector]:
    """The same two models in memory and on disk, and a change of every linear layer of the first."""
    tiny = TINY[name] if isinstance(name, str) else name
    A = saved(name, 32, depths[0], 0, tmp_path / "model-0")
    B = saved(name, 48, depths[1], 1, tmp_path / "model-1")
    calibration, objective = tiny.calibration(16), tiny.objective
    (tmp_path / "scratch").mkdir()
    lazy = [LazyModel(tiny.name, tmp_path / f"model-{side}") for side in (0, 1)]
    whole = WholePair(A, B, calibration, objective)
    blocks = BlockPair(lazy[0], lazy[1], calibration, objective, scratch=tmp_path / "scratch")
    linear = {parameter for site in whole.source_sites for parameter in (site.weight, site.bias)}
    generator = torch.Generator().manual_seed(0)
    changes = {n: 0.02 * torch.randn(p.shape, generator=generator) for n, p in A.named_parameters() if n in linear}
    return whole, blocks, TaskVector(changes)


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, "bico") for name in ("llama", "qwen3", "bert")]
    + [pytest.param(name, "bico", marks=pytest.mark.every) for name in ("gpt2", "roberta")]
    + [("llama", "theseus")]
    + [pytest.param(name, "theseus", marks=pytest.mark.every) for name in FAMILIES[1:]],
)
@pytest.mark.parametrize("depths", [(2, 5), pytest.param((5, 2), marks=pytest.mark.every)])
def test_blocks_move_what_whole_models_move(name: str, depths: tuple[int, int], method: str, tmp_path: Path) -> None:
    """Bit for bit."""
    whole, blocks, tau = pairs(name, depths, tmp_path)
    one, other = run(method, Job(whole, tau)), run(method, Job(blocks, tau))
    assert set(one.tau.deltas) == set(other.tau.deltas)
    for parameter, change in one.tau.deltas.items():
        assert relative(other.tau.deltas[parameter], change) == 0.0, parameter  # type: ignore[arg-type]
    assert one.tau.coverage == other.tau.coverage
    assert {row["target"] for row in one.sites} == {row["target"] for row in other.sites}
    for side in ("source", "target"):
        assert one.provenance[side] == other.provenance[side]
    scales = [0.0, 0.5, 1.0]
    found, known = (
        each.losses(moved.tau, scales, whole.calibration) for each, moved in ((blocks, other), (whole, one))
    )
    assert found == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize(("name", "depths"), [("gemma3", (4, 6)), ("qwen3.5", (4, 6))])
def test_blocks_of_several_kinds_cross_in_depth(name: str, depths: tuple[int, int], tmp_path: Path) -> None:
    """A source block that is asked for again, after those below it, has its gradient still."""
    whole, blocks, tau = pairs(MIXED[name], depths, tmp_path)
    order = [pair.source.block for pair in whole.pairs if pair.target.role == "mlp.down"]
    assert order != sorted(order)  # type: ignore[type-var]
    one, other = run("bico", Job(whole, tau)), run("bico", Job(blocks, tau))
    assert set(one.tau.deltas) == set(other.tau.deltas)
    for parameter, change in one.tau.deltas.items():
        assert relative(other.tau.deltas[parameter], change) < 1e-6, parameter  # type: ignore[arg-type]
    assert one.tau.coverage == other.tau.coverage


def test_blocks_know_their_micro_batches_by_what_enters_them(tmp_path: Path) -> None:
    """A head that is made from features runs the model below its head: the batch cannot be told from that call."""
    whole, blocks, tau = pairs(MASKED, (2, 3), tmp_path)
    found, known = (each.losses(TaskVector({}), [0.0], whole.calibration) for each in (blocks, whole))
    assert found == pytest.approx(known, rel=1e-6)
    one, other = run("bico", Job(whole, tau)).tau, run("bico", Job(blocks, tau)).tau
    for parameter, change in one.deltas.items():
        assert relative(other.deltas[parameter], change) < 1e-6, parameter  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_no_weight_stays_in_memory(name: str, tmp_path: Path) -> None:
    _, blocks, _ = pairs(name, (3, 3), tmp_path)
    run_ = blocks._run(0, tmp_path)
    forward([run_], blocks.objectives[0])
    assert all(p.device.type == "meta" for p in run_.model.parameters())
    with run_.lazy.weights(run_.names(1)):
        real = {n for n, p in run_.model.named_parameters() if p.device.type != "meta"}
    assert real == set(run_.names(1))


def test_all_scales_of_a_round_read_the_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, blocks, tau = pairs("llama", (2, 3), tmp_path)
    moved = run("bico", Job(blocks, tau)).tau
    opened = []
    from taskferry.engines import lazy

    real = lazy.safe_open
    monkeypatch.setattr(lazy, "safe_open", lambda path, **more: opened.append(path) or real(path, **more))
    counts = []
    for scales in ([0.0, 1.0], [0.0, 0.5, 1.0, 2.0, 4.0]):
        opened.clear()
        blocks.losses(moved, scales, blocks.calibration)
        counts.append(sum("model-1" in str(path) for path in opened))
    assert counts[0] == counts[1] > 0


def test_embeddings_are_in_memory_once_for_all_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, blocks, tau = pairs("llama", (2, 3), tmp_path)
    moved = run("bico", Job(blocks, tau)).tau
    read: list[str] = []
    real = LazyModel.read

    def counted(lazy: LazyModel, names: Iterable[str], *more: Any, **named: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in real(lazy, names, *more, **named):
            read.append(name)
            yield name, value

    monkeypatch.setattr(LazyModel, "read", counted)
    blocks.losses(moved, [0.0, 0.5, 1.0], blocks.calibration)
    outer = blocks.lazy[1].outside(["model.layers.0", "model.layers.1", "model.layers.2"])
    assert outer
    assert {read.count(name) for name in outer} == {2}  # on the way in and on the way out


def test_models_of_several_stacks_are_refused(tmp_path: Path) -> None:
    _, blocks, _ = pairs("llama", (2, 2), tmp_path)
    sites = [replace(site, stack=f"{site.stack}-{site.role}") for site in blocks.source_sites]
    with pytest.raises(TaskferryError, match="stacks of blocks"):
        BlockRun(blocks.lazy[0], sites, blocks.calibration.side(0), tmp_path)


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
    folders.passages(root / "texts.jsonl")
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
            world / "texts.jsonl",
            "--samples",
            12,
            "--method",
            "bico",
            "--scale",
            1,
            "--engine",
            engine,
            "--force",
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
    arguments += ["--calibration", world / "texts.jsonl", "--engine", "blockwise", "--out", tmp_path / "out"]
    told = taskferry("transfer", *arguments, "--labels", "teacher", code=2).err
    assert "--labels teacher needs whole models in memory" in " ".join(told.split())
    told = taskferry("transfer", *arguments, "--method", "naive", code=2).err
    assert "needs both models whole in one process" in " ".join(told.split())
    plan = taskferry("transfer", *arguments, "--dry-run", "--json").json["plan"]
    assert plan["memory_bytes"] > 0
    assert not (tmp_path / "out").exists()
