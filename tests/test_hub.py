"""A hub model is fetched after a look at the disk. The hub is a small server of ours that speaks its protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"not wanted"}
FETCH = """
import logging, sys
from eagle3.errors import RequestError
from eagle3.hub import fetch
logging.basicConfig(format="%(message)s")
logging.getLogger("eagle3").setLevel("INFO")
try:
    print("at", fetch(sys.argv[1], None, ["*.json", "*.safetensors"], "model.path"))
except RequestError as error:
    print("refused", error)
"""


class Hub(BaseHTTPRequestHandler):
    """`org/small`, and `org/vast`, whose weights are a petabyte by its own account; nothing else."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        parts = path.strip("/").split("/")
        self.asked.append(f"{self.command} {path}")
        if parts[:2] == ["api", "models"] and parts[3] in ("small", "vast"):
            self._send(json.dumps(self._listing(parts)).encode())
        elif parts[:3] == ["org", "small", "resolve"]:
            self._send(FILES[parts[4]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _listing(self, parts: list[str]) -> Any:
        vast = {"model.safetensors": 10**15} if parts[3] == "vast" else {}
        sizes = {name: vast.get(name, len(content)) for name, content in FILES.items()}
        if "tree" in parts:
            return [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return {"id": f"org/{parts[3]}", "sha": COMMIT, "siblings": siblings}

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": len(content), "ETag": f'"{self.path}"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def fetched(name: str, home: Path, hub: ThreadingHTTPServer | None, **variables: str) -> str:
    """What a process says that fetches a model from the hub, or from where none is."""
    port = hub.server_address[1] if hub else 9  # nobody listens there
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "*", **variables}
    command = [sys.executable, "-c", FETCH, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=True)
    return done.stderr + done.stdout


def test_a_model_is_fetched_with_its_size_said_before(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    said = fetched("org/small", tmp_path, hub)
    assert f"model.path: fetching org/small, 9 B in 2 files, into {tmp_path}/hub" in said
    folder = Path(said.rpartition("at ")[2].strip())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors")
    }
    again = fetched("org/small", tmp_path, hub)
    assert "fetching" not in again.replace("Fetching", "")
    assert str(folder) in again
    offline = fetched("org/small", tmp_path, None)
    assert str(folder) in offline


def test_a_model_larger_than_the_disk_is_refused_before_a_byte_of_it_comes(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    said = fetched("org/vast", tmp_path, hub)
    assert "refused model.path: org/vast needs 1000.0 TB more in 2 files, but only " in said
    assert "set HF_HOME to a folder on a larger disk" in said
    assert not any("resolve" in line for line in Hub.asked)
    assert not (tmp_path / "hub").exists()


def test_no_network_no_copy_no_such_model(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    for variables, reason in (({}, "the hub cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        said = fetched("org/small", tmp_path, None, **variables)
        assert (
            f"refused model.path: org/small is neither a local folder nor a hub model that could be fetched: {reason}"
            in said
        )
        assert f"{tmp_path}/hub has no whole copy of it" in said
    said = fetched("org/nothing", tmp_path, hub)
    assert "refused model.path: org/nothing is neither a local folder" in said
    assert "check the spelling; for a private or gated model run `hf auth login`" in said
    assert len([line for line in said.splitlines() if "refused" in line]) == 1
