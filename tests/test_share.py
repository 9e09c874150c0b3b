"""An exported model is sent to a stand-in of the hub, and loaded from there by its name."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cramming_nb.app.export import ADDED_FILES, SHARED_FILES

FILES = {*SHARED_FILES, *ADDED_FILES} - {"model.onnx"}
SHA = "0123456789abcdef0123456789abcdef01234567"


class StandIn(BaseHTTPRequestHandler):
    """What the hub answers when a model is made, a commit is sent, and a file is asked for."""

    def log_message(self, *arguments):
        pass

    def answer(self, content: dict | bytes, status: int = 200, **headers: str):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub = self.server
        hub.asked.append((self.path, self.headers.get("Authorization")))
        if self.headers.get("Authorization") != "Bearer hf_good":
            self.answer(dict(error="Invalid username or password."), 401)
        elif self.path == "/api/validate-yaml":
            hub.head = json.loads(body)["content"].split("---")[1]
            self.answer(dict(errors=[], warnings=[]))
        elif self.path == "/api/repos/create":
            hub.made = json.loads(body)
            self.answer(dict(url=f"{hub.address}/somebody/thimble", name="somebody/thimble"))
        elif self.path == "/api/validate-yaml":  # the head of the model card, before it is sent
            valid = json.loads(body)["content"].startswith("---")
            self.answer(dict(errors=[] if valid else [dict(message="no head")], warnings=[]))
        elif "/preupload/" in self.path:
            files = [
                dict(path=file["path"], uploadMode="regular", shouldIgnore=False) for file in json.loads(body)["files"]
            ]
            self.answer(dict(files=files))
        elif "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.answer(dict(commitUrl=f"{hub.address}/somebody/thimble/commit/{SHA}", commitOid=SHA, success=True))
        else:
            self.answer(dict(error="not here"), 404)

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        if "/resolve/" in self.path and name in self.server.files:
            content = self.server.files[name]
            self.answer(content, ETag=f'"{len(content)}"', X_Repo_Commit=SHA, Content_Type="application/octet-stream")
        elif self.path.startswith("/api/models/somebody/thimble"):
            siblings = [dict(rfilename=name) for name in self.server.files]
            listed = [dict(type="file", path=n, size=len(c), oid=SHA) for n, c in self.server.files.items()]
            info = dict(id="somebody/thimble", sha=SHA, siblings=siblings, private=False, tags=[])
            self.answer(listed if "/tree/" in self.path else info)
        else:
            self.answer(dict(error="Entry not found"), 404, X_Error_Code="EntryNotFound", X_Repo_Commit=SHA)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.files, server.asked, server.made, server.head = {}, [], {}, ""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    yield server
    server.shutdown()
    server.server_close()


def test_dry_run_shows_and_sends_nothing(hub, finished, cram):
    said = cram("export", finished.folder / "export", "--push-to", "somebody/thimble", "--dry-run")
    assert said.code == 0, said.err
    assert not [name for name in FILES if name not in said.out]
    assert "pipeline_tag: fill-mask" in said.out and "library_name: cramming_nb" in said.out
    assert hub.asked == []


def test_model_is_sent_and_loads_by_its_name(hub, a_copy, cram, run_python):
    folder = a_copy.folder / "export"
    (folder / "diary.txt").write_text("for me alone")
    (folder / "modeling.py").write_text("print('code')")
    said = cram("export", folder, "--push-to", "somebody/thimble", "--private")
    assert said.code == 0, said.err
    assert said.out.strip() == f"{hub.address}/somebody/thimble"
    assert set(hub.files) == FILES
    assert "private" in json.dumps(hub.made)
    assert hub.files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    card = hub.files["README.md"].decode()
    assert "pipeline_tag: fill-mask" in hub.head and "| held-out loss |" in card
    assert "THIS FOLDER" not in card and 'model="somebody/thimble"' in card
    code = """import cramming_nb.app.hf
from transformers import pipeline
print(pipeline("fill-mask", model="somebody/thimble")("the [MASK] is")[0]["token_str"])"""
    done = run_python(code)
    assert done.code == 0 and done.out.strip(), done.err


def test_finished_run_is_exported_and_sent(hub, a_copy, monkeypatch, cram):
    said = cram("export", a_copy.folder, "--push-to", "somebody/thimble")
    assert said.code == 0, said.err
    assert set(hub.files) == FILES


def test_a_stranger_is_told_to_log_in(hub, finished, cram, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    said = cram("export", finished.folder / "export", "--push-to", "somebody/thimble")
    assert said.code == 2 and said.err.count("\n") == 1, said.err
    assert "hf auth login" in said.err and hub.files == {}


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20_000])


DAMAGES = {  # name: (what is done to an export, words of the line)
    "cut weights": (cut, "model.safetensors"),
    "another configuration": (lambda folder: (folder / "config.json").write_text('{"x": 1}'), "config.json"),
    "no fields": (lambda folder: (folder / "config.json").write_text("null"), "no architecture"),
    "a card in Latin-1": (lambda folder: (folder / "README.md").write_bytes(b"caf\xe9"), "README.md: not UTF-8"),
    "half of a file": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"a": '),
        "tokenizer_config.json: cannot be read",
    ),
    "nothing in a file": (lambda folder: (folder / "modules.json").write_text("null"), "modules.json: damaged"),
    "another tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
}


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["send", "dry run"])
@pytest.mark.parametrize("damage, words", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_is_not_sent(damage, words, options, hub, a_copy, cram):
    damage(a_copy.folder / "export")
    said = cram("export", a_copy.folder / "export", "--push-to", "somebody/thimble", *options)
    assert said.code == 2 and said.err.count("\n") == 1 and words in said.err, said.err
    assert not said.out and hub.asked == [] and hub.files == {}
