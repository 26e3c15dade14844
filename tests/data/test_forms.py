"""Chats, pairs and instructions in the forms that people keep them in, through the installed command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from taskferry import TaskferryError
from taskferry.data.forms import unified
from taskferry.data.language import segments_of
from taskferry.data.samples import load_samples
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.texts import SECOND, TEXTS

pytest.importorskip("transformers")
pytest.importorskip("datasets")

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


CHAT = {
    "trl": lambda a, b: {"prompt": [user(a)], "completion": [assistant(b)]},
    "trl-mixed": lambda a, b: {"prompt": [user(a)], "completion": b},
    "sharegpt": lambda a, b: {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]},
    "sharegpt-roles": lambda a, b: {"conversations": [user(a), assistant(b)]},
}
PROMPT = {"unpaired": lambda a, b: {"prompt": a, "completion": " " + b, "label": True}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.causal(root / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "b", "LlamaForCausalLM", 16, 2, 2)
    folders.shifted(root / "a", root / "tuned")
    return root


def written(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(make: Any) -> list[Row]:
    return [make(a, b) for a, b in zip(TEXTS, SECOND, strict=True)]


def moved(world: Path, data: Path) -> dict[str, Any]:
    """What was measured on the data: the losses tell whether the same tokens were read and counted."""
    out = data.with_suffix("")
    taskferry("transfer", "--source-base", world / "a", "--source-tuned", world / "tuned", "--target-base", world / "b",
              "--calibration", data, "--samples", 8, "--scale", 0.5, "--method", "bico", "--force",
              "--out", out)  # fmt: skip
    verdict: dict[str, Any] = json.loads((out / "taskferry.json").read_text())["verdict"]
    return verdict


@pytest.fixture(scope="module")
def known(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The verdicts on `messages` and on `prompt` with `completion`."""
    root = tmp_path_factory.mktemp("known")
    chat, prompt = (moved(world, make(root / f"{make.__name__}.jsonl")) for make in (folders.chats, folders.prompts))
    assert chat != prompt
    return {"chat": chat, "prompt": prompt}


@pytest.mark.parametrize("name", CHAT)
def test_a_chat_is_the_same_in_every_form(name: str, world: Path, known: dict[str, Any], tmp_path: Path) -> None:
    assert moved(world, written(tmp_path / "data.jsonl", rows_of(CHAT[name]))) == known["chat"]


@pytest.mark.parametrize("name", PROMPT)
def test_a_prompt_is_the_same_in_every_form(name: str, world: Path, known: dict[str, Any], tmp_path: Path) -> None:
    assert moved(world, written(tmp_path / "data.jsonl", rows_of(PROMPT[name]))) == known["prompt"]


def test_instructions_are_prompts_in_the_words_of_their_form(world: Path, tmp_path: Path) -> None:
    rows = rows_of(lambda a, b: {"instruction": a, "input": a[:5] if len(a) % 2 else "", "output": b})
    samples = load_samples(str(written(tmp_path / "alpaca.jsonl", rows)))
    assert samples.kind == "prompt"
    for given, row in zip(rows, samples.rows, strict=True):
        assert row["completion"] == given["output"]
        assert f"### Instruction:\n{given['instruction']}\n\n" in row["prompt"]
        assert (f"### Input:\n{given['input']}\n\n" in row["prompt"]) == bool(given["input"])
        assert ("paired with an input" in row["prompt"]) == bool(given["input"])
        assert row["prompt"].endswith("### Response:\n")
    same = [{"prompt": row["prompt"], "completion": row["completion"]} for row in samples.rows]
    assert moved(world, tmp_path / "alpaca.jsonl") == moved(world, written(tmp_path / "same.jsonl", same))


def test_a_system_text_goes_in_front_and_unwanted_completions_are_left_out() -> None:
    kind, rows = unified([{"conversations": [{"from": "human", "value": "a"}], "system": "Be brief."}])
    assert (kind, rows[0]["messages"]) == ("messages", [{"role": "system", "content": "Be brief."}, user("a")])
    turns = [{"from": "system", "value": ""}, {"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]
    assert unified([{"conversations": turns}])[1][0]["messages"] == [user("a"), assistant("")]  # an empty system: none
    kind, rows = unified([{"prompt": "a", "completion": "b", "label": wanted} for wanted in (True, False, True)])
    assert (kind, len(rows)) == ("prompt", 2)
    kind, rows = unified([{"prompt": "a", "label": False}])
    assert rows == [{"prompt": "a", "label": False}]


def test_broken_conversations_are_named(world: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "bad.jsonl", [{"conversations": [{"from": "human"}]}] * 3)
    ran = taskferry("transfer", "--source-base", world / "a", "--source-tuned", world / "tuned", "--target-base",
                    world / "b", "--calibration", data, "--out", tmp_path / "out", code=2)  # fmt: skip
    assert "bad.jsonl, row 1: conversations need a speaker and a text each" in ran.err
    with pytest.raises(TaskferryError, match="has the columns words: rename words to text"):
        load_samples(str(written(tmp_path / "none.jsonl", [{"words": "a"}] * 3)))
    with pytest.raises(TaskferryError, match="rename chosen to completion"):
        load_samples([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3)


def test_a_picture_with_words_is_a_chat_with_a_place_for_it() -> None:
    image, text = {"type": "image"}, {"type": "text", "text": "What?"}
    asked = {"role": "user", "content": [image, text]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
    forms: list[Row] = [
        {"image": "cat.png", "prompt": "What?", "completion": "A cat."},
        {"images": ["cat.png"], "messages": [user("What?"), assistant("A cat.")]},
        {"images": ["cat.png"], "messages": [asked, assistant("A cat.")]},
        {"messages": [{"role": "user", "content": [{**image, "image": "cat.png", "text": None}, text]}, answer]},
    ]
    for row in forms:
        kind, rows = unified([row])
        assert (kind, rows[0]["image"], rows[0]["messages"]) == ("pictured", "cat.png", [asked, answer])
    kind, _ = unified([{"image": "cat.png", "label": 1}])
    assert kind == "image"
    with pytest.raises(TaskferryError, match="data, row 1: a message has a part of type 'video': text and image"):
        unified([{"image": "cat.png", "messages": [{"role": "user", "content": [{"type": "video"}]}]}])


def test_a_text_in_parts_is_a_text(tmp_path: Path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}
    data = written(tmp_path / "parts.jsonl", [{"messages": [parts, assistant("c")]}] * 3)
    samples = load_samples(str(data))
    assert samples.kind == "messages"
    assert [segment.text for segment in segments_of(samples.rows[0])] == ["a b", "c"]


def test_a_misspelt_completion_is_not_answered_by_the_source(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "completon": "so"}) + "\n" for i in range(3)))
    with pytest.raises(TaskferryError, match="a column completon, which is not read: did you mean completion"):
        load_samples(str(path))
