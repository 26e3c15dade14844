"""The model card of an output, README.md: what it says about itself to people and hubs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taskferry.integrations.hub import CARD, card_fields
from taskferry.methods import methods


def write_card(folder: Path, record: Mapping[str, Any], *, adapter: bool) -> None:
    """A Hub-compatible README.md."""
    settings, verdict = record["settings"], record["verdict"]
    source = f"`{_shown(settings['source_tuned'])}`"
    if settings.get("source_base"):  # of an adapter that passed through an alignment it need not be known
        source += f" on `{_shown(settings['source_base'])}`"
    facts = [
        f"moved from: {source}",
        f"moved to: `{_shown(settings.get('target_base') or '')}`",
        f"scale: {verdict['scale']:g}",
        f"method: {_shown(_method(record))}",
    ]
    if verdict.get("state"):
        facts.insert(0, f"verdict: {verdict['state']}")
    if (change := verdict.get("change")) and change["of"] == "source":
        facts.append(f"share of the change (‖τ‖²) that had a place to move to: {sum(change['moved'].values()):.0%}")
    parts = [f"# {'A LoRA adapter' if adapter else 'A model'} moved with taskferry", _shown(verdict["sentence"])]
    parts += [f"> **Warning:** {_shown(text)}" for text in verdict.get("warnings", ())]
    parts += [_shown(text) for text in verdict.get("notes", ())]
    parts.append("\n".join(f"- {fact}" for fact in facts))
    parts += _answers(verdict.get("answers"))
    parts += [
        "Biases, errors and unsafe behaviour of the source move along: evaluate before use.",
        f"## To repeat\n\n```\n{_shown(record['command'])}\n```",
        f"## What moved\n\n```\n{_shown(record['coverage_summary'])}\n```",
        "`taskferry.json` has all settings, hashes of the inputs, the samples used and the quality of every map.",
    ]
    fields = card_fields(folder, record, adapter=adapter)
    (folder / CARD).write_text(f"---\n{fields}\n---\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")


def _method(record: Mapping[str, Any]) -> str:
    name = str(record["provenance"].get("method", ""))
    known = methods().get(name)
    return name if known is None else f"{name}; {known.card}"


def _answers(answers: Mapping[str, Any] | None) -> list[str]:
    """Scores of held-out answers, and some prompts with what each model wrote."""
    if not answers:
        return []
    named = {"source": "tuned source", "before": "target before", "after": "target after"}
    facts = {"right": "right %", "exact": "exact %", "stopped": "stopped %", "valid_json": "valid JSON %"}
    scores = [
        [words, *(f"{answers[who][fact]:.0f}" if fact in answers[who] else "" for fact in facts)]
        for who, words in named.items()
        if who in answers
    ]
    examples = [[_shown(text) for text in example.values()] for example in answers["examples"]]
    return [
        "## Answers",
        _table([f"{answers['samples']} prompts", *facts.values()], scores),
        _table(["prompt", "tuned source", "target before", "target after"], examples),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(" ".join(c.replace("|", "¦").split()) for c in row) + " |" for row in cells)


def _shown(text: object) -> str:
    """Names come from files: without what would end a code block, start a tag or steer a terminal."""
    marks = {"`": "'", "<": "‹", ">": "›"}
    return "".join(marks.get(c, c if c.isprintable() or c == "\n" else "?") for c in str(text))
