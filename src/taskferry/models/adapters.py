"""PEFT LoRA adapters: read as low-rank task vectors, written so that `PeftModel.from_pretrained` loads them.

    >>> adapter = read_adapter(Path("my-lora"), Skeleton.of(base))     # adapter.tau: s B A for every module
    >>> write_adapter(folder, moved, Skeleton.of(target), base_name="B", like=adapter)

The files are read and written as they are; peft itself is not needed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from taskferry.disk.files import not_finite, write_plain_safetensors
from taskferry.errors import TaskferryError
from taskferry.layers.discovery import find_sites
from taskferry.layers.experts import ROUTER
from taskferry.layers.site import Site
from taskferry.models.adapter_config import CONFIG, read_config
from taskferry.models.expert_adapters import (
    OLD_NAMES,
    alike,
    old_experts,
    parameters_of,
    stacked,
    unstacked,
    wrapped,
)
from taskferry.models.folders import check_inside
from taskferry.models.huggingface import older_names
from taskferry.models.patterns import Patterns
from taskferry.models.states import read_state
from taskferry.taskvector import Delta, LowRank, TaskVector, match_names

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
TIED = ("lm_head", "embed_out")  # heads that many bases give the weights of their embedding
HEADS = ("classifier", "score")  # what PEFT saves of a classifier, asked for or not
_NUMBER = re.compile(r"\.\d+\.")
_CONVOLUTION = "a LoRA of a convolution: only linear layers move"
_MODULE = "a module trained in full beside the LoRA (modules_to_save), such as a task head"
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True)
class Skeleton:
    """What an adapter must fit: names and shapes of a model's parameters, without the model."""

    parameters: Mapping[str, tuple[int, ...]]
    linear: frozenset[str]  # weights of linear modules
    transposed: frozenset[str]  # those of them, and of the stacked ones, that are stored as [in, out]
    prefix: str = ""  # what the model is called inside a model with a head ("bert")
    older: Callable[[str], str] | None = None  # from names of older releases to those of `parameters`
    stacked: frozenset[str] = frozenset()  # weights of experts, all in one parameter
    routers: frozenset[str] = frozenset()  # matrices of modules that PEFT knows by their parameter alone

    @classmethod
    def of(cls, model: nn.Module) -> Skeleton:
        """The skeleton of a model."""
        parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
        known = cls.from_sites(parameters, find_sites(model), prefix_of(model))
        return replace(known, older=older_names(model))

    @classmethod
    def from_sites(cls, parameters: Mapping[str, tuple[int, ...]], sites: Iterable[Site], prefix: str) -> Skeleton:
        """The skeleton of a model whose sites are known, as in an alignment."""
        linear, transposed, stacked, routers = set(), set(), set(), set()
        for site in sites:
            if site.expert is not None:
                stacked.add(site.weight)
            elif site.role == ROUTER:
                routers.add(site.weight)
            elif site.weight == f"{site.name.partition('#')[0]}.weight" and len(parameters[site.weight]) == 2:
                linear.add(site.weight)
            if site.transposed and site.weight in linear | stacked:
                transposed.add(site.weight)
        sets = (frozenset(each) for each in (stacked, routers))
        return cls(parameters, frozenset(linear), frozenset(transposed), prefix, None, *sets)

    def in_all_blocks(self) -> Skeleton:
        """With what is known of some blocks taken for all: a source may have blocks that no site of an alignment is of.

        Blocks are told apart by the numbers in their names.
        """

        def everywhere(known: frozenset[str]) -> frozenset[str]:
            kinds = {_NUMBER.sub(".#.", name) for name in known}
            return known | {name for name in self.parameters if _NUMBER.sub(".#.", name) in kinds}

        return replace(
            self,
            linear=everywhere(self.linear),
            transposed=everywhere(self.transposed),
            stacked=everywhere(self.stacked),
            routers=everywhere(self.routers),
        )

    @property
    def by_parameter(self) -> frozenset[str]:
        """Weights that an adapter names as parameters.

        Beside experts PEFT takes the names that older releases gave to theirs for experts too.
        """
        more = {n for n in self.linear if self.stacked and n.removesuffix(".weight").rsplit(".", 1)[-1] in OLD_NAMES}
        return self.stacked | self.routers | more


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its task vector on the base, its settings, and what of it is no low-rank change."""

    tau: TaskVector
    config: Mapping[str, Any]
    headed: bool | None = None  # was made on a model with a head, around the base ("bert.…"); None: names do not tell
    dtype: torch.dtype = torch.float32
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensor -> why it is not moved
    saved: Mapping[str, Tensor] = field(default_factory=dict)  # a head that was trained in full beside it
    head: Mapping[str, Tensor] = field(default_factory=dict)  # one for the target, to be written beside it


def prefix_of(model: nn.Module) -> str:
    """What a model is called inside one with a head; nothing where it has a head and calls its body otherwise (T5)."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    kind = type(model).__name__
    return "" if ("For" in kind or "Head" in kind) and not hasattr(model, prefix) else prefix


