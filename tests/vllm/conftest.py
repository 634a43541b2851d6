"""Everything here starts the real vLLM; without it the tests are skipped, with the reason.

The starts are counted, in whatever process, by the first line that each leaves in its log.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from eagle3.engines.vllm_process import STARTING

# Each takes half a minute; one more is one fewer for the next test.
MOST_STARTS = 25
STARTS = pytest.StashKey[int]()
MISSING = "vllm is not installed: `make test-vllm` sets up an environment that has it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if "tests/vllm" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(1800))
            # What vLLM and what it imports warn of is theirs.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session", autouse=True)
def starts(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[None]:
    """Counts at the end; more than MOST_STARTS are an error."""
    yield
    logs = tmp_path_factory.getbasetemp().rglob("engine*.log")
    count = sum(log.read_text(errors="replace").count(STARTING) for log in logs)
    pytestconfig.stash[STARTS] = count
    assert count <= MOST_STARTS, f"{count} starts of vllm, expected at most {MOST_STARTS}: let tests share an engine"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how many engines were started."""
    if STARTS in config.stash:
        terminalreporter.write_line(f"starts of vllm: {config.stash[STARTS]}, at most {MOST_STARTS}")
