"""The skeleton of a page: one file, no script, no address; light and dark, on a phone, on a screen and on paper."""

from __future__ import annotations

from taskferry.display.html import escape, tag
from taskferry.report.figures import COLOURS
from taskferry.report.parts import Report
from taskferry.version import __version__

GENERATOR = "taskferry report"  # by this a page is known as one that may be written again

# Nothing is loaded and nothing runs, whatever stands in the page: only its own style sheet and style attributes count.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_LIGHT = {
    "paper": "#ffffff", "card": "#f6f7f9", "ink": "#18212f", "muted": "#566072", "line": "#d5dae1",
    "heat": "#7cc0ec", "moved": "#a9dcc6", "partly": "#f6d78b", "kept": "#eceef1",
    "good": "#00664b", "open": "#7a5c00", "bad": "#a33f00", "link": "#005a8f",
} | {f"c{i + 1}": colour for i, colour in enumerate(COLOURS)}  # fmt: skip
_DARK = {
    "paper": "#12161c", "card": "#1b212a", "ink": "#e7ebf1", "muted": "#a3adbb", "line": "#364050",
    "heat": "#175f91", "moved": "#0f5a45", "partly": "#6d5108", "kept": "#232b36",
    "good": "#4fd1a5", "open": "#e5c04a", "bad": "#ff9d5c", "link": "#7cc4f5",
    "c1": "#5db3ee", "c2": "#ff8a47", "c3": "#35c79b", "c4": "#e3a3c6", "c5": "#f2bd45", "c6": "#9ad3f7",
    "c7": "#b3b3b3", "c8": "#c99486", "c9": "#c8c84a",
}  # fmt: skip

