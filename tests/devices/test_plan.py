"""The plan of a device's memory, from sizes alone, against the memory counter of the pretended devices."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from taskferry.example import FILES
from taskferry.jobs.device_plan import on_device
from taskferry.jobs.opening import without_weights
from taskferry.jobs.plan import method_cost
from taskferry.jobs.settings import PlanSettings, TransferSettings
from taskferry.jobs.transfer import transfer
from tests.devices import pretend
from tests.helpers import eight_billion, folders

pytest.importorskip("transformers")
pytest.importorskip("peft")
NEAR = 0.10


def planned(given: dict[str, Any]) -> dict[str, int]:
    settings = PlanSettings(**given, device_memory=24)
    job, precisions, _ = without_weights(settings)
    job = job.in_folds()
    found = on_device(job, method_cost(job, *settings.chosen(), scale="auto"), precisions, products=False)
    return {"whole": found.whole, "blockwise": found.blockwise}


def seen(given: dict[str, Any], engine: str, out: Path) -> int:
    gc.collect()
    before = pretend.DEVICES[0].used
    pretend.reset_peaks()
    with sdpa_kernel(SDPBackend.MATH):
        transfer(TransferSettings(**given, device="pretend:0", engine=engine, out=out), command="test")
    return pretend.DEVICES[0].peak - before


@pytest.mark.parametrize(
    ("widths", "depths", "modules", "dtype", "more"),
    [
        pytest.param((32, 48), (2, 3), ["q_proj", "v_proj"], "bfloat16", {"method": "bico"}, marks=pytest.mark.every),
        pytest.param(
            (32, 48), (5, 4), ["q_proj", "v_proj", "down_proj"], "float32", {"effort": "fast"}, marks=pytest.mark.every
        ),
    ],
    ids=["half", "several"],
)
def test_the_plan_is_within_a_tenth_of_what_a_device_counts(
    tmp_path: Path,
    widths: tuple[int, int],
    depths: tuple[int, int],
    modules: list[str],
    dtype: str,
    more: dict[str, Any],
) -> None:
    folders.causal(tmp_path / "a", "LlamaForCausalLM", widths[0], depths[0], 1)
    folders.causal(tmp_path / "b", "Qwen3ForCausalLM", widths[1], depths[1], 2)
    folders.lora(tmp_path / "a", tmp_path / "lora", modules, seed=1, task_type="CAUSAL_LM")
    given = {"source_base": tmp_path / "a", "target_base": tmp_path / "b", "source_tuned": tmp_path / "lora"}
    given = {name: str(path) for name, path in given.items()}
    given |= {"calibration": str(folders.prompts(tmp_path / "p.jsonl")), "micro_batch": 6, "dtype": dtype, **more}
    assert_near(given, tmp_path)


@pytest.mark.every
def test_the_default_with_its_second_capture(tmp_path: Path) -> None:
    """On the package's example, where the first change helps: widths 96 and 128, two captures in two folds."""
    names = {"source_base": "base-a", "target_base": "base-b", "source_tuned": "my-lora", "calibration": "data.jsonl"}
    given = {name: str(FILES / file) for name, file in names.items()}
    assert_near({**given, "samples": 32, "micro_batch": 8}, tmp_path)


def assert_near(given: dict[str, Any], folder: Path) -> None:
    plan = planned(given)
    ratios = {engine: plan[engine] / seen(given, engine, folder / engine) for engine in ("whole", "blockwise")}
    assert all(abs(ratio - 1) < NEAR for ratio in ratios.values()), ratios


def test_eight_billion_on_24_and_80_gb(tmp_path: Path) -> None:
    """And the page says what the plan says."""
    found = eight_billion.plans(tmp_path)
    by = {(dtype, size): plan for dtype, size, plan in found}
    assert by["float32", 16].weights_bytes == pytest.approx(4 * (8_030_261_248 + 8_190_735_360), rel=1e-6)
    half = by["bfloat16", 4]
    assert half.pairs == 72  # q and v of 36 blocks
    assert half.weights_bytes == by["float32", 4].weights_bytes // 2
    assert half.engines["whole"] > half.weights_bytes > half.engines["blockwise"]
    assert not half.fits("whole")
    assert half.fits("blockwise")
    assert eight_billion.written() == eight_billion.table(found)
