"""Pairs and triplets of sentence encoders: files through the installed command, against ten plain lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from taskferry import Batch, Calibration, TaskferryError, load_model, load_samples
from taskferry.collect.device import frozen
from taskferry.collect.recorder import Recorder
from taskferry.data.builders import evenly, pair_calibration
from taskferry.layers.discovery import find_sites
from taskferry.objectives.objectives import Contrastive, default_objective
from tests.helpers import folders
from tests.helpers.command import Ran, taskferry
from tests.helpers.tiny import relative

pytest.importorskip("transformers")
pytest.importorskip("datasets")

WHO = ["the ferry", "a keeper", "nobody", "the deck", "rain"]
DOES = ["leaves the harbour", "waved all night", "was slippery", "expected such a crossing"]
ROWS = [(f"{who} {does}", f"{who}, still dark", f"{other} {does}")
        for who, other in zip(WHO, WHO[1:] + WHO[:1], strict=True) for does in DOES]  # fmt: skip
FORMS = {
    "pairs": ("anchor", "positive"),
    "queries": ("query", "positive"),
    "sentences": ("sentence1", "sentence2"),
    "triplets": ("anchor", "positive", "negative"),
}


def written(path: Path, names: tuple[str, ...], **more: Any) -> Path:
    rows = [dict(zip(names, row, strict=False), **more) for row in ROWS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "a", 16, 2, 1)
    folders.encoder(root / "b", 24, 3, 2)
    folders.lora(root / "a", root / "lora", ["query", "value"])
    folders.causal(root / "causal", "LlamaForCausalLM", 16, 2, 1)
    for form, names in FORMS.items():
        written(root / f"{form}.jsonl", names)
    return root


def plainly(folder: Path, texts: int, size: int, order: Sequence[int] = range(len(ROWS))) -> tuple[Tensor, Tensor]:
    """Loss and right answers, summed over micro-batches: what MultipleNegativesRankingLoss computes."""
    loaded = load_model(str(folder))
    loss, right = torch.zeros(()), torch.zeros(())
    for part in evenly(len(order), size):
        embedded = []
        for column in range(texts):
            given = loaded.tokenizer()([ROWS[order[i]][column] for i in part], padding=True, return_tensors="pt")
            hidden, mask = loaded.model(**given).last_hidden_state, given["attention_mask"][..., None]
            embedded.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
        scores = embedded[0] @ torch.cat(embedded[1:]).T / 0.05
        loss = loss + F.cross_entropy(scores, torch.arange(len(part)), reduction="sum")
        right = right + (scores.argmax(1) == torch.arange(len(part))).sum()
    return loss, right


@pytest.mark.parametrize(("form", "size"), [("pairs", 8), ("queries", 20), ("sentences", 7), ("triplets", 8)])
def test_the_loss_of_files_is_the_plain_one(form: str, size: int, world: Path) -> None:
    with torch.no_grad():
        loss, right = plainly(world / "b", len(FORMS[form]), size)
    given = ["evaluate", world / "b", "--test", world / f"{form}.jsonl", "--micro-batch", size]
    found = taskferry(*given, "--json").json
    assert found["loss"] == pytest.approx(float(loss) / len(ROWS), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * float(right) / len(ROWS))
    assert found["accuracy"] < 100
    shown = taskferry(*given).out
    assert f"{found['accuracy']:.2f} %" in shown
    assert "the positive among all candidates of its micro-batch" in shown


@pytest.mark.parametrize("texts", [2, 3])
def test_recorded_gradients_are_those_of_the_plain_loss(texts: int, world: Path) -> None:
    loaded = load_model(str(world / "b"))
    rows = [row[:texts] for row in ROWS]
    calibration = pair_calibration(rows, loaded.tokenizer(), micro_batch=8)
    assert isinstance(default_objective(loaded.model, calibration), Contrastive)
    sites = [site for site in find_sites(loaded.model) if site.block is not None]
    found = {site.name: torch.zeros(site.shape) for site in sites}
    inputs: dict[str, Tensor] = {}
    loss = Contrastive().bind(loaded.model, calibration.side(0))
    for batch in calibration.side(0):
        recorder = Recorder(
            loaded.model, sites, samples=batch.rows, on_forward=lambda call, x, _: inputs.update({call.site.name: x}),
            on_gradient=lambda call, g: found[call.site.name].add_(
                torch.einsum("nlo,nli->oi", g, inputs[call.site.name])
            ),
        )  # fmt: skip
        with frozen(loaded.model), recorder:
            value = loss(batch)
        value.backward()
    import transformers

    plain = transformers.AutoModel.from_pretrained(world / "b")
    total = torch.zeros(())
    for part in evenly(len(ROWS), 8):
        unit = []
        for column in range(texts):
            given = loaded.tokenizer()([ROWS[i][column] for i in part], padding=True, return_tensors="pt")
            mask = given["attention_mask"][..., None]
            unit.append(F.normalize((plain(**given).last_hidden_state * mask).sum(1) / mask.sum(1), dim=1))
        total = total + F.cross_entropy(20 * unit[0] @ torch.cat(unit[1:]).T, torch.arange(len(part)), reduction="sum")
    total.backward()
    assert len(sites) == 18
    for site in sites:
        gradient = plain.get_parameter(site.weight).grad
        assert gradient is not None
        assert relative(found[site.name], gradient) < 1e-4, site.name


def moved(world: Path, out: Path, *more: object, form: str = "pairs", code: int | None = 0) -> Ran:
    return taskferry("transfer", "--source-base", world / "a", "--source-tuned", world / "lora", "--target-base",
                     world / "b", "--calibration", world / f"{form}.jsonl", "--force", "--out", out, *more,
                     code=code)  # fmt: skip


@pytest.mark.parametrize("form", ["pairs", "triplets"])
def test_both_engines_move_and_measure_the_same(form: str, world: Path, tmp_path: Path) -> None:
    given = ("--set", "micro_batch=7", "--scale", 0.5, "--method", "bico")
    for engine in ("whole", "blockwise"):
        moved(world, tmp_path / engine, *given, "--engine", engine, form=form)
    records = [json.loads((tmp_path / engine / "taskferry.json").read_text()) for engine in ("whole", "blockwise")]
    (_, before), (_, after) = records[0]["scale_curve"]
    assert records[1]["scale_curve"] == [[0.0, pytest.approx(before, rel=1e-4)], [0.5, pytest.approx(after, rel=1e-4)]]
    with torch.no_grad():
        loss, _ = plainly(world / "b", len(FORMS[form]), 7, records[0]["calibration"]["indices"])
    assert before == pytest.approx(float(loss) / len(ROWS), rel=1e-4)
    whole, blocks = (load_file(tmp_path / e / "adapter_model.safetensors") for e in ("whole", "blockwise"))
    assert whole.keys() == blocks.keys()
    for name in [n for n in whole if "lora_B" in n]:
        other = name.replace("lora_B", "lora_A")
        assert relative(blocks[name] @ blocks[other], whole[name] @ whole[other]) < 1e-3, name


def test_the_scale_is_chosen_on_pairs(world: Path, tmp_path: Path) -> None:
    record = moved(world, tmp_path / "out", "--method", "bico", "--set", "micro_batch=5", "--json", code=None).json
    with torch.no_grad():
        loss, _ = plainly(world / "b", 2, 4, record["calibration"]["indices"][-4:])  # those held out
    assert record["scale_curve"][0] == [0.0, pytest.approx(float(loss) / 4, rel=1e-4)]
    assert len(record["scale_curve"]) > 4
    assert record["verdict"]["loss_unit"] == "per sample"
    plan = moved(world, tmp_path / "other", "--dry-run").out
    assert "the pairs themselves" in plan
    assert "contrastive" in plan


def test_micro_batches_of_pairs_stay_whole() -> None:
    def batch(start: int, n: int) -> Batch:
        x = torch.arange(2 * start, 2 * (start + n))[:, None].float()
        return Batch({"x": x}, ids=tuple(range(start, start + n)), texts=2)

    assert len(batch(3, 4)) == 4
    assert batch(3, 4).take([2, 0]).inputs["x"].flatten().tolist() == [10, 11, 6, 7]
    fit, held_out = Calibration((batch(s, 4), batch(s, 4)) for s in (0, 4, 8)).split(share=1 / 3)
    assert [A.ids for A, _ in fit] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [A.ids for A, _ in held_out] == [(8, 9, 10, 11)]
    assert [len(part) for part in evenly(17, 16)] == [8, 9]
    assert [len(part) for part in evenly(5, 2)] == [2, 3]
    assert evenly(3, 1) == [range(0, 1), range(1, 2), range(2, 3)]


def test_more_negatives_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ("negative_10", "positive", "negative_2", "negative_1", "query")
    rows = [{name: f"{name} {i}" for name in names} for i in range(3)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    samples = load_samples(str(tmp_path / "data.json"))
    assert samples.kind == "pairs"
    wanted = ["query 1", "positive 1", "negative_1 1", "negative_2 1", "negative_10 1"]
    assert samples.rows[1]["texts"] == wanted


def test_what_pairs_cannot_do_is_said(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for more, told in (
        (("--set", "objective=probe"), "the objective 'probe' scores classes, the samples are pairs of texts"),
        (("--labels", "teacher"), "pairs of texts have no labels that a teacher could give"),
        (("--set", "micro_batch=1"), "it needs two pairs at least"),
        (("--set", "per_class=2"), "samples of each class need labels"),
    ):
        assert told in " ".join(moved(world, out, *more, code=2).err.split())
    ran = taskferry("evaluate", world / "causal", "--test", world / "pairs.jsonl", code=2)
    assert "pairs of texts are for sentence encoders" in ran.err
    for column in ("label", "score"):
        data = written(tmp_path / f"{column}.jsonl", FORMS["sentences"], **{column: 1})
        with pytest.raises(TaskferryError, match=f"pairs with a column {column}: for a classifier rename"):
            load_samples(str(data))
    (tmp_path / "gaps.jsonl").write_text('{"anchor": "a", "positive": "b"}\n{"anchor": "a", "positive": " "}\n')
    with pytest.raises(TaskferryError, match="row 2: positive is no text"):
        load_samples(str(tmp_path / "gaps.jsonl"))
