"""Every method on every engine: equal to whole models in memory, or refused with one sentence before any work.

The matrix of docs/methods.md is made by this test: TASKFERRY_WRITE_MATRIX=1 writes it anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

from taskferry import TaskVector
from taskferry.jobs.settings import DEFAULT_METHOD
from taskferry.methods import methods
from taskferry.models import Skeleton, load_model, read_adapter
from tests.helpers import folders
from tests.helpers.command import ranks, taskferry
from tests.helpers.often import often
from tests.helpers.texts import SECOND, TEXTS

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")
pytest.importorskip("ray")

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
ENGINES = ("whole", "blockwise", "ranks", "fit + apply", "fleet")
EQUAL = 1e-5
MAPS = [name for name, method in methods().items() if method.needs.maps]
OTHERS = [name for name in methods() if name not in MAPS]
FEW = (DEFAULT_METHOD, "naive")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two decoders of other width and depth with a LoRA, and two encoders of one shape with a full fine-tune."""
    root = tmp_path_factory.mktemp("matrix")
    folders.causal(root / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "b", "LlamaForCausalLM", 24, 3, 2)
    answers = [
        {"prompt": a, "completion": f" {b}"} for a in TEXTS[:8] for b in SECOND[:7]
    ]  # enough for scales of roles
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    for name in ("a", "b"):
        words_only(root / name)
    (root / "loras").mkdir()
    # A random LoRA that helps, so that the default takes its second capture and its scales.
    modules = ["q_proj", "v_proj", "down_proj"]
    folders.lora(root / "a", root / "loras" / "lora", modules, seed=1, task_type="CAUSAL_LM")
    folders.encoder(root / "one", 16, 2, 3)
    folders.encoder(root / "other", 16, 2, 4)
    folders.shifted(root / "one", root / "tuned")
    folders.texts(root / "texts.jsonl")
    return root


