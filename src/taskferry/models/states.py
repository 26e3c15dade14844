"""State dictionaries in files of anyone: safetensors, or torch files read with weights_only, never a pickle.

Nothing that a folder names may lie outside of it.
"""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from taskferry.disk.files import read_json
from taskferry.errors import TaskferryError
from taskferry.taskvector import TaskVector, as_dense, match_names

INDEX = "model.safetensors.index.json"
TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
LONGEST_NAME = 1000
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


def read_state(path: Path) -> dict[str, Tensor]:
    """Read parameters by name, out of the wrappings that training scripts put around them."""
    if not path.is_file():
        raise TaskferryError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        try:
            return _checked(path, load_file(path))
        except (SafetensorError, OSError) as error:
            raise TaskferryError(f"{path} is no readable safetensors file: {error}") from error
    _check_zip(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders about pickles aloud; the refusal below says all
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails in as many ways as there are operations in it
        raise TaskferryError(
            f"{path} cannot be read as plain weights (a pickled module could run code on loading, so it is refused): "
            "save its state_dict() as safetensors and give that"
        ) from error
    for name in WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if not isinstance(state, Mapping):
        raise TaskferryError(f"{path} holds a {type(state).__name__}, not a state dictionary")
    tensors = {str(k).removeprefix("module."): v for k, v in state.items() if isinstance(v, Tensor)}
    if not tensors:
        raise TaskferryError(f"{path} holds no tensors")
    return _checked(path, tensors)


def _check_zip(path: Path) -> None:
    """Refuse compressed records, which could grow to anything in memory: torch stores its own as they are."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise TaskferryError(f"{path} is a damaged archive: {error}") from error
    if packed:
        raise TaskferryError(f"{path} holds compressed records ({packed[0]!r}), which torch never writes: refused")


def _checked(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Refuse names that cannot be shown, and tensors that are not as large as the file says."""
    for name, tensor in tensors.items():
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise TaskferryError(f"{path} holds a tensor called {name[:60]!r}: no model calls a parameter so")
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise TaskferryError(
                f"{path}: {name} is a sparse, empty or expanded tensor of {tuple(tensor.shape)}: save it as a plain one"
            )
    return tensors


def add_to_state(state: dict[str, Tensor], tau: TaskVector) -> dict[str, Tensor]:
    """Add τ to a state, each tensor in its own precision."""
    names = match_names(tau.deltas, state)
    changed = dict(state)
    for name, delta in tau.deltas.items():
        change = as_dense(delta)
        before = state[names[name]]
        changed[names[name]] = (before.to(change.dtype) + change).to(before.dtype)
    return changed


def check_folder(folder: Path) -> None:
    """Refuse links that lead out of a folder, and indexes of shards that name files outside of it."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            check_inside(folder, path)
        if path.name.endswith(".index.json") and path.is_file():
            read_index(path)


def read_index(path: Path) -> dict[str, Path]:
    """Read the file of every tensor from an index of shards; every file is in the folder of the index."""
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise TaskferryError(f"{path} is no index of shards: it needs a weight_map of tensor names to file names")
    found: dict[str, Path] = {}
    for file in sorted(set(shards.values())):
        if not file or not file.isprintable() or "/" in file or "\\" in file or file in (".", ".."):
            raise TaskferryError(f"{path} names a file that is not in the folder: {file[:200]!r}")
        shard = path.parent / file
        if len(file) > 255 or not shard.is_file():
            raise TaskferryError(f"{path} names a file that is not in the folder: {file[:200]!r}")
        check_inside(path.parent, shard)
        found[file] = shard
    return {name: found[file] for name, file in shards.items()}


def check_inside(folder: Path, path: Path) -> None:
    """Refuse a file outside of the folder, or of the hub's cache, whose snapshots are links to blobs beside them."""
    try:
        home, real = folder.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise TaskferryError(f"{path} is a link to nothing: {error}") from error
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(real.is_relative_to(root) for root in (home, *blobs)):
        raise TaskferryError(f"{path} is a link out of its folder, to {real}: copy the file there if you trust it")


def tensor_files(folder: Path) -> dict[str, Path]:
    """Find the file of every tensor, by the index or in the safetensors files themselves."""
    index = folder / INDEX
    if index.is_file():
        return read_index(index)
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise TaskferryError(f"{path} is no safetensors file: {error}") from error
    return found
