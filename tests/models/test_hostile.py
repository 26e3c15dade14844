"""Files from strangers: refused with the reason, nothing run, nothing read or written elsewhere, memory bounded."""

from __future__ import annotations

import io
import json
import pickle
import resource
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save, save_file

from taskferry import Alignment, TaskVector
from taskferry.alignment import FORMAT as ALIGNMENT
from taskferry.cli.terminal import plain
from taskferry.config import TransferSettings, load_settings, read_yaml
from taskferry.data.samples import load_samples, picture
from taskferry.disk.files import HEADER, write_safetensors
from taskferry.errors import TaskferryError
from taskferry.models import read_adapter
from taskferry.models.states import check_folder, read_index, read_state
from taskferry.output.card import write_card
from taskferry.taskvector import FORMAT as TASK_VECTOR
from tests.helpers import hostile
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


def test_a_task_vector_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "tau.safetensors"
    ones, nothing = torch.ones(2, 2), torch.zeros(2, 0)
    for tensors, words in (
        ({"left/a": ones}, "parts left"),
        ({"left/a": ones, "right/a": ones, "dense/a": ones}, "damaged task vector"),
        ({"a": ones}, "damaged task vector"),
        ({"left/a": ones, "right/a": torch.ones(3, 2)}, "do not multiply"),
        ({"left/a": nothing, "right/a": nothing.T}, "or none"),
        ({"dense/a": ones.long()}, "int64"),
        ({"dense/layer.3.weight": ones * torch.nan}, "layer.3.weight"),
    ):
        write_safetensors(path, tensors, {"format": TASK_VECTOR})
        with pytest.raises(TaskferryError, match=words):
            TaskVector.load(path)


def changed(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested lists and dictionaries with one value replaced."""
    if not place:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[place[0]] = changed(copy[place[0]] if not isinstance(copy, dict) else copy.get(place[0]), place[1:], value)
    return copy


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("pairs", 0, "target", "shape"), [5, 2**39]),
        (("pairs", 0, "target", "shape"), [5]),
        (("pairs", 0, "target", "rows"), [0, 5, 5]),
        (("pairs", 0, "target", "rows"), [12, 17]),
        (("pairs", 0, "target", "rows"), [-5, 0]),
        (("pairs", 0, "target", "rows"), None),
        (("pairs", 0, "target", "weight"), "elsewhere"),
        (("pairs", 0, "target", "bias"), "h.0.qkv.weight"),
        (("pairs", 0, "target", "bias"), 3),
        (("pairs", 0, "target", "transposed"), "yes"),
        (("pairs", 0, "reads"), ["h.0.qkv#q"]),
        (("pairs", 0, "reads"), "nothing"),
        (("pairs", 0), {}),
        (("pairs",), {}),
        (("target_parameters", "h.0.qkv.weight"), [2**39, 3]),
        (("target_parameters", "h.0.qkv.weight"), ["a", 3]),
        (("target_parameters",), []),
        (("source_parameters",), {}),
        (("quality_in", "h.0.qkv#q", "residual"), "good"),
        (("quality_in",), {}),
        (("quality_out", "h.0.qkv#q", "rank"), -1),
        (("reasons",), {"scale": 3}),
        (("reasons",), [1]),
        (("provenance",), 7),
    ],
)
def test_an_alignment_that_contradicts_itself(place: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.alignment"
    good = hostile.alignment()
    good.save(path)
    tau = TaskVector({f"{MODULE}.weight": torch.ones(6, 4), f"{MODULE}.bias": torch.ones(6)})
    assert set(Alignment.load(path).apply(tau).deltas) == {"h.0.qkv.weight", "h.0.qkv.bias"}
    tensors, header = good.tensors()
    write_safetensors(path, tensors, changed(json.loads(json.dumps(header)), place, value))
    with pytest.raises(TaskferryError, match="damaged alignment"):
        Alignment.load(path)


def test_maps_that_are_not_finite_or_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "bad.alignment"
    tensors, header = hostile.alignment().tensors()
    for name in tensors:
        for bad in (tensors[name] * torch.inf, tensors[name][:-1], tensors[name].to(torch.int32), tensors[name][0]):
            write_safetensors(path, {**tensors, name: bad}, header)
            with pytest.raises(TaskferryError, match="damaged alignment"):
                Alignment.load(path)
        write_safetensors(path, {k: v for k, v in tensors.items() if k != name}, header)
        with pytest.raises(TaskferryError, match="damaged alignment"):
            Alignment.load(path)
    save_file(tensors, path, {HEADER: json.dumps({"format": ALIGNMENT})})
    with pytest.raises(TaskferryError, match="damaged alignment"):
        Alignment.load(path)


def test_settings_that_are_a_bomb(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{n}: &{n} [{', '.join([f'*{p}'] * 9)}]" for p, n in zip("abcdefghij", "bcdefghijk", strict=True)]
    for content, words in (
        ("\n".join(lines), "an alias"),
        ("a: &a\n  b: *a\n", "an alias"),
        ("x: " + "[" * 100_000, "cannot be read as YAML"),
        ("x: " + "9" * 10_000, "cannot be read as YAML"),
        ("x: 2020-99-99", "cannot be read as YAML"),
        ("x: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
        ("1: 2", "holds no settings"),
        ("? [a, b]\n: c", "cannot be read as YAML"),
        ("a: " + "x" * 2_000_000, "bytes: settings have"),
        ("\x00", "cannot be read as YAML"),
        ("samples: 3\nsampels: 4\nseed: [1]\n", "unknown setting 'sampels'"),
        ("samples: .inf\nscale: .nan\nmicro_batch: 1e99", "samples"),
    ):
        file.write_text(content)
        with pytest.raises(TaskferryError, match=words):
            load_settings(TransferSettings, file, {})
    file.write_text(yaml.safe_dump({"samples": 3, "templates": ["a", "b"]}))
    assert read_yaml(file) == {"samples": 3, "templates": ["a", "b"]}


def png(width: int, height: int) -> bytes:
    """A picture of any claimed size in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def test_pictures_that_are_bombs_or_programs(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for size in ((2**20, 2**20), (12_000, 12_000), (2**31 - 1, 1)):
        with pytest.raises(TaskferryError, match=r"pixels|cannot be read"):
            picture({"image": {"bytes": png(*size)}})
    with pytest.raises(TaskferryError, match="cannot be read"):
        picture({"image": {"bytes": png(40, 40)}})  # its pixels are not there
    mark = tmp_path / "ran"
    postscript = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({mark}) (w) file closefile\n%%EOF\n"
    with pytest.raises(TaskferryError, match="cannot be read"):
        picture({"image": {"bytes": postscript.encode()}})
    assert not mark.exists()


def test_data_that_names_files_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    from PIL import Image

    folder = tmp_path / "data"
    folder.mkdir()
    outside = tmp_path / "private.png"
    Image.new("RGB", (4, 4)).save(outside)
    Image.new("RGB", (4, 4)).save(folder / "own.png")
    rows = [{"image": {"path": str(folder / "own.png"), "bytes": None}, "label": 0} for _ in range(3)]
    for other in (str(outside), str(folder / ".." / "private.png"), "/etc/hostname"):
        bad = [*rows, {"image": {"path": other, "bytes": None}, "label": 1}]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
        with pytest.raises(TaskferryError, match="not in its folder"):
            load_samples(str(folder / "data.jsonl"))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert picture(load_samples(str(folder / "data.jsonl")).rows[0]).size == (4, 4)


def test_json_that_nests_without_end(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    for content in ("[" * 100_000, '{"a":' * 100_000):
        path.write_text(content)
        with pytest.raises(TaskferryError, match="nests too many lists"):
            load_samples(str(path))
    rows = [{"text": "[" * 100 + '"' + "{" * 100 + "\\", "label": i % 2} for i in range(4)]  # brackets in a text
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_samples(str(path)).rows[0]["text"] == rows[0]["text"]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    assert len(load_samples(str(tmp_path / "list.json"))) == 4
    path.write_text('{"text": "a", "label": [[[[]]]]}\n' * 2)
    with pytest.raises(TaskferryError, match="lists or objects"):
        load_samples(str(path))


def test_parquet_that_decodes_to_terabytes(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "bomb.parquet"
    words = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1_000_000, pyarrow.int32()), ["x" * 2**20])
    table = pyarrow.table({"text": words, "label": pyarrow.array([0] * 1_000_000)})
    parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 2**20
    with pytest.raises(TaskferryError, match="decodes to more than"):
        load_samples(str(path))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 10**12], "classes are counted"),
        ([0, -1], "counted from 0"),
        ([0.0, float("nan")], "fractions|no label"),
        ([0.5, 1.0], "fractions"),
        ([0.0, 1e300], "classes are counted"),
        ([None, 1], "have no label"),
    ],
)
def test_labels_out_of_range(labels: list[Any], words: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "label": label}) + "\n" for label in labels))
    with pytest.raises(TaskferryError, match=words):
        load_samples(str(path))


