"""The page of a transfer or of a fleet, for people: one HTML file that loads nothing and runs nothing.

>>> write_report(Path("my-lora-on-b"))          # my-lora-on-b/report.html
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape as _escape
from pathlib import Path, PurePath
from typing import Any

from taskferry.disk.files import write_text
from taskferry.display.html import escape, table, tag
from taskferry.errors import TaskferryError
from taskferry.layers.family import split_path
from taskferry.output.record import find_record
from taskferry.version import __version__

Record = Mapping[str, Any]
GENERATOR = "taskferry report"  # by this a page is known as one that may be written again
BADGES = {
    "helps": ("It helps on held-out samples", "good"),
    "not shown to help": ("Not shown to help", "open"),
    "harms": ("It does harm on held-out samples", "bad"),
    None: ("Not measured", "open"),
}
MARKS = {"moved": "●", "partly": "◐", "kept": "○"}
SHOWN = 1000  # failures of a fleet that are listed


def write_report(given: Path, out: Path | None = None) -> tuple[Path, str]:
    """Write the page of an output's record; returns where it is, and the verdict."""
    file, record = find_record(given)
    try:
        page = transfer_page(record, file.parent)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TaskferryError(
            f"{file} cannot be shown, something in it is not as taskferry writes it: {error!r}"
        ) from error
    path = out or file.parent / "report.html"
    if path.exists():  # over an earlier report, never over anything else
        head = path.read_text(encoding="utf-8", errors="replace")[:2000] if path.is_file() else ""
        if GENERATOR not in head:
            raise TaskferryError(f"{path} is there and is no report: name another place with --out")
    if not path.parent.is_dir():
        raise TaskferryError(f"{path.parent} is not a folder: make it first, or name another place with --out")
    write_text(path, page)
    return path, str(record["verdict"]["sentence"])


def transfer_page(record: Record, folder: Path) -> str:
    """The page of one output."""
    settings, verdict = record["settings"], record["verdict"]
    learned = record["provenance"].get("distilled") or {}
    sections = [
        _section("In short", _warnings(verdict), _tiles(record, folder), *_notes(verdict)),
        _answers(verdict.get("answers")),
        _section("What moved", _shares(verdict.get("change", {})), _reasons(record["coverage"])),
        _section(
            "Details",
            _fold("Every layer, by block", _status_maps(record["coverage"]["rows"])),
            _fold("How good the maps are", _map_tables(record.get("sites", ()))),
            _fold("Loss at every scale that was tried", _curve(record.get("scale_curve", ()), "scale", verdict)),
            _fold("Held-out loss while it learned", _curve(learned.get("losses", ()), "step", verdict)),
            _fold("Where it comes from", _provenance(record)),
        ),
        _section("To repeat it", tag("pre", tag("code", escape(record["command"])), tabindex=0)),
    ]
    badge, colour = BADGES[verdict.get("state")]
    title = f"{_short(settings['source_tuned'])} on {_short(settings.get('target_base') or '')}"
    return _page("transfer", title, str(verdict["sentence"]), badge, colour, sections)


def fleet_page(summary: Record, failures: Sequence[tuple[str, str, str]]) -> str:
    """The page of a fleet; `failures` are adapters, moves and reasons."""
    counts = {
        "moved": (summary["done"], f"of {summary['of']}"),
        "failed": (summary["failed"], "with a reason each"),
        "pending": (summary["pending"], "rerun to resume"),
        "adapters a second": (summary["adapters_a_second"], f"in {summary['seconds']} seconds"),
    }
    sections = [_section("In short", _boxes((name, str(n), note) for name, (n, note) in counts.items()))]
    if failures:
        listed = _table(("adapter", "move", "reason"), failures[:SHOWN])
        more = "" if len(failures) <= SHOWN else tag("p", f"The first {SHOWN} of {len(failures)}.", class_="note")
        reasons = _table(("reason", "adapters"), [(why, str(n)) for why, n in summary["reasons"].items()])
        sections.append(_section("Why they failed", reasons, more, _fold("Which", listed)))
    good = not summary["failed"]
    done = f"{summary['done']} of {summary['of']} adapters moved in {summary['seconds']} s."
    badge = "All moved" if good and not summary["pending"] else f"{summary['failed']} failed"
    return _page("fleet", "A fleet of adapters", done, badge, "good" if good else "bad", sections)


def _short(given: object) -> str:
    """The last word of a path or hub id, without the ending of a file of weights."""
    path = PurePath(str(given))
    return (path.stem if path.suffix in (".safetensors", ".pt", ".bin") else path.name) or str(given)


def _warnings(verdict: Record) -> str:
    return "".join(tag("p", escape(f"Warning: {text}"), class_="warning") for text in verdict.get("warnings", ()))


