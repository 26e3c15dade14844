"""Model cards as a hub's own library reads them, and sending to a stand-in of a hub on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from taskferry import TaskferryError
from taskferry.integrations.hub import add_score, card_fields, hub_id, pipeline_of, push, read_card
from taskferry.jobs.card import write_card
from taskferry.methods import find
from tests.helpers import folders
from tests.helpers.command import taskferry

pytest.importorskip("transformers")
pytest.importorskip("peft")

RECORD = {
    "settings": {"source_base": "org/a", "source_tuned": "me/lora", "target_base": "org/b@main",
                 "calibration": "org/data", "method": "bico"},
    "verdict": {"sentence": "12 of 20 parameters moved.", "scale": 1.0},
    "provenance": {"target": {"class": "Qwen3ForCausalLM"}, "method": "bico"},
    "command": "taskferry transfer …",
    "coverage_summary": "12 of 20",
}  # fmt: skip


def card_of(folder: Path) -> Any:
    return ModelCard.load(folder / "README.md")


def test_a_hub_reads_base_relation_library_task_and_data(tmp_path: Path) -> None:
    write_card(tmp_path, RECORD, adapter=True)
    data = card_of(tmp_path).data
    assert data.base_model == "org/b"
    assert data.to_dict()["base_model_relation"] == "adapter"
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-generation")
    assert data.datasets == ["org/data"]
    assert data.tags == ["taskferry", "task-vector-transfer", "lora"]
    assert "12 of 20 parameters moved." in card_of(tmp_path).text
    assert f"- method: bico; {find('bico').shown.card}" in card_of(tmp_path).text


def test_a_folder_on_this_machine_is_no_name_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("models/b") is None
    assert hub_id("models/c@v1") == "models/c"
    assert hub_id("/models/c") is None
    fields = card_fields(tmp_path, {**RECORD, "settings": {"target_base": "models/b"}}, adapter=False).to_dict()
    assert "base_model" not in fields
    assert "datasets" not in fields


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("LlamaForCausalLM", "text-generation"),
        ("BertModel", "feature-extraction"),
        ("CLIPModel", "zero-shot-image-classification"),
        ("CustomTextCLIP", "zero-shot-image-classification"),
        ("VisionTransformer", "image-feature-extraction"),
        ("T5ForConditionalGeneration", None),
        ("", None),
    ],
)
def test_the_task_of_a_class(kind: str, task: str | None) -> None:
    assert pipeline_of(kind) == task


@pytest.mark.parametrize(
    ("file", "content", "library"),
    [
        ("config.json", '{"model_type": "bert"}', "transformers"),
        ("config.json", '{"architecture": "deit_tiny_patch16_224"}', "timm"),
        ("open_clip_config.json", "{}", "open_clip"),
    ],
)
def test_the_library_follows_from_the_files(file: str, content: str, library: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content)
    assert card_fields(tmp_path, RECORD, adapter=False)["library_name"] == library


def test_a_hostile_name_stays_one_value(tmp_path: Path) -> None:
    name = 'org/b"\nlicense: stolen\n---\n# no'
    record = {**RECORD, "settings": {**RECORD["settings"], "target_base": name, "calibration": "a: b\n- c"}}
    write_card(tmp_path, record, adapter=True)
    fields = read_card(tmp_path).data.to_dict()
    assert "license" not in fields
    assert set(fields) == {"library_name", "pipeline_tag", "tags"}


def test_scores_become_results_that_a_hub_reads(tmp_path: Path) -> None:
    write_card(tmp_path, RECORD, adapter=True)
    text = card_of(tmp_path).text
    test = tmp_path / "test.jsonl"
    test.touch()
    for value in (3.5, 3.25):  # the second look at the same data replaces the first
        add_score(tmp_path, data=str(test), metric="loss", value=value, samples=200, how="next tokens")
    add_score(tmp_path, data="org/other", metric="accuracy", value=81.5, samples=100, how="its head")
    data = card_of(tmp_path).data
    assert card_of(tmp_path).text == text
    found = {(r.dataset_type, r.metric_type): r.metric_value for r in data.eval_results}
    assert found == {("test.jsonl", "loss"): 3.25, ("org/other", "accuracy"): 81.5}
    assert all(r.task_type == "text-generation" for r in data.eval_results)


def test_fields_and_results_of_others_stay(tmp_path: Path) -> None:
    """A person may have added to the card before it is scored."""
    write_card(tmp_path, RECORD, adapter=True)
    card = card_of(tmp_path)
    card.data["license"], card.data["my_own"] = "mit", {"a": [1, "b"]}
    card.save(tmp_path / "README.md")
    for data in ("org/first", "org/second"):
        add_score(tmp_path, data=data, metric="loss", value=2.0, samples=10, how="next tokens")
    fields = card_of(tmp_path).data.to_dict()
    assert (fields["license"], fields["my_own"]) == ("mit", {"a": [1, "b"]})
    assert fields["base_model_relation"] == "adapter"
    assert fields["model-index"] == [
        {
            "name": tmp_path.name,
            "results": [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"name": name, "type": f"org/{name}"},
                    "metrics": [{"type": "loss", "value": 2.0, "name": "loss on 10 samples, by next tokens"}],
                }
                for name in ("first", "second")
            ],
        }
    ]


@pytest.mark.parametrize(
    "text",
    ["", "# mine", "---\n\n---\n# mine", "---\nlicense: mit\n# no end"],
)
def test_a_card_without_fields_is_refused(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(TaskferryError, match="an output of taskferry"):
        read_card(tmp_path)
    assert capfd.readouterr().err == ""


BOMB = "a: &a [x, x]\n" + "".join(f"{n}: &{n} [*{b}, *{b}]\n" for b, n in zip("abcdefgh", "bcdefghi", strict=True))
INDEX = "model-index: [{name: a, results: [{task: {type: t}, dataset: {type: d, name: n}, metrics: %s}]}]"


@pytest.mark.parametrize(
    "head",
    [
        "[",
        "- a",
        "3: a",
        "a: " + "[" * 5000,
        "d: 2001-99-99",
        "x: !!python/object/apply:os.system [true]",
        "to_dict: a",
        "to_yaml: a",
        "ignore_metadata_errors: true",
        "eval_results: 3",
        "model-index: 3",
        "model-index: [{name: a, results: [{task: t}]}]",
        INDEX % "[{type: loss}]",
        INDEX % "[{type: loss, value: null}]",
        INDEX.replace("type: d", "type: [d]") % "[{type: loss, value: 3}]",
        BOMB + INDEX % "[{type: loss, value: *i}]",
    ],
)
def test_a_hostile_card_gives_one_sentence(head: str, tmp_path: Path) -> None:
    card = f"---\n{head}\n---\n# mine"
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(TaskferryError, match=r"README\.md cannot be read as a model card: .") as refused:
        add_score(tmp_path, data="x", metric="loss", value=1, samples=1, how="x")
    assert len(str(refused.value).splitlines()) == 1
    assert (tmp_path / "README.md").read_text() == card


def test_a_folder_without_a_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskferryError, match=r"README\.md"):
        add_score(tmp_path, data="x", metric="loss", value=1, samples=1, how="x")


class StandIn(BaseHTTPRequestHandler):
    """What a hub's protocol asks of small repositories: create, say how each file is sent, take files, commit."""

    protocol_version = "HTTP/1.1"
    received: dict[str, bytes]
    asked: list[tuple[str, Any]]

    def _answer(self, data: Any, code: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        host = f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_test":
            self._answer({"error": "who are you?"}, 401)
        elif path == "/api/repos/create":
            self.asked.append(("create", json.loads(body)))
            self._answer({"url": f"{host}/me/moved", "name": "me/moved"})
        elif path == "/api/validate-yaml":
            self.asked.append(("card", json.loads(body)["content"]))
            self._answer({"errors": [], "warnings": []})
        elif path.startswith("/api/models/me/moved/preupload/"):
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in files
            ]  # fmt: skip
            self._answer({"files": modes})
        elif path == "/me/moved.git/info/lfs/objects/batch":
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{host}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif path.startswith("/api/models/me/moved/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.received[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    self.received[line["value"]["path"]] = self.received.pop(f"lfs:{line['value']['oid']}")
            self._answer({"commitUrl": f"{host}/me/moved/commit/1", "commitOid": "1", "hookOutput": ""})
        else:
            self._answer({"error": path}, 404)

    def do_PUT(self) -> None:
        body = self._body()
        self.received[f"lfs:{hashlib.sha256(body).hexdigest()}"] = body
        self._answer({})

    def do_GET(self) -> None:
        self._answer({"error": self.path}, 404)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[tuple[str, type[StandIn]]]:
    class Handler(StandIn):
        received: dict[str, bytes] = {}  # noqa: RUF012
        asked: list[tuple[str, Any]] = []  # noqa: RUF012

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Handler
    server.shutdown()
    thread.join()


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(tmp_path / "b", "Qwen3ForCausalLM", 24, 3, 2)
    folders.lora(tmp_path / "a", tmp_path / "lora", ["q_proj"], task_type="CAUSAL_LM")
    folders.prompts(tmp_path / "data.jsonl")
    taskferry("transfer", "--source-base", "a", "--source-tuned", "lora", "--target-base", "b", "--calibration",
              "data.jsonl", "--scale", 1, "--force", "--out", "moved", cwd=tmp_path)  # fmt: skip
    return tmp_path / "moved"


def test_push_sends_the_folder_and_nothing_of_it_changes(moved: Path, stand_in: tuple[str, type[StandIn]]) -> None:
    """Against the stand-in above: a real hub cannot be reached here."""
    address, handler = stand_in
    taskferry("evaluate", "b", "--add", "moved", "--test", "data.jsonl", "--card", "moved", cwd=moved.parent)
    before = {file.name: file.read_bytes() for file in moved.iterdir()}
    online = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    told = taskferry("push", moved, "me/moved", "--base-model", "org/b", "--json", **online)
    assert told.json == {"repository": f"{address}/me/moved", "private": True}
    created = handler.asked[0][1]
    assert created.get("private") is True or created.get("visibility") == "private"  # older and newer protocol
    assert set(handler.received) == set(before)
    assert handler.received["adapter_model.safetensors"] == before["adapter_model.safetensors"]
    assert json.loads(handler.received["adapter_config.json"])["base_model_name_or_path"] == "org/b"
    (moved.parent / "got.md").write_bytes(handler.received["README.md"])
    data = ModelCard.load(moved.parent / "got.md").data
    assert (data.base_model, data.to_dict()["base_model_relation"]) == ("org/b", "adapter")
    assert [r.metric_type for r in data.eval_results] == ["exact_match"]  # its samples are prompts with answers
    assert {file.name: file.read_bytes() for file in moved.iterdir()} == before

    refused = taskferry(
        "push", moved, "me/moved", "--base-model", "org/b", code=2, **{**online, "HF_TOKEN": "hf_other"}
    )
    assert "refused me/moved" in refused.err


def test_push_says_what_to_mend(moved: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskferryError, match=r"--base-model ORG/NAME"):
        push(moved, "me/moved")
    with pytest.raises(TaskferryError, match="OWNER/NAME"):
        push(moved, "moved", base_model="org/b")
    with pytest.raises(TaskferryError, match=r"taskferry\.json"):
        push(tmp_path, "me/moved")
    card = read_card(moved)
    card.data["base_model"] = "org/b"
    card.save(moved / "README.md")
    assert "HF_HUB_OFFLINE" in taskferry("push", moved, "me/moved", code=2).err
