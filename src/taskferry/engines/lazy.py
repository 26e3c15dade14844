"""A model whose weights stay on disk: an empty skeleton, and files that are read a block at a time.

    >>> lazy = LazyModel(folder)
    >>> with lazy.weights(lazy.under("model.layers.3")):
    ...     lazy.model.get_submodule("model.layers.3")(hidden)

The skeleton is built by accelerate without memory for parameters. Weights are read from safetensors, one tensor at a
time, and each file is closed again, so that no mapped page stays resident.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from taskferry.checkpoints import Loaded, huggingface
from taskferry.checkpoints.folders import read_index
from taskferry.engines.memory import give_back
from taskferry.errors import TaskferryError
from taskferry.files import is_finite
from taskferry.taskvector import TaskVector, as_dense, match_names

INDEX = "model.safetensors.index.json"


class LazyModel:
    """A Hugging Face folder as an empty model, with its parameters by name on disk."""

    def __init__(self, given: str, folder: Path, changes: TaskVector | None = None) -> None:
        self.given, self.folder = given, folder
        self.changes = {} if changes is None else dict(changes.deltas)  # added to what is read
        self.model, self.dtype = huggingface.skeleton(folder)
        self.files = _files(folder)
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        try:
            self.stored = match_names(self.shapes, self.files)  # parameter -> name in the checkpoint
        except TaskferryError as error:
            unknown = (n for n in self.shapes if not any(k.endswith(n) or n.endswith(k) for k in self.files))
            lost = next(unknown, next(iter(self.shapes), ""))
            raise TaskferryError(
                f"{given} cannot be walked block by block: its files call '{lost}' by another name; save it again with "
                "save_pretrained, or use the engine 'whole'"
            ) from error

    def loaded(self) -> Loaded:
        """For tokenizers and transforms: the skeleton, with where it came from."""
        return Loaded(self.model, self.given, self.folder, huggingface, extra={"dtype": self.dtype})

    def under(self, path: str) -> list[str]:
        """The parameters of one module."""
        return [name for name in self.shapes if name.startswith(f"{path}.")]

    def outside(self, paths: Iterable[str]) -> list[str]:
        """The parameters of no such module: embeddings, norms, heads."""
        inside = tuple(f"{path}." for path in paths)
        return [name for name in self.shapes if not name.startswith(inside)]

    def read(self, names: Iterable[str], dtype: torch.dtype | None = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Parameters as they are stored, or in another precision; changes are added to float32."""
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
                        # A copy in any case: nothing may point into the mapped file.
                        value = tensor.to(dtype or tensor.dtype, copy=True)
                        if name in self.changes:
                            value += as_dense(self.changes[name]).to(value)
                        yield name, value
            except (SafetensorError, OSError) as error:
                raise TaskferryError(f"{path} cannot be read: {error}") from error

    @contextmanager
    def weights(self, names: Iterable[str]) -> Iterator[None]:
        """Parameters in memory while inside."""
        names = list(names)
        try:
            for name, value in self.read(names):
                self._set(name, nn.Parameter(value, requires_grad=False))
            self._tie()
            yield
        finally:
            for name in names:
                empty = torch.empty(self.shapes[name], device="meta")
                self._set(name, nn.Parameter(empty, requires_grad=False))
            self._tie()
            give_back()

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(path), leaf, parameter)

    def _tie(self) -> None:
        """A head that is the embedding follows it."""
        tie = getattr(self.model, "tie_weights", None)
        if callable(tie):
            tie()


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from the files themselves."""
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
    if not found:
        raise TaskferryError(f"{folder} has no safetensors files: block by block needs them")
    return found
