"""Line figures by matplotlib as SVG that stands in a page: its colours are the page's own, light or dark.

    >>> svg = lines([Line("BiCo", [10, 100], [4.2, 11.0], spread=[0.4, 0.3])], x="samples", y="gain")

Text stays text, and matplotlib escapes it; no word is read as a formula.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from taskferry.display.html import plain
from taskferry.errors import TaskferryError

# Drawn in these, shown in the page's variables: what a reader's eyes or screen need is decided there.
INK, MUTED, FAINT = "#010101", "#020202", "#030303"
SERIES = ("#a00001", "#a00002", "#a00003", "#a00004", "#a00005", "#a00006", "#a00007", "#a00008", "#a00009")
_VARIABLES = {INK: "--ink", MUTED: "--muted", FAINT: "--line"} | {c: f"--c{i + 1}" for i, c in enumerate(SERIES)}
# Okabe and Ito's colours, told apart with any kind of colour vision; the marks differ as well.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b", "#8c564b", "#7a7a00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")
WIDTH, HEIGHT = 4.8, 3.2  # inches; text stays readable when a phone shows it smaller
LONGEST = 34  # characters of a name beside a curve; the tables have all of it
_numbers = count(1)


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None  # a band of y ± spread
    dashed: bool = False
    marked: int | None = None  # the place of a point that matters
    colour: int | None = None  # of the series; by its place in the figure where none is given
    plain: bool = False  # a level to compare with: grey, without marks


def lines(
    curves: Sequence[Line],
    *,
    x: str,
    y: str,
    logarithmic: str = "",
    ticks: Sequence[float] | None = None,
    low: float | None = None,
    high: float | None = None,
    level: tuple[float, str] | None = None,
    height: float = HEIGHT,
) -> str:
    """Curves with bands, marks and a legend; `logarithmic` names the axes that are, `level` is a line across."""
    with _drawing() as plot:
        figure, axes = plot.subplots(figsize=(WIDTH, height))
        for place, curve in enumerate(curves):
            number = place if curve.colour is None else curve.colour
            colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
            style = "--" if curve.dashed else "-"
            if curve.plain:
                colour, marker = INK if curve.dashed else MUTED, ""
            axes.plot(
                curve.x,
                curve.y,
                style,
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.8,
                label=_label(curve.name),
            )
            if curve.spread is not None:
                below = [a - b for a, b in zip(curve.y, curve.spread, strict=True)]
                above = [a + b for a, b in zip(curve.y, curve.spread, strict=True)]
                axes.fill_between(curve.x, below, above, color=colour, alpha=0.18, linewidth=0)
            if curve.marked is not None:
                at = (curve.x[curve.marked], curve.y[curve.marked])
                axes.plot(*at, marker="o", markersize=12, fillstyle="none", markeredgewidth=2, color=INK)
        if level is not None:
            axes.axhline(level[0], color=MUTED, linewidth=1, linestyle=":", label=_label(level[1]))
        whole = all(float(place).is_integer() for curve in curves for place in curve.x)
        _finish(axes, x, y, logarithmic, ticks, low, high, len(curves) + (level is not None), whole)
        return _svg(figure)


def dots(rows: Sequence[tuple[str, float, float | None]], *, x: str) -> str:
    """One mark a row with its spread: rows of a table at a glance."""
    with _drawing() as plot:
        figure, axes = plot.subplots(figsize=(WIDTH, 0.7 + 0.27 * len(rows)))
        axes.axvline(0, color=MUTED, linewidth=1)
        for place, (_, value, spread) in enumerate(rows):
            axes.plot([0, value], [place, place], color=FAINT, linewidth=2)
            axes.errorbar(value, place, xerr=spread, fmt="o", color=SERIES[0], markersize=6, capsize=3)
        axes.set_yticks(range(len(rows)), [_label(name) for name, _, _ in rows])
        axes.invert_yaxis()
        axes.set_ylim(len(rows) - 0.4, -0.6)
        _finish(axes, x, "", "", None, None, None, 0)
        return _svg(figure)


def _label(name: str) -> str:
    """A name that leaves room for the curves."""
    text = plain(name).replace("\n", " ")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _finish(
    axes: Any,
    x: str,
    y: str,
    logarithmic: str,
    ticks: Sequence[float] | None,
    low: float | None,
    high: float | None,
    entries: int,
    whole: bool = False,
) -> None:
    axes.set_xlabel(plain(x))
    axes.set_ylabel(plain(y))
    if "x" in logarithmic:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    if "y" in logarithmic:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    if whole and ticks is None and "x" not in logarithmic:  # blocks and steps: no ticks between them
        axes.xaxis.get_major_locator().set_params(integer=True)
    if ticks is not None:
        axes.set_xticks(list(ticks), [f"{t:g}" for t in ticks])
        axes.minorticks_off()
    if low is not None or high is not None:
        axes.set_ylim(low, high)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    if entries > 1:
        names = sorted(len(name) for name in axes.get_legend_handles_labels()[1])
        # Above the axes: no curve lies under it, at any number of entries.
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=2 if sum(names[-2:]) < 56 else 1,
            frameon=False,
            borderaxespad=0.3,
            columnspacing=1.2,
        )


def _plain_ticks(axis: Any) -> None:
    """Numbers as they are: matplotlib would write powers as formulas, which nothing here reads."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


@contextmanager
def _drawing() -> Iterator[Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise TaskferryError("figures need matplotlib: pip install 'taskferry[report]'") from error
    matplotlib.use("svg", force=False)
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "taskferry",  # the same drawing has the same bytes
        "text.parse_math": False,
        "font.size": 11.5,
        "legend.fontsize": 10.5,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": FAINT,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.03,
    }
    with pyplot.rc_context(style):
        try:
            yield pyplot
        finally:
            pyplot.close("all")


def _svg(figure: Any) -> str:
    """The drawing without what a page has no use for, its names made its own, its colours those of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", pad_inches=0.04)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->|<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    mark = f"f{next(_numbers)}-"
    text = re.sub(r'\bid="', f'id="{mark}', text)
    text = re.sub(r"url\(#", f"url(#{mark}", text)
    text = re.sub(r'href="#', f'href="#{mark}', text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def alone(svg: str) -> str:
    """The same drawing as a file of its own, in colours that are seen on light and dark grounds."""
    colours = {"--ink": "#1f2937", "--muted": "#6b7280", "--line": "#d1d5db"}
    colours |= {f"--c{i + 1}": colour for i, colour in enumerate(COLOURS)}
    for variable, colour in colours.items():
        svg = svg.replace(f"var({variable})", colour)
    head = '<svg style="background: #ffffff; font-family: system-ui, sans-serif"'
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace("<svg", head, 1) + "\n"
