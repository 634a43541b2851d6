"""The other end of `vllm_host`: starts it, talks to it, notices its death and says why (step 3 of the walk).

All output of the host and of every worker goes to one log file. A death is noticed within a second and reported with
the first failure that any worker wrote there and with the last lines.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import eagle3
from eagle3.engines.process_group import WORKER, ending, group_memory, group_titles, kill_group, memory_kills
from eagle3.errors import EngineError

LAST_LINES = 15
# The first line of an engine in its log; the arguments of `vllm.LLM` follow.
STARTING = "eagle3: starting vllm_host for"
CLOSE_SECONDS = 20.0
# vLLM puts "(Worker_TP1 pid=17) ERROR 11-30 00:12:13 [core.py:100] " in front of each line.
PREFIX = re.compile(r"^(\([^)]*pid=\d+\) *)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?")

# What vLLM says of a worker that somebody killed; the exceptions after it only follow from that.
DIED = re.compile(r"Worker proc \S+ died unexpectedly.*")
# How vLLM speaks of arguments that it does not take.
REFUSED = re.compile(r"ValidationError|unexpected keyword argument")
REFUSED_HINT = (
    "vLLM refuses what it was started with: correct hardware.engine_options, or the setting that is named above"
)
KILLED_HINT = "SIGKILL is what the kernel sends when memory runs out: see `dmesg`"
WARNED = re.compile(r"^(\([^)]*pid=\d+\) *)?(DEBUG|INFO|WARNING) [\d-]+ [\d:.]+ ")


class EngineProcess:
    """A running `vllm_host`. `receive` hands out its messages; answers of `call` are told from finished requests."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], log_file: Path) -> None:
        ours, theirs = socket.socketpair()
        # The host and vLLM's workers import eagle3 also where it is not installed.
        source = str(Path(eagle3.__file__).parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        self.log_file = log_file
        # Makes ids of requests unlike those of any earlier use of the engine.
        self.numbers = itertools.count()
        self._broken = self._ready = False
        self._held: set[Path] = set()
        self._memory_kills = memory_kills()
        self._workers: dict[int, str] = {}
        self._gone: list[str] = []
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log, theirs:
            self._log_start = log.tell()
            log.write(f"{STARTING} {dict(arguments)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eagle3.engines.vllm_host", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": path, **environment},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C is for us to handle, and all of it can be ended at once.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._finished: deque[list[Any]] = deque()
        with suppress(OSError):  # it is gone already, of which `wait_ready` tells
            self._connection.send(dict(arguments))

    def wait_ready(self, watch: Callable[[str], None]) -> str:
        """Waits for the load to end; `watch` sees the log's text as it grows and may raise. Returns vLLM's version."""
        position = self._log_start
        while True:
            message = self._receive(0.5)
            with self.log_file.open("rb") as file:
                file.seek(position)
                text = file.read()
            position += len(text)
            self._look()
            watch(text.decode("utf-8", "replace"))
            if message is not None:
                self._ready = True
                return message[1]

    def _look(self) -> None:
        """Notes while the others live what they hold, and which workers are gone: vLLM may not say of one that somebody
        killed while it loaded, and the others end soon after.
        """
        self._held |= group_memory(self._process.pid)
        living = {pid: title for pid, title in group_titles(self._process.pid) if title.startswith(WORKER)}
        for pid in self._workers.keys() - living.keys():
            self._gone.append(f"{self._workers.pop(pid)} at {time.strftime('%H:%M:%S')}")
        self._workers.update(living)

    def submit(
        self, requests: list[tuple[str, list[int], dict[str, Any]]], first: tuple[str, tuple[Any, ...]] | None = None
    ) -> None:
        """Queues requests: id, token ids, sampling parameters. `first` is a method and arguments for all workers, which
        is called before; nobody waits for it here, since a call is answered only between two steps of the engine.
        """
        self._send(("submit", requests, first))

    def call(self, method: str, *arguments: Any, waiting: Callable[[], object] | None = None) -> list[Any]:
        """The answers of all workers to a method of the worker extension; `waiting` as in `ask`."""
        return self.ask("call", method, arguments, waiting=waiting)

    def ask(self, *message: Any, waiting: Callable[[], object] | None = None) -> Any:
        """The host's answer to a message of its protocol that has one; `waiting` is called each second until then."""
        self._send(message)
        while True:
            message = self._receive(1.0)
            if message is None:
                if waiting is not None:
                    waiting()
                continue
            if message[0] == "result":
                return message[1]
            self._finished.append(message[1])

    def finished(self, timeout_s: float) -> list[tuple[str, list[int], str]]:
        """Requests that have ended (id, new token ids, reason), waiting at most `timeout_s` for one."""
        if not self._finished and (message := self._receive(timeout_s)) is not None:
            self._finished.append(message[1])
        return [request for batch in iter(self._pop, None) for request in batch]

    def _pop(self) -> list[Any] | None:
        return self._finished.popleft() if self._finished else None

    def close(self, *, gently: bool = True) -> None:
        """Ends the host and everything that it started; `gently` lets vLLM shut down by itself first."""
        if self._connection.closed:
            return
        if self._process.poll() is None and gently:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._connection.send(("close",))
                self._process.wait(CLOSE_SECONDS)
        self.kill()
        self._process.wait()
        self._connection.close()

    def kill(self) -> None:
        """Ends all processes at once, also while another thread talks to them: it hears of it. `close` later."""
        kill_group(self._process.pid, self._held)

    def failure(self, what: str, details: str = "") -> EngineError:
        """An error of one screen with the engine's own words: the first failure in its log, and the last lines."""
        text = self.log_text()
        first = first_exception(text) or ""
        last = "\n".join(f"    {line}" for line in without_warned_tracebacks(text.strip().splitlines())[-LAST_LINES:])
        # The type's name has its module's before it in a log.
        told = what.endswith(first) or (first.partition(": ")[2] or first) in what
        self._broken = True
        hint = REFUSED_HINT if not self._ready and REFUSED.search(what) else ""
        hint = KILLED_HINT if re.search(r"\bSIGKILL\b|: -9\b", f"{what} {first}") else hint
        if kills := memory_kills() - self._memory_kills:
            hint = f"meanwhile the kernel has ended {kills} processes of this machine for want of memory: see `dmesg`"
        kept = "what is complete is kept: once the cause is gone, the same command goes on from there"
        parts = [
            what,
            "" if told else f"first failure in the engine's log: {first}",
            f"workers that ended while it loaded: {', '.join(self._gone)}" if self._gone else "",
            details.strip(),
            f"last lines of {self.log_file}:\n{last}",
            hint,
            kept if self._ready else "",
        ]
        return EngineError("\n".join(part for part in parts if part))

    def log_text(self) -> str:
        """What this host has logged so far."""
        with self.log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode("utf-8", "replace")

    @property
    def broken(self) -> bool:
        """Whether the host has failed or died."""
        return self._broken or self._process.poll() is not None

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._death() from error

    def _receive(self, timeout_s: float) -> Any:
        """The next message, None after `timeout_s`; a reported failure or a death is raised."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._connection.poll(max(min(deadline - time.monotonic(), 0.5), 0)):
                    message = self._connection.recv()
                    if message[0] == "failed":
                        raise self.failure(f"vllm: {message[1]}")
                    return message
            except (EOFError, OSError) as error:
                raise self._death() from error
            if self._process.poll() is not None and not self._connection.poll(0):
                raise self._death()
            if time.monotonic() >= deadline:
                return None

    def _death(self) -> EngineError:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return self.failure("vllm: the engine's process closed its connection")
        return self.failure(f"vllm: the engine's process {ending(code)}")


def without_warned_tracebacks(lines: Sequence[str]) -> list[str]:
    """The lines but for tracebacks that vLLM logs as warnings, which look like the reason and are not."""
    kept: list[str] = []
    inside = False
    for line in lines:
        text = PREFIX.sub("", line) if WARNED.match(line) else None
        if text is None:
            inside = False
        elif text.startswith("Traceback (most recent call last)"):
            inside = True
        if not inside:
            kept.append(line)
        elif text is not None and text.strip() and not text.startswith((" ", "\t", "Traceback")):
            inside = False  # that was the exception
    return kept


def first_exception(log: str) -> str | None:
    """The line that ends the first traceback of a log, or tells of a worker's death before, vLLM's own prefixes taken
    away; None when there is none.

    Tracebacks that vLLM logs as warnings (an optional package that is absent) do not count.
    """
    lines = [PREFIX.sub("", line) for line in log.splitlines() if not WARNED.match(line)]
    for start, line in enumerate(lines):
        if DIED.match(line):
            return line
        if line.startswith("Traceback (most recent call last)"):
            for following in lines[start + 1 :]:
                if following and not following.startswith((" ", "\t")):
                    return following
    return None
