"""A fleet on a real Ray: every adapter once, poisoned ones with their reason, and again from where it stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from taskferry import Alignment
from taskferry.checkpoints import Skeleton, load_model, read_adapter
from taskferry.engines.moving import Way, move_batch
from taskferry.engines.store import Store
from taskferry.errors import TaskferryError
from tests import folders
from tests.command import taskferry
from tests.tiny import relative

pytest.importorskip("ray")
pytest.importorskip("peft")
pytest.importorskip("datasets")
GOOD = 9


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two encoders, an alignment, adapters, and some that are poisoned."""
    root = tmp_path_factory.mktemp("fleet")
    folders.encoder(root / "base-a", 16, 2, 1)
    folders.encoder(root / "base-b", 24, 3, 2)
    folders.encoder(root / "base-c", 32, 2, 3)
    folders.texts(root / "texts.jsonl")
    taskferry("fit", "--source-base", root / "base-a", "--target-base", root / "base-b", "--calibration",
              root / "texts.jsonl", "--samples", 12, "--out", root / "a-to-b.alignment")  # fmt: skip
    adapters = root / "adapters"
    for i in range(GOOD):
        folders.lora(root / "base-a", adapters / f"good-{i}", ["query", "value"], seed=i)
    poison(adapters, root / "base-c")
    return root


def poison(adapters: Path, other: Path) -> None:
    for name in ("truncated", "nan", "shape", "no-config", "hostile <b>"):
        shutil.copytree(adapters / "good-0", adapters / name)
    weights = adapters / "truncated" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    for name in ("nan", "shape"):
        path = adapters / name / "adapter_model.safetensors"
        tensors = load_file(path)
        key = next(iter(tensors))
        tensors[key] = torch.full_like(tensors[key], torch.nan) if name == "nan" else tensors[key][:, :-1].contiguous()
        save_file(tensors, path)
    (adapters / "no-config" / "adapter_config.json").unlink()
    (adapters / "hostile <b>" / "adapter_config.json").write_text('{"peft_type": "<script>"}')
    folders.lora(other, adapters / "wrong-base", ["query"], seed=0)


def plan(world: Path, out: Path) -> Path:
    settings = {
        "adapters": str(world / "adapters"),
        "out": str(out),
        "batch": 3,
        "moves": [{"name": "b", "alignment": str(world / "a-to-b.alignment"), "target_base": "base-b"}],
    }
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(settings))
    return file


def test_every_adapter_is_moved_once_and_poison_stops_nobody(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "moved"
    summary = taskferry("fleet", plan(world, out), "--json", code=4).json
    assert (summary["done"], summary["failed"], summary["pending"]) == (GOOD, 6, 0)
    lines = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert len(lines) == len({(line["move"], line["adapter"]) for line in lines}) == GOOD + 6
    reasons = {line["adapter"]: line["reason"] for line in lines if line["status"] == "failed"}
    assert set(reasons) == {"truncated", "nan", "shape", "no-config", "hostile <b>", "wrong-base"}
    assert "not finite" in reasons["nan"]
    assert "another base" in reasons["wrong-base"]
    page = (out / "summary.html").read_text()
    assert "<script>" not in page
    assert "hostile &lt;b&gt;" in page
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")]

    alignment = Alignment.load(world / "a-to-b.alignment")
    skeletons = [Skeleton.of(load_model(str(world / name)).model) for name in ("base-a", "base-b")]
    for i in range(GOOD):
        alone = alignment.apply(read_adapter(world / "adapters" / f"good-{i}", skeletons[0]).tau).dense()
        found = read_adapter(out / f"b--good-{i}", skeletons[1]).tau.dense()
        assert set(found.deltas) == set(alone.deltas)
        for name, change in alone.deltas.items():
            assert relative(found.deltas[name], change) < 1e-5  # type: ignore[arg-type]

    # Again: nothing is done twice; one that was mended is done, a lost manifest is found again by its outputs.
    shutil.rmtree(world / "adapters" / "nan")
    shutil.copytree(world / "adapters" / "good-1", world / "adapters" / "zz-new")
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.is_dir()}
    (out / "manifest.jsonl").write_text(lines_of(lines[:4]) + '{"adapter": "half')
    summary = taskferry("fleet", plan(world, out), "--json", code=4).json
    assert summary["done"] == GOOD + 1
    after = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.is_dir()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"b--zz-new"}


def lines_of(lines: list[dict[str, object]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_an_address_of_fsspec_is_as_good_as_a_folder(world: Path) -> None:
    pytest.importorskip("fsspec")
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(f"{world / 'adapters' / 'good-2'}/", "/fleet-in/good-2/", recursive=True)
    inputs, outputs = Store("memory://fleet-in"), Store("memory://fleet-out")
    outputs.make()
    assert inputs.adapters() == ["good-2"]
    way = Way.of(Alignment.load(world / "a-to-b.alignment"))
    (moved,) = move_batch(way, "b", "base-b", ["good-2"], inputs, outputs, 1.0)
    assert moved.status == "done", moved.reason
    assert memory.exists("/fleet-out/b--good-2/adapter_model.safetensors")
    assert move_batch(way, "b", "base-b", ["good-2"], inputs, outputs, 1.0)[0].again


@pytest.mark.parametrize("name", ["..", "a/b", "", "a\\b", "x\0"])
def test_no_name_leaves_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(TaskferryError, match="no name"), Store(str(tmp_path)).staged(name):
        pass


def test_a_path_means_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a cluster do not run where the command was given."""
    monkeypatch.chdir(tmp_path)
    store = Store("moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Store(store.address).make()
    assert (tmp_path / "moved").is_dir()
    assert not (tmp_path / "elsewhere" / "moved").exists()