def words_only(folder: Path) -> None:
    """A tokenizer of whole words in place of a trained one: training breaks ties as it likes, from run to run.

    The default's second capture amplifies the rounding of float32 (up to 1e-4 was seen on random models of this size),
    so the models of this test are always the same.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    cut = pre_tokenizers.Whitespace()
    words = sorted({word for text in [*TEXTS, *SECOND] for word, _ in cut.pre_tokenize_str(text)})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "</s>", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = cut
    for file in folder.glob("*token*"):
        file.unlink()
    special = {"unk_token": "<unk>", "pad_token": "<pad>"}  # no end of a text: a random source ends no answer
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)


def pair(world: Path, method: str) -> list[object]:
    a, b, tuned, data, samples = ("a", "b", "loras/lora", "prompts.jsonl", 56)
    if method in OTHERS:
        a, b, tuned, data, samples = ("one", "other", "tuned", "texts.jsonl", 12)
    words: list[object] = ["--source-base", world / a, "--source-tuned", world / tuned, "--target-base", world / b]
    words += ["--calibration", world / data, "--samples", samples, "--micro-batch", 16, "--method", method]
    return [*words, "--method-settings", "steps=2"] if methods()[method].needs.training else words


def moved(world: Path, folder: Path) -> TaskVector:
    return read_adapter(folder, Skeleton.of(load_model(str(world / "b")).model)).tau.dense()


Cells = Callable[[str], dict[str, TaskVector | str]]


@pytest.fixture(scope="module")
def cells(world: Path) -> Cells:
    """Of a method: engine -> what it moved, or the sentence that refuses it; once for all tests that ask."""
    return cache(lambda method: (with_maps if method in MAPS else without)(world, method))


def with_maps(world: Path, method: str) -> dict[str, TaskVector | str]:
    """At scale 1, as `apply` and a fleet move it: the default has scaled it already."""
    found: dict[str, TaskVector | str] = {}
    for engine, options in (("whole", ()), ("blockwise", ("--engine", "blockwise"))):
        out = world / f"{engine}-{method}"
        taskferry("transfer", *pair(world, method), "--scale", 1, "--force", *options, "--out", out, "--quiet")
        found[engine] = moved(world, out)
    ranks(2, "transfer", *pair(world, method), "--scale", 1, "--out", world / f"ranks-{method}", "--quiet")
    found["ranks"] = moved(world, world / f"ranks-{method}")

    fitted, out = world / f"{method}.alignment", world / f"applied-{method}"
    taskferry("fit", *pair(world, method), "--out", fitted, "--quiet")
    taskferry("apply", fitted, world / "loras" / "lora", "--target-base", world / "b", "--out", out, "--quiet")
    found["fit + apply"] = moved(world, out)
    moves = [{"name": method, "alignment": str(fitted), "target_base": str(world / "b")}]
    plan = {"adapters": str(world / "loras"), "out": str(world / "fleet"), "moves": moves}
    (world / "fleet.yaml").write_text(yaml.safe_dump(plan))
    taskferry("fleet", world / "fleet.yaml", "--quiet")
    return found | {"fleet": moved(world, world / "fleet" / f"{method}--lora")}


def without(world: Path, method: str) -> dict[str, TaskVector | str]:
    out = world / f"other-{method}"
    words: list[object] = ["transfer", *pair(world, method), "--scale", 1, "--out", out]
    found: dict[str, TaskVector | str] = {
        "blockwise": refused([*words, "--engine", "blockwise"]),
        "ranks": refused(words, RANK="0", WORLD_SIZE="1"),
    }
    found["fit + apply"] = refused(["fit", *pair(world, method), "--out", world / f"{method}.alignment"])
    found["fleet"] = found["fit + apply"]
    alone = ["--scale", 1] if methods()[method].needs.change else ["--refine", 2, "--dry-run"]  # a start moves nothing
    taskferry("transfer", *pair(world, method), *alone, "--out", world / f"whole-{method}", "--quiet")
    return found | {"whole": "moved"}


def refused(words: list[object], **environment: str) -> str:
    out = Path(str(words[words.index("--out") + 1]))
    told = taskferry(*words, code=2, **environment).err
    assert not out.exists()
    return " ".join(told.removeprefix("taskferry:").split())


@pytest.mark.parametrize("engine", ENGINES[1:])
@pytest.mark.parametrize("method", often(MAPS, FEW))
def test_methods_with_maps_are_the_same_on_every_engine(world: Path, cells: Cells, method: str, engine: str) -> None:
    whole, found = cells(method)["whole"], cells(method)[engine]
    assert isinstance(whole, TaskVector)
    assert isinstance(found, TaskVector)
    assert set(found.deltas) == set(whole.deltas)
    assert found.norm() > 0
    assert (found - whole).norm() < EQUAL * whole.norm()
    if method == DEFAULT_METHOD:  # nothing of it is left out
        record = json.loads((world / f"whole-{method}" / "taskferry.json").read_text())
        assert record["provenance"]["captures"] == 2


@pytest.mark.parametrize("method", often(OTHERS, FEW))
def test_methods_that_need_whole_models_say_so(cells: Cells, method: str) -> None:
    found = cells(method)
    assert found["whole"] == "moved"
    for engine in ("blockwise", "ranks"):
        assert f"the method {method} needs both models whole in one process" in str(found[engine])
    assert f"the method {method} leaves no maps to save" in str(found["fit + apply"])


def test_a_default_that_is_fitted_without_a_reference_says_so(world: Path, tmp_path: Path) -> None:
    words = pair(world, DEFAULT_METHOD)
    at = words.index("--source-tuned")
    told = taskferry("fit", *words[:at], *words[at + 2 :], "--out", tmp_path / "x.alignment").out
    assert "fitted without a task vector" in " ".join(told.split())
    lora = world / "loras" / "lora"
    taskferry("apply", tmp_path / "x.alignment", lora, "--target-base", world / "b", "--out", tmp_path / "out")


def test_an_output_of_a_fleet_is_read_like_any_other(world: Path, cells: Cells, tmp_path: Path) -> None:
    """`inspect` and `report`."""
    assert cells(DEFAULT_METHOD)
    out = tmp_path / "out"
    shutil.copytree(world / "fleet" / f"{DEFAULT_METHOD}--lora", out)
    assert "weights moved at scale 1" in taskferry("inspect", out).out
    taskferry("report", out)
    assert DEFAULT_METHOD in (out / "report.html").read_text()


@pytest.mark.every
def test_the_page_shows_this_matrix(cells: Cells) -> None:
    lines = ["| method | " + " | ".join(ENGINES) + " |", "|---" * (len(ENGINES) + 1) + "|"]
    for name in sorted(methods(), key=lambda name: (name in OTHERS, name)):
        words = ["yes" if cells(name)[engine] == "moved" or not isinstance(cells(name)[engine], str) else "refused"
                 for engine in ENGINES]  # fmt: skip
        lines.append(f"| `{name}` | " + " | ".join(words) + " |")
    text = "\n".join(lines)
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(r"(<!-- matrix -->\n).*?(<!-- /matrix -->)", re.S)
    made = pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)
    if os.environ.get("TASKFERRY_WRITE_MATRIX"):
        PAGE.write_text(made, encoding="utf-8")
    assert pattern.search(page) is not None
    assert made == page, "run it with TASKFERRY_WRITE_MATRIX=1"
