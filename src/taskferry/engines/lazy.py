"""A model whose weights stay on disk: an empty skeleton, and files that are read a block at a time.

    >>> lazy = LazyModel(given, folder)
    >>> with lazy.weights(lazy.under("model.layers.3")):
    ...     lazy.model.get_submodule("model.layers.3")(hidden)

The skeleton is built by accelerate without memory for parameters. Weights are read from safetensors, one tensor at a
time, and each file is closed again, so that no mapped page stays resident.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from taskferry.disk.files import hash_tensor, is_finite, write_plain_safetensors
from taskferry.errors import TaskferryError
from taskferry.models import Loaded, huggingface
from taskferry.models.loaded import BUFFER, as_stored
from taskferry.models.models import resized
from taskferry.models.states import INDEX, tensor_files
from taskferry.taskvector import LazyDeltas, TaskVector, as_dense, match_names


class LazyModel:
    """A Hugging Face folder as an empty model, with its parameters by name on disk."""

    def __init__(
        self, given: str, folder: Path, device: str | torch.device = "cpu", precision: str = "float32"
    ) -> None:
        self.given, self.folder, self.device = given, folder, torch.device(device)
        if (form := huggingface.quantised(folder)) is not None:
            raise TaskferryError(
                f"{given} is stored in {form}, which block by block does not read: use --engine whole, or "
                f"{huggingface.ORIGINAL}"
            )
        self.model, self.dtype = huggingface.skeleton(folder)
        self.precision = as_stored(precision, self.dtype)  # of the weights while they are in memory
        self.files = tensor_files(folder)
        if not self.files:
            raise TaskferryError(f"{folder} has no safetensors files: block by block needs them")
        self.extra: dict[str, Any] = {"dtype": self.dtype}
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        try:
            self.stored = match_names(self.shapes, self.files)  # parameter -> name in the checkpoint
        except TaskferryError as error:
            unknown = (n for n in self.shapes if not any(k.endswith(n) or n.endswith(k) for k in self.files))
            lost = next(unknown, next(iter(self.shapes), ""))
            raise TaskferryError(
                f"{given} cannot be walked block by block: its files call '{lost}' by another name; "
                "use the engine 'whole'"
            ) from error

        # Rotary tables and the like are computed: all that the skeleton holds itself. Others lie in the files.
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        self.buffers = self._read_buffers()

    def _read_buffers(self) -> list[str]:
        """Fill the buffers that are in the files, such as the scalar of a layer; they stay in memory."""
        saved = self.model.state_dict().keys()
        own = {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        for name in own:
            with suppress(TaskferryError):  # in none of them: as the model begins with
                self.stored |= match_names([name], self.files)
        found = [name for name in own if name in self.stored]
        for name, value in self._from_files(found):
            if value.shape != own[name].shape:
                raise TaskferryError(
                    f"{self.given}: {name} is {list(value.shape)} in its files, {list(own[name].shape)} by its "
                    "configuration: they do not belong together"
                )
            path, _, leaf = name.rpartition(".")
            # In the precision that hidden states have, so that those keep theirs.
            kept = value.to(self.precision) if value.is_floating_point() else value
            self.model.get_submodule(path)._buffers[leaf] = kept.to(self.device, copy=True)
        return found

    def loaded(self) -> Loaded:
        """For tokenizers and transforms: the skeleton, with where it came from."""
        return Loaded(self.model, self.given, self.folder, huggingface, extra=dict(self.extra))

    def under(self, path: str) -> list[str]:
        """The parameters of one module."""
        return [name for name in self.shapes if name.startswith(f"{path}.")]

    def outside(self, paths: Iterable[str]) -> list[str]:
        """The parameters of no such module: embeddings, norms, heads."""
        inside = tuple(f"{path}." for path in paths)
        return [name for name in self.shapes if not name.startswith(inside)]

    def read(self, names: Iterable[str], dtype: torch.dtype | None = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Parameters as they are stored, or in another precision."""
        for name, stored in self._from_files(names):
            yield name, stored.to(dtype or stored.dtype, copy=True)  # nothing may point into the mapped file

    def _from_files(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[self.stored[name]], []).append(name)
        for path, inside in by_file.items():
            try:
                with safe_open(str(path), framework="pt") as file:
                    for name in inside:
                        tensor: Tensor = file.get_tensor(self.stored[name])
                        if not is_finite(tensor):
                            raise TaskferryError(f"{path}: {name} holds numbers that are not finite: it is damaged")
                        yield name, tensor
            except (SafetensorError, OSError) as error:
                raise TaskferryError(f"{path} cannot be read: {error}") from error

    @contextmanager
    def weights(self, names: Iterable[str]) -> Iterator[None]:
        """Parameters in memory while inside."""
        names = list(names)
        try:
            for name, value in self.read(names, self.precision):
                self._set(name, nn.Parameter(value.to(self.device), requires_grad=False))
            self._tie()
            yield
        finally:
            for name in names:
                empty = torch.empty(self.shapes[name], device="meta")
                self._set(name, nn.Parameter(empty, requires_grad=False))
            self._tie()

    def hash(self) -> str:
        """As of the model in memory."""
        digest = hashlib.sha256()
        for name in self.shapes:
            hash_tensor(digest, name, next(self.read([name], self.precision))[1])
        return digest.hexdigest()

    def write(self, tau: TaskVector, folder: Path, parts: Iterable[list[str]]) -> None:
        """The model with τ added, in its own precision, a shard for each part of its parameters."""
        total, shards = 0, dict[str, str]()
        parts = [part for part in (*parts, self.buffers) if part]
        for number, names in enumerate(parts, 1):
            file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            tensors = {self.stored[name]: value for name, value in self._as_written(names, tau)}
            write_plain_safetensors(folder / file, tensors)
            shards |= dict.fromkeys(tensors, file)
            total += sum(value.nbytes for value in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        huggingface.copy_side_files(self.folder, folder)

    def check(self, folder: Path, tau: TaskVector) -> None:
        """Read what was written, one parameter at a time, and compare it with what was meant."""
        written = LazyModel(str(folder), folder)
        for name in (*self.shapes, *self.buffers):
            found, value = next(written.read([name], None))[1], next(self._as_written([name], tau))[1]
            if found.dtype != value.dtype or not torch.equal(found, value):
                raise TaskferryError(f"{name} was not written as it was meant: nothing was kept")

    def _as_written(self, names: Iterable[str], tau: TaskVector) -> Iterator[tuple[str, Tensor]]:
        """Parameters with τ added, in the precision they are stored in."""
        for name, stored in self.read(names, None):
            if name in tau.deltas:
                change = as_dense(tau.deltas[name]).to(stored.device, torch.float32)
                yield name, (stored.float() + change).to(stored.dtype)
            else:
                yield name, stored

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(path), leaf, parameter)

    def _tie(self) -> None:
        """A head that is the embedding follows it."""
        tie = getattr(self.model, "tie_weights", None)
        if callable(tie):
            tie()


