"""Calibration sets for language models: text, prompts with completions, chats, in one tokenizer or two.

    >>> language_calibration([[Segment("2 + 2 = ", counted=False), Segment("4")]], tokenizer_A, tokenizer_B, ends=True)

A sample is a list of segments; the loss counts the tokens of some. Every model renders it in its own way (a chat
template adds marks of its own); tokens are paired by the characters of the segments, whatever stands between them.
The end of an answer counts as one more token: the end of turn that the model's chat template writes, or the model's
end-of-text token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from taskferry.data.batch import IGNORED, Batch, Calibration
from taskferry.data.builders import fill_padding, in_micro_batches
from taskferry.data.forms import text_of
from taskferry.errors import TaskferryError


@dataclass(frozen=True)
class Segment:
    """A piece of text; `role` is set where it is a message of a chat."""

    text: str
    counted: bool = True
    role: str | None = None
    picture: str | None = None  # "front" or "behind", where an image stands in the message as well


@dataclass(frozen=True)
class Place:
    """Where a segment, or the end of an answer, stands."""

    start: int  # in the rendered text
    stop: int
    origin: int  # of the segment in the text of all segments: the same for both models
    counted: bool
    end: bool = False  # one character in the text of all segments, whatever a model writes there


MARK = "taskferry-message"  # stands for a message, to see what a template writes around it


def segments_of(row: Mapping[str, Any]) -> list[Segment]:
    """A row of a file: `messages`, `prompt` with `completion`, or `text`."""
    if row.get("messages") is not None:
        messages = messages_of(row)
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if last < 0:
            raise TaskferryError("a chat without an answer of the assistant has nothing to learn from")
        return [Segment(m["content"], i == last, m["role"]) for i, m in enumerate(messages[: last + 1])]
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is not None and completion is None:
        raise TaskferryError(
            f"the prompt '{str(prompt)[:60]}' has no completion: fill the column completion, or leave the row out "
            "(transfer and fit let the tuned source answer: --labels teacher)"
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        return [Segment(prompt, counted=False), Segment(completion)]
    if "texts" in row:
        raise TaskferryError(
            "pairs of texts are for sentence encoders; a language model needs text, prompt and completion, or messages"
        )
    if not isinstance(row.get("text"), str):
        raise TaskferryError(
            f"the row {str(dict(row))[:80]} has neither text, nor prompt and completion, nor messages: fill it, or "
            "leave it out"
        )
    return [Segment(row["text"])]


def messages_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The messages of a chat, checked: contents are texts."""
    messages = row["messages"] if isinstance(row["messages"], list) else [None]
    if any(isinstance(m, Mapping) and m.get("tool_calls") for m in messages):
        raise TaskferryError(
            "a chat has tool_calls, which are not read: leave such chats out, or write them as content"
        )
    found: list[Mapping[str, Any]] = [
        {**m, "content": text_of(m.get("content"))} for m in messages if isinstance(m, Mapping)
    ]
    if len(found) < len(messages) or not all(isinstance(m[key], str) for m in found for key in ("role", "content")):
        raise TaskferryError("messages need a role and a text content each: [{'role': 'user', 'content': '…'}, …]")
    return found


def language_calibration(
    samples: Sequence[Sequence[Segment]],
    tokenizer_A: Any,
    tokenizer_B: Any | None = None,
    *,
    max_length: int = 256,
    micro_batch: int = 8,
    ends: bool = False,
) -> Calibration:
    """For causal models: `labels` are the counted tokens; with `ends` each answer has one more, its end."""
    kinds = {"chats" if some[0].role is not None else "prompts" if len(some) > 1 else "texts" for some in samples}
    if len(kinds) > 1:  # marks at the beginning and what is cut differ between them
        raise TaskferryError(f"the samples are {' and '.join(sorted(kinds))}: give one kind in a file")

    bare = differ_in_spaces(tokenizer_A, tokenizer_B)

    def batch(tokenizer: Any, chosen: range) -> Batch:
        first = samples[chosen[0]]
        answers = len(first) > 1  # a prompt or chat, not plain text
        rendered = [rendered_chat(tokenizer, samples[i], ends=ends and answers) for i in chosen]
        texts = [text for text, _ in rendered]
        chat = first[0].role is not None
        encoded = _encode(tokenizer, texts, max_length, bare, chat=chat, keep_end=answers)
        spans, counted = spans_of(encoded.pop("offset_mapping"), [places for _, places in rendered])
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        labels = ids.masked_fill((mask == 0) | ~counted, IGNORED)
        lost = [chosen[i] for i in range(len(chosen)) if not bool((labels[i] != IGNORED).any())]
        if lost:
            text = texts[lost[0] - chosen[0]]
            told = f"the sample '{text[:60]}…'" if text.strip() else "a sample that is blank"
            raise TaskferryError(
                f"{told}: nothing of its answer fits in {max_length} tokens: leave blank answers out, or raise "
                "max_length"
            )
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return Batch(inputs, None, tuple(chosen), {"tokens": spans})

    made = in_micro_batches(len(samples), micro_batch, batch, tokenizer_A, tokenizer_B)
    return Calibration(made, (tokenizer_A, tokenizer_B or tokenizer_A))


