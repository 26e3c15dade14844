"""What an output says about itself: taskferry.json for machines, README.md (a model card) for people and hubs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taskferry.alignment import Alignment
from taskferry.hub import CARD, card_fields, front_matter
from taskferry.version import __version__


def site_table(alignment: Alignment) -> list[dict[str, Any]]:
    """One row a pair of sites: where its change comes from, and how good its two maps are."""
    rows = []
    for pair in alignment.pairs:
        q_in, q_out = alignment.quality_in[pair.reads], alignment.quality_out[pair.target.name]
        rows.append(
            {
                "target": pair.target.name,
                "source": pair.source.name,
                "rank_in": q_in.rank,
                "rank_out": q_out.rank,
                "residual_in": round(q_in.residual, 6),
                "residual_out": round(q_out.residual, 6),
            }
        )
    return rows


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """taskferry.json."""
    text = json.dumps({"taskferry": __version__, **record}, indent=1, default=str)
    (folder / "taskferry.json").write_text(text + "\n", encoding="utf-8")


def _method(record: Mapping[str, Any]) -> str:
    name = str(record["settings"].get("method", "bico"))
    if name == "bico":
        return "bico; nothing was trained: the change of every linear layer was carried over by two orthogonal maps"
    if name == "twofold":
        return "twofold; nothing was trained: two orthogonal maps a layer carried the change over, fitted in two places"
    if name == "few-shot":
        return "few-shot; the target was fine-tuned on the calibration samples"
    if name == "distil":
        return "distil; moved by bico, then trained for a few steps towards the tuned source on the calibration samples"
    return f"{name}; nothing was trained"


def _shown(text: object) -> str:
    """Names come from files: without what would end a code block, start a tag or steer a terminal."""
    marks = {"`": "'", "<": "‹", ">": "›"}
    return "".join(marks.get(c, c if c.isprintable() or c == "\n" else "?") for c in str(text))


def write_card(folder: Path, record: Mapping[str, Any], *, adapter: bool) -> None:
    """README.md with the fields that hubs read."""
    settings, verdict = record["settings"], record["verdict"]
    body = f"""
# {"A LoRA adapter" if adapter else "A model"} moved with taskferry

{_shown(verdict["sentence"])}

- moved from: `{_shown(settings.get("source_tuned"))}` on `{_shown(settings.get("source_base"))}`
- moved to: `{_shown(settings.get("target_base") or "")}`
- scale: {verdict["scale"]}
- method: {_method(record)}

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
    (folder / CARD).write_text(front_matter(fields) + body, encoding="utf-8")
