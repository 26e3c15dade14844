"""Readers of files from strangers: for any structure a result or a TaskferryError, never anything else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from taskferry import Alignment, TaskVector
from taskferry.config import FleetSettings, TransferSettings, load_settings
from taskferry.disk.files import write_safetensors
from taskferry.errors import TaskferryError
from taskferry.models import read_adapter
from taskferry.models.states import check_folder, read_state
from tests.helpers import hostile
from tests.helpers.hostile import factors, raw_safetensors, skeleton

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([0, -1, 2**63, "LORA", "..", "../x", "(x|xx)*y", "\x1b[2J", 1e308])
)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
# A busy machine is no fault of a reader: how fast inputs are made is not asked.
quickly = settings(
    max_examples=120,
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def answers(read: Callable[[Path], object], make: Callable[[Path], None]) -> None:
    """The file is made in a folder of its own; nothing else may be there afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make(folder)
        before = sorted(folder.rglob("*"))
        try:
            read(folder)
        except TaskferryError:
            pass
        assert sorted(folder.rglob("*")) == before


@quickly
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "r",
                "lora_alpha",
                "peft_type",
                "alpha_pattern",
                "rank_pattern",
                "use_rslora",
                "use_dora",
                "init_lora_weights",
            ]
        ),
        anything,
    )
)
def test_adapter_configurations(changes: dict[str, Any]) -> None:
    answers(lambda folder: read_adapter(folder, skeleton()), lambda folder: hostile.adapter(folder, **changes) and None)


@quickly
@given(anything)
def test_indexes(index: Any) -> None:
    def make(folder: Path) -> None:
        (folder / "a.safetensors").write_bytes(save(factors()))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    answers(check_folder, make)


@quickly
@given(
    st.dictionaries(
        st.text(max_size=12),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F16", "F32", "I64", "BOOL", "F8_E4M3", "C64", "X"]) | anything,
                "shape": st.lists(st.integers(-1, 2**40), max_size=4) | anything,
                "data_offsets": st.lists(st.integers(-1, 200), min_size=2, max_size=2) | anything,
            }
        )
        | anything,
        max_size=4,
    ),
    st.binary(max_size=200),
)
def test_safetensors_headers(header: dict[str, Any], data: bytes) -> None:
    content = raw_safetensors(header, data)
    for name, read in (("x.safetensors", read_state), ("x.tau", TaskVector.load), ("x.alignment", Alignment.load)):
        answers(
            lambda folder, n=name, r=read: r(folder / n),
            lambda folder, n=name: (folder / n).write_bytes(content) and None,
        )


FIELDS = ["pairs", "quality_in", "quality_out", "source_parameters", "target_parameters", "reasons", "provenance"]
SITE = ["name", "weight", "bias", "shape", "role", "stack", "block", "stream", "rows", "transposed", "fixed"]


@quickly
@given(st.sampled_from(FIELDS), anything, st.sampled_from(SITE), anything, st.sampled_from(["source", "target"]))
def test_alignments(field: str, value: Any, part: str, other: Any, side: str) -> None:
    tensors, header = hostile.alignment().tensors()
    one, two = (json.loads(json.dumps(header)) for _ in range(2))
    one[field] = value
    two["pairs"][0][side][part] = other
    A, B = factors().values()
    tau = TaskVector({f"{hostile.MODULE}.weight": B @ A})
    for wrong in (one, two):
        answers(
            lambda folder: Alignment.load(folder / "x").apply(tau).norm(),
            lambda folder, wrong=wrong: write_safetensors(folder / "x", tensors, wrong),
        )


@quickly
@given(st.dictionaries(st.sampled_from([*TransferSettings.model_fields, "other"]), anything))
def test_settings_of_any_value(values: dict[str, Any]) -> None:
    def make(folder: Path) -> None:
        (folder / "s.yaml").write_text(yaml.safe_dump(values), encoding="utf-8", errors="replace")

    for kind in (TransferSettings, FleetSettings):
        answers(lambda folder, kind=kind: load_settings(kind, folder / "s.yaml", {}), make)


@pytest.mark.parametrize("kind", [TransferSettings, FleetSettings])
@quickly
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_settings_of_any_text(kind: Any, content: str | bytes) -> None:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content

    def make(folder: Path) -> None:
        (folder / "s.yaml").write_bytes(data)

    answers(lambda folder: load_settings(kind, folder / "s.yaml", {}), make)
