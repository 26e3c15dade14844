"""Atomic writes, and careful reads of files that may come from anyone."""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from taskferry.disk.temporary import sweep, temporary_folder
from taskferry.errors import TaskferryError

if TYPE_CHECKING:  # imported on use: commands that only read or copy files need no torch
    from torch import Tensor, nn

HEADER = "taskferry"  # one metadata entry only: safetensors writes several in any order, and bytes must repeat
SMALL = 64 * 2**20  # bytes of tensors that may be copied once more
MOST_JSON = 64 * 2**20  # bytes; the largest real index of shards has a few


def write_safetensors(path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """A file of our own kinds, with its header."""
    from safetensors.torch import save_file

    with replacing(Path(path)) as temporary:
        save_file(_separate(tensors), temporary, {HEADER: json.dumps(header)})


def write_plain_safetensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """A file as other tools write them, in a folder that is temporary itself: that one is synced and renamed."""
    import torch
    from safetensors.numpy import save_file as save_arrays
    from safetensors.torch import save_file

    separate = _separate(tensors)
    kinds = {tensor.dtype for tensor in separate.values()}
    few = sum(tensor.nbytes for tensor in separate.values()) < SMALL
    with writing(Path(path)):
        if few and kinds <= {torch.float32, torch.float16}:  # the same bytes in half the time, for one more copy
            save_arrays({name: tensor.numpy() for name, tensor in separate.items()}, path, {"format": "pt"})
        else:
            save_file(separate, path, {"format": "pt"})


def write_text(path: str | Path, text: str) -> None:
    """A text file, over an earlier one."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary sibling to write; it is flushed to disk and takes the name at the end, or is gone on any error."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, path.name)
        # In a folder of its own, which is locked: libraries may write a file by replacing it.
        with temporary_folder(path.parent, path.name) as folder:
            temporary = folder / "whole"
            yield temporary
            sync(temporary)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        sync(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the operating system says against writing, as one sentence with the next step."""
    try:
        yield
    except TaskferryError:
        raise
    except Exception as error:
        # safetensors and transformers wrap the operating system's error in their own.
        text = str(error)
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text or "os error 28" in text:
            raise TaskferryError(
                f"the disk is full, nothing was written to {path}: free room, or give another --out"
            ) from error
        if isinstance(error, OSError | SafetensorError):
            reason = getattr(error, "strerror", None) or error
            raise TaskferryError(f"{path} cannot be written: {reason}; give another --out") from error
        raise


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_json(data: Any) -> str:
    """Indented JSON; NaN and infinities, which JSON does not have, as null; other objects as their text."""
    return json.dumps(_finite(data), indent=1, default=str, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, bool):
        return data
    if isinstance(data, Integral):
        return int(data)
    if isinstance(data, Real):  # of numpy as well
        return float(data) if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return [_finite(value) for value in data]
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that may come from anyone."""
    try:
        size = path.stat().st_size
        data = json.loads(path.read_text(encoding="utf-8")) if size <= MOST_JSON else None
    except (OSError, ValueError, RecursionError) as error:
        raise TaskferryError(f"{path} is no JSON: {error}") from error
    if size > MOST_JSON:
        raise TaskferryError(
            f"{path} has {size / 2**20:.0f} MiB, {MOST_JSON / 2**20:.0f} are the most: it is no settings"
        )
    if not isinstance(data, dict):
        raise TaskferryError(f"{path} is no JSON object")
    return data


def hash_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    """Add a tensor's name, shape, type and bytes to a hash."""
    import torch

    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # a rank's part of it: all ranks hash the whole
        tensor = tensor.full_tensor()
    value = tensor.cpu().contiguous()
    digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
    digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())


@contextmanager
def open_safetensors(path: str | Path, kind: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(file, header) of a file that `write_safetensors` wrote with `{"format": kind}`."""
    if Path(path).is_dir():
        raise TaskferryError(f"{path} is a folder, where a file is wanted: {kind}")
    if not Path(path).is_file():
        raise TaskferryError(f"{path} does not exist")
    try:
        with safe_open(str(path), framework="pt") as opened:
            text = (opened.metadata() or {}).get(HEADER, "{}")
            try:
                header = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise TaskferryError(f"{path}: its header is damaged: {error}") from error
            if not isinstance(header, dict) or header.get("format") != kind:
                raise TaskferryError(f"{path} is no {kind}")
            yield opened, header
    except (SafetensorError, OSError) as error:  # also while its tensors are read
        raise TaskferryError(f"{path} is no readable safetensors file: {error}") from error


def is_kind(path: str | Path, kind: str) -> bool:
    """Whether a file says that it is of this kind, damaged or not."""
    try:
        with open_safetensors(path, kind):
            return True
    except TaskferryError:
        return False


def nearest(given: str | Path) -> str:
    """`: did you mean …?` for a name that is not there, where its folder has one much like it."""
    path = Path(given)
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return f": there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, names, 1)
    return f": did you mean {path.parent / close[0]}?" if close else f": {path.parent.resolve()} has no such name"


def is_finite(tensor: Tensor) -> bool:
    """Whether all its numbers are; nothing as large as the tensor is made for it."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.dtype.itemsize < 2:
        tensor = tensor.float()
    import torch

    least, most = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(least) and torch.isfinite(most))


def not_finite(tensors: Mapping[str, Sequence[Tensor]]) -> str | None:
    """The first of many small groups of tensors that holds a number which is not finite; one call where none does."""
    import torch

    together = [tensor.float() for group in tensors.values() for tensor in group]
    if bool(torch.isfinite(torch.nn.utils.get_total_norm(together))):
        return None
    return next((name for name, group in tensors.items() if not all(map(is_finite, group))), None)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors in the host's memory that share none of it: the format has no place for views."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
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


def hash_parameters(model: nn.Module) -> str:
    """sha256 over names, shapes, types and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        hash_tensor(digest, name, parameter)
    return digest.hexdigest()
