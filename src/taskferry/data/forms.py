"""The forms in which people keep samples, each brought to one of six.

Image, pictured (an image with a prompt or messages), messages, prompt with completion, pairs (or triplets), text.

    >>> kind, rows = unified([{"instruction": "Add.", "input": "2 and 2", "output": "4"}])
    >>> kind, rows[0]["completion"]
    ('prompt', '4')

`pictured` is a chat about an image. Chats and pairs as trl writes them, ShareGPT's conversations and Alpaca's
instructions are those of docs/commands.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from taskferry.data.pictured import is_pictured, pictured
from taskferry.errors import TaskferryError

Kind = Literal["image", "messages", "pictured", "prompt", "pairs", "text"]
Row = dict[str, Any]
_NEGATIVE = re.compile(r"negative(?:_\d{1,4})?")

_OTHER_NAMES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("question", "answer"), ("prompt", "completion")),
    (("input", "output"), ("prompt", "completion")),
    (("input", "target"), ("prompt", "completion")),
    (("query", "response"), ("prompt", "completion")),
    (("instruction", "response"), ("prompt", "completion")),
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
    if is_pictured(rows):
        return "pictured", [pictured(row, f"{given}, row {i}") for i, row in enumerate(rows, 1)]
    if "image" in columns:
        return "image", list(rows)
    if "messages" in columns:
        return "messages", list(rows)
    if "conversations" in columns:
        return "messages", [
            {**row, "messages": _conversation(row, f"{given}, row {i}")} for i, row in enumerate(rows, 1)
        ]
    if "prompt" in columns or "chosen" in columns:
        return _asked(rows)
    if "instruction" in columns and "output" in columns:
        return "prompt", [{**row, "prompt": _instruction(row), "completion": row["output"]} for row in rows]
    if "text" in columns:
        return "text", list(rows)
    pair = next((names for names in _PAIRS if all(name in columns for name in names)), None)
    if pair is None:
        return None, list(rows)
    return "pairs", _compared(rows, [*pair, *sorted(filter(_NEGATIVE.fullmatch, columns), key=_number)], given)


def renaming(columns: Sequence[str]) -> str:
    """What to call the columns of data that no form fits."""
    for names, wanted in _OTHER_NAMES:
        found = [name for name in names if name in columns]
        if len(found) == len(wanted):
            return " and ".join(f"rename {old} to {new}" for old, new in zip(found, wanted, strict=True))
    return "rename one of them to text, or two to prompt and completion (docs/commands.md lists every form)"


def _conversation(row: Row, where: str) -> list[dict[str, Any]] | None:
    """ShareGPT: a speaker and what was said; a system text may stand in a column of its own."""
    turns = row["conversations"]
    if turns is None:
        return None
    messages = []
    for turn in turns if isinstance(turns, list) else [turns]:
        said = turn if isinstance(turn, Mapping) else {}
        pairs = (("from", "role"), ("value", "content"))
        speaker, text = (said[a] if said.get(a) is not None else said.get(b) for a, b in pairs)
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise TaskferryError(
                f"{where}: conversations need a speaker and a text each: [{{'from': 'human', 'value': '…'}}, …]"
            )
        if speaker != "system" or text:  # an empty one stands for none
            messages.append({"role": _SPEAKERS.get(speaker, speaker), "content": text})
    if isinstance(row.get("system"), str) and row["system"] and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _compared(rows: Sequence[Row], names: Sequence[str], given: str) -> list[Row]:
    """Pairs and triplets of sentence-transformers: `texts` are an anchor, its positive and any negatives."""
    for number, row in enumerate(rows, 1):
        wrong = next((name for name in names if not isinstance(row[name], str) or not row[name].strip()), None)
        if wrong is not None:
            raise TaskferryError(f"{given}, row {number}: {wrong} is no text: fill it with one, or leave the row out")
    return [{**row, "texts": [row[name] for name in names]} for row in rows]


def _number(name: str) -> int:
    return int(name.rpartition("_")[2]) if "_" in name else -1


def _asked(rows: Sequence[Row]) -> tuple[Kind, list[Row]]:
    """A prompt with what is to follow it: a completion, or the chosen one of two, as text or as messages."""
    # An unpaired preference says of each completion whether it is wanted; nothing is to be learnt from the others.
    wanted = [row for row in rows if not (row.get("label") is False and row.get("completion") is not None)]
    found = [(row, *_question_and_answer(row)) for row in wanted]
    if any(isinstance(part, list) for _, *parts in found for part in parts):
        return "messages", [{**row, "messages": _joined(asked, answer)} for row, asked, answer in found]
    return "prompt", [
        row if answer is None else {**row, "prompt": asked, "completion": answer} for row, asked, answer in found
    ]


def _question_and_answer(row: Row) -> tuple[Any, Any]:
    answer = row.get("completion") if row.get("completion") is not None else row.get("chosen")
    asked, other = row.get("prompt"), row.get("rejected")
    if asked is not None or not isinstance(answer, str):
        return asked, answer
    if not isinstance(other, str):
        return "", answer
    # The prompt of a pair of whole texts is what they have in common; a space belongs to the word behind it.
    same = next(
        (i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b), min(len(answer), len(other))
    )
    same -= same > 0 and answer[same - 1] == " "
    return answer[:same], answer[same:]


def _joined(asked: Any, answer: Any) -> list[Any]:
    """One chat; some data repeats the prompt in front of the answer."""
    before = asked if isinstance(asked, list) else [] if asked is None else [{"role": "user", "content": asked}]
    after = answer if isinstance(answer, list) else [] if answer is None else [{"role": "assistant", "content": answer}]
    repeated = bool(after) and isinstance(after[0], Mapping) and after[0].get("role") != "assistant"
    return after if repeated else [*before, *after]


def _instruction(row: Row) -> str | None:
    """Alpaca's own words around an instruction: models tuned on that form have learnt them."""
    if not isinstance(row["instruction"], str):
        return None
    more = row.get("input")
    paired = isinstance(more, str) and bool(more.strip())
    start = "Below is an instruction that describes a task" + (
        ", paired with an input that provides further context. " if paired else ". "
    )
    middle = f"### Input:\n{more}\n\n" if paired else ""
    return (
        f"{start}Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{row['instruction']}\n\n{middle}### Response:\n"
    )