def _notes(verdict: Record) -> list[str]:
    return [tag("p", escape(text), class_="note") for text in verdict.get("notes", ())]


def _tiles(record: Record, folder: Path) -> str:
    verdict, tiles = record["verdict"], []
    if answers := verdict.get("answers"):
        after = answers["after"]
        note = f"{answers['before']['right']:.0f} % before"
        note += f", source {answers['source']['right']:.0f} %" if "source" in answers else ""
        tiles.append(("Right answers", f"{after['right']:.0f} %", note))
    if verdict.get("loss_before") is not None:
        note = f"{verdict['loss_before']:.4g} before, {verdict['loss_unit']}"
        tiles.append(("Held-out loss", f"{verdict['loss_after']:.4g}", note))
    tiles.append(("Scale", f"{verdict['scale']:.3g}", ""))
    weights = folder / "adapter_model.safetensors"
    if record.get("form") == "lora" and record.get("rank"):
        size = f"{weights.stat().st_size / 2**20:.1f} MiB" if weights.is_file() else ""
        tiles.append(("Rank of the LoRA", str(record["rank"]), size))
    if verdict.get("weights") is not None:
        note = f"{verdict['moved']} of {verdict['of']} tensors"
        tiles.append(("Weights moved", f"{100 * verdict['weights']:.1f} %", note))
    if indices := record.get("calibration", {}).get("indices"):
        tiles.append(("Samples", str(len(indices)), str(record["calibration"].get("labels", ""))))
    return _boxes(tiles)


def _boxes(tiles: Iterable[tuple[str, str, str]]) -> str:
    boxes = (
        tag("div", tag("dt", escape(name)), tag("dd", escape(value), tag("small", escape(note))))
        for name, value, note in tiles
    )
    return tag("dl", *boxes, class_="tiles")


def _answers(answers: Record | None) -> str:
    """Some prompts with what each model wrote, and scores with their interval."""
    if not answers:
        return ""
    named = {"source": "tuned source", "before": "target before", "after": "target after"}
    facts = {"right": "right", "exact": "exact", "begins": "begins right", "stopped": "stopped", "valid_json": "JSON"}
    shown = {name: words for name, words in facts.items() if name in answers["before"]}
    scores = [
        [words, *(f"{answers[who][name]:.0f} %" for name in shown)] for who, words in named.items() if who in answers
    ]
    gain = answers["gain"]
    told = f"{gain['points']:+.0f} points of right answers, 95 % interval {gain['low']:+.0f} to {gain['high']:+.0f}"
    examples = [[example[name] for name in ("prompt", "source", "before", "after")] for example in answers["examples"]]
    return _section(
        "What it answers",
        _table(("prompt", "tuned source", "target before", "target after"), examples),
        tag("p", escape(f"{told}, on {answers['samples']} prompts."), class_="note"),
        _table(("", *shown.values()), scores),
    )


def _shares(change: Record) -> str:
    """What moved as one bar of shares of the change, ‖τ‖²."""
    parts = [(where, share, "moved") for where, share in change.get("moved", {}).items()]
    parts += [(where, share, "kept") for where, share in change.get("stayed", {}).items()]
    if not parts:
        return ""
    bar = (tag("i", class_=kind, style=f"flex-grow:{share:.4f}") for _, share, kind in parts)
    large = [part for part in parts if part[1] >= 0.005]
    legend = ", ".join(f"{where} {share:.0%}{'' if kind == 'moved' else ' stayed'}" for where, share, kind in large)
    words = f"Shares of the change, by squared norm: {legend}."
    return tag("div", *bar, class_="shares", role="img", aria_label="Shares of the change") + tag(
        "p", escape(words), class_="note"
    )


def _reasons(coverage: Record) -> str:
    reasons = Counter(row["reason"] for row in coverage["rows"] if row["status"] != "moved")
    rows = [(why, str(n)) for why, n in reasons.most_common()]
    unused = Counter(coverage.get("unused", {}).values())
    rows += [(f"a change of the source: {why}", str(n)) for why, n in unused.most_common()]
    return _table(("what stayed, and why", "parameters"), rows) if rows else ""


def _status_maps(rows: Sequence[Record]) -> str:
    """One grid a stack: a row a kind of layer, a column a block."""
    cells = {row["parameter"]: tag("td", MARKS[row["status"]], class_=row["status"]) for row in rows}
    outside = [(row["parameter"], row["status"]) for row in rows if split_path(row["parameter"])[1] is None]
    legend = ", ".join(f"{mark} {status}" for status, mark in MARKS.items())
    grids = "".join(_grid(stack, names, cells) for stack, names in _stacks(cells).items())
    return tag("p", legend, class_="note") + grids + (_table(("outside of the blocks", ""), outside) if outside else "")


