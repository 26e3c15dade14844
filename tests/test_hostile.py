"""Task vectors, alignments, settings, data and texts from strangers: refused with the reason, memory bounded."""

from __future__ import annotations

import io
import json
import resource
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from taskferry import Alignment, TaskVector
from taskferry.alignment import FORMAT as ALIGNMENT
from taskferry.cli.terminal import plain
from taskferry.config import TransferSettings, load_settings, read_yaml
from taskferry.data.samples import load_samples, picture
from taskferry.disk.files import HEADER, write_safetensors
from taskferry.errors import TaskferryError
from taskferry.output.card import write_card
from taskferry.taskvector import FORMAT as TASK_VECTOR
from tests.helpers import hostile
from tests.helpers.hostile import EVIL, MODULE


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """No reader here may take more than four gigabytes beyond what the process has."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


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


def test_lines_that_have_no_end(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = tmp_path / "long.jsonl"
    for content in ("[" * 100_000, '{"a":' * 100_000, '{"text": "[[[[", "label": ' + "[" * 70 + "]" * 70 + "}"):
        path.write_text(content)
        with pytest.raises(TaskferryError, match=r"nests|1 sample"):
            load_samples(str(path))
    rows = [{"text": "[" * 100 + '"' + "{" * 100 + "\\", "label": i % 2} for i in range(4)]  # brackets in a text
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_samples(str(path)).rows[0]["text"] == rows[0]["text"]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    assert len(load_samples(str(tmp_path / "list.json"))) == 4


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
