"""Names of classes decide what a row of a head means, wherever data and heads have them; numbers only where not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from taskferry import TaskferryError, load_model, load_samples, load_tuned
from taskferry.config import CalibrationSettings
from taskferry.data.samples import Samples
from taskferry.engines.whole import WholePair
from taskferry.objectives.heads import order_of, own_head
from taskferry.objectives.preparation import Prepared, prepare
from taskferry.objectives.teacher import lesson_of
from taskferry.taskvector import TaskVector
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.texts import TEXTS

transformers = pytest.importorskip("transformers")
NAMES, TURNED = ("wolf", "ant", "cow"), (2, 0, 1)  # no order that sorting would give


def classifier(folder: Path, body: Path, names: tuple[str, ...], order: tuple[int, ...] = (0, 1, 2)) -> Path:
    """A head of large numbers on a body, its rows and their names in another order."""
    torch.manual_seed(7)
    kind = transformers.BertForSequenceClassification
    model = kind.from_pretrained(body, num_labels=3, id2label={i: names[k] for i, k in enumerate(order)})
    weight, bias = 3 * torch.randn(3, model.config.hidden_size), torch.randn(3)
    model.classifier.weight.data, model.classifier.bias.data = weight[list(order)], bias[list(order)]
    return beside(folders.save(model, folder), body)


def beside(folder: Path, body: Path) -> Path:
    """With the tokenizer of the body: two trainings of one need not end alike."""
    for file in body.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def rows(path: Path, labels: list[object]) -> Path:
    lines = [json.dumps({"text": text, "label": label}) for text, label in zip(TEXTS, labels, strict=False)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "wide", 24, 3, 2)
    for name, body, names, order in (
        ("a", "bert", NAMES, (0, 1, 2)),
        ("a-turned", "bert", NAMES, TURNED),
        ("a-counted", "bert", ("LABEL_0", "LABEL_1", "LABEL_2"), (0, 1, 2)),
        ("b", "wide", NAMES, (0, 1, 2)),
        ("b-counted", "wide", ("LABEL_0", "LABEL_1", "LABEL_2"), (0, 1, 2)),
        ("b-turned", "wide", tuple(name.upper() for name in NAMES), TURNED),
    ):
        classifier(root / name, root / body, names, order)
    folders.shifted(root / "a", root / "a-tuned", size=0.3, only="encoder")
    rows(root / "named.jsonl", [NAMES[i % 5 // 2] for i in range(12)])
    rows(root / "counted.jsonl", [i % 5 // 2 for i in range(12)])
    (root / "plain.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return root


def score(world: Path, model: str, data: str, *more: object) -> dict[str, object]:
    found: dict[str, object] = taskferry("evaluate", world / model, "--test", world / data, "--json", *more).json
    return found


def test_a_score_is_by_name(world: Path) -> None:
    """The data's names sorted are other numbers than the head's."""
    turned, straight = score(world, "a-turned", "named.jsonl"), score(world, "a", "named.jsonl")
    assert turned["loss"] == pytest.approx(straight["loss"], rel=1e-5)
    assert turned["accuracy"] == straight["accuracy"]
    # Of a head that only counts, rows are what the numbers of the data say.
    assert straight["loss"] == pytest.approx(score(world, "a-counted", "counted.jsonl")["loss"], rel=1e-5)
    assert straight["loss"] != pytest.approx(score(world, "a-turned", "counted.jsonl")["loss"], rel=1e-2)


def prepared(world: Path, target: str, data: str, labels: str = "auto") -> tuple[Prepared, WholePair, TaskVector]:
    settings = CalibrationSettings(calibration=str(world / data), objective="head", samples=12, labels=labels)
    A, B = load_model(str(world / "a")), load_model(str(world / target))
    tuned = load_tuned(str(world / "a-tuned"), A)
    found = prepare(settings, A, B, tuned)
    return found, WholePair(A.model, B.model, found.calibration, found.objectives), tuned.tau


@pytest.mark.parametrize("data", ["named.jsonl", "plain.jsonl"])
def test_losses_and_lessons_of_a_turned_head_are_those_of_the_head(world: Path, data: str) -> None:
    """Labels of the data, and of the teacher where it has none."""
    losses, taught = [], []
    for target in ("b", "b-turned"):
        found, pair, tau = prepared(world, target, data)
        batches = found.calibration.side(1)
        loss = found.objectives[1].bind(pair.target, batches)
        losses.append(sum(float(loss(batch).detach()) for batch in batches))
        lesson = lesson_of((pair.source, pair.target), tau, pair.calibration, pair.objectives)
        taught.append(float(lesson.loss(lesson.batch(range(12))).detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert taught[0] == pytest.approx(taught[1], rel=1e-5)
    assert found.objectives[0].describe() != found.objectives[1].describe()


def test_names_that_differ_are_refused(world: Path, tmp_path: Path) -> None:
    for strange in ("Wolf", "horse"):  # however it is written; a class of its own
        rows(tmp_path / "strange.jsonl", [strange, *NAMES[1:], *NAMES])
        given = ["evaluate", world / "a", "--test", tmp_path / "strange.jsonl", "--json"]
        if strange == "horse":
            said = taskferry(*given, code=2).err
            assert "has the class 'horse', the head of" in said
            assert "wolf, ant, cow" in said
        else:
            rows(tmp_path / "strange.jsonl", [strange, *NAMES[1:]])
            taskferry(*given)
    with pytest.raises(TaskferryError, match=r"by number, and .* counts wolf, ant, cow, .* cow, wolf, ant"):
        prepared(world, "b-turned", "counted.jsonl")


def test_a_head_without_names_beside_one_that_counts_otherwise_is_refused(world: Path) -> None:
    """The data has no order of its own: what the head without names means by its numbers, nobody knows."""
    with pytest.raises(TaskferryError, match=r"does not name its classes, and .* counts wolf, ant, cow, .*id2label"):
        prepared(world, "b-counted", "named.jsonl")
    prepared(world, "b-counted", "counted.jsonl")


@pytest.mark.parametrize("classes", [("LABEL_1", "LABEL_2"), ("0", "1", "10", "2")])
def test_a_head_without_names_takes_numbers(world: Path, classes: tuple[str, ...]) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(world / "bert", num_labels=12)
    loaded = replace(load_model(str(world / "b-counted")), model=model, absent=frozenset())
    head = own_head(loaded, Samples("text", [], (), classes, "data", sorted=True))
    assert [f"{row}" for row in head.order[: len(classes)]] == [name.removeprefix("LABEL_") for name in classes]
    assert sorted(head.order) == list(range(12))
    assert head.names == ()


def test_names_of_their_own_are_refused_where_nobody_has_counted_them(world: Path, tmp_path: Path) -> None:
    import datasets

    data = rows(tmp_path / "other.jsonl", ["x", "y", "z"] * 4)
    assert "the class 'x'" in taskferry("evaluate", world / "a", "--test", data, code=2).err
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y", "z"])}
    )
    table = {"text": list(TEXTS[:12]), "label": [i % 5 // 2 for i in range(12)]}
    datasets.Dataset.from_dict(table, features=features).to_parquet(str(tmp_path / "counted.parquet"))
    counted = taskferry("evaluate", world / "a", "--test", tmp_path / "counted.parquet", "--json").json
    assert counted["loss"] == pytest.approx(score(world, "a", "counted.jsonl")["loss"], rel=1e-5)


def test_a_head_that_is_in_no_file_scores_nothing(world: Path, tmp_path: Path) -> None:
    import peft

    model = transformers.BertForSequenceClassification.from_pretrained(world / "a")
    folder = beside(folders.save(model, tmp_path / "headless"), world / "bert")
    stored = transformers.BertModel.from_pretrained(world / "bert").state_dict()
    from safetensors.torch import save_file

    save_file({f"bert.{name}": tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    given = ["evaluate", folder, "--test", world / "named.jsonl"]
    assert "classifier.bias is in none of its files" in taskferry(*given, code=2).err
    assert "a linear probe" in taskferry(*given, "--shots", world / "named.jsonl").out
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"], task_type="SEQ_CLS")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "lora")
    added = taskferry(*given, "--add", tmp_path / "lora", "--json").json  # which brings the head
    assert added["loss"] == pytest.approx(score(world, "a", "named.jsonl")["loss"], rel=1e-5)


def test_a_head_for_tokens_is_no_head_for_samples(world: Path, tmp_path: Path) -> None:
    kind = transformers.BertForTokenClassification
    folders.save(kind.from_pretrained(world / "bert", num_labels=3), tmp_path / "tokens")
    given = ["evaluate", tmp_path / "tokens", "--test", world / "counted.jsonl", "--objective", "head"]
    assert "not one score for each class" in taskferry(*given, code=2).err


def images(folder: Path, names: tuple[str, ...]) -> Path:
    from PIL import Image

    for shade, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (4, 4), (50 * shade, 10, 10)).save(folder / name / f"{i}.png")
    return folder


def test_folders_of_pictures_keep_the_numbers_of_their_names(tmp_path: Path) -> None:
    train = load_samples(str(images(tmp_path / "train", ("cat", "dog", "tree"))))
    assert train.sorted
    few = load_samples(str(images(tmp_path / "test", ("dog", "tree"))), classes=train.classes)
    assert few.labels == (1, 1, 2, 2)
    assert few.classes == train.classes
    with pytest.raises(TaskferryError, match="the class 'elk', which the calibration data does not have"):
        load_samples(str(images(tmp_path / "other", ("dog", "elk"))), classes=train.classes)
    (tmp_path / "train" / "classes.json").write_text('["tree", "cat", "dog"]')
    again = load_samples(str(tmp_path / "train"))
    assert again.labels == (1, 1, 2, 2, 0, 0)
    assert again.classes == ("tree", "cat", "dog")
    assert not again.sorted
    (tmp_path / "train" / "classes.json").write_text('["tree", "cat", "fox"]')
    with pytest.raises(TaskferryError, match=r"the class 'dog', which classes.json does not have"):
        load_samples(str(tmp_path / "train"))


def test_names_for_folders_that_only_count(tmp_path: Path) -> None:
    folder = images(tmp_path / "train", ("000", "001"))
    (folder / "classes.json").write_text('["tree", "cat"]')
    samples = load_samples(str(folder))
    assert samples.labels == (0, 0, 1, 1)
    assert samples.classes == ("tree", "cat")
    rows(tmp_path / "data.jsonl", [0, 1, 2])
    (tmp_path / "classes.json").write_text('["tree", "cat"]')
    with pytest.raises(TaskferryError, match=r"the class 2, classes.json the names of 2"):
        load_samples(str(tmp_path / "data.jsonl"))


def head_of(names: tuple[str, ...], classes: tuple[str, ...], **more: object) -> tuple[int, ...]:
    samples = Samples("text", [], None, classes, "data.jsonl", **more)  # type: ignore[arg-type]
    return order_of(names, len(names), samples, "the model")


def test_a_name_that_a_head_has_twice_decides_nothing_for_the_others() -> None:
    """ImageNet's head has two cranes."""
    names = ("tench", "crane", "dog", "crane", "cat")
    assert head_of(names, ("cat", "dog"), sorted=True) == (4, 2, 0, 1, 3)
    for wrong, says in ((("cat", "crane"), "'crane', the head of the model more than once"), (("zebra",), "'zebra'")):
        with pytest.raises(TaskferryError, match=says):
            head_of(names, wrong, sorted=True)


