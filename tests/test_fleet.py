"""A fleet on a real Ray: every adapter once, poisoned ones with their reason, and again from where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from taskferry import Alignment, fleet
from taskferry.config import FleetSettings, Move, load_settings
from taskferry.disk.store import Store
from taskferry.errors import TaskferryError
from taskferry.fleet import RECORD, WEIGHTS, OpenAlignment, move_batch
from taskferry.models import Skeleton, load_model, read_adapter
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.often import often
from tests.helpers.tiny import relative

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
    assert summary["manifest"] == str(out / "manifest")
    lines = manifest(out)
    assert len(lines) == len({(line["move"], line["adapter"]) for line in lines}) == GOOD + 6
    reasons = {line["adapter"]: line["reason"] for line in lines if line["status"] == "failed"}
    assert set(reasons) == {"truncated", "nan", "shape", "no-config", "hostile <b>", "wrong-base"}
    assert "not finite" in reasons["nan"]
    assert "another base" in reasons["wrong-base"]
    assert any("not finite" in reason for reason in summary["reasons"])
    inside = str(world / "adapters")
    assert not [reason for reason in summary["reasons"] if inside in reason]
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
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.is_dir() and p.name != "manifest"}
    parts = sorted((out / "manifest").iterdir())
    for part in parts[1:]:
        part.unlink()
    with open(parts[0], "a") as file:
        file.write('{"adapter": "half')
    first = parts[0].read_bytes()
    summary = taskferry("fleet", plan(world, out), "--json", code=4).json
    assert (summary["done"], summary["failed"], summary["pending"]) == (GOOD + 1, 5, 0)
    after = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.is_dir() and p.name != "manifest"}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"b--zz-new"}
    assert parts[0].read_bytes() == first


def manifest(out: Path) -> list[dict[str, Any]]:
    parts = sorted((out / "manifest").iterdir())
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


MOVE = Move(name="b", alignment=Path("a-to-b.alignment"), target_base="base-b")


def test_an_address_of_fsspec_is_as_good_as_a_folder(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("good-2", "*"):  # a name is never a pattern
        memory.put(f"{world / 'adapters' / 'good-2'}/", f"/fleet-in/{name}/", recursive=True)
    memory.pipe_file("/fleet-in/good-2/optimizer.pt", b"large, and of no use")
    inputs, outputs = Store("memory://fleet-in"), Store("memory://fleet-out")
    outputs.make()
    assert inputs.adapters() == ["*", "good-2"]
    with inputs.local("good-2", ["adapter_config.json", "absent.json"]) as folder:
        assert [p.name for p in folder.iterdir()] == ["adapter_config.json"]
    opened = OpenAlignment.of(Alignment.load(world / "a-to-b.alignment"))

    def move() -> Any:
        moved = move_batch(opened, MOVE, inputs.adapters(), inputs, outputs, 1.0)
        assert {each.status for each in moved} == {"done"}, moved
        return [each.again for each in moved]

    assert move() == [False, False]
    assert memory.exists("/fleet-out/b--good-2/adapter_model.safetensors")
    assert move() == [True, True]
    # Cut off while it is written once more: the record went first and comes last, so it is seen to be no output.
    put, done = memory.put_file, []
    monkeypatch.setattr(memory, "put_file", lambda *given, **named: done.append(given) or put(*given, **named))
    memory.pipe_file("/fleet-out/b--good-2/adapter_config.json", b"spoiled")
    assert move() == [True, False]
    assert [Path(to).name for _, to in done][-1] == RECORD
    monkeypatch.setattr(memory, "put_file", broken)
    memory.pipe_file("/fleet-out/b--good-2/adapter_config.json", b"spoiled")
    assert move_batch(opened, MOVE, ["good-2"], inputs, outputs, 1.0)[0].status == "failed"
    assert not memory.exists(f"/fleet-out/b--good-2/{RECORD}")
    assert memory.exists(f"/fleet-out/b--*/{RECORD}")


def broken(*given: Any, **named: Any) -> None:
    raise OSError("the line is down")


@pytest.mark.parametrize("address", ["memory://fleet-manifest", "{tmp}"])
def test_parts_of_a_manifest_are_written_once_and_later_ones_win(address: str, tmp_path: Path) -> None:
    store = Store(address.format(tmp=tmp_path))
    keys = [("b", f"lora-{i}") for i in range(4)]
    wanted = dict.fromkeys(keys, "by these maps")
    first = fleet.Manifest.open(store, wanted)
    assert not first.states
    for _, name in keys:
        store.make(f"b--{name}")
        store.write_text(f"b--{name}/taskferry.json", "{}")
        store.write_text(f"b--{name}/{WEIGHTS}", "")
    first.add([fleet.Moved("lora-0", "b", "done"), fleet.Moved("lora-1", "b", "failed", "why")])
    first.add([fleet.Moved("lora-2", "b", "done"), fleet.Moved("gone", "b", "done")])
    second = fleet.Manifest.open(store, wanted)
    assert list(second.states) == [keys[0], keys[2]]  # what failed is tried again, what is gone does not count
    second.add([fleet.Moved("lora-1", "b", "done")])
    store.write_text("manifest/part-9.jsonl", '{"adapter": "lora-3", "move": "b", "status": "do')
    assert list(fleet.Manifest.open(store, wanted).states) == keys[:3]
    assert len(store.fs.ls(f"{store.root}/manifest")) == 4
    other = {**wanted, keys[0]: "at another scale"}
    assert list(fleet.Manifest.open(store, other).states) == keys[1:3]
    store.fs.rm(f"{store.root}/b--lora-1", recursive=True)
    assert list(fleet.Manifest.open(store, wanted).states) == [keys[0], keys[2]]  # an output that is gone is made again


def test_a_fleet_whose_outputs_would_overwrite_each_other_is_refused(world: Path, tmp_path: Path) -> None:
    file = plan(world, tmp_path / "moved")
    given = yaml.safe_load(file.read_text())
    for changed, words in (
        ({"moves": [*given["moves"], dict(given["moves"][0])]}, "two moves are called b"),
        ({"out": given["adapters"]}, "out is the folder of the adapters"),
        ({"out": given["adapters"] + "/moved"}, "or lies in it"),
    ):
        file.write_text(yaml.safe_dump({**given, **changed}))
        assert words in taskferry("fleet", file, code=2).err


def test_no_address_that_nothing_opens() -> None:
    with pytest.raises(TaskferryError, match="cannot be opened"):
        Store("nowhere://bucket")


def test_folders_of_a_folder(tmp_path: Path) -> None:
    for name in ("b", ".hidden", "a [1]"):
        (tmp_path / "in" / name).mkdir(parents=True)
    (tmp_path / "in" / "file").touch()
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "in" / "b")
    (tmp_path / "in" / "broken").symlink_to(tmp_path / "nothing")
    store = Store(str(tmp_path / "in"))
    assert store.adapters() == ["a [1]", "b", "linked"]
    (tmp_path / "in" / "b" / "weights").write_text("1")
    assert store.holding(["weights"]) == {"b", "linked"}
    before = store.stamps(["weights"])
    assert before["b"] == before["linked"]
    (tmp_path / "in" / "b" / "weights").write_text("12")
    assert store.stamps(["weights"])["linked"] != before["linked"]
    with pytest.raises(TaskferryError, match="is not a folder"):
        Store(str(tmp_path / "absent")).adapters()


@pytest.mark.parametrize("name", ["..", "a/b", "", "a\\b", "x\0"])
def test_no_name_leaves_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(TaskferryError, match="no name"), Store(str(tmp_path)).staged(name, RECORD):
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each; Ray gives a node half a minute to start, which a busy machine may miss."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100_000_000}
    for tries in (2, 1, 0):
        found = Cluster()
        try:
            found.add_node(**node)
            found.second = found.add_node(**node)
            break
        except Exception:  # Ray raises no narrower one
            found.shutdown()
            if not tries:
                raise
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


def settings(world: Path, out: str, **more: Any) -> FleetSettings:
    move = Move(name="b", alignment=world / "a-to-b.alignment", target_base="base-b")
    return FleetSettings(adapters=str(world / "adapters"), out=out, moves=[move], batch=8, **more)


def in_workers(monkeypatch: pytest.MonkeyPatch, trouble: Callable[[list[str], Callable[[], Any]], Any]) -> None:
    """Let a function of (names, the work) do the work of every batch."""
    whole = fleet._in_worker
    monkeypatch.setattr(fleet, "_in_worker", lambda *given: trouble(given[2], lambda: whole(*given)))


def test_a_fleet_with_other_maps_scale_or_adapters_is_moved_again(
    world: Path, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters, out = tmp_path / "adapters", tmp_path / "moved"
    for i in range(2):
        shutil.copytree(world / "adapters" / f"good-{i}", adapters / f"good-{i}")
    given = settings(world, str(out)).model_copy(update={"adapters": str(adapters)})

    def moved(scale: float | None = None) -> dict[str, bytes]:
        assert fleet.run_fleet(given.model_copy(update={"scale": scale} if scale else {}))["done"] == 2
        return {p.parent.name: p.read_bytes() for p in sorted(out.glob("b--*/adapter_model.safetensors"))}

    first = moved()
    with monkeypatch.context() as patch:  # one that is done starts nothing
        patch.setattr(fleet, "_connect", None)
        patch.setattr(fleet, "_batches_as_they_end", None)
        assert moved() == first
    half = moved(scale=0.5)
    assert all(half[name] != first[name] for name in first)
    shutil.rmtree(out / "b--good-0")
    (out / "b--good-1" / WEIGHTS).unlink()  # its record is still there
    assert moved(scale=0.5) == half
    shutil.copyfile(world / "adapters" / "good-2" / WEIGHTS, adapters / "good-1" / WEIGHTS)
    last = moved(scale=0.5)
    assert last["b--good-0"] == half["b--good-0"]
    assert last["b--good-1"] != half["b--good-1"]
    record = json.loads((out / "b--good-0" / "taskferry.json").read_text())
    assert str(adapters / "good-0") in record["command"]


def test_a_fleet_says_what_does_not_fit(world: Path, tmp_path: Path, cluster: Any) -> None:
    """Another target, adapters of several bases, and settings of a move that nobody knows."""
    adapters, out = tmp_path / "adapters", tmp_path / "moved"
    for i in range(2):
        shutil.copytree(world / "adapters" / f"good-{i}", adapters / f"good-{i}")
    config = adapters / "good-1" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "another/base"}))
    file = plan(world, out)
    given = yaml.safe_load(file.read_text()) | {"adapters": str(adapters)}
    move = given["moves"][0]
    for moves, words in (
        ([{**move, "target_bas": "x"}], "moves.0: unknown setting 'target_bas', did you mean target_base?"),
        # Before anything of the first move is done.
        ([move, {**move, "name": "c", "target_base": str(world / "base-a")}],
         "base-a is not the target that this alignment was fitted on: encoder.layer.0"),
    ):  # fmt: skip
        file.write_text(yaml.safe_dump({**given, "moves": moves}))
        assert words in " ".join(taskferry("fleet", file, code=2).err.split())
    assert not (out / "b--good-0").exists()
    file.write_text(yaml.safe_dump(given))
    summary = fleet.run_fleet(load_settings(FleetSettings, file, {}))
    assert summary["bases"] == {str(world / "base-a"): 1, "another/base": 1}


def test_a_batch_whose_worker_dies_is_tried_again_and_not_made_again(
    world: Path, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_once(names: list[str], work: Callable[[], Any]) -> Any:
        moved, mark = work(), tmp_path / names[0]
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)  # before it can tell
        return moved

    in_workers(monkeypatch, dies_once)
    # Workers run where the nodes were started: nothing of an output that is named from here may be written there.
    there, where = Path.cwd(), tmp_path / "where"
    where.mkdir()
    monkeypatch.chdir(where)
    summary = fleet.run_fleet(settings(world, "moved-from-here"))
    lines = manifest(where / "moved-from-here")
    assert (summary["done"], summary["pending"]) == (sum(line["status"] == "done" for line in lines), 0)
    assert summary["done"] >= GOOD
    assert len(lines) == len({line["adapter"] for line in lines}) == summary["of"]
    assert all(line["again"] for line in lines if line["status"] == "done")
    assert not (there / "moved-from-here").exists()


@pytest.mark.parametrize("kind", often(["dies", "raises"], ["raises"]))
def test_a_batch_that_is_given_up_fails_with_a_reason_for_each(
    world: Path, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def trouble(names: list[str], work: Callable[[], Any]) -> Any:
        if "good-0" not in names:
            return work()
        with open(tmp_path / "tries", "a") as file:
            file.write("x")
        if kind == "raises":
            raise OSError("no such luck")
        return os.kill(os.getpid(), signal.SIGKILL)

    in_workers(monkeypatch, trouble)
    summary = fleet.run_fleet(settings(world, str(tmp_path / "moved"), retries=1))
    assert (tmp_path / "tries").read_text() == "xx"
    lines = {line["adapter"]: line for line in manifest(tmp_path / "moved")}
    assert len(lines) == summary["of"]
    wanted = "OSError: no such luck" if kind == "raises" else "WorkerCrashedError: "
    together = [name for name, line in lines.items() if line["reason"].startswith(wanted)]
    assert len(together) == 8
    assert "good-0" in together
    assert summary["done"] >= GOOD - 8
    # With better luck the next run does them.
    monkeypatch.undo()
    assert fleet.run_fleet(settings(world, str(tmp_path / "moved")))["done"] >= GOOD


def test_a_node_that_is_killed_costs_nothing(
    world: Path, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = cluster.second.node_id

    def hangs_there(names: list[str], work: Callable[[], Any]) -> Any:
        import ray

        if ray.get_runtime_context().get_node_id() == lost:
            (tmp_path / "hangs").touch()
            time.sleep(600)
        return work()

    def kill() -> None:
        while not (tmp_path / "hangs").exists():
            time.sleep(0.05)
        cluster.remove_node(cluster.second, allow_graceful=False)

    in_workers(monkeypatch, hangs_there)
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    summary = fleet.run_fleet(settings(world, str(tmp_path / "moved")))
    killer.join(60)
    assert not killer.is_alive()
    lines = manifest(tmp_path / "moved")
    assert len(lines) == len({line["adapter"] for line in lines}) == summary["of"]
    assert summary["done"] >= GOOD
    assert not any("DiedError" in line["reason"] or "Crashed" in line["reason"] for line in lines)
