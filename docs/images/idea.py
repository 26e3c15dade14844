"""Make docs/images/idea.svg: four spaces, two of them seen through activations, two through gradients.

python docs/images/idea.py
"""

from __future__ import annotations

import math
from pathlib import Path

# Okabe and Ito: told apart by every kind of eye. The same colour and number is the same sample.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
LIGHT = ("#e69f00", "#cc79a7", "#56b4e9", "#009e73")  # these take dark numbers
INPUTS = [(-0.62, -0.30), (-0.15, -0.62), (0.55, -0.45), (0.20, 0.05), (-0.45, 0.35), (0.60, 0.55)]
OUTPUTS = [(0.05, -0.65), (-0.60, -0.15), (-0.20, 0.10), (0.60, -0.25), (0.40, 0.60), (-0.50, 0.55)]
STYLE = """
  .page { fill: #ffffff; stroke: #d7dde3 } .space { fill: #f3f6f8; stroke: #8b98a5 } .axis { stroke: #c3ccd4 }
  text { font-family: system-ui, sans-serif; font-size: 15px; fill: #1d2b36 } .soft { fill: #52626f; font-size: 13.5px }
  .sample { font-size: 9.5px; font-weight: 700 } .way { stroke: #52626f } .head { fill: #52626f }
  .new { stroke: #00796b } .newhead, .newtext { fill: #00796b } .bold { font-weight: 700 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1b2229; stroke: #33404b } .space { fill: #242e37; stroke: #7d8b97 } .axis { stroke: #43515d }
    text { fill: #e6edf2 } .soft { fill: #aebac4 } .way { stroke: #aebac4 } .head { fill: #aebac4 }
    .new { stroke: #4db6ac } .newhead, .newtext { fill: #4db6ac }
  }
  .sample { fill: #ffffff } .sample.dark { fill: #10181f }
"""


def turned(points: list[tuple[float, float]], degrees: float, mirrored: bool) -> list[tuple[float, float]]:
    """The same points in other coordinates: a rotation, perhaps with a mirror."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    flip = -1 if mirrored else 1
    return [(c * flip * x - s * y, s * flip * x + c * y) for x, y in points]


def space(x: float, y: float, half: float, points: list[tuple[float, float]]) -> str:
    parts = [
        f'<rect class="space" x="{x - half}" y="{y - half}" width="{2 * half}" height="{2 * half}" rx="8"/>',
        f'<path class="axis" d="M{x - half + 6} {y}H{x + half - 6}M{x} {y - half + 6}V{y + half - 6}"/>',
    ]
    for number, ((u, v), colour) in enumerate(zip(points, COLOURS, strict=True), 1):
        cx, cy = x + 0.86 * half * u, y + 0.86 * half * v
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="7.5" fill="{colour}"/>')
        ink = "sample dark" if colour in LIGHT else "sample"
        parts.append(f'<text class="{ink}" x="{cx:.1f}" y="{cy + 3.4:.1f}" text-anchor="middle">{number}</text>')
    return "\n".join(parts)


def arrow(path: str, kind: str = "way", head: str = "head", dashes: str = "") -> str:
    width = 3 if kind == "new" else 2
    return f'<path class="{kind}" d="{path}" fill="none" stroke-width="{width}"{dashes} marker-end="url(#{head})"/>'


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def sub(letter: str, below: str) -> str:
    return f'{letter}<tspan dy="4" font-size="11">{below}</tspan><tspan dy="-4"></tspan>'


def drawing() -> str:
    left, right, top, bottom, small, large = 102, 378, 112, 342, 56, 70
    parts = [
        '<rect class="page" x="0.5" y="0.5" width="479" height="459" rx="10"/>',
        text(left, 30, "inputs of a layer", kind="soft"),
        text(right, 30, "outputs of a layer", kind="soft"),
        text(240, 30, "base A", kind="bold"),
        text(240, 442, "base B", kind="bold"),
        space(left, top, small, INPUTS),
        space(right, top, small, OUTPUTS),
        space(left, bottom, large, turned(INPUTS, 115, True)),
        space(right, bottom, large, turned(OUTPUTS, -70, False)),
        arrow(f"M{left + small + 8} {top}H{right - small - 16}"),
        text(240, top - 14, sub("τ", "A"), kind="bold"),
        text(240, top + 24, "the fine-tune", kind="soft"),
        arrow(f"M{left} {bottom - large - 8}V{top + small + 16}"),
        text(left + 14, 216, sub("R", "in"), "start", "bold"),
        text(left + 14, 238, "from activations", "start", "soft"),
        arrow(f"M{right} {top + small + 8}V{bottom - large - 16}"),
        text(right - 14, 216, sub("R", "out") + "ᵀ", "end", "bold"),
        text(right - 14, 238, "from gradients", "end", "soft"),
        arrow(f"M{left + large + 8} {bottom}H{right - large - 18}", "new", "newhead", ' stroke-dasharray="7 5"'),
        text(240, bottom - 16, sub("τ", "B"), kind="bold newtext"),
        text(240, bottom + 26, "the way round", kind="newtext"),
    ]
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="2" refY="5" markerWidth="{size}" markerHeight="{size}" '
        f'orient="auto"><path class="{name}" d="M0 0L10 5L0 10z"/></marker>'
        for name, size in (("head", 6), ("newhead", 5))
    )
    title = "The change of base B is the way round through base A"
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 460" width="480" height="460" role="img" '
        f'aria-label="{title}">\n<title>{title}</title>\n<style>{STYLE}</style>\n<defs>{heads}</defs>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    (Path(__file__).parent / "idea.svg").write_text(drawing(), encoding="utf-8")
