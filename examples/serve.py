"""List moved adapters for a server that reads PEFT folders by name, such as vLLM.

    python examples/serve.py moved

Every folder below `moved` with an `adapter_config.json` is one adapter, called by its folder's name. They are checked
for what such servers ask for: one base, plain LoRA, no module trained in full, one scaling. Only files are read; the
command is printed, not run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any


def adapters(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Name → (folder, settings) of every adapter."""
    found = {}
    for file in sorted(folder.rglob("adapter_config.json")):
        if (file.parent / "adapter_model.safetensors").is_file():
            found[file.parent.name] = file.parent, json.loads(file.read_text(encoding="utf-8"))
    return found


def problems(config: dict[str, Any]) -> list[str]:
    """Why a server would refuse it, or serve it wrongly."""
    found = []
    if config["peft_type"] != "LORA" or config.get("use_dora"):
        found.append("is no plain LoRA")
    if config.get("modules_to_save") or config.get("bias", "none") != "none":
        found.append("has modules or biases trained in full")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    scaling = config["lora_alpha"] / config["r"]
    if any(alphas.get(name, config["lora_alpha"]) / rank != scaling for name, rank in ranks.items()):
        found.append("scales its modules differently, which servers do not read")
    return found


def command(folder: Path) -> list[str]:
    """`vllm serve BASE --enable-lora …` for all of them."""
    found = adapters(folder)
    if not found:
        sys.exit(f"{folder} holds no adapters: a folder with adapter_config.json and adapter_model.safetensors is one")
    for name, (_, config) in found.items():
        for problem in problems(config):
            sys.exit(f"{name} {problem}")
    bases = {config["base_model_name_or_path"] for _, config in found.values()}
    if len(bases) > 1:
        sys.exit(f"{folder} holds adapters of several bases ({', '.join(sorted(bases))}): serve one base at a time")
    rank = max(max([config["r"], *(config.get("rank_pattern") or {}).values()]) for _, config in found.values())
    modules = [f"{name}={path}" for name, (path, _) in found.items()]
    return ["vllm", "serve", *bases, "--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", *modules]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(shlex.join(command(parser.parse_args().folder)))
