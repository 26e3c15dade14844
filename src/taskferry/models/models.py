"""Loading and writing models: Hugging Face folders and hub ids, timm folders, OpenCLIP names and folders.

    >>> A = load_model("path/or/hub-id@revision")
    >>> tau = load_tuned("path/to/tuned", A).tau
    >>> B.format.write(B, moved, folder)

Each format is one file beside this one: `owns`, `load`, `write`, `tokenizer`, `image_transform`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from taskferry.disk.files import is_finite, nearest, read_json
from taskferry.errors import TaskferryError
from taskferry.models import huggingface, openclip, timm
from taskferry.models.loaded import BUFFER, Loaded
from taskferry.models.peft import (
    CONFIG,
    Adapter,
    Skeleton,
    alike,
    in_body,
    is_adapter,
    read_adapter,
    read_converted,
)
from taskferry.models.states import TORCH_FILES, read_state
from taskferry.taskvector import Delta, TaskVector, is_task_vector, match_names

_FORMATS: tuple[ModuleType, ...] = (openclip, timm, huggingface)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def load_model(
    given: str | Path,
    *,
    like: nn.Module | None = None,
    architecture: str | None = None,
    image_size: int | None = None,
    dtype: str = "float32",
) -> Loaded:
    """Load a model, frozen and in eval mode.

    Args:
        given: A Hugging Face, timm or OpenCLIP folder, a hub id, or openclip:NAME:CHECKPOINT.
        like: A model whose class is to be loaded, in place of the folder's own: the base of a fine-tune.
        architecture: A class of transformers in place of the folder's own: T5EncoderModel for a whole T5.
        image_size: Images that a timm model is to read, in place of its own size.
        dtype: Precision of the weights: float32, bfloat16, float16, or auto for the stored one.
    """
    given = str(given)
    where = resolve(given)
    kind = next((each for each in _FORMATS if each.owns(where)), None)
    if kind is None:
        raise TaskferryError(
            f"{given} is not a model folder: give one with config.json (Hugging Face, timm) or open_clip_config.json, "
            "a hub id, or openclip:NAME:CHECKPOINT"
        )
    # What the files do not hold (a new head) is made by chance: the same whenever a model is loaded.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if kind is huggingface and image_size is None:
            model, folder, absent, extra = kind.load(where, like, dtype, architecture)
        elif kind is timm and architecture is None:
            model, folder, absent, extra = kind.load(where, like, dtype, image_size)
        elif architecture is None and image_size is None:
            model, folder, absent, extra = kind.load(where, like, dtype)
        else:
            raise TaskferryError(f"{given}: architecture is for Hugging Face models alone, image_size for timm models")
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise TaskferryError(f"{given}: {name} holds numbers that are not finite: it is damaged")
    return Loaded(model.eval().requires_grad_(False), given, folder, kind, frozenset(absent), extra, dtype)


def resolve(given: str) -> str:
    """Find what a name stands for: a path that exists, an openclip: name, or the local folder of a hub id."""
    if given.startswith("openclip:") or Path(given).exists():
        return given
    if _HUB_ID.fullmatch(given) and not given.startswith((".", "/")):
        return huggingface.download(given)
    raise TaskferryError(f"{given} does not exist{nearest(given)}")


@dataclass(frozen=True)
class Tuned:
    """A fine-tune: its change of the base, and the adapter that it came as, if it did."""

    tau: TaskVector
    adapter: Adapter | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)  # what it holds beside changes of the base
    given: str = ""  # what the user wrote
    unread: frozenset[str] = frozenset()  # of those, what a model of the base's class has no use for

    @property
    def beside(self) -> dict[str, str]:
        """Parts that make it another model than base + τ, and why they are not in τ."""
        return {name: why for name, why in self.ignored.items() if name not in self.unread}

    def add_to(self, model: nn.Module, scale: float = 1.0) -> dict[str, str]:
        """Change a base model, and put a head that was saved beside an adapter in its place, all of it or nothing.

        Returns:
            What is left, and why.
        """
        self.tau.add_to(model, scale=scale)
        saved, own = {} if self.adapter is None else self.adapter.saved, dict(model.named_parameters())
        if any(name not in own or own[name].shape != tensor.shape for name, tensor in saved.items()):
            return self.beside
        for name, tensor in saved.items():
            own[name].data.copy_(tensor)
        return {name: why for name, why in self.beside.items() if name not in saved}


def by_reason(left: Mapping[str, str], what: str = "did not move") -> list[str]:
    """List what is left of a fine-tune: a line for each reason, with the first names."""
    lines = []
    for reason in dict.fromkeys(left.values()):
        names = [name for name, why in left.items() if why == reason]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"{', '.join(names[:2])}{more} of the fine-tune {what}: {reason}")
    return lines


def load_tuned(given: str | Path, base: Loaded) -> Tuned:
    """Read the change of a tuned model, a PEFT adapter, a state file or a saved task vector, on the given base.

    The first two are a folder or a hub id: only what the hub gives says which.
    """
    given = str(given)
    path = Path(resolve(given))
    if is_adapter(path):
        lora = read_json(path / CONFIG).get("peft_type") in ("LORA", None)
        adapter = read_adapter(path, Skeleton.of(base.model)) if lora else read_converted(path, base.model)
        return Tuned(adapter.tau, adapter, adapter.ignored, given)
    if path.is_file():
        if path.suffix == ".safetensors" and is_task_vector(path):
            return Tuned(TaskVector.load(path), given=given)
        if path.suffix in (".safetensors", *TORCH_FILES):
            _same_form(base, given, None)
            return _from_state(path, _stored(base))
        raise TaskferryError(f"{given} is no tuned model: a folder, a .safetensors or a .pt state file is needed")
    precision = "float32" if base.precision == "float32" else "auto"
    tuned = load_model(given, like=base.model, image_size=base.extra.get("image_size"), dtype=precision)
    _same_form(base, given, tuned.extra.get("quantised"))
    if type(tuned.model) is not type(base.model):
        raise TaskferryError(
            f"{given} is a {type(tuned.model).__name__}, the base a {type(base.model).__name__}: give the base model "
            "that was tuned"
        )
    stored = _stored(base)
    after, before = (dict(m.named_parameters()) for m in (tuned.model, stored))
    shared = {n for n in before if n in after and n not in base.absent and n not in tuned.absent}
    reshaped = {n for n in shared if before[n].shape != after[n].shape}
    tokens = resized(base.model, {name: tuple(parameter.shape) for name, parameter in after.items()})
    # Heads may differ, they are never moved, and tokens may have been added; a block or another embedding that differs
    # means another base.
    lost = sorted(n for n in ((set(before) - shared - base.absent) | reshaped) - tokens.keys() if in_body(n))
    strange = sorted(n for n in set(after) - set(before) if in_body(n))
    if lost or strange:
        raise TaskferryError(
            f"{given} lacks {len(lost)} parameters of the base and has {len(strange)} others "
            f"({', '.join([*lost, *strange][:3])} …): give the base model that was tuned"
        )
    keep = shared - reshaped
    tau = TaskVector.between({n: before[n] for n in before if n in keep}, {n: after[n] for n in keep})
    unread = tuned.extra.get("unexpected", ())
    heads = [*unread, *sorted(set(after) - set(before)), *sorted(reshaped)]
    ignored = dict.fromkeys(heads, "a task head that the base does not have in this form") | tokens
    buffers = dict(tuned.model.named_buffers())
    differ = [n for n, b in stored.named_buffers() if n in buffers and not torch.equal(b, buffers[n].to(b))]
    return Tuned(tau, None, ignored | dict.fromkeys(differ, BUFFER), given, frozenset(unread))


def _same_form(base: Loaded, given: str, form: str | None) -> None:
    """Refuse a difference that would be the rounding of one of the two."""
    stored = base.extra.get("quantised")
    if stored != form:
        raise TaskferryError(
            f"{base.given} is stored in {stored or 'plain numbers'} and {given} in {form or 'plain numbers'}: their "
            "difference would be rounding, not a fine-tune; give both in 16 bits, or the LoRA by itself"
        )


def _stored(base: Loaded) -> nn.Module:
    """Get the base with the digits that are stored: a fine-tune changes what rounding to half precision would hide."""
    if base.exact:
        return base.model
    return load_model(base.given, like=base.model, image_size=base.extra.get("image_size"), dtype="auto").model


def _from_state(path: Path, base: nn.Module) -> Tuned:
    """Read a state file, which may hold only what was trained; what it holds must fit the base."""
    state = read_state(path)
    small = [name for name, tensor in state.items() if tensor.dtype.itemsize < 2 and name.endswith("weight")]
    if small:
        raise TaskferryError(
            f"{path}: {small[0]} is quantised, and a file of weights does not say how: give the 16-bit weights"
        )
    parameters = dict(base.named_parameters())
    deltas: dict[str, Delta] = {}
    fitting = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    known = [n for n in fitting if n in parameters or any(alike(n, name) for name in parameters)]
    try:
        names = match_names(known, parameters)
    except TaskferryError as error:
        raise TaskferryError(f"{path}: {error}") from error
    if not names:
        raise TaskferryError(f"{path} and the base have no parameter in common: give the base model that was tuned")
    tokens = resized(base, {base_name: tuple(fitting[name].shape) for name, base_name in names.items()})
    for name, base_name in names.items():
        before, after = parameters[base_name].detach(), fitting[name]
        if base_name in tokens:
            continue
        if before.shape != after.shape:
            raise TaskferryError(
                f"{path}: {name} is {tuple(after.shape)}, the base has {tuple(before.shape)}: "
                "give the base model that was tuned"
            )
        if not is_finite(after):
            raise TaskferryError(f"{path}: {name} holds numbers that are not finite: it is damaged")
        change: Tensor = after.to(before.device, torch.promote_types(before.dtype, torch.float32)) - before
        if bool(change.any()):
            deltas[base_name] = change
    shared = {name for name, _ in base.named_parameters(remove_duplicate=False)} - parameters.keys()
    unread = frozenset(n for n in state if n not in names and not any(alike(n, name) for name in shared))
    ignored = dict.fromkeys((n for n in state if n in unread), "the base has no such parameter") | tokens
    return Tuned(TaskVector(deltas), None, ignored, str(path), unread)


def resized(base: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Find the base's tables of tokens that have another number of rows in `shapes`, each with the reason to stay.

    Rows of any other parameter are no tokens, and another shape there means another base.
    """
    found = {}
    for side in ("get_input_embeddings", "get_output_embeddings"):
        try:
            table = getattr(base, side, lambda: None)()
        except (NotImplementedError, AttributeError):  # a model without one of them
            continue
        ours = {id(parameter) for parameter in table.parameters()} if isinstance(table, nn.Module) else set()
        for name, parameter in base.named_parameters(remove_duplicate=False):
            before, after = tuple(parameter.shape), shapes.get(name)
            if id(parameter) in ours and after is not None and after != before and after[1:] == before[1:]:
                found[name] = (
                    f"the table of {after[0]} tokens, {before[0]} in the base: its rows are tokens, not a space of "
                    "activations, and the target has tokens of its own"
                )
    return found
