"""Writing files so that a reader sees all of one or nothing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from taskferry.errors import TaskferryError

HEADER = "taskferry"  # one metadata entry only: safetensors writes several in any order, and bytes must repeat


def write_safetensors(path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """A file of our own kinds, with its header."""
    _write(Path(path), tensors, {HEADER: json.dumps(header)})


def write_plain_safetensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """A file as other tools write them."""
    _write(Path(path), tensors, {"format": "pt"})


def write_text(path: str | Path, text: str) -> None:
    """A text file."""
    with _beside(Path(path)) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    with _beside(path) as temporary:
        save_file(_separate(tensors), temporary, metadata)


@contextmanager
def _beside(path: Path) -> Iterator[str]:
    """A file beside the destination; it is flushed to disk and renamed over it at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def hash_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    """Add a tensor's name, shape, type and bytes to a hash."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # a rank's part of it: all ranks hash the whole
        tensor = tensor.full_tensor()
    value = tensor.cpu().contiguous()
    digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
    digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())


@contextmanager
def open_safetensors(path: str | Path, kind: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(file, header) of a file that `write_safetensors` wrote with `{"format": kind}`."""
    if not Path(path).is_file():
        raise TaskferryError(f"{path} does not exist")
    try:
        file = safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise TaskferryError(f"{path} is no safetensors file: {error}") from error
    with file as opened:
        text = (opened.metadata() or {}).get(HEADER, "{}")
        try:
            header = json.loads(text)
        except json.JSONDecodeError as error:
            raise TaskferryError(f"{path}: its header is damaged: {error}") from error
        if not isinstance(header, dict) or header.get("format") != kind:
            raise TaskferryError(f"{path} is no {kind}")
        yield opened, header


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory: the format has no place for views."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in seen or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(pointer)
        separate[name] = tensor
    return separate


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