def in_body(name: str) -> bool:
    """Whether a parameter belongs to a block or an embedding, not to a head or pooler."""
    return any(part.isdigit() for part in name.split(".")) or "embed" in name


def is_adapter(path: Path) -> bool:
    """A folder with an adapter's configuration."""
    return (path / CONFIG).is_file()


def weights_of(folder: Path) -> Path:
    """Its file of weights."""
    found = next((folder / n for n in (WEIGHTS, "adapter_model.bin") if (folder / n).is_file()), folder / WEIGHTS)
    if found.is_symlink():
        check_inside(folder, found)
    return found


def read_adapter(folder: Path, base: Skeleton) -> Adapter:
    """τ = s B A with s = α / r, or α / √r for rsLoRA; ranks and α by module as PEFT reads them."""
    config = read_config(folder)
    alphas, ranks = (Patterns(folder, name, config.get(name)) for name in ("alpha_pattern", "rank_pattern"))
    weights = weights_of(folder)
    factors: dict[str, dict[str, Tensor]] = {}
    ignored: dict[str, str] = {}
    saved: dict[str, Tensor] = {}
    for key, tensor in read_state(weights).items():
        name = key.removeprefix(_PREFIX)
        factor = _FACTOR.fullmatch(name)
        if factor is not None and tensor.ndim == 2:
            factors.setdefault(factor["module"], {})[factor["side"]] = tensor
        else:
            if _frozen(name, tensor, base, config):
                continue
            ignored[name] = _CONVOLUTION if factor is not None else _why_ignored(name)
            if ignored[name] == _MODULE and not in_body(name):
                saved[name] = tensor
    if not factors:
        raise TaskferryError(f"{folder}: no LoRA factors in {weights.name}")
    dtype = next(iter(next(iter(factors.values())).values())).dtype

    def change_of(module: str, sides: Mapping[str, Tensor], experts: int = 0) -> LowRank:
        rank, alpha = ranks.of(module, config["r"]), alphas.of(module, config["lora_alpha"])
        return _change(folder, module, sides, rank, alpha / (rank**0.5 if config.get("use_rslora") else rank), experts)

    found: dict[str, LowRank] = {}
    modules = []
    for name, (module, sides) in parameters_of(folder, factors, config.get("target_parameters"), base).items():
        found[name] = change_of(name, sides, base.parameters[name][0] if name in base.stacked else 0)
        modules.append(module)
    found |= old_experts(factors, change_of, base)
    names = _matched(folder, factors, base)
    for module, sides in factors.items():
        found[names[module][1]] = change_of(module, sides)  # patterns are in the adapter's own names
    deltas: dict[str, Delta] = {}
    for name, change in found.items():
        change = change.T if name in base.transposed else change
        shape = base.parameters[name]
        if change.shape != shape:
            raise TaskferryError(
                f"{folder} was made on another base model{_own_base(folder)}: {name} changes by a matrix of shape "
                f"{change.shape}, the base has {shape}; give the base that it was made on"
            )
        deltas[name] = change
    wrong = not_finite({name: (d.left, d.right) for name, d in deltas.items() if isinstance(d, LowRank)})
    if wrong is not None:
        raise TaskferryError(f"{folder}: the change of {wrong} holds numbers that are not finite")
    headed = _is_headed([*(now for now, _ in names.values()), *modules], base, config)
    return Adapter(TaskVector(deltas), config, headed, dtype, ignored, saved)


