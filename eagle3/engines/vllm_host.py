"""The process that holds vLLM, so that eagle3's own process outlives whatever happens in it (step 3 of the walk).

`python -m eagle3.engines.vllm_host FD` reads messages from the socket FD: first the arguments of `vllm.LLM`, then

    ("call", method, args)              calls a method of the worker extension in every worker → ("result", [answers])
    ("submit", [(id, ids, sampling)], first)   queues requests; each ends in ("finished", [(id, new ids, reason), …]).
                                        `first` is None or a (method, args) to call before, whose answers are dropped
    ("counters",)                       vLLM's counters of speculative decoding → ("result", [(name, labels, numbers)])
    ("alive",)                          → ("result", None), between two steps of the engine
    ("margin", ids)                     while nothing runs: how far the last id is from the model's choice there, in
                                        natural-log probability → ("result", margin)
    ("close",)                          ends the process

Every failure becomes ("failed", message), also the death of a process of vLLM's. The engine is stepped here rather than
by `LLM.generate`, so that requests can follow while others run. When the other side is gone, the whole process group
ends.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import select
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from eagle3.engines.process_group import WORKER, ending, group_titles, kill_group

GRACE_SECONDS = 5.0


def main() -> int:
    """Serves the socket whose descriptor the command line gives; returns the exit code."""
    connection, engine = Connection(int(sys.argv[1])), []
    threading.Thread(target=end_with_other_side, args=(connection.fileno(),), daemon=True).start()
    try:
        arguments = connection.recv()
        vllm: Any = importlib.import_module("vllm")
        llm = vllm.LLM(**arguments)
        engine = multiprocessing.active_children()
        threading.Thread(target=report_death, args=(connection, engine, open_workers()), daemon=True).start()
        connection.send(("ready", vllm.__version__))
        serve(llm, connection)
    except EOFError:
        kill_group(os.getpgid(0))
    except BaseException as error:
        traceback.print_exc()  # into the engine's log
        connection.send(
            ("failed", "; ".join([f"{type(error).__name__}: {str(error) or 'no message'}", *ended(engine)]))
        )
        return 1
    return 0


def end_with_other_side(descriptor: int) -> None:
    """Ends the process group when the other side is gone, also in the middle of a long load."""
    gone = select.poll()
    gone.register(descriptor, select.POLLRDHUP)
    gone.poll()
    kill_group(os.getpgid(0))


def open_workers() -> dict[int, str]:
    """A descriptor of each worker that lives, and its title: nothing would tell of one that died before this."""
    workers: dict[int, str] = {}
    for process, title in group_titles(os.getpgid(0)):
        if title.startswith(WORKER):
            # Gone already, or a kernel without such descriptors, or a Python: conda's is built for old kernels.
            with suppress(OSError, AttributeError):
                workers[os.pidfd_open(process)] = title
    return workers


def report_death(connection: Connection, engine: list[BaseProcess], workers: dict[int, str]) -> None:
    """Waits until a process that vLLM started ends, and says so when vLLM does not: whoever waits for its answer to a
    call would wait for ever. Workers are the engine's children, whose end it may take half a minute to tell.
    """
    if not engine and not workers:
        return
    over = wait([*(process.sentinel for process in engine), *workers])
    time.sleep(GRACE_SECONDS)
    gone = [f"{title} ended" for descriptor, title in workers.items() if descriptor in over]
    with suppress(OSError):
        connection.send(("failed", f"of the engine's processes {', '.join([*gone, *ended(engine)])}"))
    os._exit(1)


def ended(engine: list[BaseProcess]) -> list[str]:
    """Those of the engine's processes that live no more, and how each ended."""
    return [f"{process.name} {ending(process.exitcode)}" for process in engine if not process.is_alive()]


def serve(llm: Any, connection: Connection) -> None:
    """Answers messages and steps the engine until the other side says close."""
    vllm: Any = importlib.import_module("vllm")
    tokens_input = importlib.import_module("vllm.inputs").tokens_input
    engine = llm.llm_engine
    while True:
        while connection.poll(0 if engine.has_unfinished_requests() else None):
            name, *arguments = connection.recv()
            if name == "close":
                return
            if name == "call":
                method, values = arguments
                connection.send(("result", llm.collective_rpc(method, args=tuple(values))))
            elif name == "counters":
                connection.send(("result", counters(llm)))
            elif name == "alive":
                connection.send(("result", None))
            elif name == "margin":
                connection.send(("result", margin(llm, arguments[0])))
            elif name == "submit":
                requests, first = arguments
                if first is not None:
                    llm.collective_rpc(first[0], args=tuple(first[1]))
                for request_id, input_ids, sampling in requests:
                    engine.add_request(request_id, tokens_input(input_ids), vllm.SamplingParams(**sampling))
        outputs = [output for output in engine.step() if output.finished]
        if outputs:
            ended = [(o.request_id, list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]
            connection.send(("finished", ended))


def counters(llm: Any) -> list[tuple[str, dict[str, str], list[int]]]:
    """Every counter of speculative decoding so far: one entry for each engine; positions stand in one list."""
    found = [metric for metric in llm.get_metrics() if "spec_decode" in metric.name]
    return [(m.name, dict(m.labels), list(m.values) if hasattr(m, "values") else [m.value]) for m in found]


def margin(llm: Any, input_ids: list[int]) -> float:
    """The best token's log probability at the last position of `input_ids`, less that of the id which stands there."""
    vllm: Any = importlib.import_module("vllm")
    tokens_input = importlib.import_module("vllm.inputs").tokens_input
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    llm.llm_engine.add_request("margin", tokens_input(input_ids), sampling)
    outputs: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in llm.llm_engine.step() if output.finished]
    last = outputs[-1].prompt_logprobs[-1]
    return max(entry.logprob for entry in last.values()) - last[input_ids[-1]].logprob


if __name__ == "__main__":
    sys.exit(main())
