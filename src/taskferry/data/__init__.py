"""Calibration: what both models are shown, and the loss whose gradient is taken."""

from taskferry.data.batch import Batch, Calibration
from taskferry.data.builders import image_calibration, text_calibration

__all__ = ["Batch", "Calibration", "image_calibration", "text_calibration"]
