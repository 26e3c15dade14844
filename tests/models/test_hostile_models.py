"""Model folders from strangers: no code of theirs is run, no number that is none gets in."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry.errors import TaskferryError
from taskferry.models import load_model
from tests.helpers import folders
from tests.helpers.hostile import Runs

pytest.importorskip("transformers")


def test_a_folder_with_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    code = f"import os\nos.mkdir({str(mark)!r})\nfrom transformers import PretrainedConfig, PreTrainedModel\n"
    (folder / "own.py").write_text(
        code + "class C(PretrainedConfig):\n    model_type = 'own'\nclass M(PreTrainedModel): ...\n"
    )
    maps = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": "own.T"}
    for kind in ("own", "bert"):
        config = {"model_type": kind, "architectures": ["M"], "auto_map": maps, "hidden_size": 16}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"a": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(TaskferryError, match="code of its own"):
            load_model(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["Trainer", "pipeline", "AutoTokenizer", "logging", "__name__", "os", "../x", 3, None, []]
)
def test_an_architecture_that_is_no_model(name: Any, tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TaskferryError):
        load_model(str(tmp_path))


def test_a_model_with_numbers_that_are_not_finite(tmp_path: Path) -> None:
    folder = folders.encoder(tmp_path / "bert", 16, 2, 1)
    for value in (torch.nan, torch.inf):
        state = load_file(folder / "model.safetensors")
        state["encoder.layer.1.output.dense.weight"][3, 4] = value
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(TaskferryError, match=r"encoder\.layer\.1\.output\.dense\.weight holds numbers"):
            load_model(str(folder))
    os.remove(folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(TaskferryError, match="could run code"):
        load_model(str(folder))
    assert not (tmp_path / "ran").exists()
