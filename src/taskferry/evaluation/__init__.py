"""Scoring models on anyone's data."""

from taskferry.evaluation.pool import Pool
from taskferry.evaluation.scoring import Score, evaluate

__all__ = ["Pool", "Score", "evaluate"]