def test_class_names_that_are_no_list(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n')
    for content in ("{}", "[[1]]", "[" * 100_000, "\xff"):
        (tmp_path / "classes.json").write_text(content, encoding="latin-1")
        with pytest.raises(TaskferryError, match=r"classes\.json"):
            load_samples(str(path))


def test_text_does_not_escape_into_terminal_or_card(tmp_path: Path) -> None:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system=None).print(f"[bold]{plain(EVIL)}[/]")
    shown = stream.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert shown.strip().isprintable()
    assert "[bold]<script>" in shown  # as text: not taken for markup
    record = {
        "settings": {"source_tuned": EVIL, "source_base": "a`b", "target_base": f'x"\n{EVIL}'},
        "verdict": {"sentence": EVIL, "scale": 1.0},
        "provenance": {"method": EVIL},  # of an alignment that a stranger saved
        "command": "taskferry ```\n# title",
        "coverage_summary": f"```\n{EVIL}",
    }
    write_card(tmp_path, record, adapter=True)
    card = (tmp_path / "README.md").read_text()
    assert "<script>" not in card
    assert card.count("```") == 4
    assert all(c.isprintable() or c == "\n" for c in card)
    front = yaml.safe_load(card.split("---")[1])
    assert set(front) == {"library_name", "tags"}  # what cannot be a name on a hub is no base model there


def test_a_line_that_is_no_object_ends_no_process(tmp_path: Path) -> None:
    """A null on the first line ends pyarrow's own parser, and the process with it."""
    pytest.importorskip("datasets")
    good = json.dumps({"text": "a", "label": 0})
    (tmp_path / "data.jsonl").write_text(f"null\n{good}\n{good}\n")
    with pytest.raises(TaskferryError, match="entry 1 is no object with columns"):
        load_samples(str(tmp_path / "data.jsonl"))
    separator = json.dumps({"text": "two\u2028lines", "label": 1}, ensure_ascii=False)
    (tmp_path / "more.jsonl").write_text(f"{good}\n{separator}\n", encoding="utf-8")
    assert load_samples(str(tmp_path / "more.jsonl")).rows[1]["text"] == "two\u2028lines"