_STYLE = """
*, *::before, *::after { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif }
main, header, footer { max-width: 68rem; margin: 0 auto; padding: 0 clamp(1rem, 4vw, 2rem) }
header { padding-top: clamp(1.25rem, 4vw, 2.5rem) }
.kind { margin: 0; color: var(--muted); font-size: .875rem; letter-spacing: .02em }
h1 { margin: .15rem 0 0; font-size: clamp(1.45rem, 1.1rem + 1.8vw, 2.2rem); line-height: 1.2; letter-spacing: -.015em;
  overflow-wrap: anywhere; text-wrap: balance }
.verdict { margin: 1.1rem 0 0; padding: .85rem 1.1rem; border-left: 4px solid var(--muted); background: var(--card);
  border-radius: 0 .5rem .5rem 0; font-size: 1.0625rem; overflow-wrap: anywhere }
.verdict.good { border-color: var(--good) } .verdict.open { border-color: var(--open) }
.verdict.bad { border-color: var(--bad) }
.verdict b { display: block; font-size: .875rem } .good b { color: var(--good) } .open b { color: var(--open) }
.bad b { color: var(--bad) }
section { margin: 2.6rem 0 }
h2 { margin: 0 0 .75rem; font-size: 1.25rem; line-height: 1.3; letter-spacing: -.01em; overflow-wrap: anywhere }
p { margin: 0 0 .8rem; max-width: 46rem; overflow-wrap: anywhere } .note { color: var(--muted); font-size: .9375rem }
.warning { border-left: .25rem solid #c77700; padding: .1rem 0 .1rem .8rem; font-weight: 600 }
dl { margin: 0 } dd { margin: 0; overflow-wrap: anywhere }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(9.5rem, 46%), 1fr)); gap: .75rem }
.tiles div { background: var(--card); border-radius: .6rem; padding: .75rem .9rem }
.tiles dt { color: var(--muted); font-size: .875rem }
.tiles dd { font-size: 1.5rem; line-height: 1.25; font-weight: 650; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums }
.tiles small { display: block; margin-top: .15rem; font-size: .875rem; font-weight: 400; letter-spacing: 0;
  line-height: 1.4; color: var(--muted) }
.facts { display: grid; grid-template-columns: minmax(7rem, max-content) minmax(0, 1fr); gap: .45rem 1.25rem }
.facts dt { color: var(--muted) }
.scroll { position: relative; overflow-x: auto; margin: 0 0 1.25rem; max-width: 100% }
.scroll:focus-visible, pre:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums }
caption { text-align: left; color: var(--muted); padding: 0 0 .45rem; font-size: .9375rem }
th, td { padding: .34rem .8rem .34rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
thead th { color: var(--muted); font-weight: 500; font-size: .875rem; line-height: 1.35; vertical-align: bottom }
thead .n { white-space: normal; max-width: 8rem }
tbody th { font-weight: 400; min-width: 11rem; position: sticky; left: 0; background: var(--paper) }
.n { text-align: right; white-space: nowrap; padding-left: .5rem }
.strong > * { font-weight: 650 }
.grid caption { white-space: nowrap }
.grid th, .grid td { border: 0; padding: .22rem .4rem } .grid { border-collapse: separate; border-spacing: 2px }
.grid td, .grid thead th { text-align: center } .grid th:first-child { text-align: left; padding-left: 0 }
.grid tbody th { white-space: nowrap; font-size: .875rem; min-width: 0 }
.grid td { position: relative; min-width: 2.3rem; border-radius: .25rem; font-size: .8125rem; white-space: nowrap }
.heat td[style] { background: color-mix(in oklab, var(--heat) calc(var(--v) * 100%), var(--card)) }
.moved { background: var(--moved) } .partly { background: var(--partly) } .kept { background: var(--kept) }
.status i { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
.row > * { min-width: 0 }
.row { display: grid; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.75rem 2rem }
figure { margin: 0 0 1.25rem; min-width: 0 }
figure svg { display: block; width: 100%; height: auto; max-width: 30rem; stroke-linejoin: round }
figcaption { color: var(--muted); font-size: .9375rem; margin-top: .4rem; max-width: 30rem }
details { margin: .4rem 0 1rem; font-size: .9375rem }
summary { cursor: pointer; overflow-wrap: anywhere; color: var(--link) }
details > .scroll, details > dl { margin: .5rem 0 0 }
pre { margin: 0 0 1rem; padding: .8rem 1rem; background: var(--card); border-radius: .5rem; white-space: pre-wrap;
  overflow-wrap: anywhere; direction: ltr; font: .875rem/1.6 ui-monospace, "SF Mono", Menlo, Consolas, monospace }
footer { color: var(--muted); font-size: .875rem; padding-bottom: 2.5rem; overflow-wrap: anywhere }
@media (max-width: 34rem) { tbody th { min-width: 8.5rem; max-width: 52vw } .grid tbody th { max-width: none }
  .status td { min-width: 1.6rem } .grid th, .grid td { padding: .2rem .25rem }
  .facts { grid-template-columns: minmax(0, 1fr); gap: 0 }
  .facts dd { margin-bottom: .55rem } .tiles dd { font-size: 1.3rem } }
@media print { body { font-size: 10pt; -webkit-print-color-adjust: exact; print-color-adjust: exact }
  section { margin: 1.4rem 0 } h2, caption { break-after: avoid } figure, tr, .tiles div { break-inside: avoid }
  .scroll { overflow: visible } details { display: none } }
"""


def page(report: Report) -> str:
    """The whole file."""
    mark = f"verdict {report.colour}".strip()
    verdict = tag("b", escape(report.badge)) if report.badge else ""
    title = escape(report.title)
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="{GENERATOR}"><meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{_colours()}{_STYLE}</style></head>\n<body>\n"
        f'<header><p class="kind">taskferry {escape(report.kind)} report</p><h1>{title}</h1>\n'
        f"{tag('p', verdict, escape(report.lead), class_=mark)}</header>\n"
        f"{tag('main', *(section.html() for section in report.sections))}\n"
        f"<footer><p>{escape(report.foot)} Made by taskferry {__version__}.</p></footer>\n</body></html>\n"
    )


def _colours() -> str:
    def block(colours: dict[str, str]) -> str:
        return "; ".join(f"--{name}: {colour}" for name, colour in colours.items())

    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {block(_DARK)} }} }}"
    return f":root {{ color-scheme: light; {block(_LIGHT)} }}\n{dark}"
