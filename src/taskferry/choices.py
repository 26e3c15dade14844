"""Words that settings, commands and the library share, declared once."""

from __future__ import annotations

from string import Formatter
from typing import Literal

LabelSource = Literal["auto", "data", "teacher"]
WRITTEN = "calibration.jsonl"  # in an output folder: the samples, where they were generated
TEMPLATE = "chat_template.jinja"  # beside an output: the source's, where the target has none
GENERATE = "generate"  # in place of calibration data: the tuned source writes the samples
FREE, OWN = "none", "own"  # what they begin with: nothing, or a prompt that it makes up
ObjectiveName = Literal["auto", "prototypes", "probe", "head", "zero-shot", "language"]
RankPolicy = Literal["range", "full"]

DEFAULT_TOLERANCE = 1e-6  # smallest singular value kept, relative to the largest


def is_language_class(name: str) -> bool:
    """Tell by the name of a class whether its models predict tokens."""
    return name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel"))  # MT: of Marian


def template(text: str) -> str:
    """One plain {}, and no other brace that a format would read."""
    try:
        holes = [tuple(hole) for _, *hole in Formatter().parse(text) if hole[0] is not None]
    except ValueError:  # a lone brace
        holes = []
    if holes != [("", "", None)]:
        raise ValueError(f"'{text}' is no template: it needs one {{}}, where the class goes, as 'a photo of a {{}}.'")
    return text
