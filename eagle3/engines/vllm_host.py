"""The process that holds vLLM, so that eagle3's own process outlives whatever happens in it (step 3 of the walk).

`python -m eagle3.engines.vllm_host FD` reads messages from the socket FD: first the arguments of `vllm.LLM`, then

    ("call", method, args)              calls a method of the worker extension in every worker → ("result", [answers])
    ("submit", [(id, ids, sampling)])   queues requests; each ends in ("finished", [(id, new ids, reason), …])
    ("close",)                          ends the process

Every failure becomes ("failed", message). The engine is stepped here rather than by `LLM.generate`, so that
requests can follow while others run. When the other side is gone, the whole process group ends.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main() -> int:
    """Serves the socket whose descriptor the command line gives; returns the exit code."""
    connection = Connection(int(sys.argv[1]))
    try:
        arguments = connection.recv()
        vllm: Any = importlib.import_module("vllm")
        llm = vllm.LLM(**arguments)
        connection.send(("ready", vllm.__version__))
        serve(llm, connection)
    except EOFError:
        os.killpg(0, signal.SIGKILL)
    except BaseException as error:
        traceback.print_exc()  # into the engine's log
        connection.send(("failed", f"{type(error).__name__}: {str(error) or 'no message'}"))
        return 1
    return 0


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
            elif name == "submit":
                for request_id, input_ids, sampling in arguments[0]:
                    engine.add_request(request_id, tokens_input(input_ids), vllm.SamplingParams(**sampling))
        outputs = [output for output in engine.step() if output.finished]
        if outputs:
            ended = [(o.request_id, list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]
            connection.send(("finished", ended))


if __name__ == "__main__":
    sys.exit(main())
