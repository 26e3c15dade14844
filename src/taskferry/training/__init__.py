"""Everything that trains: fine-tuning by the paper's protocol, and refining what was moved."""

from taskferry.training.finetuning import FineTuning, History, finetune

__all__ = ["FineTuning", "History", "finetune"]
