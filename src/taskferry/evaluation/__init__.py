"""Scoring models and fine-tuning them by the paper's protocol, on anyone's data."""

from taskferry.evaluation.finetuning import FineTuning, History, finetune
from taskferry.evaluation.pool import Pool
from taskferry.evaluation.scoring import Score, evaluate

__all__ = ["FineTuning", "History", "Pool", "Score", "evaluate", "finetune"]
