"""What an output says about itself to people and hubs: README.md, a model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taskferry.integrations.hub import CARD, card_fields
from taskferry.methods import methods


def _method(record: Mapping[str, Any]) -> str:
    name = str(record["provenance"].get("method", ""))
    known = methods().get(name)
    if known is None:
        return name
    refined = record.get("refined", {})
    if not refined.get("kept"):
        return f"{name}; {known.card}"
    trained = f"then trained for {refined['kept']} steps towards the tuned source, without labels"
    moved = known.card.removeprefix("nothing was trained").removeprefix(": ")
    return "; ".join(filter(None, (name, moved, trained)))


def _on(base: object) -> str:
    """Of an adapter that passed through an alignment the base need not be known."""
    return "" if base is None else f" on `{_shown(base)}`"


def _energy(verdict: Mapping[str, Any]) -> str:
    moved = verdict.get("change", {}).get("moved")
    share = 0.0 if moved is None else sum(moved.values())
    return "" if moved is None else f"\n- share of the change (‖τ‖²) that had a place to move to: {100 * share:.0f} %"


def _warnings(verdict: Mapping[str, Any]) -> str:
    return "".join(f"\n> **Warning:** {_shown(text)}\n" for text in verdict.get("warnings", ()))


def _answers(verdict: Mapping[str, Any]) -> str:
    """The state of the verdict, and held-out prompts with their answers."""
    state, answers = verdict.get("state"), verdict.get("answers")
    lines = "" if state is None else f"\n- verdict: {state}"
    if not answers:
        return lines
    named = {"source": "tuned source", "before": "target before", "moved": "target moved", "refined": "target refined"}
    rows = [f"| {words} | {_numbers(answers[name])} |" for name, words in named.items() if name in answers]
    examples = [
        "| " + " | ".join(_cell(example[name]) for name in ("prompt", "source", "before", "after")) + " |"
        for example in answers["examples"]
    ]
    head = f"| {answers['samples']} prompts | right % | exact % | stopped % | valid JSON % |\n|---|---|---|---|---|"
    table = "| prompt | tuned source | target before | target after |\n|---|---|---|---|"
    return "\n".join([lines, "", "## Answers", "", head, *rows, "", table, *examples])


def _numbers(facts: Mapping[str, Any]) -> str:
    return " | ".join(
        f"{facts[name]:.0f}" if name in facts else "" for name in ("right", "exact", "stopped", "valid_json")
    )


def _cell(text: str) -> str:
    """A text in a cell of a table."""
    return " ".join(_shown(text).replace("|", "¦").split())


def _shown(text: object) -> str:
    """Names come from files: without what would end a code block, start a tag or steer a terminal."""
    marks = {"`": "'", "<": "‹", ">": "›"}
    return "".join(marks.get(c, c if c.isprintable() or c == "\n" else "?") for c in str(text))


def write_card(folder: Path, record: Mapping[str, Any], *, adapter: bool) -> None:
    """A Hub-compatible README.md."""
    settings, verdict = record["settings"], record["verdict"]
    body = f"""
# {"A LoRA adapter" if adapter else "A model"} moved with taskferry

{_shown(verdict["sentence"])}
{_warnings(verdict)}
- moved from: `{_shown(settings.get("source_tuned"))}`{_on(settings.get("source_base"))}
- moved to: `{_shown(settings.get("target_base") or "")}`
- scale: {verdict["scale"] or "none, nothing was moved"}{_energy(verdict)}
- method: {_shown(_method(record))}{_answers(verdict)}

Biases, errors and unsafe behaviour of the source move along: evaluate before use.

## To repeat

```
{_shown(record["command"])}
```

## What moved

```
{_shown(record["coverage_summary"])}
```

`taskferry.json` has all settings, hashes of the inputs, the samples used and the quality of every map.
"""
    fields = card_fields(folder, record, adapter=adapter)
    (folder / CARD).write_text(f"---\n{fields}\n---\n{body}", encoding="utf-8")
