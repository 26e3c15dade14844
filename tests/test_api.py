"""`taskferry.transfer` in one call: samples in memory, a PEFT model, a result that loads and saves itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import taskferry
from taskferry.example import FILES

peft = pytest.importorskip("peft")
GIVEN = {"target_base": str(FILES / "base-b"), "source_base": str(FILES / "base-a"), "method": "bico", "samples": 16,
         "max_length": 32, "progress": False}  # fmt: skip
ROWS = [json.loads(line) for line in (FILES / "data.jsonl").read_text().splitlines()[:20]]


def test_one_call_in_memory(tmp_path: Path) -> None:
    result = taskferry.transfer(source_tuned=str(FILES / "my-lora"), data=ROWS, **GIVEN)
    assert result.state == "helps"
    assert result.verdict.startswith("It helps: ")
    assert result.coverage is not None
    assert len(result.coverage.moved()) == 42
    model = result.model()
    assert isinstance(model, peft.PeftModel)
    assert "It helps" in result.report(tmp_path / "page.html").read_text()
    saved = result.save(tmp_path / "saved")
    assert (saved / "adapter_model.safetensors").is_file()
    assert "It helps" in result._repr_html_()

    again = taskferry.transfer(source_tuned=model_of_source(), data=ROWS, out=tmp_path / "again", **GIVEN)
    assert again.folder == tmp_path / "again"
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (saved, tmp_path / "again"))
    assert one.keys() == two.keys()
    assert all(
        torch.allclose(value.float(), two[name].float(), atol=1e-3) for name, value in one.items()
    )  # the same samples


def model_of_source() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(FILES / "base-a"), FILES / "my-lora")


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(taskferry.TaskferryError, match="give a PeftModel"):
        taskferry.transfer(source_tuned=object(), data=ROWS, **GIVEN)
    with pytest.raises(taskferry.TaskferryError, match="unknown setting 'sampels', did you mean samples"):
        taskferry.transfer(source_tuned="x", data=ROWS, sampels=3, **GIVEN)


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, taskferry; taskferry.transfer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