def _map_tables(sites: Sequence[Record]) -> str:
    """Rank and residual of every map; the residual is 0 where two models differ by a rotation alone."""
    found = ""
    for side, word in (("in", "reads"), ("out", "writes")):
        for what, top in (("residual", 1.0), ("rank", None)):
            values = {site["target"]: float(site[f"{what}_{side}"]) for site in sites if f"{what}_{side}" in site}
            most = top or max(values.values(), default=1.0) or 1.0
            cells = {
                name: tag("td", f"{value:.2f}" if what == "residual" else f"{value:.0f}", class_="heat",
                          style=f"--v:{max(0.0, min(1.0, value / most)):.3f}")
                for name, value in values.items()
            }  # fmt: skip
            for stack, names in _stacks(cells).items():
                found += _grid(f"{stack}: {what} of what a layer {word}", names, cells)
    return found


def _stacks(names: Iterable[str]) -> dict[str, list[str]]:
    """Names in blocks, by the stack that they stand in."""
    found: dict[str, list[str]] = {}
    for name in names:
        stack, block, _ = split_path(name)
        if block is not None:
            found.setdefault(stack, []).append(name)
    return found


def _grid(caption: str, names: Sequence[str], cells: Mapping[str, str]) -> str:
    at = {(role, block): cells[name] for name in names for _, block, role in [split_path(name)]}
    roles, blocks = list(dict.fromkeys(role for role, _ in at)), sorted({block or 0 for _, block in at})
    head = [tag("th", "block", scope="col"), *(tag("th", str(block), scope="col") for block in blocks)]
    rows = [
        [tag("th", escape(role), scope="row"), *(at.get((role, block), "<td></td>") for block in blocks)]
        for role in roles
    ]
    return tag("div", table(rows, head, caption, "grid"), class_="scroll", tabindex=0)


def _curve(points: Sequence[Sequence[float]], x: str, verdict: Record) -> str:
    """Losses as a line, with their numbers below."""
    known = sorted((float(a), float(b)) for a, b in points if b is not None and math.isfinite(b))
    if len(known) < 3:
        return ""
    (left, right), losses = (known[0][0], known[-1][0]), [loss for _, loss in known]
    low, high = min(losses), max(losses)
    places = [
        (40 + 440 * (a - left) / ((right - left) or 1), 130 - 110 * (b - low) / ((high - low) or 1)) for a, b in known
    ]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in places)
    words = f"Loss from {losses[0]:.4g} at {x} {left:g} to {losses[-1]:.4g} at {right:g}; the lowest is {low:.4g}."
    drawing = (
        f'<svg viewBox="0 0 500 150" role="img" aria-label="{_escape(words)}"><polyline points="{line}"/>{dots}</svg>'
    )
    unit = str(verdict.get("loss_unit", ""))
    return tag("figure", drawing, tag("figcaption", escape(words))) + _table(
        (x, f"loss {unit}"), [(f"{a:.4g}", f"{b:.4g}") for a, b in known]
    )


def _provenance(record: Record) -> str:
    settings, known = record["settings"], record.get("provenance", {})
    facts = {
        "tuned source": settings.get("source_tuned"),
        "its base": settings.get("source_base"),
        "target": settings.get("target_base"),
        "calibration": settings.get("calibration"),
        "method": settings.get("method", known.get("method")),
        "seed": settings.get("seed"),
        "objective": " / ".join(dict.fromkeys(map(str, known.get("objective", ())))),
        "versions": ", ".join(f"{name} {version}" for name, version in known.get("versions", {}).items()),
    }
    hashes = [
        (f"{name.replace('_', ' ')}: {file}", str(digest))
        for name, files in record.get("inputs", {}).items()
        for file, digest in files.items()
    ]
    told = [(name, str(value)) for name, value in facts.items() if value not in (None, "")]
    return _table(("", ""), told) + (_table(("sha256 of the inputs", ""), hashes) if hashes else "")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = [tag("th", escape(name), scope="col") for name in header] if any(header) else []
    cells = ([tag("td", escape(cell)) for cell in row] for row in rows)
    return tag("div", table(cells, head), class_="scroll", tabindex=0)


def _section(title: str, *parts: str) -> str:
    return tag("section", tag("h2", escape(title)), *parts) if any(parts) else ""


def _fold(title: str, inside: str) -> str:
    return tag("details", tag("summary", escape(title)), inside) if inside else ""


