"""Samples from files, their choice, chats in two tokenizers, low-rank cuts."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch

from taskferry import LowRank, TaskferryError, TaskVector
from taskferry.data.language import Segment, language_calibration, segments_of, sequence_calibration
from taskferry.data.samples import choose, held_out_split, load_samples, picture
from taskferry.layers import family_of
from taskferry.layers.tokens import match
from taskferry.models.lowrank import compress
from tests.helpers.texts import train
from tests.helpers.tiny import relative

image = pytest.importorskip("PIL.Image")
pytest.importorskip("datasets")

ROWS = [{"text": f"line {i}", "label": name} for i, name in enumerate(["sad", "glad", "sad", "mad"])]


def png(colour: tuple[int, int, int]) -> bytes:
    buffer = io.BytesIO()
    image.new("RGB", (8, 8), colour).save(buffer, format="PNG")
    return buffer.getvalue()


def test_jsonl_csv_and_parquet_give_the_same_samples(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "a.csv").write_text("text,label\n" + "\n".join(f"{r['text']},{r['label']}" for r in ROWS))
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for end in ("jsonl", "csv", "parquet"):
        samples = load_samples(str(tmp_path / f"a.{end}"))
        assert samples.kind == "text"
        assert samples.classes == ("glad", "mad", "sad")
        assert samples.labels == (2, 0, 2, 1)
        assert [row["text"] for row in samples.rows] == [row["text"] for row in ROWS]
        assert samples.take([3, 0]).labels == (1, 2)


ANSWERS = ["NA", "007", "1.50", "true", "None", "two, three", "1"]


@pytest.mark.parametrize("end", ["csv", "jsonl"])
def test_answers_are_texts_as_they_stand_in_the_file(end: str, tmp_path: Path) -> None:
    """A reader that guesses types makes 7 of 007, and nothing at all of NA."""
    path = tmp_path / f"a.{end}"
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets save it
        if end == "csv":
            writer = csv.writer(file)
            writer.writerows([["prompt", "completion", "label"], *([f"q {i}", a, 0.25] for i, a in enumerate(ANSWERS))])
        else:
            rows = [{"prompt": f"q {i}", "completion": a, "label": None} for i, a in enumerate(ANSWERS)]
            file.writelines(json.dumps(row) + "\n" for row in rows)
    samples = load_samples(str(path))
    assert [row["completion"] for row in samples.rows] == ANSWERS
    assert samples.labels is None  # a score beside prompts is no class


def test_numbers_as_answers_keep_their_form(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "q", "completion": answer} for answer in (4, 5.5, True, "six")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["completion"] for row in load_samples(str(path)).rows] == ["4", "5.5", "true", "six"]


def test_an_empty_cell_is_missing_and_a_short_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion\nq,\nr,yes\n")
    assert [row["completion"] for row in load_samples(str(path)).rows] == [None, "yes"]
    path.write_text("prompt,completion\nq,no\nr\n")
    with pytest.raises(TaskferryError, match="line 3: not as many cells"):
        load_samples(str(path))
    path.write_text("text,label\na,1.0\nb,0.0\n")
    assert load_samples(str(path)).labels == (1, 0)
    path.write_text("text,label\na,0.5\nb,0.25\n")
    with pytest.raises(TaskferryError, match="fractions"):
        load_samples(str(path))


def test_images_as_bytes_and_as_a_folder(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{"image": png((i, 0, 0)), "label": i % 2} for i in range(4)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "classes.json").write_text('["cat", "dog"]')
    for given in (tmp_path, tmp_path / "train.parquet"):
        samples = load_samples(str(given))
        assert samples.kind == "image"
        assert samples.classes == ("cat", "dog")
        assert [picture(row).getpixel((0, 0))[0] for row in samples.rows] == [0, 1, 2, 3]
    for name, colour in (("dog", 1), ("cat", 2)):
        (tmp_path / "folder" / name).mkdir(parents=True)
        (tmp_path / "folder" / name / "x.png").write_bytes(png((colour, 0, 0)))
    folder = load_samples(str(tmp_path / "folder"))
    assert folder.classes == ("cat", "dog")
    assert [picture(row).getpixel((0, 0))[0] for row in folder.rows] == [2, 1]


def test_labels_that_are_none_or_negative(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": 1}\n{"text": "y", "label": null}')
    with pytest.raises(TaskferryError, match="1 rows have no label"):
        load_samples(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text('{"text": "x", "label": -1}\n{"text": "y", "label": 0}')
    with pytest.raises(TaskferryError, match="counted from 0"):
        load_samples(str(tmp_path / "a.jsonl"))


def test_samples_in_memory_are_those_of_a_file(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    known = load_samples(str(tmp_path / "a.jsonl"))
    for given in (ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS), tmp_path / "a.jsonl"):
        samples = load_samples(given)
        assert (samples.kind, samples.labels, samples.classes) == (known.kind, known.labels, known.classes)
        assert samples.rows == known.rows
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    named = datasets.Dataset.from_list([{"text": "a", "label": 1}, {"text": "b", "label": 0}], features=features)
    assert load_samples(named).classes == ("no", "yes")
    assert load_samples(["a film", "a quay"]).rows == [{"text": "a film"}, {"text": "a quay"}]
    assert load_samples([{"image": image.new("RGB", (2, 2), (9, 0, 0))}] * 2).kind == "image"
    assert held_out_split(ROWS) == "train"
    with pytest.raises(TaskferryError, match=r"has the parts train: give one of them"):
        load_samples(datasets.DatasetDict({"train": named}))
    with pytest.raises(TaskferryError, match="entry 2 is no object"):
        load_samples([{"text": "a"}, 5])


LABELS = [i % 5 for i in range(200)]


def test_samples_are_drawn_by_a_seed() -> None:
    chosen = choose(200, 40)
    assert len(set(chosen)) == 40
    assert chosen == choose(200, 40)
    assert set(chosen) != set(choose(200, 40, seed=1))
    per_class = choose(200, 0, labels=LABELS, per_class=3)
    assert sorted(LABELS[i] for i in per_class) == sorted([0, 1, 2, 3, 4] * 3)
    with pytest.raises(TaskferryError, match="need labels"):
        choose(10, 5, per_class=1)
    with pytest.raises(TaskferryError, match="class 0 has 40 samples, 50 are asked for"):
        choose(200, 0, labels=LABELS, per_class=50)


CHAT = [[Segment("Where is the ferry?", False, "user"), Segment("At the quay.", True, "assistant")]] * 3


def test_chats_are_paired_by_their_words_whatever_the_template() -> None:
    one, two = train("pieces"), train("bytes")
    one.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"
    two.chat_template = "{% for m in messages %}### {{ m.role | upper }} says: {{ m.content }} ###\n{% endfor %}"
    ((A, B),) = language_calibration(CHAT, one, two, micro_batch=3).pairs
    for batch, tokenizer in ((A, one), (B, two)):
        ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
        counted = tokenizer.decode(ids[0][labels[0] != -100]).replace(" ", "").lower()
        assert counted == "atthequay."
    family = family_of(torch.nn.Linear(1, 1))
    layouts = [family.layouts(torch.nn.Linear(1, 1), batch)["tokens"] for batch in (A, B)]
    pairs = match(*layouts, A.inputs["input_ids"].shape[1], B.inputs["input_ids"].shape[1])
    assert pairs.keep is not None
    text = "Where is the ferry?At the quay."
    for j in pairs.keep[0].nonzero().flatten().tolist():
        first, last = (B.spans["tokens"][0, j] - 1).tolist()
        sources = [(A.spans["tokens"][0, k] - 1).tolist() for k in pairs.weights[0, j].nonzero().flatten().tolist()]
        assert text[first:last].strip().lower() in text[sources[0][0] : sources[-1][1]].lower() or len(sources) == 1
    assert int(pairs.keep[0].sum()) >= 8


def test_prompts_count_their_completions_only() -> None:
    tokenizer = train("bytes")
    segments = segments_of({"prompt": "Rain fell on", "completion": " the quay."})
    ((A, _),) = language_calibration([segments], tokenizer).pairs
    ids, labels = A.inputs["input_ids"][0], A.inputs["labels"][0]
    assert tokenizer.decode(ids[labels != -100]) == " the quay."
    ((A, _),) = sequence_calibration([segments], tokenizer).pairs
    assert tokenizer.decode(A.inputs["input_ids"][0], skip_special_tokens=True) == "Rain fell on"
    assert tokenizer.decode(A.inputs["labels"][0], skip_special_tokens=True) == " the quay."
    for row in ({"prompt": "Rain?"}, {"prompt": "Rain?", "completion": None}):
        with pytest.raises(TaskferryError, match=r"'Rain\?' has no completion"):  # it was the text "None"
            segments_of(row)
    with pytest.raises(TaskferryError, match="prompts and texts: give one kind"):
        language_calibration([segments, [Segment("Rain fell.")]], tokenizer)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(TaskferryError, match="refuses a chat of user, assistant: System role not supported"):
        language_calibration(CHAT, tokenizer)
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "clock"}}]}
    with pytest.raises(TaskferryError, match="tool_calls, which are not read"):
        segments_of(
            {"messages": [{"role": "user", "content": "Late?"}, called, {"role": "assistant", "content": "No"}]}
        )
    with pytest.raises(TaskferryError, match="without an answer"):
        segments_of({"messages": [{"role": "user", "content": "Hello?"}]})
    tokenizer.chat_template = None
    with pytest.raises(TaskferryError, match="no chat template"):
        language_calibration(CHAT, tokenizer)


def test_names_of_classes_beside_the_data_give_the_numbers(tmp_path: Path) -> None:
    """The same number for the same name in train and test, in the order of classes.json."""
    (tmp_path / "classes.json").write_text('["dog", "cat"]')
    for split in ("train", "test"):
        rows = [{"text": "x", "label": name} for name in ("dog", "cat", "dog")]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = load_samples(str(tmp_path))
    test = load_samples(str(tmp_path), split="test", classes=train.classes)
    assert train.labels == test.labels == (0, 1, 0)
    assert train.classes == test.classes == ("dog", "cat")


def test_rows_that_say_they_have_no_label_are_left_out_and_told(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"premise": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])}
    )
    rows = {"premise": ["a", "b", "c", "d"], "label": [0, -1, 1, 0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    samples = load_samples(str(tmp_path), columns={"premise": "text"})
    assert samples.labels == (0, 1, 0)
    assert [row["text"] for row in samples.rows] == ["a", "c", "d"]
    assert samples.left_out == 1


def test_pictures_are_decoded_when_they_are_used(tmp_path: Path) -> None:
    """Tables and folders of images, with a split of their own."""
    from PIL import Image

    for split in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / split / label
            folder.mkdir(parents=True)
            Image.new("RGB", (4, 5), (200, 10, 10)).save(folder / "1.png")
    for split in ("train", "test"):
        samples = load_samples(str(tmp_path), split=split)
        assert samples.labels == (0, 1)
        assert not any(isinstance(row["image"], Image.Image) for row in samples.rows)
        assert picture(samples.rows[0]).size == (4, 5)


def test_labels_keep_their_numbers(tmp_path: Path) -> None:
    def write(name: str, labels: list[object]) -> str:
        rows = [json.dumps({"text": f"{i}", "label": label}) for i, label in enumerate(labels)]
        (tmp_path / name).write_text("\n".join(rows))
        return str(tmp_path / name)

    train_data = load_samples(write("train.jsonl", ["b", "c", "a"]))
    test = load_samples(write("test.jsonl", ["c", "b"]), classes=train_data.classes)
    assert train_data.labels == (1, 2, 0)
    assert test.labels == (2, 1)
    with pytest.raises(TaskferryError, match="class 'd'"):
        load_samples(write("other.jsonl", ["d", "a"]), classes=train_data.classes)
    assert load_samples(write("digits.jsonl", ["10", "2"])).labels == (10, 2)
    with pytest.raises(TaskferryError, match="fractions"):
        load_samples(write("scores.jsonl", [0.5, 1.5]))


def test_what_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's test part, a file as it is; the hub's answers are stood in for, because none can be reached here."""
    import datasets

    (tmp_path / "both").mkdir()
    for name in ("train", "test"):
        (tmp_path / "both" / f"{name}.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert held_out_split(str(tmp_path / "both")) == "test"
    assert held_out_split(str(tmp_path / "one.jsonl")) == "train"
    splits = ["train", "validation"]
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: splits)
    assert held_out_split("org/data@v1") == "validation"
    splits.append("test")
    assert held_out_split("org/data") == "test"
    del splits[1:]
    with pytest.raises(TaskferryError, match="has no test or validation split"):
        held_out_split("org/data")


def test_a_full_change_cut_to_a_lora() -> None:
    torch.manual_seed(0)
    exact = torch.randn(9, 3) @ torch.randn(3, 7)
    tau = TaskVector({"w": exact, "b": torch.ones(3), "l": LowRank(torch.ones(2, 1), torch.ones(1, 2))})
    low, errors, lost = compress(tau, rank=3)
    assert isinstance(low.deltas["w"], LowRank)
    assert relative(low.deltas["w"].dense(), exact) < 1e-5
    assert errors["w"] < 1e-3
    assert list(lost) == ["b"]
    assert low.deltas["l"] is tau.deltas["l"]
    cut, errors, _ = compress(tau, rank=1)
    assert relative(cut.deltas["w"].dense(), exact) == pytest.approx(errors["w"], rel=1e-4)
    none, errors, _ = compress(TaskVector({"w": torch.zeros(9, 7)}), rank=3)
    assert (none.deltas["w"].rank, errors["w"]) == (3, 0.0)
    assert not none.deltas["w"].left.any()  # one factor is zero, so that the other can learn
    assert none.deltas["w"].right.all()
    with pytest.raises(TaskferryError):
        compress(tau, rank=0)
