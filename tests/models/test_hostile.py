"""Models and adapters from strangers: refused with the reason, nothing run, nothing read elsewhere, memory bounded."""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from taskferry import Alignment, TaskVector
from taskferry.errors import TaskferryError
from taskferry.models import load_model, read_adapter
from taskferry.models.states import check_folder, read_index, read_state
from tests.helpers import folders, hostile
from tests.helpers.hostile import EVIL, MODULE, Runs, adapter, raw_safetensors, skeleton


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """No reader here may take more than four gigabytes beyond what the process has."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for name in ("evil.pt", "evil.bin", "evil.ckpt"):
        (tmp_path / name).write_bytes(pickle.dumps(Runs(mark)))
        with pytest.raises(TaskferryError, match="could run code on loading, so it is refused"):
            read_state(tmp_path / name)
    torch.save({"state_dict": {"a": torch.ones(2)}, "more": Runs(mark)}, tmp_path / "zip.pt")
    with pytest.raises(TaskferryError, match="could run code on loading, so it is refused"):
        read_state(tmp_path / "zip.pt")
    folder = adapter(tmp_path / "lora")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Runs(mark)))
    with pytest.raises(TaskferryError, match="could run code"):
        read_adapter(folder, skeleton())
    assert not mark.exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert mark.exists()  # the file would have done it


def test_a_torch_file_cannot_grow_in_memory(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "plain.pt")
    assert read_state(tmp_path / "plain.pt")["a"].shape == (2**20,)
    with pytest.raises(TaskferryError, match="compressed records"):
        read_state(hostile.packed_again(tmp_path / "plain.pt", tmp_path / "packed.pt"))
    torch.save({"a": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "expanded.pt")
    with pytest.raises(TaskferryError, match=r"expanded tensor of \(1048576, 1048576\)"):
        read_state(tmp_path / "expanded.pt")
    torch.save({"a": torch.sparse_coo_tensor([[0], [0]], [1.0], (2**30, 2**30))}, tmp_path / "sparse.pt")
    with pytest.raises(TaskferryError, match="sparse"):
        read_state(tmp_path / "sparse.pt")


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10\x00\x00\x00",
        raw_safetensors({"a": entry([2], 0, 8)}, bytes(8), length=2**63),
        raw_safetensors({"a": entry([2], 0, 8)}, bytes(8), length=2**31),
        raw_safetensors({"a": entry([2], 0, 8)}, bytes(4)),
        raw_safetensors({"a": entry([2], 0, 2**60)}, bytes(8)),
        raw_safetensors({"a": entry([2], 8, 0)}, bytes(8)),
        raw_safetensors({"a": entry([2], -8, 8)}, bytes(8)),
        raw_safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        raw_safetensors({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8)),
        raw_safetensors({"a": entry([2], 0, 8, "F99")}, bytes(8)),
        raw_safetensors({"a": entry([2**62, 2**62], 0, 8)}, bytes(8)),
        raw_safetensors({"a": entry([2**33, 2**33], 0, 16)}, bytes(16)),
        raw_safetensors({"a": entry([2], 0, 8)}, bytes(800)),
        raw_safetensors(b"[" * 100_000, bytes(8)),
        raw_safetensors(b"\xff\xfe{}", bytes(8)),
        raw_safetensors({"a": None}, bytes(8)),
    ],
    ids=["empty", "short", "header-2^63", "header-2^31", "cut", "far-end", "backwards", "negative", "overlapping",
         "shared", "type", "shape-2^124", "shape-wraps", "hole", "nested", "not-utf8", "null"],
)  # fmt: skip
def test_a_safetensors_file_that_lies(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    for reader in (read_state, TaskVector.load, Alignment.load):
        with pytest.raises(TaskferryError, match=r"bad\.safetensors"):
            reader(path)


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "a\u202eb", "x" * 5000, "\x00"])
def test_tensor_names_that_steer_a_terminal(name: str, tmp_path: Path) -> None:
    (tmp_path / "s.safetensors").write_bytes(save({name: torch.ones(2)}))
    with pytest.raises(TaskferryError, match="no model calls a parameter so") as caught:
        read_state(tmp_path / "s.safetensors")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_an_index_that_leaves_its_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "secret.safetensors"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, outside)
    index = folder / "model.safetensors.index.json"
    (folder / "link.safetensors").symlink_to(outside)
    for file in (
        "../secret.safetensors",
        str(outside),
        "link.safetensors",
        "..",
        "",
        "a\0b",
        "a\\b",
        "x" * 300,
        "gone",
    ):
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(TaskferryError, match=r"not in the folder|link out of its folder"):
            read_index(index)
    for content in ({"weight_map": {"a": 3}}, {"weight_map": ["a"]}, {}, {"weight_map": {"a": ["../x"]}}):
        index.write_text(json.dumps(content))
        with pytest.raises(TaskferryError, match="no index of shards"):
            read_index(index)
    (folder / "link.safetensors").unlink()
    (folder / "vocab.txt").symlink_to("/etc/passwd")  # it would be copied beside the output
    index.unlink()
    with pytest.raises(TaskferryError, match="link out of its folder, to /etc/passwd"):
        check_folder(folder)


def test_links_of_the_hub_cache_are_in_order(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    check_folder(snapshot)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 0}, "r is 0, a positive number"),
        ({"r": -3}, "r is -3"),
        ({"r": 2.5}, "r is 2.5"),
        ({"r": "2"}, "r is '2'"),
        ({"r": True}, "r is True"),
        ({"r": None}, "r is None"),
        ({"r": 10**30}, "a positive number"),
        ({"r": 3}, "do not have the rank 3"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": [1]}, "lora_alpha is"),
        ({"alpha_pattern": {"query": -1}}, "alpha_pattern is no table"),
        ({"alpha_pattern": {"query": "9"}}, "alpha_pattern is no table"),
        ({"alpha_pattern": ["query"]}, "alpha_pattern is no table"),
        ({"rank_pattern": {"query": 0}}, "rank_pattern is no table"),
        ({"rank_pattern": {"query": 1}}, "do not have the rank 1"),
        ({"alpha_pattern": {"(": 1}}, "no expression"),
        ({"alpha_pattern": {"(a|": 1}}, "no expression"),
        ({"alpha_pattern": {"x*" * 600: 1}}, "simplify it"),
        ({"peft_type": ["LORA"]}, "only a LoRA"),
        ({"peft_type": EVIL}, "only a LoRA"),
    ],
)
def test_an_adapter_with_wild_values(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    if words == "no expression":
        pytest.importorskip("regex")
    with pytest.raises(TaskferryError, match=words):
        read_adapter(adapter(tmp_path / "lora", **changes), skeleton())


def test_an_expression_that_explodes_is_stopped(tmp_path: Path) -> None:
    """(x|xx)*y takes 1.6^n steps on n letters x; the target_modules of an adapter are never matched at all."""
    pytest.importorskip("regex")
    state = hostile.factors()
    long = {key.replace(MODULE, f"{'x' * 60}.{MODULE}"): value for key, value in state.items()}
    folder = adapter(tmp_path / "lora", alpha_pattern={r"(x|xx)*y": 3})
    (folder / "adapter_model.safetensors").write_bytes(save(long))
    started = time.perf_counter()
    with pytest.raises(TaskferryError, match="takes too long to match"):
        read_adapter(folder, skeleton())
    assert time.perf_counter() - started < 60  # of 1.6^60 steps
    read_adapter(adapter(tmp_path / "other", target_modules=r"(x|xx)*y"), skeleton())


def test_patterns_mean_what_they_mean_in_peft(tmp_path: Path) -> None:
    pytest.importorskip("regex")
    plain_ = read_adapter(adapter(tmp_path / "a"), skeleton()).tau.norm()
    for pattern in ("query", "self.query", MODULE, r"layer\.\d+.*query", r"encoder.*\.(query|key)"):
        folder = adapter(tmp_path / "b", alpha_pattern={"key": 1, pattern: 12})
        assert read_adapter(folder, skeleton()).tau.norm() == pytest.approx(3 * plain_)
    for pattern in ("uery", "layer", r"layer\.1.*query"):
        folder = adapter(tmp_path / "c", alpha_pattern={pattern: 12})
        assert read_adapter(folder, skeleton()).tau.norm() == pytest.approx(plain_)


def test_adapter_files_that_are_no_settings(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora")
    for content in ("[" * 200_000, "[]", "null", '{"r": ' + "9" * 10_000 + "}", "\xff", '{"a": 1' + " " * (65 * 2**20)):
        (folder / "adapter_config.json").write_text(content, encoding="latin-1")
        with pytest.raises(TaskferryError, match=r"adapter_config\.json"):
            read_adapter(folder, skeleton())


def test_factors_that_are_no_numbers(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", lora_alpha=999_999)
    (first, A), (second, B) = hostile.factors().items()
    huge = torch.full_like(B, 3e38)
    for state, words in (
        ({first: A, second: torch.full_like(B, torch.inf)}, f"{MODULE}.weight holds numbers that are not finite"),
        ({first: A, second: huge}, "not finite"),  # finite themselves, but not times alpha
        ({first: A.long(), second: B}, "int64"),
        ({first: A[:0], second: B[:, :0]}, "do not have the rank"),
        ({first: A[0], second: B}, "has only lora_B"),
        ({first: A}, "has only lora_A"),
        ({"other": A}, "no LoRA factors"),
    ):
        (folder / "adapter_model.safetensors").write_bytes(save(state))
        with pytest.raises(TaskferryError, match=words):
            read_adapter(folder, skeleton())


def test_a_folder_with_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    code = f"import os\nos.mkdir({str(mark)!r})\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
    (folder / "own.py").write_text(
        code + "class C(PretrainedConfig):\n    model_type = 'own'\nclass M(PreTrainedModel): ...\n"
    )
    maps = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": "own.T"}
    for kind in ("own", "bert"):
        config = {"model_type": kind, "architectures": ["M"], "auto_map": maps, "hidden_size": 16}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"a": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(TaskferryError, match="code of its own"):
            load_model(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["Trainer", "pipeline", "AutoTokenizer", "logging", "__name__", "os", "../x", 3, None, []]
)
def test_an_architecture_that_is_no_model(name: Any, tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TaskferryError):
        load_model(str(tmp_path))


def test_a_model_with_numbers_that_are_not_finite(tmp_path: Path) -> None:
    folder = folders.encoder(tmp_path / "bert", 16, 2, 1)
    for value in (torch.nan, torch.inf):
        state = load_file(folder / "model.safetensors")
        state["encoder.layer.1.output.dense.weight"][3, 4] = value
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(TaskferryError, match=r"encoder\.layer\.1\.output\.dense\.weight holds numbers"):
            load_model(str(folder))
    os.remove(folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(TaskferryError, match="could run code"):
        load_model(str(folder))
    assert not (tmp_path / "ran").exists()
