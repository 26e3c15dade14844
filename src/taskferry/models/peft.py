"""PEFT adapters: read as low-rank task vectors, written so that `PeftModel.from_pretrained` loads them.

    >>> adapter = read_adapter(Path("my-lora"), Skeleton.of(base))     # adapter.tau: s B A for every module
    >>> write_adapter(folder, moved, Skeleton.of(target), base_name="B", like=adapter)

A LoRA is read from its files by names and shapes: no weight of its base is needed, and no class or expression that a
stranger wrote is run. Adapters of other kinds go through PEFT's own conversion, with the base in memory.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import regex
import torch
from torch import Tensor, nn

from taskferry.disk.files import not_finite, read_json, write_plain_safetensors
from taskferry.errors import TaskferryError, first_line
from taskferry.layers.discovery import find_sites
from taskferry.layers.site import Site
from taskferry.models.huggingface import older_names
from taskferry.models.states import check_inside, read_state
from taskferry.taskvector import Delta, LowRank, TaskVector, match_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEPT = 1 - 1e-6  # of the energy of each module's change in a conversion: at most a thousandth of its norm is lost
SECONDS, LONGEST = 1.0, 1000  # of one match, and of one expression, in a stranger's configuration
EXPERTS = "a LoRA of experts of a mixture, or of their router: they stay as they are"
_CONVOLUTION = "a LoRA of a convolution: only linear layers move"
_MODULE = "a module trained in full beside the LoRA (modules_to_save), such as a task head"
_MERGE = "merge it into its base with PEFT (merge_and_unload) and give the merged model"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_PLAIN_NAME = re.compile(r"[\w.-]+")
_NUMBER = re.compile(r"\.\d+\.")
_REBASING = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that rewrite the base
TIED = ("lm_head", "embed_out")  # heads that many bases give the weights of their embedding
_HEADS = ("classifier", "score")  # saved by PEFT of every classifier
# Settings that are read, refused or reported below, and settings that leave the change as it is, whatever their value.
# Any other may change what an adapter computes, as PEFT adds one with every new kind of LoRA.
_KNOWN = frozenset((
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "loftq_config",
    "init_lora_weights", "bias", "modules_to_save", "target_parameters",
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying",
    "lora_dropout", "runtime_config", "velora_config", "eva_config", "corda_config", "lora_ga_config",
    "megatron_core", "qalora_group_size", "merge_weights",
))  # fmt: skip


@dataclass(frozen=True)
class Skeleton:
    """Names and shapes of a model's parameters, which an adapter must fit, without the model."""

    parameters: Mapping[str, tuple[int, ...]]
    linear: frozenset[str]  # weights of linear modules
    transposed: frozenset[str]  # those of them that are stored as [in, out]
    prefix: str = ""  # name of the model inside a model with a head ("bert")
    older: Callable[[str], str] | None = None  # from names of older releases to those of `parameters`

    @classmethod
    def of(cls, model: nn.Module) -> Skeleton:
        """Read the skeleton of a model."""
        parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
        known = cls.from_sites(parameters, find_sites(model), prefix_of(model))
        return replace(known, older=older_names(model))

    @classmethod
    def from_sites(cls, parameters: Mapping[str, tuple[int, ...]], sites: Iterable[Site], prefix: str) -> Skeleton:
        """Make the skeleton of a model whose linear layers are known, as in an alignment."""
        plain = {s.weight: s.transposed for s in sites if s.weight == f"{s.name.partition('#')[0]}.weight"}
        linear = {weight for weight in plain if len(parameters[weight]) == 2}
        return cls(parameters, frozenset(linear), frozenset(weight for weight in linear if plain[weight]), prefix)

    def in_all_blocks(self) -> Skeleton:
        """Take what is known of some blocks for all: an alignment has no layer of source blocks that pair with none."""

        def everywhere(known: frozenset[str]) -> frozenset[str]:
            kinds = {_NUMBER.sub(".#.", name) for name in known}
            return known | {name for name in self.parameters if _NUMBER.sub(".#.", name) in kinds}

        return replace(self, linear=everywhere(self.linear), transposed=everywhere(self.transposed))


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its task vector on the base, its settings, and what of it is no low-rank change."""

    tau: TaskVector
    config: Mapping[str, Any]
    headed: bool | None = None  # made on a model with a head, around the base ("bert.…"); None: names do not tell
    dtype: torch.dtype = torch.float32
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensor -> why it does not move
    saved: Mapping[str, Tensor] = field(default_factory=dict)  # a head that was trained in full beside it
    head: Mapping[str, Tensor] = field(default_factory=dict)  # one for the target, to be written beside it


def is_adapter(path: Path) -> bool:
    """Tell a folder with an adapter's configuration."""
    return (path / CONFIG).is_file()


