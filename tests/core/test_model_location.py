"""Model names: a local folder as it stands, the Hub's cache offline, the Hub itself (a stand-in on the loopback)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from repeats import slow

from batchgen.core.errors import ModelError
from batchgen.core.model_files import resolve_model

COMMIT = "c" * 40
PATTERNS = ("*.safetensors", "*.json", "*.jinja")
FILES = {
    "config.json": b'{"model_type": "lfm2"}',
    "model.safetensors": b"weights",
    "chat_template.jinja": b"{{ messages }}",
    "tiny-Q4_0.gguf": b"GGUF of 4 bits",
    "tiny-Q8_0.gguf": b"GGUF of 8 bits",
    "pytorch_model.bin": b"a pickle",
    "modeling_lfm2.py": b"code",
}
RESOLVE = """
import sys
from batchgen.core.errors import ModelError
from batchgen.core.model_files import resolve_model
try:
    print(resolve_model(sys.argv[1], sys.argv[2], sys.argv[3].split(",")))
except ModelError as error:
    print("ModelError:", error)
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a snapshot of org/tiny takes; org/gated asks for an agreement, all else is not there."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/gated"):
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif not path.removeprefix("/api/models").startswith("/org/tiny"):
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": _etag(name)} for name in FILES]
            self.answer(200, json.dumps(tree).encode())
        elif path in ("/api/models/org/tiny", *(f"/api/models/org/tiny/revision/{name}" for name in ("main", COMMIT))):
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            self.answer(200, FILES[name], {"ETag": f'"{_etag(name)}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    do_HEAD = do_GET  # noqa: N815 - the name BaseHTTPRequestHandler looks for

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


def _etag(name: str) -> str:
    return hashlib.sha1(FILES[name]).hexdigest()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(name: str, home: Path, revision: str = "main", **environment: str) -> str:
    """What ``resolve_model`` says in a process of its own: huggingface_hub reads its settings when imported."""
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", **environment}
    command = [sys.executable, "-c", RESOLVE, name, revision, ",".join(PATTERNS)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True, cwd=home)
    return done.stdout.strip()


def test_a_local_folder_is_taken_as_it_stands_whatever_the_revision(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), "no-such-revision", PATTERNS) == tmp_path


@pytest.mark.parametrize("name", ["./model", "/no/model", "../model", "a/b/c", "~/no-such-model", "with space", "-"])
def test_what_can_only_be_a_folder_and_is_not_there_is_one_line(name: str) -> None:
    with pytest.raises(ModelError, match="no model folder") as caught:
        resolve_model(name, "main", PATTERNS)
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="is a file; give the folder"):
        resolve_model(str(tmp_path / "config.json"), "main", PATTERNS)


def test_a_hub_model_is_downloaded_once_without_pickles_or_code_then_found_offline(
    endpoint: str, tmp_path: Path
) -> None:
    folder = Path(resolve("org/tiny", tmp_path, HF_ENDPOINT=endpoint))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "chat_template.jinja")
    }
    assert resolve("org/tiny", tmp_path, HF_HUB_OFFLINE="1") == str(folder)
    assert resolve("org/tiny", tmp_path, COMMIT, HF_HUB_OFFLINE="1") == str(folder)


def test_of_several_gguf_files_the_one_that_is_named_is_downloaded(endpoint: str, tmp_path: Path) -> None:
    path = Path(resolve("org/tiny/tiny-Q4_0.gguf", tmp_path, HF_ENDPOINT=endpoint))
    assert path.read_bytes() == FILES["tiny-Q4_0.gguf"]
    assert {file.name for file in path.parent.iterdir()} == {"tiny-Q4_0.gguf", "config.json", "chat_template.jinja"}
    assert resolve("org/tiny/tiny-Q4_0.gguf", tmp_path, HF_HUB_OFFLINE="1") == str(path)
    said = resolve("org/tiny/tiny-Q2_K.gguf", tmp_path, HF_ENDPOINT=endpoint)
    assert said.startswith("ModelError: ") and "tiny-Q2_K.gguf: cannot be read (No such file" in said


@pytest.mark.parametrize("name", ["tiny.gguf", "folder/tiny.gguf", "/nowhere/tiny.gguf"])
def test_a_file_that_is_missing_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match=rf"no file {name} \(and one on the Hub is written"):
        resolve_model(name, "main", ["*.json"])


@pytest.mark.parametrize(
    ("name", "revision", "environment", "message"),
    [
        ("org/nothing", "main", {}, "the Hub has no such model, or it is private"),
        slow("org/gated", "main", {}, "access to it must be granted"),
        slow("org/tiny", "v9", {}, "no revision 'v9'"),
        ("org/tiny", "main", {"HF_HUB_OFFLINE": "1"}, "revision 'main' is not in the Hub's"),
        slow("org/tiny", "main", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hub cannot be reached (["),
    ],
)
def test_what_the_hub_refuses_or_cannot_give_is_one_line(
    name: str, revision: str, environment: dict[str, str], message: str, endpoint: str, tmp_path: Path
) -> None:
    said = resolve(name, tmp_path, revision, **{"HF_ENDPOINT": endpoint} | environment)
    assert said.startswith(f"ModelError: no model folder {name}, and as a Hub id: ")
    assert message in said and "\n" not in said