def write_adapter(
    folder: Path,
    tau: TaskVector,
    target: Skeleton,
    *,
    base_name: str,
    revision: str | None = None,
    like: Adapter | None = None,
) -> None:
    """An adapter for the target; every change must be low-rank and belong to a linear module.

    The scale is part of the factors, so α = r for every module. Modules are named by their last name where
    that selects no other module of the target, by their whole path otherwise.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    of_peft = _renamed(target, None if like is None else like.headed)
    dtype = torch.float32 if like is None else like.dtype
    by_parameter = [name for name in tau.deltas if name in target.by_parameter]
    for name, delta in tau.deltas.items():
        if not isinstance(delta, LowRank) or name not in target.linear | target.by_parameter:
            raise TaskferryError(f"an adapter cannot hold the change of {name}: write a full model (--as-model)")
        change = delta.T if name in target.transposed else delta
        path = of_peft(name.removesuffix(".weight"))
        A, B, module = change.right, change.left, path
        if name in by_parameter:
            module = of_peft(wrapped(name, by_parameter, target.parameters))
            A, B = stacked(A, B) if name in target.stacked else (A, B)
            path = of_peft(name)
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = A.to(dtype).contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = B.to(dtype).contiguous()
        ranks[path] = change.rank
    head = {} if like is None else like.head
    tensors |= {f"{_PREFIX}{name}": tensor.to(dtype).contiguous() for name, tensor in head.items()}
    wrong = not_finite({name: (tensor,) for name, tensor in tensors.items()})
    if wrong is not None:
        raise TaskferryError(f"{wrong} does not fit into {dtype}: give a smaller --scale")
    if not ranks:
        raise TaskferryError("nothing moved, so there is no adapter to write")
    rank = Counter(ranks.values()).most_common(1)[0][0]
    other = {path: r for path, r in ranks.items() if r != rank}
    config = {
        "peft_type": "LORA",
        "task_type": _task_type(like),
        "base_model_name_or_path": base_name,
        "revision": revision,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": other,
        "alpha_pattern": other,
        "target_modules": _target_modules(
            map(of_peft, target.parameters), [path for path in ranks if path not in set(map(of_peft, by_parameter))]
        ),
        "target_parameters": sorted(map(of_peft, by_parameter)) or None,
        "fan_in_fan_out": bool(target.transposed & set(tau.deltas)),
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in head}) or None,
    }
    write_plain_safetensors(folder / WEIGHTS, tensors)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _is_headed(modules: Iterable[str], base: Skeleton, config: Mapping[str, Any]) -> bool | None:
    """Whether an adapter names its modules as a model with a head does, whatever head the base has here."""
    if not base.prefix:
        return None
    if any(module.startswith(f"{base.prefix}.") for module in modules):
        return True
    bare = config.get("task_type") == "FEATURE_EXTRACTION"  # of AutoModel
    return False if bare or any(name.startswith(f"{base.prefix}.") for name in base.parameters) else None


def _renamed(target: Skeleton, headed: bool | None) -> Callable[[str], str]:
    """From the target's names to those in a model with a head or without one, whichever the adapter is for."""
    own = f"{target.prefix}."
    if headed is None or not target.prefix:
        return str
    if not headed:
        return lambda name: name.removeprefix(own)
    inside = any(name.startswith(own) for name in target.parameters)  # the target has a head itself
    return str if inside else lambda name: own + name