def weights_of(folder: Path) -> Path:
    """Find an adapter's file of weights."""
    found = next((folder / n for n in (WEIGHTS, "adapter_model.bin") if (folder / n).is_file()), folder / WEIGHTS)
    if found.is_symlink():
        check_inside(folder, found)
    return found


def prefix_of(model: nn.Module) -> str:
    """Name a model inside one with a head; nothing where it has a head and calls its body otherwise (T5)."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    kind = type(model).__name__
    return "" if ("For" in kind or "Head" in kind) and not hasattr(model, prefix) else prefix


def in_body(name: str) -> bool:
    """Tell a parameter of a block or an embedding from one of a head or pooler."""
    return any(part.isdigit() for part in name.split(".")) or "embed" in name


def alike(a: str, b: str) -> bool:
    """Compare names with or without a prefix such as `model.`"""
    return a == b or a.endswith(f".{b}") or b.endswith(f".{a}")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a LoRA; refuse one whose change may not be s B A at every module."""
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise TaskferryError(
            f"{folder} is an adapter of type {config.get('peft_type')}, and only a LoRA can be moved without its base "
            "in memory: convert it with PEFT (save_as_lora), or merge it into its base and give the merged model"
        )
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_REBASING) or config.get("loftq_config"):
        raise TaskferryError(
            f"{folder} was initialised with {start}, which changes the base's own weights, so its factors are no "
            f"change of the base: convert it to a plain LoRA with PEFT, or {_MERGE}"
        )
    for key, value in config.items():
        if value and key not in _KNOWN:
            raise TaskferryError(
                f"{folder / CONFIG} sets {key[:80]}, with which an adapter may be more than a change s B A of its "
                f"layers: train it as a plain LoRA, or {_MERGE}; set it to null if it changes nothing"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    for name, number, kinds in (("r", rank, int), ("lora_alpha", alpha, (int, float))):
        if not isinstance(number, kinds) or not _is_positive(number):
            raise TaskferryError(f"{folder / CONFIG}: {name} is {number!r}, a positive number is needed")
    wanted = config.get("target_parameters") or []
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise TaskferryError(f"{folder}: target_parameters is no list of names: the adapter is damaged")
    return config


def read_adapter(folder: Path, base: Skeleton) -> Adapter:
    """Read τ = s B A with s = α / r, or α / √r for rsLoRA; ranks and α by module as PEFT reads them."""
    config = read_config(folder)
    # Parameters that are no weight of a linear module: experts in one parameter, and routers.
    stacked = [name.rpartition(".")[0] for name in config.get("target_parameters") or []]
    factors: dict[str, dict[str, Tensor]] = {}
    ignored: dict[str, str] = {}
    saved: dict[str, Tensor] = {}
    for key, tensor in read_state(weights_of(folder)).items():
        name = key.removeprefix(_PREFIX)
        factor = _FACTOR.fullmatch(name)
        if factor is not None:
            module = factor["module"].replace(".base_layer", "")
            if "experts" in module.split(".") or any(alike(module, each) for each in stacked):
                ignored[name] = EXPERTS
            elif tensor.ndim == 2:
                factors.setdefault(factor["module"], {})[factor["side"]] = tensor
            else:
                ignored[name] = _CONVOLUTION
        elif not _is_frozen(name, tensor, base, config):
            ignored[name] = _why_ignored(name)
            if ignored[name] == _MODULE and not in_body(name):
                saved[name] = tensor
    if not factors:
        why = f"all of it is {EXPERTS}" if EXPERTS in ignored.values() else f"no LoRA factors in {WEIGHTS}"
        raise TaskferryError(f"{folder}: {why}")
    dtype = next(iter(next(iter(factors.values())).values())).dtype
    names = _matched(folder, factors, base)
    deltas: dict[str, Delta] = {}
    for module, sides in factors.items():
        if set(sides) != {"A", "B"}:
            raise TaskferryError(f"{folder}: {module} has only lora_{next(iter(sides))}: the adapter is damaged")
        for side, tensor in sides.items():
            if not tensor.is_floating_point():
                raise TaskferryError(f"{folder}: lora_{side} of {module} is {tensor.dtype}, no floating-point numbers")
        A, B = sides["A"].float(), sides["B"].float()
        # Patterns are in the adapter's own names.
        rank = _by_pattern(folder, config, "rank_pattern", module, config["r"])
        alpha = _by_pattern(folder, config, "alpha_pattern", module, config["lora_alpha"])
        if A.shape[0] != rank or B.shape[1] != rank:
            raise TaskferryError(
                f"{folder}: {module}: lora_A {tuple(A.shape)} and lora_B {tuple(B.shape)} do not have the rank {rank} "
                f"of its {CONFIG}: the adapter is damaged"
            )
        change = LowRank(B * (alpha / (rank**0.5 if config.get("use_rslora") else rank)), A)
        name = names[module][1]
        change = change.T if name in base.transposed else change
        if change.shape != base.parameters[name]:
            raise TaskferryError(
                f"{folder} was made on another base model{_own_base(config)}: {name} changes by a matrix of shape "
                f"{change.shape}, the base has {base.parameters[name]}; give the base that it was made on"
            )
        deltas[name] = change
    wrong = not_finite({name: (d.left, d.right) for name, d in deltas.items() if isinstance(d, LowRank)})
    if wrong is not None:
        raise TaskferryError(f"{folder}: the change of {wrong} holds numbers that are not finite")
    headed = _is_headed([now for now, _ in names.values()], base, config)
    return Adapter(TaskVector(deltas), config, headed, dtype, ignored, saved)


def read_converted(folder: Path, base: nn.Module) -> Adapter:
    """Read an adapter of another kind (LoHa, LoKr, VeRA …) as PEFT converts it to a LoRA; the base is left as it was.

    PEFT multiplies the change of every module out and keeps the leading directions.
    """
    import peft

    config = read_json(folder / CONFIG)
    kind = str(config.get("peft_type"))
    kinds: Mapping[Any, Any] = peft.PEFT_TYPE_TO_CONFIG_MAPPING
    known = kinds.get(kind)
    if known is None:
        raise TaskferryError(f"{folder} is an adapter of type {kind[:60]}, unknown to this PEFT: {_MERGE}")
    if issubclass(known, peft.PromptLearningConfig):
        raise TaskferryError(
            f"{folder} is an adapter of type {kind}: it has learned inputs of its base and changes no weight, so there "
            "is nothing to move; train it on the new base, or train a LoRA"
        )
    strange = [key for key, value in config.items() if value and key not in known.__dataclass_fields__]
    if strange:  # PEFT would drop it without a word
        raise TaskferryError(f"{folder / CONFIG} sets {strange[0][:80]}, which this PEFT does not know: {_MERGE}")
    for key in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern"):
        value = config.get(key) or ()
        if isinstance(value, str) or not all(isinstance(name, str) and _PLAIN_NAME.fullmatch(name) for name in value):
            raise TaskferryError(f"{folder / CONFIG}: {key} holds an expression, names are needed: {_MERGE}")
    with tempfile.TemporaryDirectory(prefix="taskferry-lora-") as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Weights come from the file alone: the sizes of a configuration take no memory.
            wrapped = peft.PeftModel.from_pretrained(base, str(folder), low_cpu_mem_usage=True)
            try:
                if not wrapped.supports_lora_conversion():
                    raise TaskferryError(f"{folder} is an adapter of type {kind}, which PEFT cannot convert: {_MERGE}")
                peft.save_as_lora(place, wrapped, rank=KEPT)
            finally:
                wrapped.unload()
            adapter = read_adapter(Path(place), Skeleton.of(base))
        except TaskferryError as error:
            raise TaskferryError(str(error).replace(place, str(folder))) from error
        except Exception as error:  # whatever stands in its files, on whatever base
            raise TaskferryError(
                f"{folder}: PEFT does not convert this adapter of type {kind} on the base that was given "
                f"({first_line(error)}): give the base that was tuned, or {_MERGE}"
            ) from error
    return replace(adapter, config={**adapter.config, "task_type": config.get("task_type")})


def write_adapter(
    folder: Path,
    tau: TaskVector,
    target: Skeleton,
    *,
    base_name: str,
    revision: str | None = None,
    like: Adapter | None = None,
) -> None:
    """Write an adapter for the target; every change must be low-rank and belong to a linear module.

    The scale is part of the factors, so α = r for every module. Modules are named by their last name where
    that selects no other module of the target, by their whole path otherwise.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    rename = _renamed(target, None if like is None else like.headed)
    dtype = torch.float32 if like is None else like.dtype
    for name, delta in tau.deltas.items():
        if not isinstance(delta, LowRank) or name not in target.linear:
            raise TaskferryError(f"an adapter cannot hold the change of {name}: write a full model (--as model)")
        change = delta.T if name in target.transposed else delta
        path = rename(name.removesuffix(".weight"))
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = change.right.to(dtype).contiguous()
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = change.left.to(dtype).contiguous()
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
    leaves = sorted({path.rpartition(".")[2] for path in ranks})
    modules = {rename(name).rpartition(".")[0] for name in target.parameters}
    selected = {module for module in modules if module.rpartition(".")[2] in leaves}
    task = None if like is None else like.config.get("task_type")
    config = {
        "peft_type": "LORA",
        # PEFT asks for a head with these tasks.
        "task_type": None if task in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS") and not head else task,
        "base_model_name_or_path": base_name,
        "revision": revision,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": other,
        "alpha_pattern": other,
        "target_modules": leaves if selected == set(ranks) else list(ranks),
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


def _is_positive(value: Any) -> bool:
    """Tell a number above zero and below a million, no switch, which is no size to be refused."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e6


def _by_pattern(folder: Path, config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Look a value up as PEFT does: by the first name or expression that ends the module's path.

    Python's own matcher has no bound in time, so a stranger's expression could run for ever.
    """
    table = config.get(key) or {}
    if not isinstance(table, dict) or not all(map(_is_positive, table.values())):
        raise TaskferryError(f"{folder}: {key} is no table of positive numbers by module: the adapter is damaged")
    for pattern, value in table.items():
        if module == pattern or module.endswith(f".{pattern}"):
            return value
        if _PLAIN_NAME.fullmatch(pattern):
            continue
        if len(pattern) > LONGEST:
            raise TaskferryError(f"{folder}: {key} has an expression of {len(pattern)} letters: simplify it")
        try:
            found = regex.match(rf"(.*\.)?({pattern})$", module, timeout=SECONDS)
        except (TimeoutError, regex.error, RecursionError, OverflowError, ValueError, MemoryError) as error:
            why = "takes too long to match" if isinstance(error, TimeoutError) else f"is no expression ({error})"
            raise TaskferryError(f"{folder}: {key}: {pattern[:80]!r} {why}: simplify it") from error
        if found is not None:
            return value
    return default


def _matched(folder: Path, factors: Mapping[str, Any], base: Skeleton) -> dict[str, tuple[str, str]]:
    """Find what each module is called now, and the base's name of its weight; by older names where today's fail."""

    def found(rename: Callable[[str], str]) -> dict[str, tuple[str, str]]:
        now = {module: rename(f"{module}.weight") for module in factors}
        names = match_names(now.values(), base.parameters)
        return {module: (name, names[name]) for module, name in now.items()}

    try:
        return found(str)
    except TaskferryError as error:
        if base.older is not None:
            with suppress(TaskferryError):
                return found(base.older)
        lost = [m for m in factors if not any(alike(f"{m}.weight", name) for name in base.parameters)] or list(factors)
        if all(module.rpartition(".")[2] in TIED for module in lost):
            raise TaskferryError(
                f"{folder} changes {lost[0]}, which its base has no weight for (it shares that of the embedding): "
                "train the adapter without it"
            ) from error
        raise TaskferryError(
            f"{folder} was made on another base model{_own_base(read_config(folder))}: the base has no module "
            f"{lost[0]}; give the base that it was made on (in a transfer, perhaps --source-base and --target-base "
            "are swapped)"
        ) from error


def _own_base(config: Mapping[str, Any]) -> str:
    own = config.get("base_model_name_or_path")
    return f" ({own})" if isinstance(own, str) and own else ""


def _is_headed(modules: Iterable[str], base: Skeleton, config: Mapping[str, Any]) -> bool | None:
    """Tell whether an adapter names its modules as a model with a head does, whatever head the base has here."""
    if not base.prefix:
        return None
    if any(module.startswith(f"{base.prefix}.") for module in modules):
        return True
    bare = config.get("task_type") == "FEATURE_EXTRACTION"  # of AutoModel
    return False if bare or any(name.startswith(f"{base.prefix}.") for name in base.parameters) else None


def _renamed(target: Skeleton, headed: bool | None) -> Callable[[str], str]:
    """Rename from the target's names to those in a model with a head or without one, whichever the adapter is for."""
    own = f"{target.prefix}."
    if headed is None or not target.prefix:
        return str
    if not headed:
        return lambda name: name.removeprefix(own)
    inside = any(name.startswith(own) for name in target.parameters)  # the target has a head itself
    return str if inside else lambda name: own + name


def _is_frozen(name: str, tensor: Tensor, base: Skeleton, config: Mapping[str, Any]) -> bool:
    """Tell a table that PEFT saves beside the LoRA of an embedding or output layer: the base's own, unless resized."""
    if name.endswith("bias") and config.get("bias", "none") != "none":
        return False  # trained
    own, shape = name.replace(".base_layer.", "."), tuple(tensor.shape)
    return own != name and any(alike(own, known) and shape == size for known, size in base.parameters.items())


def _why_ignored(name: str) -> str:
    if "lora_embedding" in name:
        return "a LoRA of an embedding: its rows are tokens, not a space of activations"
    if name.endswith("bias") and name.partition(".")[0] not in _HEADS:
        return "a bias trained beside the LoRA: no adapter of another base can hold it"
    return _MODULE
