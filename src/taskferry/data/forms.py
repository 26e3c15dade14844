"""The forms in which people keep samples, each brought to one of six kinds.

Image, pictured (a chat about one image), messages, prompt with completion, pairs (or triplets), text.

    >>> kind, rows = unified([{"instruction": "Add.", "input": "2 and 2", "output": "4"}])
    >>> kind, rows[0]["completion"]
    ('prompt', '4')

Chats and pairs as trl writes them, ShareGPT's conversations and Alpaca's instructions are those of docs/commands.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from taskferry.errors import TaskferryError

Kind = Literal["image", "messages", "pictured", "prompt", "pairs", "text"]
Row = dict[str, Any]
_NEGATIVE = re.compile(r"negative(?:_\d{1,4})?")

_OTHER_NAMES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("prompt", "chosen"), ("prompt", "completion")),
    (("question", "answer"), ("prompt", "completion")),
    (("input", "output"), ("prompt", "completion")),
    (("input", "target"), ("prompt", "completion")),
    (("query", "response"), ("prompt", "completion")),
    (("instruction", "response"), ("prompt", "completion")),
    (("chosen",), ("messages",)),
    (("premise", "hypothesis"), ("text", "text_pair")),
    (("sentence1", "sentence2"), ("text", "text_pair")),
    (("sentence", "review", "content", "words", "body"), ("text",)),
    (("img", "picture", "jpg", "png"), ("image",)),
)
_PAIRS = (("anchor", "positive"), ("query", "positive"), ("sentence1", "sentence2"))  # and any negatives
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


def unified(rows: Sequence[Row], given: str = "the data") -> tuple[Kind | None, list[Row]]:
    """What the columns say the rows are, and the rows with the columns of that kind; None where they say nothing."""
    columns = rows[0].keys() if rows else ()
    numbered = [(f"{given}, row {i}", row) for i, row in enumerate(rows, 1)]
    shown = any(part.get("type") == "image" for row in rows for part in _parts(row.get("messages")))
    asked = "messages" in columns or ("prompt" in columns and "completion" in columns)
    if shown or (asked and ("image" in columns or "images" in columns)):
        return "pictured", [_pictured(row, where) for where, row in numbered]
    if "image" in columns:
        return "image", list(rows)
    if "messages" in columns:
        return "messages", list(rows)
    if "conversations" in columns:
        return "messages", [{**row, "messages": _conversation(row, where)} for where, row in numbered]
    if "prompt" in columns and "chosen" not in columns:
        # An unpaired preference says of each completion whether it is wanted; nothing is to be learnt from the others.
        rows = [row for row in rows if not (row.get("label") is False and row.get("completion") is not None)]
        if any(isinstance(row.get(name), list) for row in rows for name in ("prompt", "completion")):
            return "messages", [{**row, "messages": _chat(row)} for row in rows]
        return "prompt", list(rows)
    if "instruction" in columns and "output" in columns:
        return "prompt", [{**row, "prompt": _instruction(row), "completion": row["output"]} for row in rows]
    if "text" in columns:
        return "text", list(rows)
    pair = next((names for names in _PAIRS if all(name in columns for name in names)), None)
    if pair is None:
        return None, list(rows)
    negatives = sorted(filter(_NEGATIVE.fullmatch, columns), key=lambda name: int(name.partition("_")[2] or -1))
    return "pairs", [_texts(row, [*pair, *negatives], where) for where, row in numbered]


def renaming(columns: Sequence[str]) -> str:
    """What to call the columns of data that no form fits."""
    for names, wanted in _OTHER_NAMES:
        found = [name for name in names if name in columns]
        if len(found) == len(wanted):
            pairs = [(old, new) for old, new in zip(found, wanted, strict=True) if old != new]
            return " and ".join(f"rename {old} to {new}" for old, new in pairs)
    return "rename one of them to text, or two to prompt and completion (docs/commands.md lists every form)"


def text_of(content: Any) -> Any:
    """The text of a content that is given in parts of text alone; any other content as it is."""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return content
    texts = [part.get("text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _conversation(row: Row, where: str) -> list[Row] | None:
    """ShareGPT: a speaker and what was said; a system text may stand in a column of its own."""
    turns = row["conversations"]
    if turns is None:
        return None
    messages = []
    for turn in turns if isinstance(turns, list) else [turns]:
        said = turn if isinstance(turn, Mapping) else {}
        speaker = said["from"] if said.get("from") is not None else said.get("role")
        text = said["value"] if said.get("value") is not None else said.get("content")
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise TaskferryError(
                f"{where}: conversations need a speaker and a text each: [{{'from': 'human', 'value': '…'}}, …]"
            )
        if speaker != "system" or text:  # an empty one stands for none
            messages.append({"role": _SPEAKERS.get(speaker, speaker), "content": text})
    if isinstance(row.get("system"), str) and row["system"] and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _chat(row: Row) -> list[Any]:
    """A prompt and its completion, of which one is a list of messages, as one chat."""
    asked, answer = row.get("prompt"), row.get("completion")
    before = asked if isinstance(asked, list) else [] if asked is None else [{"role": "user", "content": asked}]
    after = answer if isinstance(answer, list) else [] if answer is None else [{"role": "assistant", "content": answer}]
    return [*before, *after]


def _texts(row: Row, names: Sequence[str], where: str) -> Row:
    """Pairs and triplets of sentence-transformers: `texts` are an anchor, its positive and any negatives."""
    wrong = next((name for name in names if not isinstance(row[name], str) or not row[name].strip()), None)
    if wrong is not None:
        raise TaskferryError(f"{where}: {wrong} is no text: fill it with one, or leave the row out")
    return {**row, "texts": [row[name] for name in names]}


def _instruction(row: Row) -> str | None:
    """Alpaca's own words around an instruction: models tuned on that form have learnt them."""
    if not isinstance(row["instruction"], str):
        return None
    more = row.get("input")
    paired = isinstance(more, str) and bool(more.strip())
    begin = "Below is an instruction that describes a task"
    begin += ", paired with an input that provides further context. " if paired else ". "
    begin += "Write a response that appropriately completes the request.\n\n"
    middle = f"### Input:\n{more}\n\n" if paired else ""
    return f"{begin}### Instruction:\n{row['instruction']}\n\n{middle}### Response:\n"