def sequence_calibration(
    samples: Sequence[Sequence[Segment]],
    tokenizer_A: Any,
    tokenizer_B: Any | None = None,
    *,
    max_length: int = 256,
    micro_batch: int = 8,
) -> Calibration:
    """For encoder-decoders: what does not count is read, what counts is the answer."""
    bare = differ_in_spaces(tokenizer_A, tokenizer_B)

    def batch(tokenizer: Any, chosen: range) -> Batch:
        asked = ["".join(s.text for s in samples[i] if not s.counted) for i in chosen]
        answers = ["".join(s.text for s in samples[i] if s.counted) for i in chosen]
        encoder = _encode(tokenizer, asked, max_length, bare)
        decoder = _encode(tokenizer, answers, max_length, bare)
        spans = {"tokens": encoder.pop("offset_mapping"), "decoder": decoder["offset_mapping"]}
        labels = decoder["input_ids"].masked_fill(decoder["attention_mask"] == 0, IGNORED)
        inputs = {"input_ids": encoder["input_ids"], "attention_mask": encoder["attention_mask"], "labels": labels}
        return Batch(inputs, None, tuple(chosen), spans)

    made = in_micro_batches(len(samples), micro_batch, batch, tokenizer_A, tokenizer_B)
    return Calibration(made, (tokenizer_A, tokenizer_B or tokenizer_A))


def prompt_of(tokenizer: Any, segments: Sequence[Segment]) -> str:
    """The text in front of the answer, as a model reads it."""
    text, places = rendered_chat(tokenizer, segments)
    return text[: places[-1].start]


def end_mark(tokenizer: Any, behind: str) -> str | None:
    """The end of an answer: the special token that a chat template writes behind it, or the end-of-text token."""
    if not behind.strip():  # thousands of added tokens need not be looked through for each prompt
        own: str | None = tokenizer.eos_token
        return own
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    found = [token for token in special if token and behind.lstrip().startswith(token)]
    mark: str | None = max(found, key=len, default=tokenizer.eos_token)
    return mark


def chat_end(tokenizer: Any, segments: Sequence[Segment]) -> str | None:
    """The end of an answer to this prompt or chat."""
    text, places = rendered_chat(tokenizer, segments)
    return end_mark(tokenizer, text[places[-1].stop :])


def with_template(tokenizer: Any, other: Any) -> bool:
    """Give a tokenizer without a chat template that of another one, as text; whether it took it.

    What ends a turn there is no token here, so the own end of a text takes its place; a mark of the beginning, which
    a model needs and a foreign template does not write, is added in front.
    """
    if getattr(tokenizer, "chat_template", None) or not getattr(other, "chat_template", None):
        return False
    template, begin = str(other.chat_template), tokenizer.bos_token
    chat = [Segment("Question?", False, "user"), Segment("Answer.", True, "assistant")]
    end = chat_end(other, chat)
    if end is not None and tokenizer.eos_token is not None and end not in tokenizer.get_vocab():
        template = template.replace(end, tokenizer.eos_token)
    marked = begin is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    if marked and "bos_token" not in template:
        template = "{{ bos_token }}" + template
    tokenizer.chat_template = template
    return True


