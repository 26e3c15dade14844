"""What a transfer costs against a fine-tune, in FLOPs (paper, appendix on computational cost).

    >>> cost = transfer_cost((P_A, P_B), matrices, tokens=(1700, 2600), samples=100)
    >>> cost.paper_ratio, cost.ratio

The paper counts a pass over the calibration set as 2 P forward and 4 P backward, and a step of AdamW as 16 P: BiCo
6 P_A + 6 P_B + C_align, a fine-tune 2,000 · 16 P_B = 32,000 P_B. That counts a pass over a hundred samples and a step
on a batch alike, and leaves the tokens out. The second count here has them: 2 P for each token and direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

STEPS, BATCH = 2000, 128  # the paper's fine-tuning protocol


@dataclass(frozen=True)
class Matrix:
    """One weight that is moved: its shapes [out, in] in both models, and the tokens that its two maps have seen."""

    source: tuple[int, int]
    target: tuple[int, int]
    tokens: tuple[int, int]  # of the input map and of the output map


@dataclass(frozen=True)
class Cost:
    """FLOPs of one transfer and of one fine-tune of the target."""

    parameters: tuple[int, int]  # P_A, P_B
    tokens: tuple[int, int]  # of the calibration set, in each model
    passes: float  # forward and backward of both models over the calibration set
    covariances: float  # Σ 2 M d_A d_B
    decompositions: float  # Σ d² D, for the narrower side d and the wider D
    applying: float  # Σ 2 (out_A in_A in_B + out_A out_B in_B)
    finetune: float  # steps · (6 P_B · tokens of a batch + 10 P_B)
    steps: int = STEPS
    batch: int = BATCH

    @property
    def align(self) -> float:
        """C_align."""
        return self.covariances + self.decompositions + self.applying

    @property
    def transfer(self) -> float:
        """All of it."""
        return self.passes + self.align

    @property
    def ratio(self) -> float:
        """How many transfers one fine-tune costs."""
        return self.finetune / self.transfer

    @property
    def paper_ratio(self) -> float:
        """32,000 P_B / (6 P_A + 6 P_B): the paper's count of the passes, with C_align left out as it is there."""
        P_A, P_B = self.parameters
        return 16 * self.steps * P_B / (6 * (P_A + P_B))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        more = {"align": self.align, "transfer": self.transfer, "ratio": self.ratio, "paper_ratio": self.paper_ratio}
        return {**asdict(self), **more}


def transfer_cost(
    parameters: tuple[int, int],
    matrices: Iterable[Matrix],
    *,
    tokens: tuple[int, int],
    samples: int,
    steps: int = STEPS,
    batch: int = BATCH,
) -> Cost:
    """From the parameters that a pass uses, the matrices that are moved, and the tokens of the calibration set."""
    covariances = decompositions = applying = 0.0
    for matrix in matrices:
        (out_A, in_A), (out_B, in_B) = matrix.source, matrix.target
        for tokens_seen, a, b in zip(matrix.tokens, (in_A, out_A), (in_B, out_B), strict=True):
            covariances += 2.0 * tokens_seen * a * b
            decompositions += float(min(a, b) ** 2 * max(a, b))
        applying += 2.0 * (out_A * in_A * in_B + out_A * out_B * in_B)
    P_A, P_B = parameters
    return Cost(
        parameters=parameters,
        tokens=tokens,
        passes=6.0 * (P_A * tokens[0] + P_B * tokens[1]),
        covariances=covariances,
        decompositions=decompositions,
        applying=applying,
        finetune=steps * (6.0 * P_B * batch * tokens[1] / samples + 10.0 * P_B),
        steps=steps,
        batch=batch,
    )