def _frozen(name: str, tensor: Tensor, base: Skeleton, config: Mapping[str, Any]) -> bool:
    """A table that PEFT saves beside the LoRA of an embedding or of an output layer: the base's own, unless resized."""
    if name.endswith("bias") and config.get("bias", "none") != "none":
        return False  # trained
    own, shape = name.replace(".base_layer.", "."), tuple(tensor.shape)
    return own != name and any(alike(own, known) and shape == size for known, size in base.parameters.items())


def _matched(folder: Path, factors: Mapping[str, Mapping[str, Tensor]], base: Skeleton) -> dict[str, tuple[str, str]]:
    """What each module is called now, and the base's name of its weight; by older names where today's fail."""

    def found(now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        names = match_names([f"{module}.weight" for module in now.values()], base.parameters)
        return {module: (name, names[f"{name}.weight"]) for module, name in now.items()}

    try:
        return found({module: module for module in factors})
    except TaskferryError as error:
        if base.older is not None:
            older = base.older
            with suppress(TaskferryError):
                return found({module: older(f"{module}.weight").removesuffix(".weight") for module in factors})
        lost = [module for module in factors if not _known(module, base)]
        if lost and all(module.rpartition(".")[2] in TIED for module in lost):
            raise TaskferryError(
                f"{folder} changes {lost[0]}, which its base has no weight for (it shares that of the embedding): "
                "train the adapter without it"
            ) from error
        raise TaskferryError(
            f"{folder} was made on another base model{_own_base(folder)}: the base has no module "
            f"{(lost or list(factors))[0]}; give the base that it was made on (in a transfer, perhaps --source-base "
            "and --target-base are swapped)"
        ) from error


def _known(module: str, base: Skeleton) -> bool:
    with suppress(TaskferryError):
        return bool(match_names([f"{module}.weight"], base.parameters))
    return False


def _own_base(folder: Path) -> str:
    """What the adapter itself says."""
    own = read_config(folder).get("base_model_name_or_path")
    return f" ({own})" if isinstance(own, str) and own else ""


def _change(folder: Path, module: str, sides: Mapping[str, Tensor], rank: int, scale: float, experts: int) -> LowRank:
    """s B A, [out, in], or [experts, out, in]."""
    if set(sides) != {"A", "B"}:
        raise TaskferryError(f"{folder}: {module} has only lora_{next(iter(sides))}: the adapter is damaged")
    for side, factor in sides.items():
        if not factor.is_floating_point():
            raise TaskferryError(f"{folder}: lora_{side} of {module} is {factor.dtype}, no floating-point numbers")
    A, B = sides["A"].float(), sides["B"].float()
    if A.shape[0] != rank * max(1, experts) or B.shape[1] != rank * max(1, experts):
        raise TaskferryError(
            f"{folder}: {module}: lora_A {tuple(A.shape)} and lora_B {tuple(B.shape)} do not have the rank {rank} of "
            f"its {CONFIG}{f' for {experts} experts' if experts else ''}: the adapter is damaged"
        )
    if experts:
        A, B = unstacked(A, B, experts)
    return LowRank(B * scale, A)


def _why_ignored(name: str) -> str:
    if "lora_embedding" in name:
        return "a LoRA of an embedding: its rows are tokens, not a space of activations"
    if name.endswith("bias") and name.partition(".")[0] not in HEADS:
        return "a bias trained beside the LoRA: no adapter of another base can hold it"
    return _MODULE


def _task_type(like: Adapter | None) -> str | None:
    """Classification adapters bring a head of their own: where it is not moved, PEFT would not load them."""
    kind = None if like is None else like.config.get("task_type")
    return None if kind in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS") and not (like and like.head) else kind


def _target_modules(parameters: Iterable[str], paths: list[str]) -> list[str]:
    if not paths:
        return []
    modules = {name.rpartition(".")[0] for name in parameters}
    leaves = sorted({path.rsplit(".", 1)[-1] for path in paths})
    selected = {module for module in modules if module.rsplit(".", 1)[-1] in leaves}
    return leaves if selected == set(paths) else paths
