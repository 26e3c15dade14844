"""What the tuned source says: itself as a model, and what it writes behind a prompt.

>>> with teacher_model(source, tuned) as teacher:
...     written(teacher.model, tokenizer, ["2 + 2 = "], length=8)
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taskferry.collect.device import device_of, evaluating
from taskferry.collect.scale import moved_by
from taskferry.errors import TaskferryError
from taskferry.models import Loaded, Tuned, load_model
from taskferry.models.adapters import in_body
from taskferry.models.models import resolve
from taskferry.objectives.language import is_sequence_to_sequence, longest_text


@contextmanager
def teacher_model(source: Loaded, tuned: Tuned | None) -> Iterator[Loaded]:
    """The tuned source: base + τ where that is all of it, or as it was saved, with its head."""
    if tuned is None:
        raise TaskferryError(
            "labels from the teacher need the tuned source in memory, and it is not there: give labels, or give "
            "--source-tuned and whole models (no --engine blockwise, no --device-memory)"
        )
    whole = tuned.adapter is None and Path(resolve(tuned.given)).is_dir()
    if not whole:
        check_whole(tuned, "give labels")
    if whole and (tuned.ignored or source.absent):
        loaded = load_model(tuned.given, dtype=source.precision)
        loaded.model.to(device_of(source.model))
        yield loaded
    else:
        with moved_by(source.model, tuned.tau) as set_scale:
            set_scale(1.0)
            yield source


def can_answer(tuned: Tuned | None) -> bool:
    """True where the tuned source can be had as a model: saved whole, or its base with its change and no more."""
    if tuned is None:
        return False
    return not tuned.beside or (tuned.adapter is None and Path(resolve(tuned.given)).is_dir())


def check_whole(tuned: Tuned, otherwise: str, *, heads: bool = True) -> None:
    """Refuses a tuned source that is more than base + τ; without `heads` those may differ: nothing is asked of them."""
    for name, reason in tuned.beside.items():
        if heads or in_body(name):
            merge = "" if tuned.adapter is None else ", or merge the adapter and give the full model"
            raise TaskferryError(
                f"{tuned.given} has also trained {name}, which is not in its change ({reason}), so that base and "
                f"change are not the tuned source: {otherwise}{merge}"
            )


@dataclass(frozen=True)
class Written:
    """Text that a model writes behind a prompt."""

    text: str
    stopped: bool  # by an end of its own, before the bound on the length


@torch.no_grad()
def written(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    length: int,
    temperature: float = 0.0,
    keep: int = sys.maxsize,
    special: bool = True,
    ends: Collection[int] = (),
    batch: int = 16,
) -> list[Written]:
    """Let a language model write behind each prompt: greedily, or drawn from its own distribution.

    Of a long prompt the last `keep` tokens are read; an empty one is the beginning of a text. `special` adds the
    tokenizer's own marks; `ends` are tokens that end an answer beside those that the model knows. What is drawn at a
    temperature depends on the prompts that stand in its batch.
    """
    both, device, most = is_sequence_to_sequence(model), device_of(model), longest_text(sys.maxsize, model)
    length = min(length, max(1, most // 2))
    keep = min(keep, most if both else most - length)  # so that the answer has a place behind it
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    found: dict[int, Written] = {}
    with as_it_is(model, tokenizer, ends) as (generator, stops, pad), evaluating(model):
        read = [_ids(model, tokenizer, prompt, special, stops)[-keep:] for prompt in prompts]
        order = list(range(len(read))) if temperature else sorted(range(len(read)), key=lambda i: len(read[i]))
        for start in range(0, len(read), batch):
            some = order[start : start + batch]
            width = max(len(read[i]) for i in some)
            ids, mask = torch.full((len(some), width), pad), torch.zeros(len(some), width, dtype=torch.long)
            for row, i in enumerate(some):
                where = slice(0, len(read[i])) if both else slice(width - len(read[i]), width)
                ids[row, where], mask[row, where] = torch.tensor(read[i]), 1
            output: Tensor = generator.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=length, **drawn
            )
            for i, row_ids in zip(some, output.tolist(), strict=True):
                found[i] = _read(tokenizer, [] if both else read[i], row_ids[1:] if both else row_ids[width:], stops)
    return [found[i] for i in range(len(read))]


def _read(tokenizer: Any, before: list[int], new: list[int], stops: Collection[int]) -> Written:
    """The new tokens as text, up to the first that ends it."""
    end = next((i for i, token in enumerate(new) if token in stops), len(new))
    # Decoded as a whole: a piece on its own may lose the space before it.
    text = _decoded(tokenizer, before + new[:end])[len(_decoded(tokenizer, before)) :]
    return Written(text, end < len(new))


def is_blank(answer: str) -> bool:
    """True where an answer says nothing: a broken character does not either, and some tokenizers drop it."""
    return not answer.replace("\ufffd", "").strip()


@contextmanager
def as_it_is(
    model: torch.nn.Module, tokenizer: Any, ends: Collection[int] = ()
) -> Iterator[tuple[Any, Collection[int], int]]:
    """The model as one that writes by its own distribution, the tokens that end a text, and one for padding.

    Nothing of a generation_config.json but the tokens that begin and end a text has a say: cut or penalised
    distributions would be another model's.
    """
    generator: Any = model
    own = generator.generation_config
    stops = {*ends, *_numbers(own.eos_token_id), *_numbers(tokenizer.eos_token_id)}
    pad = next((n for n in (tokenizer.pad_token_id, *sorted(stops)) if n is not None), 0)
    places: tuple[Any, ...] = (own, model.config)
    starts = {
        name: next((getattr(each, name) for each in places if getattr(each, name, None) is not None), None)
        for name in ("bos_token_id", "decoder_start_token_id")
    }
    generator.generation_config = type(own)(eos_token_id=sorted(stops) or None, pad_token_id=pad, **starts)
    try:
        yield generator, stops, pad
    finally:
        generator.generation_config = own


def _ids(model: torch.nn.Module, tokenizer: Any, prompt: str, special: bool, stops: Collection[int]) -> list[int]:
    """A prompt in tokens; some tokenizers end every text, which nothing could follow."""
    ids: list[int] = tokenizer(prompt, add_special_tokens=special)["input_ids"]
    if is_sequence_to_sequence(model):
        return ids
    config: Any = model.config
    first = (tokenizer.bos_token_id, getattr(config, "bos_token_id", None), tokenizer.eos_token_id)
    start = next((n for n in first if n is not None), 0)
    while len(ids) > 1 and special and ids[-1] in stops:
        ids = ids[:-1]
    return ids or [start]


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def _numbers(value: int | Sequence[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