def _pictured(row: Row, where: str) -> Row:
    """A chat about one image, as transformers and trl write it: contents in parts, of which one is the image.

    The picture is found in a column (`image`, or `images` with one) or in a part of a message; where no message says
    its place, it stands in front of the first question.
    """
    messages = row.get("messages")
    if messages is None:
        if not all(isinstance(row.get(name), str | list) for name in ("prompt", "completion")):
            raise TaskferryError(f"{where}: rows with an image need a prompt and a completion, or messages")
        messages = _chat(row)
    several = row.get("images") if isinstance(row.get("images"), list) else [row.get("images")]
    named = [part.get(name) for part in _parts(messages) for name in ("image", "path", "url")]
    pictures = [value for value in (*named, row.get("image"), *(several or [])) if value]
    if len(pictures) != 1:
        raise TaskferryError(f"{where} has {len(pictures)} images: one in each row is read, give rows with one each")
    chat: list[Row] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TaskferryError(f"{where}: messages need a role and a content each")
        content = message.get("content")
        parts = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("text", "image") or (kind == "text" and not isinstance(part.get("text"), str)):
                raise TaskferryError(f"{where}: a message has a part of type {kind!r}: text and image are read")
            parts.append({"type": "text", "text": part["text"]} if kind == "text" else {"type": "image"})
        chat.append({"role": message["role"], "content": parts})
    places = sum(part["type"] == "image" for message in chat for part in message["content"])
    first = next((message for message in chat if message["role"] == "user"), None)
    if places > 1:
        raise TaskferryError(f"{where}: its messages have {places} places for one image: leave one")
    if not places and first is None:
        raise TaskferryError(f"{where}: no message of the user, in front of which its image could stand: add one")
    if not places and first is not None:
        first["content"].insert(0, {"type": "image"})
    return {**row, "image": pictures[0], "messages": chat}


def _parts(messages: Any) -> list[Mapping[str, Any]]:
    """The parts of all contents that are given in parts."""
    chat = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in chat if isinstance(message, Mapping)]
    return [part for parts in contents if isinstance(parts, list) for part in parts if isinstance(part, Mapping)]
