"""Samples where there are none: texts that the tuned source writes itself.

    >>> drawn = draw(settings, source, target, tuned)             # settings.calibration is "generate"
    >>> drawn.samples, drawn.how["sha256"]
    >>> draw(settings, source, target, None, adapters=[folder, …])     # for the maps of a fleet: each writes a share

They are drawn in batches of one size, each from a seed of its own: the same settings give the same texts, the first
fifty of a hundred are those of fifty, and micro-batches do not show.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from taskferry.choices import FREE, OWN
from taskferry.collect.device import device_of
from taskferry.collect.progress import Progress, Steps
from taskferry.config import GenerationSettings
from taskferry.data.forms import Kind, Row
from taskferry.data.language import MARK, check_fast, messages_of, templated, with_template
from taskferry.data.samples import Samples, choose, load_samples
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

    @property
    def whole(self) -> bool:
        """Whether the source wrote all of it, and not answers to prompts that were given."""
        return self.how["prompts"] in (FREE, OWN)

    @property
    def labels(self) -> str:
        """Whose answers they are."""
        adapters = self.how.get("adapters")
        return "written by " + ("the tuned source" if adapters is None else f"{len(adapters)} adapters in turn")

    @property
    def told(self) -> str:
        """For a plan."""
        drawn = (
            "{samples}, {by}: prompts {prompts}, temperature {temperature:g}, seed {seed}, up to {length} tokens each"
        )
        return drawn.format(**self.how, by=self.labels)

    def lines(self) -> str:
        """A file that `--calibration` takes."""
        return lines_of(self.samples.rows)


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
    """Draw as many samples as the settings ask for.

    Args:
        settings: How many, what they begin with, temperature and seed.
        source: The base model of the authors.
        target: The model that will read them: no text is longer than it can read.
        tuned: The author.
        adapters: Of the source, in place of `tuned`: each writes an equal share.
        trial: Write one batch, and repeat it.
        progress: Called as samples are written.
    """
    if tuned is None and not adapters:
        raise TaskferryError("--calibration generate: the tuned source writes the samples: give --source-tuned")
    kind, given = _kind(settings, source, target)
    # With the mark at the beginning no text is longer than a model has places for.
    length = max(2, min(settings.max_length, positions(source.model), positions(target.model)) - 2)
    wanted, authors = settings.samples, "the adapters" if adapters else "the tuned source"
    shares = [len(range(i, wanted, len(adapters))) for i in range(len(adapters))] or [wanted]
    if not min(shares):
        raise TaskferryError(
            f"{len(adapters)} adapters cannot share {wanted} samples: raise --samples, or give --adapters a folder "
            "with fewer of them, some of each kind"
        )
    steps, rows = Steps(progress, STAGE, wanted), list[Row]()
    for place, share in enumerate(shares[:1] if trial else shares):
        author = load_tuned(str(adapters[place]), source) if adapters else tuned
        mine, most = list[Row](), wanted if trial else share
        with teacher_model(source, author) as teacher:
            writer = Author(teacher.model, source.tokenizer(), settings, kind, length, given, place)
            for number in range(1 if trial else TRIES * -(-share // BATCH)):
                if len(mine) < most:
                    before = len(mine)
                    mine = [*mine, *writer.rows(number)][:most]
                    steps.step(len(mine) - before)
        if len(mine) < share and not trial:
            raise _too_few(f"the adapter {adapters[place].name}" if adapters else authors, mine, share)
        rows += mine
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
    }
    if adapters:
        how["adapters"] = [folder.name for folder in adapters]
    return Drawn(Samples(kind, rows, None, (), f"what {authors} wrote"), how)


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

    def rows(self, number: int) -> list[Row]:
        """Batch `number`, without those that say nothing."""
        device = device_of(self.model)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed * 1_000_003 + self.place * 10_007 + number)
            if not self.given:
                return self._chats() if self.kind == "messages" else self._texts()
            # Prompts in the order of the seed, again from the first where there are too few.
            order = choose(len(self.given), len(self.given), seed=self.settings.seed)
            rows = [self.given[order[i % len(order)]] for i in range(number * BATCH, (number + 1) * BATCH)]
            if self.kind == "messages":
                return self._answers([_unanswered(messages_of(row)) for row in rows])
            prompts = [row["prompt"] for row in rows]
            answers = self._behind(prompts, self.length // 2)
            found = zip(prompts, answers, strict=True)
            return [{"prompt": prompt, "completion": answer} for prompt, answer in found if not is_blank(answer)]

    def _texts(self) -> list[Row]:
        """Whole texts; where it makes up its own prompts, the first quarter of each is the prompt."""
        rows: list[Row] = []
        for text in self._behind([""] * BATCH, self.length):
            offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            cut = offsets[-(-len(offsets) // 4)][0] if len(offsets) > 1 else 0
            if not cut or is_blank(text):
                continue  # no token of it would be predicted
            if self.kind == "text":
                rows.append({"text": text})
            elif not is_blank(text[cut:]):
                rows.append({"prompt": text[:cut], "completion": text[cut:]})
        return rows

    def _chats(self) -> list[Row]:
        """What a user would ask, written in the user's place, and the answer."""
        before, behind = _around(self.tokenizer, [], "user")
        asked = self._behind([before] * BATCH, self.length // 4, behind)
        return self._answers([[{"role": "user", "content": text.strip()}] for text in asked])

    def _answers(self, chats: Sequence[list[Mapping[str, Any]]]) -> list[Row]:
        around = [_around(self.tokenizer, messages, "assistant") for messages in chats]
        answers = self._behind([before for before, _ in around], self.length // 2, around[0][1])
        return [
            {"messages": [*messages, {"role": "assistant", "content": answer.strip()}]}
            for messages, answer in zip(chats, answers, strict=True)
            if not (is_blank(answer) or is_blank(str(messages[-1]["content"])))
        ]

    def _behind(self, prompts: Sequence[str], length: int, closing: str | None = None) -> list[str]:
        """What it writes behind prompts; `closing` is what a chat template writes behind a message."""
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
