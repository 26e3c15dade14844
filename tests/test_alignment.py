"""Coverage and refusals: nothing is silent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from taskferry import Alignment, Batch, Calibration, LowRank, TaskferryError, TaskVector, fit
from taskferry.collect.maps import NO_SIGNAL, UNREACHED, Maps
from tests.helpers.architectures import PACKED
from tests.helpers.tiny import TINY, tuned


@pytest.fixture(scope="module")
def llama() -> Alignment:
    tiny = TINY["llama"]
    return fit(tiny.model(16, 2, 1), tiny.model(24, 3, 2), tiny.calibration(), tiny.objective)


def test_coverage_has_every_parameter_with_its_reason(llama: Alignment) -> None:
    tiny = TINY["llama"]
    A = tiny.model(16, 2, 1)
    only = {n: t for n, t in tuned(A).items() if "q_proj" in n or "lm_head" in n}
    tau = TaskVector.between(dict(A.named_parameters()), {**dict(A.named_parameters()), **only})
    coverage = llama.apply(tau).coverage
    assert coverage is not None
    assert coverage.moved() == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]
    kept = coverage.kept()
    assert "unchanged by the fine-tune" in kept["model.layers.0.mlp.up_proj.weight"]
    assert "task head" in kept["lm_head.weight"]
    assert "embedding" in kept["model.embed_tokens.weight"]
    assert "normalisation" in kept["model.layers.0.input_layernorm.weight"]
    assert coverage.unused == {"lm_head.weight": "no layer of the target takes it"}
    assert coverage["model.layers.1.self_attn.q_proj.weight"].sources == ("model.layers.1.self_attn.q_proj.weight",)
    assert coverage.summary().startswith("3 of 30 parameters of the target moved")
    assert len(coverage.to_json()["rows"]) == 30


def test_towers_that_are_not_run_are_listed() -> None:
    tiny = TINY["openclip"]
    A, B = tiny.model(16, 2, 1), tiny.model(24, 2, 2)
    moved = fit(A, B, tiny.calibration(), tiny.objective).apply(
        TaskVector.between(dict(A.named_parameters()), tuned(A))
    )
    kept = moved.coverage.kept()  # type: ignore[union-attr]
    assert kept["transformer.resblocks.0.attn.in_proj_weight"] == UNREACHED
    assert kept["text_projection"] == UNREACHED
    assert "visual.proj" in moved.deltas
    assert "visual.conv1.weight" in moved.deltas  # patches of the same size


def test_patches_of_different_size_are_kept_with_the_reason() -> None:
    import open_clip

    tiny = TINY["openclip"]
    A, B = tiny.model(16, 2, 1), tiny.model(24, 2, 2)
    visual = {"image_size": 32, "patch_size": 4, "width": 24, "head_width": 6, "layers": 2}
    words = {"context_length": 8, "vocab_size": 40, "width": 24, "heads": 4, "layers": 2}
    B = open_clip.CLIP(embed_dim=12, vision_cfg=visual, text_cfg=words)
    moved = fit(A, B, tiny.calibration(), tiny.objective).apply(
        TaskVector.between(dict(A.named_parameters()), tuned(A))
    )
    coverage = moved.coverage
    assert coverage is not None
    assert coverage.kept()["visual.conv1.weight"] == "patches of different size: 192 and 48 numbers in a patch"
    assert coverage["visual.transformer.resblocks.1.attn.in_proj_weight"].status == "moved"


class Dead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.live, self.dead = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.live(x) + 0 * self.dead(x)


def test_a_site_without_signal_is_not_moved_and_listed() -> None:
    A, B = Dead(), Dead()
    batch = Batch({"x": torch.randn(9, 4)}, torch.arange(9) % 3)
    alignment = fit(A, B, Calibration([(batch, batch)]), lambda model, b: model(**b.inputs).square().sum())
    moved = alignment.apply(TaskVector.between(A, tuned(A)))
    assert set(moved.deltas) == {"live.weight", "live.bias"}
    assert moved.coverage.kept() == {"dead.weight": NO_SIGNAL, "dead.bias": NO_SIGNAL}  # type: ignore[union-attr]


def test_a_bias_that_only_one_side_has() -> None:
    batch = Batch({"input": torch.randn(20, 4)})
    with_bias, without = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def loss(model: nn.Module, b: Batch) -> torch.Tensor:
        return model(**b.inputs).square().sum()

    there = fit(with_bias, without, Calibration([(batch, batch)]), loss)
    coverage = there.apply(TaskVector.between(with_bias, tuned(with_bias))).coverage
    assert coverage is not None
    assert coverage.unused == {"bias": "the target has no bias there"}
    back = fit(without, with_bias, Calibration([(batch, batch)]), loss)
    coverage = back.apply(TaskVector.between(without, tuned(without))).coverage
    assert coverage is not None
    assert coverage.kept() == {"bias": "unchanged by the fine-tune"}


def test_a_task_vector_of_another_model_is_refused(llama: Alignment) -> None:
    with pytest.raises(TaskferryError, match=r"change is \(5, 5\).*source has \(16, 16\)"):
        llama.apply(TaskVector({"model.layers.0.self_attn.q_proj.weight": torch.ones(5, 5)}))
    with pytest.raises(TaskferryError, match="not a parameter here"):
        llama.apply(TaskVector({"model.layers.7.self_attn.q_proj.weight": torch.ones(16, 16)}))
    with pytest.raises(TaskferryError, match="do not multiply"):
        LowRank(torch.ones(3, 2), torch.ones(3, 2))


def test_models_that_have_nothing_in_common_are_refused() -> None:
    batch = Batch({"x": torch.randn(4, 6, 10)}, torch.arange(4) % 2)
    with pytest.raises(TaskferryError, match=r"no linear layer of Llama.* has a partner in Dead"):
        fit(Dead(), TINY["llama"].model(16, 1, 0), Calibration([(batch, batch)]), lambda m, b: torch.zeros(()))


def test_the_calibration_set_is_checked() -> None:
    one, two = TINY["plain"].batch(0, 4), TINY["plain"].batch(1, 4)
    with pytest.raises(TaskferryError, match="empty"):
        Calibration([])
    with pytest.raises(TaskferryError, match="4 samples for the source, 3 for the target"):
        Calibration([(one, TINY["plain"].batch(0, 3))])
    with pytest.raises(TaskferryError, match="different samples, or another order"):
        Calibration([(one, two)])
    with pytest.raises(TaskferryError, match="labels of source and target differ"):
        Calibration([(one, replace(two, ids=one.ids))])
    with pytest.raises(TaskferryError, match="as many labels"):
        Calibration([(one, one)]).with_labels(torch.zeros(3))
    same, other = Calibration([(one, one)]), Calibration([(two, two)])
    assert same.identity() == Calibration([(one, one)]).identity() != other.identity()


def test_provenance_tells_what_was_fitted(llama: Alignment) -> None:
    tiny = TINY["llama"]
    again = fit(tiny.model(16, 2, 1), tiny.model(24, 3, 2), tiny.calibration(), tiny.objective)
    other = fit(tiny.model(16, 2, 3), tiny.model(24, 3, 2), tiny.calibration(), tiny.objective, maps=Maps(rank="full"))
    assert again.provenance == llama.provenance
    assert other.provenance["source"] != llama.provenance["source"]
    assert other.provenance["target"] == llama.provenance["target"]
    assert other.provenance["settings"]["map_rank"] == "full"
    assert llama.provenance["calibration"]["samples"] == 24
    assert llama.provenance["objective"] == ["LanguageModel()", "LanguageModel()"]


def test_a_damaged_alignment_is_refused(llama: Alignment, tmp_path: Path) -> None:
    from taskferry.alignment import FORMAT
    from taskferry.disk.files import write_safetensors

    write_safetensors(tmp_path / "x.alignment", {}, {"format": FORMAT, "pairs": [{"source": 3}]})
    with pytest.raises(TaskferryError, match="damaged alignment"):
        Alignment.load(tmp_path / "x.alignment")
    llama.save(tmp_path / "good.alignment")
    data = (tmp_path / "good.alignment").read_bytes()
    (tmp_path / "cut.alignment").write_bytes(data[: len(data) // 2])
    with pytest.raises(TaskferryError, match="no readable safetensors file"):
        Alignment.load(tmp_path / "cut.alignment")


def test_rows_in_runs_are_saved_and_files_from_before_are_read(tmp_path: Path) -> None:
    """GPT-NeoX has q, k and v head by head; a file of an earlier release knows neither runs nor kinds nor notes."""
    tiny = PACKED["neox"]
    A = tiny.model(16, 2, 1)
    alignment = fit(A, tiny.model(24, 3, 2), tiny.calibration(8), tiny.objective)
    alignment.save(tmp_path / "a.alignment")
    loaded = Alignment.load(tmp_path / "a.alignment")
    assert loaded.pairs == alignment.pairs
    assert {pair.target.rows for pair in loaded.pairs} == {None, (0, 6, 18), (6, 12, 18), (12, 18, 18)}
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    for name, delta in alignment.apply(tau).deltas.items():
        assert torch.equal(loaded.apply(tau).deltas[name], delta)  # type: ignore[arg-type]
    for wrong in ((0, 6, 4), (0, 6, 12), (6, 6, 18), (0, 6, 18, 2)):
        pair = next(pair for pair in alignment.pairs if pair.target.rows == (0, 6, 18))
        damaged = replace(pair, target=replace(pair.target, rows=wrong))
        pairs = tuple(damaged if p is pair else p for p in alignment.pairs)
        replace(alignment, pairs=pairs).save(tmp_path / "wrong.alignment")
        with pytest.raises(TaskferryError, match="does not fit"):
            Alignment.load(tmp_path / "wrong.alignment")
    tensors, header = alignment.tensors()
    header = json.loads(json.dumps(header))
    for pair in header["pairs"]:
        del pair["note"], pair["source"]["kind"], pair["target"]["kind"]
    assert Alignment.from_tensors(tensors, header, "old").pairs == alignment.pairs


def test_only_the_maps_that_are_needed_are_solved() -> None:
    """The maps of a part are those of the whole; everything else is listed as not changed."""
    tiny = TINY["llama"]
    A, B = tiny.model(16, 2, 1), tiny.model(24, 3, 2)
    whole = fit(A, B, tiny.calibration(), tiny.objective)
    names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qv"]
    part = fit(A, B, tiny.calibration(), tiny.objective, only=names)
    assert {pair.target.role for pair in part.pairs} == {"attn.q", "attn.v"}
    tau = TaskVector({name: torch.ones(whole.source_parameters[name]) for name in names})
    expected, moved = whole.apply(tau), part.apply(tau)
    assert all(torch.allclose(moved.deltas[n], d, atol=1e-6) for n, d in expected.deltas.items())
    assert moved.coverage.kept() == expected.coverage.kept()  # type: ignore[union-attr]


def test_task_vectors_moved_together_are_those_moved_alone(llama: Alignment) -> None:
    """Bit for bit, dense and low-rank in one list, each with its own coverage."""
    A = TINY["llama"].model(16, 2, 1)
    dense = TaskVector.between(dict(A.named_parameters()), tuned(A))
    torch.manual_seed(3)
    lora = {
        f"model.layers.{i}.self_attn.q_proj.weight": LowRank(torch.randn(16, 2), torch.randn(2, 16)) for i in (0, 1)
    }
    taus = [dense, TaskVector(lora), dense * 0.5, TaskVector(dict(list(lora.items())[:1]))]
    for alone, together in zip(map(llama.apply, taus), llama.apply_all(taus), strict=True):
        assert alone.deltas.keys() == together.deltas.keys()
        for name, delta in alone.deltas.items():
            other = together.deltas[name]
            if isinstance(delta, LowRank):
                assert isinstance(other, LowRank)
                assert torch.equal(delta.left, other.left)
                assert torch.equal(delta.right, other.right)
            else:
                assert torch.equal(delta, other)
        assert alone.coverage == together.coverage
    with pytest.raises(TaskferryError, match="made on another base model"):
        llama.apply_all([dense, TaskVector({"model.layers.0.self_attn.q_proj.weight": torch.ones(3, 3)})])


def test_the_table_has_a_row_for_each_pair(llama: Alignment) -> None:
    rows = llama.table()
    assert [row["target"] for row in rows] == [pair.target.name for pair in llama.pairs]
    assert [row["source"] for row in rows] == [pair.source.name for pair in llama.pairs]
    for pair, row in zip(llama.pairs, rows, strict=True):
        assert row["rank_in"] == llama.quality_in[pair.reads].rank
        assert row["residual_out"] == pytest.approx(llama.quality_out[pair.target.name].residual, abs=1e-6)
