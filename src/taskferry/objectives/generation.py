"""Samples where there are none: texts that the tuned source writes itself.

    >>> drawn = draw(settings, source, target, tuned)             # settings.calibration is "generate"
    >>> drawn.samples, drawn.how["sha256"]
    >>> draw(settings, source, target, None, adapters=[folder, …])     # for the maps of a fleet: each writes a share

They are drawn in batches of one size, each from a seed of its own: the same settings give the same texts, the first
fifty of a hundred are those of fifty, and neither micro-batches nor processes show.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taskferry.choices import FREE, OWN
from taskferry.collect.device import device_of
from taskferry.collect.progress import Progress, Steps
from taskferry.config import GenerationSettings
from taskferry.data.data import Samples, load_samples
from taskferry.data.forms import Kind, Row
from taskferry.data.language import MARK, check_fast, messages_of, templated, with_template
from taskferry.data.samplers import choose
from taskferry.errors import TaskferryError
from taskferry.models import Loaded, Tuned, is_adapter, load_tuned
from taskferry.objectives.answers import is_blank, written
from taskferry.objectives.language import positions
from taskferry.objectives.preparation import language_kind
from taskferry.objectives.teacher import teacher_model

STAGE = "generate"
BATCH = 16  # texts that are written together
TRIES = 4  # so many times the texts that are wanted, where some say nothing
HALF = 0.5  # of the scale that is best on whole texts of the source (docs/how-to/no-data.md)


@dataclass(frozen=True)
class Drawn:
    """Samples of the tuned source, with what drew them."""

    samples: Samples
    how: Mapping[str, Any]  # for the record
    seconds: float | None = None  # that drawing all would take, where few were drawn to see

    @property
    def whole(self) -> bool:
        """Whether the source wrote all of it, and not answers to prompts that were given."""
        return self.how["prompts"] in (FREE, OWN)

    @property
    def labels(self) -> str:
        """Whose answers they are."""
        return f"written by {self._authors}"

    @property
    def told(self) -> str:
        """For a plan."""
        drawn = "{samples}, written by {by}: prompts {prompts}, temperature {temperature:g}, seed {seed}, "
        return f"{drawn}up to {{length}} tokens each".format(**self.how, by=self._authors)

    @property
    def _authors(self) -> str:
        adapters = self.how.get("adapters")
        return "the tuned source" if adapters is None else f"{len(adapters)} adapters in turn"

    def lines(self) -> str:
        """A file that `--calibration` takes."""
        return lines_of(self.samples.rows)


@dataclass(frozen=True)
class Author:
    """The tuned source with a place to begin: one batch of samples at a time."""

    model: torch.nn.Module
    tokenizer: Any
    settings: GenerationSettings
    kind: Kind
    length: int  # of a text in tokens
    given: Sequence[Row] = ()  # prompts
    place: int = 0  # among several authors: each draws other numbers

    def write(self, wanted: int, most: int, steps: Steps) -> tuple[list[Row], int]:
        """So many samples from at most so many batches, and the batches that it took."""
        rows, number = list[Row](), 0
        while len(rows) < wanted and number < most:
            before = min(len(rows), wanted)
            rows += self.rows(number)
            number += 1
            steps.step(min(len(rows), wanted) - before)
        return rows[:wanted], number

    def rows(self, number: int) -> list[Row]:
        """Batch `number`, without those that say nothing."""
        device = device_of(self.model)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed * 1_000_003 + self.place * 10_007 + number)
            rows = self._given(number) if self.given else self._free() if self.kind != "messages" else self._chats()
        return [row for row in rows if row is not None]

    def _free(self) -> list[Row | None]:
        """Whole texts; of a prompt of its own, the first quarter, the rest alone counts."""
        texts = self._behind([""] * BATCH, self.length)
        rows: list[Row | None] = []
        for text in texts:
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            cut = offsets[-(-len(offsets) // 4)][0] if len(offsets) > 1 else 0
            if not cut or is_blank(text):
                rows.append(None)  # no token of it would be predicted
            elif self.kind == "text":
                rows.append({"text": text})
            else:
                rows.append(_answered(text[:cut], text[cut:]))
        return rows

    def _chats(self) -> list[Row | None]:
        """What a user would ask, written in the user's place, and the answer."""
        before, behind = _around(self.tokenizer, [], "user")
        asked = self._behind([before] * BATCH, self.length // 4, behind)
        return self._answers([[{"role": "user", "content": text.strip()}] for text in asked])

    def _given(self, number: int) -> list[Row | None]:
        """Prompts in the order of the seed, again from the first where there are too few."""
        order = choose(len(self.given), len(self.given), seed=self.settings.seed)
        rows = [self.given[order[i % len(order)]] for i in range(number * BATCH, (number + 1) * BATCH)]
        if self.kind == "messages":
            return self._answers([_unanswered(messages_of(row)) for row in rows])
        answers = self._behind([row["prompt"] for row in rows], self.length // 2)
        return [_answered(row["prompt"], answer) for row, answer in zip(rows, answers, strict=True)]

    def _answers(self, chats: Sequence[list[Mapping[str, Any]]]) -> list[Row | None]:
        around = [_around(self.tokenizer, messages, "assistant") for messages in chats]
        answers = self._behind([before for before, _ in around], self.length // 2, around[0][1])
        return [
            None
            if is_blank(answer) or is_blank(str(messages[-1]["content"]))
            else {"messages": [*messages, {"role": "assistant", "content": answer.strip()}]}
            for messages, answer in zip(chats, answers, strict=True)
        ]

    def _behind(self, prompts: Sequence[str], length: int, closing: str | None = None) -> list[str]:
        """`closing` is what a chat template writes behind a message."""
        first = self.tokenizer(closing or "", add_special_tokens=False)["input_ids"][:1]
        found = written(
            self.model,
            self.tokenizer,
            prompts,
            length=length,
            keep=self.length + 2 - length,
            temperature=self.settings.temperature,
            special=closing is None,  # a template writes its own
            ends=[token for token in first if token in self.tokenizer.all_special_ids],
            batch=len(prompts),
        )
        texts = [each.text.replace("\ufffd", "") for each in found]  # half a character
        mark = (closing or "").strip()
        return [text.partition(mark)[0] for text in texts] if mark else texts


def draw(
    settings: GenerationSettings,
    source: Loaded,
    target: Loaded,
    tuned: Tuned | None,
    *,
    adapters: Sequence[Path] = (),
    trial: bool = False,
    progress: Progress | None = None,
) -> Drawn:
    """As many samples as the settings ask for, by the tuned source, or by `adapters` of the source in equal shares.

    A `trial` writes one batch, says how long all would take, and repeats it.
    """
    if tuned is None and not adapters:
        raise TaskferryError("--calibration generate: the tuned source writes the samples: give --source-tuned")
    kind, given = _kind(settings, source, target)
    length = _length(settings.max_length, source, target)
    wanted, authors = settings.samples, "the adapters" if adapters else "the tuned source"
    shares = [len(range(i, wanted, len(adapters))) for i in range(len(adapters))] or [wanted]
    if not min(shares):
        raise TaskferryError(
            f"{len(adapters)} adapters cannot share {wanted} samples: raise --samples, or give --adapters a folder "
            "with fewer of them, some of each kind"
        )
    steps = Steps(progress, STAGE, wanted)
    rows, batches, drawn = list[Row](), sum(-(-share // BATCH) for share in shares), 0
    started = time.perf_counter()
    for place, share in enumerate(shares[:1] if trial else shares):
        author = load_tuned(str(adapters[place]), source) if adapters else tuned
        most = 1 if trial else TRIES * -(-share // BATCH)
        with teacher_model(source, author) as teacher:
            writer = Author(teacher.model, source.tokenizer(), settings, kind, length, given, place)
            written_by, number = writer.write(wanted if trial else share, most, steps)
        if len(written_by) < share and not trial:
            raise _too_few(f"the adapter {adapters[place].name}" if adapters else authors, written_by, share)
        rows, drawn = rows + written_by, drawn + number
    seconds = (time.perf_counter() - started) * batches / drawn if trial else None
    distinct = _different(rows)
    if distinct < 2:
        raise _too_few(authors, rows, wanted)
    rows = [rows[i % len(rows)] for i in range(wanted)]  # of a trial, again and again
    how = {
        "prompts": settings.prompts,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "samples": wanted,
        "distinct": distinct,
        "length": length,
        "sha256": hashlib.sha256(lines_of(rows).encode()).hexdigest(),
        **({"adapters": [folder.name for folder in adapters]} if adapters else {}),
    }
    return Drawn(Samples(kind, rows, None, (), f"what {authors} wrote"), how, seconds)


def _different(rows: Sequence[Row]) -> int:
    return len({json.dumps(row, sort_keys=True) for row in rows})


def _too_few(who: str, rows: Sequence[Row], wanted: int) -> TaskferryError:
    return TaskferryError(
        f"{who} wrote {len(rows)} texts that say something and {_different(rows)} that differ, where {wanted} are "
        "needed: raise temperature or max_length (--set), or give samples of your own with --calibration"
    )


def adapters_in(folder: Path) -> list[Path]:
    """The adapters of a folder, by name."""
    found = sorted(path for path in folder.iterdir() if is_adapter(path)) if folder.is_dir() else []
    if not found:
        raise TaskferryError(f"--adapters: {folder} has no folders of PEFT adapters in it: give one that has")
    return found


def lines_of(rows: Sequence[Row]) -> str:
    """JSONL."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _kind(settings: GenerationSettings, source: Loaded, target: Loaded) -> tuple[Kind, Sequence[Row]]:
    """What the samples will be, and the prompts that were given for them; refuses what cannot be written."""
    language = language_kind(source, target)
    if language is None:
        raise TaskferryError(
            f"--calibration generate: {source.given} is a {type(source.model).__name__}, which writes no text: give "
            "texts or pictures with --calibration, which the tuned source labels with --labels teacher"
        )
    for loaded in (source, target):
        check_fast(loaded.tokenizer())
    with_template(target.tokenizer(), source.tokenizer())
    chats = [loaded for loaded in (source, target) if getattr(loaded.tokenizer(), "chat_template", None)]
    if settings.prompts in (FREE, OWN):
        if language == "sequence":
            raise TaskferryError(
                f"--calibration generate: {source.given} answers what it reads: give a file with the column prompt "
                "with --set prompts=FILE"
            )
        return ("text" if settings.prompts == FREE else "messages" if len(chats) == 2 else "prompt"), ()
    prompts = load_samples(settings.prompts)
    if prompts.kind not in ("prompt", "messages") or (prompts.kind == "messages" and language == "sequence"):
        raise TaskferryError(f"prompts: {settings.prompts} has {prompts.kind} rows: the column prompt is needed")
    if prompts.kind == "messages" and len(chats) < 2:
        raise TaskferryError(
            f"prompts: {settings.prompts} has messages, but a model's tokenizer has no chat template: give the "
            "column prompt"
        )
    wanted = str if prompts.kind == "prompt" else list
    blank = [
        i for i, row in enumerate(prompts.rows, 1) if not (row[prompts.kind] and isinstance(row[prompts.kind], wanted))
    ]
    if blank:
        raise TaskferryError(f"prompts: row {blank[0]} of {settings.prompts} has no {prompts.kind}: leave it out")
    return prompts.kind, prompts.rows


def _length(longest: int, source: Loaded, target: Loaded) -> int:
    """In tokens, with the mark at the beginning: no model has places for more."""
    return max(2, min(longest, positions(source.model), positions(target.model)) - 2)


def _answered(prompt: str, answer: str) -> Row | None:
    return None if is_blank(answer) else {"prompt": prompt, "completion": answer}


def _unanswered(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A chat up to its last question."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
    return list(messages[: last if last > 0 else len(messages)])


def _around(tokenizer: Any, messages: Sequence[Mapping[str, Any]], role: str) -> tuple[str, str]:
    """What a chat template writes before and behind the next message."""
    text = templated(tokenizer, [*messages, {"role": role, "content": MARK}])
    before, found, behind = text.partition(MARK)
    if not found:
        raise TaskferryError(f"the chat template of the source drops the message of a {role}: set prompts to a file")
    return before, behind


def beside(out: Path) -> Path:
    """Where the samples of a file's maps are written."""
    return out.with_name(f"{out.name}.calibration.jsonl")
