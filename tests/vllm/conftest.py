"""Everything here starts the real vLLM; without it the tests are skipped, with the reason."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = "vllm is not installed: `make test-vllm` sets up an environment that has it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if "tests/vllm" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            # What vLLM and what it imports warn of is theirs.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason=MISSING))
