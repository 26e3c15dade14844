"""What files hold beside parameters, and what blocks hand each other beside their output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import LanguageModel, TaskVector
from taskferry.engines.blocks import BlockPair
from taskferry.engines.lazy import Difference, LazyModel
from taskferry.engines.whole import WholePair
from taskferry.errors import TaskferryError
from taskferry.methods import Job, run
from taskferry.models import load_model, load_tuned
from tests.helpers.tiny import TINY, VOCABULARY, relative

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not hasattr(transformers, "Gemma4ForCausalLM"), reason="transformers without Gemma 4")
SCALAR = 0.4
WORDS = 2048  # more than the layers that any model has


def gemma(folder: Path, width: int, seed: int, **more: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, global_head_dim=16, max_position_embeddings=32,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": WORDS, **more},
    )  # fmt: skip
    model = transformers.Gemma4ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for layer in model.model.layers:
            layer.layer_scalar.fill_(SCALAR)
    model.save_pretrained(folder)
    found: torch.nn.Module = model
    return found


def pairs(tmp_path: Path, **more: object) -> tuple[WholePair, BlockPair, TaskVector]:
    A, B = gemma(tmp_path / "a", 32, 0, **more), gemma(tmp_path / "b", 48, 1, **more)
    calibration = TINY["llama"].calibration(8)
    (tmp_path / "scratch").mkdir()
    lazy = [LazyModel(name, tmp_path / name) for name in "ab"]
    whole = WholePair(A, B, calibration, LanguageModel())
    blocks = BlockPair(lazy[0], lazy[1], calibration, LanguageModel(), scratch=tmp_path / "scratch")
    linear = {site.weight for site in whole.source_sites if site.block is not None}
    changes = {name: 0.02 * torch.randn_like(p) for name, p in A.named_parameters() if name in linear}
    return whole, blocks, TaskVector(changes)


def test_buffers_of_the_files_count_as_in_whole_models(tmp_path: Path) -> None:
    whole, blocks, tau = pairs(tmp_path)
    found, known = (each.losses(TaskVector({}), [0.0], whole.calibration) for each in (blocks, whole))
    assert found == pytest.approx(known, rel=1e-6)
    one, other = run("bico", Job(whole, tau)).tau, run("bico", Job(blocks, tau)).tau
    assert set(one.deltas) == set(other.deltas)
    for parameter, change in one.deltas.items():
        assert relative(other.deltas[parameter], change) < 1e-6, parameter  # type: ignore[arg-type]


def test_buffers_are_written_and_checked(tmp_path: Path) -> None:
    gemma(tmp_path / "a", 32, 0)
    lazy, out = LazyModel("a", tmp_path / "a"), tmp_path / "out"
    out.mkdir()
    lazy.write(TaskVector({}), out, [list(lazy.shapes)])
    written = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    known = load_file(tmp_path / "a" / "model.safetensors")
    assert written.keys() == known.keys()
    assert all(torch.equal(written[name], value) for name, value in known.items())
    assert all(layer.layer_scalar == SCALAR for layer in load_model(out).model.model.layers)  # type: ignore[union-attr]
    lazy.check(out, TaskVector({}))
    last = sorted(out.glob("*.safetensors"))[-1]
    save_file({name: value + 1 for name, value in load_file(last).items()}, last)
    with pytest.raises(TaskferryError, match="layer_scalar was not written as it was meant"):
        lazy.check(out, TaskVector({}))


def test_a_fine_tune_that_changes_a_buffer_says_that_it_stays(tmp_path: Path) -> None:
    base = gemma(tmp_path / "a", 32, 0)
    with torch.no_grad():
        base.model.layers[1].layer_scalar.fill_(0.9)  # type: ignore[union-attr, index, operator]
        base.model.layers[1].mlp.up_proj.weight.add_(0.1)  # type: ignore[union-attr, index, operator]
    base.save_pretrained(tmp_path / "tuned")  # type: ignore[operator]
    whole = load_tuned(tmp_path / "tuned", load_model(tmp_path / "a"))
    lazy = Difference(LazyModel("a", tmp_path / "a"), LazyModel("tuned", tmp_path / "tuned"))
    assert whole.ignored == lazy.left_out
    assert list(whole.ignored) == ["model.layers.1.layer_scalar"]
    assert "a buffer" in whole.ignored["model.layers.1.layer_scalar"]
    assert [name for name in lazy if lazy.changed(name)] == list(whole.tau.deltas)


def test_buffers_of_another_shape_are_refused(tmp_path: Path) -> None:
    gemma(tmp_path / "a", 32, 0)
    file = tmp_path / "a" / "model.safetensors"
    save_file({n: v.repeat(2) if n.endswith("0.layer_scalar") else v for n, v in load_file(file).items()}, file)
    with pytest.raises(TaskferryError, match=r"layers\.0\.layer_scalar is \[2\] in its files, \[1\]"):
        LazyModel("a", tmp_path / "a")


def test_blocks_that_share_keys_and_values_are_refused(tmp_path: Path) -> None:
    """The gradient that later blocks have for them would be lost."""
    whole, blocks, tau = pairs(tmp_path, num_kv_shared_layers=2, hidden_size_per_layer_input=8)
    assert len(run("bico", Job(whole, tau)).tau)
    with pytest.raises(TaskferryError, match=r"layers\.0 hands later blocks more than its output.*'whole'"):
        run("bico", Job(blocks, tau))