def test_names_that_count_are_the_numbers_of_the_head() -> None:
    """As a pipeline of transformers prints them, or folders of pictures: sorted, 10 stands before 2."""
    counted = tuple(f"LABEL_{i}" for i in range(12))
    assert order_of((), 12, Samples("text", [], None, ("LABEL_1", "LABEL_10", "LABEL_2"), ""), "")[:3] == (1, 10, 2)
    assert head_of(counted, counted) == ()
    assert head_of(("a", "b", "c"), ("0", "2"), sorted=True) == (0, 2, 1)
    with pytest.raises(TaskferryError, match="has the class 12, the head of the model 12 classes"):
        head_of(counted, ("LABEL_12",))


def test_classes_that_the_data_lacks_meet_by_name_as_well(world: Path, tmp_path: Path) -> None:
    """Two classes of five in the data; the target has the other three in another order."""
    names, order = ("wolf", "ant", "cow", "elk", "owl"), (0, 1, 4, 2, 3)
    torch.manual_seed(3)
    weight, found = torch.randn(5, 24), []
    kind = transformers.BertForSequenceClassification
    for place, at in (("a", (0, 1, 2, 3, 4)), ("straight", (0, 1, 2, 3, 4)), ("turned", order)):
        body = world / ("bert" if place == "a" else "wide")
        model = kind.from_pretrained(body, num_labels=5, id2label={i: names[k] for i, k in enumerate(at)})
        model.classifier.weight.data = weight[list(at), : model.config.hidden_size].clone()
        beside(folders.save(model, tmp_path / place), world / "bert")
    folders.shifted(tmp_path / "a", tmp_path / "a-tuned", size=0.3, only="encoder")
    rows(tmp_path / "two.jsonl", ["wolf", "ant"] * 6)
    (tmp_path / "plain.jsonl").write_text((world / "plain.jsonl").read_text())
    for data in ("two.jsonl", "plain.jsonl"):
        for target in ("straight", "turned"):
            _, pair, tau = prepared(tmp_path, target, data)
            lesson = lesson_of((pair.source, pair.target), tau, pair.calibration, pair.objectives)
            found.append(float(lesson.loss(lesson.batch(range(12))).detach()))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[2] == pytest.approx(found[3], rel=1e-5)
    other = kind.from_pretrained(tmp_path / "straight")
    other.config.id2label = dict(enumerate(("wolf", "ant", "cow", "elk", "fox")))
    beside(folders.save(other, tmp_path / "fox"), world / "bert")
    _, pair, tau = prepared(tmp_path, "fox", "two.jsonl")
    with pytest.raises(TaskferryError, match="it cannot teach them"):
        lesson_of((pair.source, pair.target), tau, pair.calibration, pair.objectives)


def test_a_teacher_is_not_asked_for_the_labels_of_the_data(world: Path, tmp_path: Path) -> None:
    rows(tmp_path / "where.jsonl", ["web", "book"] * 6)
    settings = CalibrationSettings(calibration=str(tmp_path / "where.jsonl"), samples=12, labels="teacher")
    A, B = load_model(str(world / "a")), load_model(str(world / "b-turned"))
    found = prepare(settings, A, B, load_tuned(str(world / "a-tuned"), A))
    assert found.taught


def test_shots_that_are_sorted_number_no_head(world: Path, tmp_path: Path) -> None:
    data = rows(tmp_path / "other.jsonl", ["x", "y", "z"] * 4)
    given = ["evaluate", world / "a", "--test", data, "--shots", data, "--objective", "head"]
    assert "the class 'x'" in taskferry(*given, code=2).err