# Nothing is loaded and nothing runs, whatever stands in the page: only its own style sheet and style attributes count.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_LIGHT = (
    "--paper:#fff;--card:#f6f7f9;--ink:#18212f;--muted:#566072;--line:#d5dae1;--heat:#7cc0ec;--moved:#a9dcc6;"
    "--partly:#f6d78b;--kept:#e2e5ea;--good:#00664b;--open:#7a5c00;--bad:#a33f00;--link:#005a8f"
)
_DARK = (
    "--paper:#12161c;--card:#1b212a;--ink:#e7ebf1;--muted:#a3adbb;--line:#364050;--heat:#175f91;--moved:#0f5a45;"
    "--partly:#6d5108;--kept:#2c3542;--good:#4fd1a5;--open:#e5c04a;--bad:#ff9d5c;--link:#7cc4f5"
)
_STYLE = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif }
main, header, footer { max-width: 68rem; margin: 0 auto; padding: 0 clamp(1rem, 4vw, 2rem) }
header { padding-top: clamp(1.25rem, 4vw, 2.5rem) }
.kind { margin: 0; color: var(--muted); font-size: .875rem }
h1 { margin: .15rem 0 0; font-size: clamp(1.45rem, 1.1rem + 1.8vw, 2.2rem); line-height: 1.2; overflow-wrap: anywhere }
.verdict { margin: 1.1rem 0 0; padding: .85rem 1.1rem; border-left: 4px solid var(--muted); background: var(--card);
  font-size: 1.0625rem; overflow-wrap: anywhere } .verdict b { display: block; font-size: .875rem }
.verdict.good { border-color: var(--good) } .verdict.open { border-color: var(--open) }
.verdict.bad { border-color: var(--bad) }
.good b { color: var(--good) } .open b { color: var(--open) } .bad b { color: var(--bad) }
section { margin: 2.4rem 0 } h2 { margin: 0 0 .75rem; font-size: 1.25rem }
p { margin: 0 0 .8rem; max-width: 46rem; overflow-wrap: anywhere } .note { color: var(--muted); font-size: .9375rem }
.warning { border-left: .25rem solid #c77700; padding: .1rem 0 .1rem .8rem; font-weight: 600 }
dl { margin: 0 0 1rem } dd { margin: 0; overflow-wrap: anywhere }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(9.5rem, 46%), 1fr)); gap: .75rem }
.tiles div { background: var(--card); border-radius: .6rem; padding: .75rem .9rem }
.tiles dt { color: var(--muted); font-size: .875rem }
.tiles dd { font-size: 1.5rem; line-height: 1.25; font-weight: 650 }
.tiles small { display: block; font-size: .875rem; font-weight: 400; color: var(--muted) }
.shares { display: flex; height: 1.5rem; border-radius: .4rem; overflow: hidden; margin: 0 0 .6rem; gap: 1px }
.shares i { min-width: 2px; flex-basis: 0 }
.scroll { overflow-x: auto; margin: 0 0 1.25rem } .scroll:focus-visible { outline: 2px solid var(--link) }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums }
caption { text-align: left; color: var(--muted); padding: 0 0 .45rem }
th, td { padding: .34rem .8rem .34rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: anywhere }
thead th { color: var(--muted); font-weight: 500; font-size: .875rem } tbody th { font-weight: 400 }
.grid { border-collapse: separate; border-spacing: 2px } .grid th, .grid td { border: 0; padding: .2rem .35rem }
.grid td { text-align: center; border-radius: .25rem; font-size: .8125rem; min-width: 1.6rem }
.grid th { white-space: nowrap }
.heat { background: color-mix(in oklab, var(--heat) calc(var(--v) * 100%), var(--card)) }
.moved { background: var(--moved) } .partly { background: var(--partly) } .kept { background: var(--kept) }
figure { margin: 0 0 1rem } figcaption { color: var(--muted); font-size: .9375rem }
svg { width: 100%; max-width: 32rem } polyline { fill: none; stroke: var(--link); stroke-width: 2 }
circle { fill: var(--link) }
details { margin: .4rem 0 1rem } summary { cursor: pointer; color: var(--link) } details > * + * { margin-top: .6rem }
pre { padding: .8rem 1rem; background: var(--card); border-radius: .5rem; white-space: pre-wrap;
  overflow-wrap: anywhere; direction: ltr; font: .875rem/1.6 ui-monospace, monospace }
footer { color: var(--muted); font-size: .875rem; padding-bottom: 2.5rem }
@media print { section { margin: 1.4rem 0 } .scroll { overflow: visible } }
"""


def _page(kind: str, title: str, lead: str, badge: str, colour: str, sections: Sequence[str]) -> str:
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {_DARK} }} }}"
    style = f":root {{ color-scheme: light; {_LIGHT} }}\n{dark}{_STYLE}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="{GENERATOR}"><title>{escape(title)}</title>\n<style>{style}</style></head>\n'
        f'<body><header><p class="kind">taskferry {kind} report</p><h1>{escape(title)}</h1>\n'
        f"{tag('p', tag('b', escape(badge)), escape(lead), class_=f'verdict {colour}')}</header>\n"
        f"{tag('main', *sections)}\n<footer><p>Made by taskferry {__version__}.</p></footer></body></html>\n"
    )
