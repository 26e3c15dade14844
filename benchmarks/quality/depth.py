"""Which source block feeds which target block, where the truth is known: block i of MiniLM-L6 descends from block 2i of
gte-small.

    python benchmarks/quality/depth.py [--quick] [--json benchmarks/results/depth.json]

Rules: the paper's (nearest in relative depth), and the monotone path of the highest likeness between blocks, by linear
CKA or by the similarity that an orthogonal map reaches, of what the MLP reads, on 100 sentences.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.quality.ideas import always, monotone
from benchmarks.shared import common
from benchmarks.zoo.zoo_trial import AllRows
from taskferry import load_model, text_calibration
from taskferry.analysis.moments import Moments
from taskferry.collect.capture import Side, collect
from taskferry.collect.statistics import Capture
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import nearest_block, pair_sites
from taskferry.layers.site import depths
from taskferry.linalg.sums import CrossCovariance
from taskferry.objectives.objectives import ForwardOnly

PAIRS = (("gte-small", "all-MiniLM-L6-v2"), ("all-MiniLM-L6-v2", "gte-small"))


def likeness(A: Any, B: Any, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks of B, blocks of A], by CKA and by an orthogonal map."""
    calibration = text_calibration(texts, A.tokenizer(), B.tokenizer(), max_length=48)
    sites = find_sites(A.model), find_sites(B.model)
    D_A, D_B = (max(depths(found).values()) for found in sites)
    by_cka, by_map = torch.zeros(D_B, D_A), torch.zeros(D_B, D_A)
    forward = ForwardOnly()
    for i in range(D_A):
        pairs = [p for p in pair_sites(*sites, always(i))[0] if p.target.role == "mlp.up"]
        rows = AllRows()
        sides = [Side(m.model, forward.bind(m.model, ())) for m in (A, B)]
        collect(rows, *sides, pairs, calibration, Capture(outputs="activations"))
        for pair in pairs:
            if pair.target.block is None:
                continue
            X_A, X_B = rows.inputs[rows.reads[pair.target.name][0]].both()
            by_cka[pair.target.block, i] = Moments.of(X_A, X_B).cka()
            sums = CrossCovariance(X_A.shape[1], X_B.shape[1])
            sums.add(X_A - X_A.mean(0), X_B - X_B.mean(0))
            by_map[pair.target.block, i] = sums.solve()[1].similarity
    return by_cka, by_map


def main() -> None:
    options = common.arguments(__doc__ or "")
    shared, started = common.need_shared(), time.time()
    lines = (shared / "data" / "ag_news" / "train.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[: 20 if options.quick else 100]]
    results: dict[str, Any] = {}
    rows = []
    for a, b in PAIRS:
        A, B = load_model(shared / "models" / a), load_model(shared / "models" / b)
        by_cka, by_map = likeness(A, B, texts)
        D_B, D_A = by_cka.shape
        truth = {j: 2 * j for j in range(D_B)} if D_A > D_B else {2 * i: i for i in range(D_A)}
        found = {
            "nearest in relative depth": [nearest_block(j, D_A, D_B) for j in range(D_B)],
            "CKA, monotone": monotone(by_cka),
            "orthogonal map, monotone": monotone(by_map),
        }
        results[f"{a} → {b}"] = found
        for rule, path in found.items():
            right = sum(path[j] == i for j, i in truth.items())
            off = sum(abs(path[j] - i) for j, i in truth.items()) / len(truth)
            rows.append([f"{a} → {b}", rule, " ".join(map(str, path)), f"{right} of {len(truth)}", f"{off:.1f}"])
    header = ["", "rule", "source block of each target block", "as descended", "blocks off, mean"]
    common.finish({"paths": results}, common.table(header, rows), options.json, [], started)


if __name__ == "__main__":
    main()
