"""Peers' training steps in processes of their own: they compile at once, and are timed when the GPU is theirs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from queue import Empty, Queue
from typing import Any

WAIT_S = 150.0  # for what comes next from a peer


class PeerProcess:
    """Steps of a peer (`specforge`, `speculators`) on batches of one shape: `peer_steps` as a child.

    `batches` by name: lengths and supervised spans of their documents. With `errors` it finds the errors of its bf16
    gradients at once; otherwise it waits for `results` before it times anything.
    """

    def __init__(
        self, peer: str, shape: str, steps: int, batches: Mapping[str, tuple[Sequence[int], Any]], errors: bool = False
    ) -> None:
        self.names = list(batches)
        found = [{"case": name, "lengths": list(lengths), "spans": spans} for name, (lengths, spans) in batches.items()]
        request = {"peer": peer, "shape": shape, "steps": steps, "batches": found, "errors": errors}
        command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.peer_steps", json.dumps(request)]
        self._trouble = tempfile.TemporaryFile("w+")  # noqa: SIM115, for as long as the child lives
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._trouble, text=True
        )
        self._lines: Queue[dict[str, Any] | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def _next(self, timeout_s: float = WAIT_S) -> dict[str, Any] | None:
        line = None
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.1))
        except Empty:
            self._process.kill()
        if line is None:
            self._lines.put(None)  # for whoever asks again
        return line

    def ready(self, timeout_s: float) -> bool:
        """Waits until everything is compiled; False when it never will be. Ends a peer that takes too long."""
        return self._next(timeout_s) is not None

    def results(self) -> dict[str, dict[str, Any]]:
        """Has it measure; what it found, or its error, by the batches' names."""
        found: dict[str, dict[str, Any]] = {}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, and said why
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        while len(found) < len(self.names) and (line := self._next()) is not None:
            found[line.pop("case")] = line
        code = self._process.wait()
        self._trouble.seek(0)
        trouble = (self._trouble.read().strip().splitlines() or [f"exit {code}, or silent for too long"])[-1]
        return {name: found.get(name, {"error": trouble}) for name in self.names}
