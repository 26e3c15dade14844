"""Measurements of the paper's figures: how alike two models are, before and after their spaces are aligned."""

from taskferry.analysis.agreement import Agreement, agreement
from taskferry.analysis.cost import Cost, transfer_cost
from taskferry.analysis.geometry import Isometry, isometries
from taskferry.analysis.moments import Moments
from taskferry.analysis.outputs import output_similarity
from taskferry.analysis.similarity import SiteSimilarity, similarity
from taskferry.analysis.trajectory import Trajectory

__all__ = [
    "Agreement",
    "Cost",
    "Isometry",
    "Moments",
    "SiteSimilarity",
    "Trajectory",
    "agreement",
    "isometries",
    "output_similarity",
    "similarity",
    "transfer_cost",
]
