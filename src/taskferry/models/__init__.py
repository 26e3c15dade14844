"""Models, adapters and outputs on disk. Nothing here runs a model."""

from taskferry.models.loaded import Loaded
from taskferry.models.models import Tuned, by_reason, load_model, load_tuned
from taskferry.models.peft import Adapter, Skeleton, is_adapter, read_adapter, write_adapter

__all__ = [
    "Adapter",
    "Loaded",
    "Skeleton",
    "Tuned",
    "by_reason",
    "is_adapter",
    "load_model",
    "load_tuned",
    "read_adapter",
    "write_adapter",
]