class DiskDeltas(LazyDeltas):
    """Dense changes in files of a folder, one file a part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}

    def put(self, changes: TaskVector) -> None:
        """Write more of them."""
        if len(changes):
            path = self.folder / f"{len(set(self.files.values()))}.safetensors"
            write_plain_safetensors(path, {name: as_dense(delta) for name, delta in changes.deltas.items()})
            self.files |= dict.fromkeys(changes.deltas, path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(str(self.files[name]), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


class Difference(LazyDeltas):
    """tuned − base of two models on disk."""

    def __init__(self, base: LazyModel, tuned: LazyModel) -> None:
        self.left_out = resized(base.model, tuned.shapes)
        both = (tuned.shapes, base.shapes)
        differing = {n for n in both[0].keys() | both[1].keys() if both[0].get(n) != both[1].get(n)}
        strange = sorted(differing - self.left_out.keys())
        if strange:
            raise TaskferryError(
                f"{tuned.given} and {base.given} differ in {strange[0]}: give the base model that was tuned"
            )
        self.base, self.tuned = base, tuned
        self.names = [name for name in base.shapes if name not in self.left_out]
        both_have = [name for name in base.buffers if name in tuned.buffers]
        self.left_out |= dict.fromkeys(filter(self.changed, both_have), BUFFER)

    def __getitem__(self, name: str) -> Tensor:
        after, before = (next(model.read([name]))[1] for model in (self.tuned, self.base))
        return after.sub_(before)

    def changed(self, name: str) -> bool:
        """As they are stored: an embedding in float32, twice, may be more memory than is left."""
        after, before = (next(model.read([name], dtype=None))[1] for model in (self.tuned, self.base))
        precision = torch.promote_types(after.dtype, before.dtype)
        return not torch.equal(after.to(precision), before.to(precision))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
