"""Rows of a picture and words, for language models that also see: each brought to a chat with one picture.

    >>> pictured({"image": "cat.png", "prompt": "What is it?", "completion": "A cat."}, "data.jsonl, row 1")
    {'image': 'cat.png', 'messages': [{'role': 'user', 'content': [{'type': 'image'}, …]}, …]}

The picture stands in a column (`image`, or `images` with one) or in a part of a message, as transformers and trl write
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taskferry.errors import TaskferryError

Row = dict[str, Any]
_NAMES = ("image", "path", "url")  # what a part of a message calls its picture


def is_pictured(rows: Sequence[Row]) -> bool:
    """Whether rows hold a picture with words about it."""
    columns = rows[0].keys() if rows else ()
    if "messages" in columns and any(_is_image(part) for row in rows for part in _parts(row.get("messages"))):
        return True
    named = "image" in columns or "images" in columns
    return named and ("messages" in columns or ("prompt" in columns and "completion" in columns))


def pictured(row: Row, where: str) -> Row:
    """A row as a chat; the picture, where no message says its place, stands in front of the first question."""
    messages = row.get("messages")
    if messages is None:
        asked, answer = row.get("prompt"), row.get("completion")
        if not isinstance(asked, str | list) or not isinstance(answer, str | list):
            raise TaskferryError(f"{where}: rows with an image need a prompt and a completion, or messages")
        before = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        messages = [*before, *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)]
    found = [part.get(name) for part in _parts(messages) if _is_image(part) for name in _NAMES if part.get(name)]
    several = row.get("images")
    beside = [row.get("image"), *(several if isinstance(several, list) else [several])]
    pictures = [*found, *(value for value in beside if value is not None)]
    if len(pictures) != 1:
        raise TaskferryError(f"{where} has {len(pictures)} images: one in each row is read, give rows with one each")
    plain: list[Row] = [{"role": _role(message, where), "content": _content(message, where)} for message in messages]
    places = sum(part["type"] == "image" for message in plain for part in message["content"])
    if places > 1:
        raise TaskferryError(f"{where}: its messages have {places} places for one image: leave one")
    first = next((message for message in plain if message["role"] == "user"), None)
    if not places and first is not None:
        first["content"] = [{"type": "image"}, *first["content"]]
    elif not places:
        raise TaskferryError(f"{where}: no message of the user, in front of which its image could stand: add one")
    return {**row, "image": pictures[0], "messages": plain}


def evened(rows: Sequence[Row]) -> list[Row]:
    """Contents of messages as lists of parts, where some are: a column has one type."""
    if not any(isinstance(m.get("content"), list) for row in rows for m in _messages(row.get("messages"))):
        return list(rows)
    return [
        {**row, "messages": [{**m, "content": _listed(m.get("content"))} for m in _messages(row.get("messages"))]}
        for row in rows
    ]


def text_of(content: Any) -> Any:
    """The text of a content that is given in parts of text alone; any other content as it is."""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return content
    texts = [part.get("text") for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _messages(given: Any) -> list[Mapping[str, Any]]:
    return [message for message in given if isinstance(message, Mapping)] if isinstance(given, list) else []


def _parts(messages: Any) -> list[Mapping[str, Any]]:
    contents = [m.get("content") for m in _messages(messages)]
    return [part for parts in contents if isinstance(parts, list) for part in parts if isinstance(part, Mapping)]


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image"


def _listed(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _role(message: Any, where: str) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise TaskferryError(f"{where}: messages need a role and a content each")
    return role


def _content(message: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for part in _listed(message.get("content")) or []:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image":
            parts.append({"type": "image"})
        else:
            raise TaskferryError(f"{where}: a message has a part of type {kind!r}: text and image are read")
    return parts
