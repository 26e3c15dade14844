"""From plain samples to micro-batches, with one tokenizer or two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from taskferry import TaskferryError, TaskVector, fit, image_calibration, text_calibration
from taskferry.layers.tokens import Layout, match
from tests.helpers.texts import SECOND, TEXTS, train
from tests.helpers.tiny import TINY, hf


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Any, Any]:
    return train("pieces"), train("bytes")


def test_two_tokenizers_are_paired_by_characters(tokenizers: tuple[Any, Any]) -> None:
    """Each paired target token takes source tokens that share characters with it, in the right text of a pair."""
    calibration = text_calibration(TEXTS, *tokenizers, pairs=SECOND, micro_batch=5)
    checked = 0
    for A, B in calibration:
        layouts = [Layout(x.inputs["attention_mask"], x.inputs["input_ids"], x.spans["tokens"]) for x in (A, B)]
        pairs = match(*layouts, A.inputs["input_ids"].shape[1], B.inputs["input_ids"].shape[1])
        assert pairs.weights is not None
        assert pairs.keep is not None
        rows = pairs.weights[pairs.keep]
        assert torch.allclose(rows.sum(1), torch.ones(len(rows), dtype=rows.dtype))
        for i, sample in enumerate(A.ids):
            whole = f"{TEXTS[sample]} {SECOND[sample]}"
            alone = (B.inputs["attention_mask"][i].bool() & ~pairs.keep[i]).nonzero().flatten().tolist()
            for j in alone:  # only a lone space, or the separator in the middle, has no partner
                assert not whole[slice(*B.spans["tokens"][i, j].tolist())].strip()
            for j in pairs.keep[i].nonzero().flatten().tolist():
                start, stop = B.spans["tokens"][i, j].tolist()
                for k in pairs.weights[i, j].nonzero().flatten().tolist():
                    first, last = A.spans["tokens"][i, k].tolist()
                    if start < stop:
                        assert max(first, start) < min(last, stop)
                        assert whole[first:last].strip()
                        checked += 1
    assert checked > 300


def test_fit_between_models_with_different_tokenizers(tokenizers: tuple[Any, Any]) -> None:
    A = hf("BertModel", 16, 2, vocab_size=len(tokenizers[0]))
    B = hf("RobertaModel", 24, 3, vocab_size=len(tokenizers[1]), pad_token_id=0)
    calibration = text_calibration(TEXTS, *tokenizers, labels=[i % 4 for i in range(12)])
    alignment = fit(A, B, calibration)
    moved = alignment.apply(TaskVector({n: torch.ones(p.shape) for n, p in A.named_parameters() if p.ndim == 2}))
    assert sum("encoder.layer" in name for name in moved.coverage.moved()) == 3 * 6  # type: ignore[union-attr]
    for A_batch, _ in calibration:
        A_batch.spans.clear()  # type: ignore[attr-defined]
    with pytest.raises(TaskferryError, match=r"attention\.self\.query .* no character offsets"):
        fit(A, B, calibration)


def test_micro_batches_hold_all_samples_in_order(tokenizers: tuple[Any, Any]) -> None:
    calibration = text_calibration(TEXTS, tokenizers[0], labels=list(range(12)), micro_batch=5, causal=True)
    assert [len(A) for A, _ in calibration] == [5, 5, 2]
    assert [i for A, _ in calibration for i in A.ids] == list(range(12))
    assert calibration.labels.tolist() == list(range(12))  # type: ignore[union-attr]
    labels, mask = (calibration.pairs[0][0].inputs[k] for k in ("labels", "attention_mask"))
    assert torch.equal(labels == -100, mask == 0)
    with pytest.raises(TaskferryError, match="12 samples but 3 labels"):
        text_calibration(TEXTS, tokenizers[0], labels=[1, 2, 3])


def test_each_model_gets_its_own_image_transform() -> None:
    """Images of two sizes make two grids of patches, and the pair still fits."""
    tiny = TINY["timm"]
    timm = pytest.importorskip("timm")
    A = tiny.model(16, 2, 1)
    B = timm.models.VisionTransformer(img_size=48, patch_size=8, embed_dim=24, depth=3, num_heads=4, num_classes=0)
    images = [torch.randn(3, 32, 32) for _ in range(20)]

    def enlarge(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x[None], 48, mode="bilinear")[0]

    calibration = image_calibration(images, lambda x: x, enlarge, key=("x", "x"), labels=[i % 3 for i in range(20)])
    assert calibration.pairs[0][1].inputs["x"].shape == (16, 3, 48, 48)
    alignment = fit(A, B, calibration)
    assert {q.rows for q in alignment.quality_in.values()} <= {20 * 37, 20 * 36}
    assert len(alignment.pairs) == 3 * 6 + 1


def test_what_makes_no_samples_is_refused() -> None:
    tokenizer = train("pieces")
    with pytest.raises(TaskferryError, match="one text was given: give a list"):
        text_calibration("abc", tokenizer)
    with pytest.raises(TaskferryError, match="micro-batches of 0 samples"):
        text_calibration(TEXTS, tokenizer, micro_batch=0)