def rendered_chat(tokenizer: Any, segments: Sequence[Segment], *, ends: bool = False) -> tuple[str, list[Place]]:
    """The text a model reads, and where each segment stands in it; with `ends` the end of the last one too.

    A chat is rendered twice, the second time with marks in place of its messages: so it is known what the template
    writes around each. A short answer ("a") may stand in the mark of a role ("assistant") as well.
    """
    if segments[0].role is None:
        text = "".join(segment.text for segment in segments)
        frame = [""] * (len(segments) + 1)
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise TaskferryError(
                f"the data has messages but the tokenizer of {tokenizer.name_or_path or 'a model'} has no chat "
                "template: give prompt and completion columns"
            )
        text = templated(tokenizer, _messages(segments))
        marked = [replace(segment, text=MARK) for segment in segments]
        frame = templated(tokenizer, _messages(marked)).split(MARK)
    found = None
    if len(frame) == len(segments) + 1:
        # Templates may trim messages.
        contents = [
            f"({re.escape(s.text)})" if s.role is None else rf"(\s*{re.escape(s.text.strip())}\s*)" for s in segments
        ]
        around = [re.escape(piece) for piece in frame]
        found = re.fullmatch("".join([around[0], *(a + b for a, b in zip(contents, around[1:], strict=True))]), text)
    if found is None:
        raise TaskferryError("a chat template changes the text of a message: its tokens cannot be paired")
    places, origin = [], 1  # an origin of 0 would look like a special token's empty span
    for i, segment in enumerate(segments):
        content = segment.text if segment.role is None else segment.text.strip()
        start = found.start(i + 1) + found[i + 1].find(content)
        places.append(Place(start, start + len(content), origin, segment.counted))
        origin += len(content)
    at = places[-1].stop
    mark = end_mark(tokenizer, text[at:]) if ends else None
    if mark is None or text[:at].rstrip().endswith(mark):
        return text, places
    start = text.find(mark, at)
    if start < 0 or text[at:start].strip():  # the template writes no such mark
        text, start = text[:at] + mark, at
    places.append(Place(start, start + len(mark), origin, True, end=True))
    return text, places


def templated(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """A chat as a model reads it; templates refuse chats that their models do not know (a system message, say)."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:
        if not type(error).__module__.startswith("jinja2"):
            raise
        roles = ", ".join(str(message["role"]) for message in messages)
        name = getattr(tokenizer, "name_or_path", "") or "a model"
        raise TaskferryError(
            f"the chat template of {name} refuses a chat of {roles}: {error}. Leave such chats out, or give columns "
            "prompt and completion"
        ) from error


def _messages(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """A chat as a template takes it; with a picture contents are given in parts."""
    if not any(segment.picture for segment in segments):
        return [{"role": s.role, "content": s.text} for s in segments]
    messages = []
    for segment in segments:
        parts = [{"type": "text", "text": segment.text}]
        if segment.picture is not None:
            parts.insert(0 if segment.picture == "front" else 1, {"type": "image"})
        messages.append({"role": segment.role, "content": parts})
    return messages


def _encode(
    tokenizer: Any, texts: list[str], max_length: int, bare: bool, chat: bool = False, keep_end: bool = False
) -> dict[str, Tensor]:
    """`bare`: offsets without the space in front of a word."""
    check_fast(tokenizer)
    fill_padding(tokenizer)
    # Of a prompt and its answer the end matters: cut the beginning.
    side, tokenizer.truncation_side = tokenizer.truncation_side, "left" if keep_end else "right"
    try:
        encoded = tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=max_length,
            return_tensors="pt",
            return_offsets_mapping=True,
            add_special_tokens=not chat,  # a chat template writes its own
        )
    finally:
        tokenizer.truncation_side = side
    found = dict(encoded)
    if bare:
        for text, offsets in zip(texts, found["offset_mapping"], strict=True):
            for span in offsets:
                written = text[span[0] : span[1]]
                span[0] += len(written) - len(written.lstrip()) if written.strip() else 0
    return found


def differ_in_spaces(tokenizer_A: Any, tokenizer_B: Any | None) -> bool:
    """Whether a token's offsets have the space in front of its word by one tokenizer and not by the other.

    Tokens that begin with the same character would not be found to.
    """
    kinds = set()
    for tokenizer in (tokenizer_A, tokenizer_B or tokenizer_A):
        check_fast(tokenizer)
        offsets = tokenizer("a b", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        kinds.add(any(start == 1 for start, _ in offsets))
    return len(kinds) > 1


def check_fast(tokenizer: Any) -> None:
    """Tokens are paired by the characters that they stand for."""
    if not getattr(tokenizer, "is_fast", False):
        raise TaskferryError("a fast tokenizer is needed, for its character offsets: this model has none")


def spans_of(offsets: Tensor, places: Sequence[Sequence[Place]]) -> tuple[Tensor, Tensor]:
    """Offsets in the segments' own characters [n, L, 2], and whether a token's segment counts [n, L]."""
    spans = torch.zeros_like(offsets)
    counted = torch.zeros(offsets.shape[:2], dtype=torch.bool)
    for i, sample in enumerate(places):
        start, stop = offsets[i, :, 0], offsets[i, :, 1]
        for place in sample:
            inside = (start < place.stop) & (stop > place.start) & (stop > start)
            spans[i, inside, 0] = start[inside].clamp_min(place.start) - place.start + place.origin
            last = place.start + 1 if place.end else place.stop
            spans[i, inside, 1] = stop[inside].clamp_max(last) - place.start + place.origin
            if place.counted:
                counted[i] |= inside
    return spans, counted
