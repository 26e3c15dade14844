"""What a new user meets: the start, the help, the warnings, and mistakes that end with the next step."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from taskferry.cli.app import VERBS, app
from tests.helpers import folders
from tests.helpers.command import taskferry

WITHOUT_TORCH = """
import sys
from taskferry.cli import main
sys.argv = ["taskferry", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code or 0
else:
    code = 0
heavy = {"torch", "transformers", "peft", "datasets", "matplotlib", "sympy"}
if not any(not word.startswith("-") for word in sys.argv[1:]):  # of no verb: neither settings nor options
    heavy |= {"yaml", "taskferry.config", "taskferry.cli.options"}
if sys.argv[1:] == ["--help"]:
    heavy |= {"pydantic"}
if "--version" in sys.argv:
    heavy |= {"typer", "rich", "importlib.metadata"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
sys.exit(code)
"""


def light(*words: str, code: int = 0) -> str:
    """The command in a new process that may import nothing heavy, in 80 columns; with a code, what it says of it."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    variables = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "TERMINAL_WIDTH": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=900)
    assert done.returncode == code, done.stderr
    if code:
        return done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    return done.stdout


def test_version_and_help_need_no_torch() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", light("--version"))
    shown = light("--help")
    for panel, verbs in {
        "Move one fine-tune": ["example", "transfer", "evaluate", "report"],
        "Move many": ["fit", "apply", "fleet"],
        "Look and compare": ["inspect", "compare"],
    }.items():
        part = shown.split(f" {panel} ", 1)[1].split("╰", 1)[0]
        assert all(re.search(rf"^│ {verb} ", part, re.M) for verb in verbs), (panel, part)
    assert "--install-completion" in shown
    assert "<bool>" not in shown


def test_what_reads_or_copies_files_alone_needs_no_torch(tmp_path: Path) -> None:
    light("example", str(tmp_path / "demo"), "--quiet")
    (tmp_path / "moved").mkdir()
    rows = [{"parameter": "w", "status": "moved", "reason": ""}]
    record = {"verdict": {"sentence": "It moved."}, "coverage": {"rows": rows}}
    (tmp_path / "moved" / "taskferry.json").write_text(json.dumps(record))
    assert "It moved." in light("inspect", str(tmp_path / "moved"))


def test_a_missing_or_wrong_option_needs_no_torch(tmp_path: Path) -> None:
    bases = ["--source-base", str(tmp_path), "--target-base", str(tmp_path), "--source-tuned", str(tmp_path)]
    assert "--source-tuned is missing" in light("transfer", code=2)
    assert "--calibration is missing" in light("transfer", *bases, "--out", "moved", code=2)
    assert "--out is missing" in light("fit", *bases, "--calibration", "data.jsonl", code=2)
    assert "No such option" in light("transfer", "--sampels", "3", code=2)


@pytest.mark.parametrize(
    ("verb", "option", "right"),
    [
        ("transfer", "--lora", "--source-tuned"),
        ("transfer", "--model", "--source-base, --source-tuned, --target-base"),
        ("fit", "--dataset", "--calibration"),
        ("evaluate", "--lora", "--add"),
    ],
)
def test_other_words_for_an_option_name_the_right_one(verb: str, option: str, right: str) -> None:
    err = taskferry(verb, option, "x", code=2).err
    assert re.search(rf"No such option: {option} .*(options: |mean ){right}[?)\s]", " ".join(err.split())), err


@pytest.mark.parametrize(("verb", "sentence"), [pair for verbs in VERBS.values() for pair in verbs.items()])
def test_the_help_of_all_says_of_a_verb_what_its_own_help_says(verb: str, sentence: str) -> None:
    """The sentences stand apart from the verbs, so that the help of all imports none."""
    shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output
    assert sentence in shown
    assert "<bool>" not in shown


def test_options_stand_in_three_groups_with_what_must_be_given_first() -> None:
    shown = light("transfer", "--help")
    groups = [shown.index(f" {name} ") for name in ("What to move", "How", "Where, and in what form")]
    assert groups == sorted(groups)
    assert shown.count("(required)") == 3
    for option in ("--source-tuned", "--target-base", "--calibration", "--out"):
        assert groups[0] < shown.index(f"{option} ") < groups[1], option
    options = set(re.findall(r"^│ \*? +(--[a-z-]+)", shown, re.M))
    assert len(options - {"--dry-run", "--quiet", "--json", "--help"}) <= 20, options
    assert "<bool>" not in shown
    words = " ".join(re.sub(r"\s*│\s*│\s*", " ", shown.replace("\n", "")).split())
    assert "lora, model or task-vector" in words
    assert "Example: taskferry transfer --source-tuned my-lora" in shown


def test_the_command_alone_says_what_to_do_first() -> None:
    shown = light()
    assert "taskferry example demo" in shown
    assert "taskferry transfer --source-tuned my-lora" in shown


def test_a_terminal_shows_something_before_torch_is_there(tmp_path: Path) -> None:
    """In a terminal a line stands there while Python still imports; `torch` here never ends."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    ours, theirs = pty.openpty()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "taskferry", "inspect", "x"]
    variables = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "80"}
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    shown, end = b"", time.monotonic() + 30  # a second on a quiet machine; no test machine is one
    try:
        while b"starting" not in shown and time.monotonic() < end:
            if select.select([ours], [], [], 0.2)[0]:
                shown += os.read(ours, 4096)
    finally:
        running.kill()
        running.wait()
        os.close(ours)
        os.close(theirs)
    assert b"starting" in shown


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("transformers", "peft", "datasets"):
        pytest.importorskip(needed)
    root = tmp_path_factory.mktemp("world")
    folders.causal(root / "base-a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "base-b", "Qwen3ForCausalLM", 24, 3, 2)
    folders.lora(root / "base-a", root / "my-lora", ["q_proj", "v_proj"], task_type="CAUSAL_LM")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.prompts(root / "data.jsonl")
    return root


def given(world: Path, out: Path, **changed: object) -> list[object]:
    inputs = {"source_base": world / "base-a", "source_tuned": world / "my-lora", "target_base": world / "base-b",
              "calibration": world / "data.jsonl", "out": out, **changed}  # fmt: skip
    return [*(part for name, value in inputs.items() for part in (f"--{name.replace('_', '-')}", value)), "--force"]


def test_one_unit_of_loss(world: Path, tmp_path: Path) -> None:
    """The verdict's loss of the unchanged target is the loss per token that evaluate prints of the same samples."""
    data = tmp_path / "texts.jsonl"  # of answers a random source ends none, so that their ends would not count
    rows = [json.loads(line) for line in (world / "data.jsonl").read_text().splitlines()]
    data.write_text("".join(json.dumps({"text": row["prompt"] + row["completion"]}) + "\n" for row in rows))
    options = given(world, tmp_path / "out", calibration=data)
    told = taskferry("transfer", *options, "--paper", "--samples", len(rows), "--json").json
    scored = taskferry("evaluate", world / "base-b", "--test", data, "--json").json
    assert told["nearness"]["relation"] == "not comparable"  # other widths
    assert told["verdict"]["loss_unit"] == "per token"
    assert told["verdict"]["loss_before"] == pytest.approx(scored["loss"], rel=1e-4)
    assert " per token" in told["verdict"]["sentence"]
    assert dict(map(tuple, told["scale_curve"]))[0.0] == told["verdict"]["loss_before"]


def test_warnings_that_cannot_be_missed(world: Path, tmp_path: Path) -> None:
    """Few samples, a loss that went up, and a module trained in full: in the terminal, the card and the report."""
    for seed in range(12):  # of random changes of random models, about half make the loss worse
        adapter, out = tmp_path / f"with-head-{seed}", tmp_path / f"out-{seed}"
        folders.lora(world / "base-a", adapter, ["q_proj"], seed=seed, modules_to_save=["lm_head"])
        options = given(world, out, source_tuned=adapter)
        ran = taskferry("transfer", *options, "--method", "naive", "--scale", 50, "--samples", 3)
        shown = " ".join(ran.out.split())
        if "went UP" in shown:
            break
    assert "It does harm: " in shown
    assert "went UP" in shown
    assert "warning only 3 samples" in shown
    assert "lm_head" in shown.split("warning", 1)[1]
    assert f"next rm -r {out}, then the same command without --scale" in shown
    card = (out / "README.md").read_text()
    assert card.count("> **Warning:**") >= 3
    taskferry("report", out)
    assert "Warning: only 3 samples" in (out / "report.html").read_text()


def test_the_last_line_can_be_pasted(world: Path, tmp_path: Path) -> None:
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "data.jsonl").write_text((world / "data.jsonl").read_text())
    (desk / "test.jsonl").write_text((world / "data.jsonl").read_text())
    options = given(world, Path("moved"), calibration="data.jsonl")
    ran = taskferry("transfer", *options, "--method", "bico", "--scale", "0.01", "--samples", 8, cwd=desk)
    if "does harm" in ran.out:  # which way a tiny step goes rests on the tie-breaks of a trained tokenizer
        assert "rm -r moved, then the same command without --scale" in ran.out
        return
    line = next(line for line in ran.out.splitlines() if "taskferry evaluate" in line)
    words = line.split("taskferry ", 1)[1].split()
    assert words[-2:] == ["--test", "test.jsonl"]
    assert "per token" in taskferry(*words, cwd=desk).out


def test_fit_ends_with_a_command_of_what_it_was_given(world: Path, tmp_path: Path) -> None:
    folders.shifted(world / "base-a", tmp_path / "tuned")
    for name, tuned in {"nothing": None, "model": tmp_path / "tuned"}.items():
        options = given(world, tmp_path / name, source_tuned=tuned)[:-1]  # fit has no --force
        if tuned is None:
            del options[2:4]
        ran = taskferry("fit", *options, "--samples", 6, "--method", "bico")
        verb, alignment, shown, *more = ran.out.split("taskferry ", 1)[1].split()
        assert (verb, Path(alignment)) == ("apply", tmp_path / name)
        assert shown == str(tuned or "ADAPTER")
        taskferry(verb, alignment, shown.replace("ADAPTER", str(world / "my-lora")), *more, cwd=tmp_path)
        assert (tmp_path / f"{Path(shown).name}-moved" / "taskferry.json").is_file()


def test_what_is_said_of_a_mistake(world: Path, tmp_path: Path) -> None:
    def refused(*words: str, more: tuple[object, ...] = (), **changed: object) -> None:
        err = taskferry("transfer", *given(world, tmp_path / "out", **changed), *more, code=2).err
        assert all(word in err for word in words), err

    refused("--source-base: ", "did you mean", "base-a?", source_base=world / "base-aa")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    refused("empty.jsonl is empty", calibration=empty)
    asked = tmp_path / "asked.jsonl"
    asked.write_text(2 * (json.dumps({"question": "Where?", "answer": "Here."}) + "\n"))
    refused("rename question to prompt and rename answer to completion", calibration=asked)
    refused("another base model", str(world / "base-a"), "swapped",
            source_base=world / "bert", target_base=world / "bert")  # fmt: skip
    settings = tmp_path / "move.yaml"
    settings.write_text("source_tunned: my-lora\n")
    ran = taskferry("transfer", "--config", settings, code=2)
    assert "did you mean source_tuned?" in ran.err
    assert "taskferry transfer --help" in ran.err


def test_inspect_of_an_output_has_one_line_for_each_reason(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    taskferry("transfer", *given(world, out), "--paper", "--samples", 8, "--quiet")
    rows = taskferry("inspect", out).out.splitlines()
    every = taskferry("inspect", out, "--all").out.splitlines()
    assert len(rows) < 20 < len(every)


def test_a_damaged_head_is_told(world: Path, tmp_path: Path) -> None:
    """Resized embeddings beside a LoRA are named in the verdict."""
    adapter = Path(folders.lora(world / "base-a", tmp_path / "resized", ["q_proj"]))
    file = adapter / "adapter_model.safetensors"
    state = load_file(file)
    state["base_model.model.model.embed_tokens.weight"] = next(iter(state.values())).new_zeros(402, 16)
    save_file(state, file, metadata={"format": "pt"})
    options = given(world, tmp_path / "out", source_tuned=adapter)
    told = taskferry("transfer", *options, "--paper", "--samples", 8, "--json").json
    assert any("embed_tokens" in text for text in told["verdict"]["warnings"])
