"""What holds for every test: clusters do not meet at a port or by a secret, torch computes in one thread, and waits end."""

import asyncio
import functools
import inspect
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import pytest

os.environ.setdefault("PDSERVE_HTTP_PORT", "0")
# Where a script runs the tests in its background, Ctrl-C is ignored, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Files of keys and secrets that a group may change are refused; a test that wants one says so.
os.umask(0o022)
# Clusters of other users of this account are not found, nor do they find those of the tests.
_RUNTIME = tempfile.TemporaryDirectory(prefix="pdserve-tests-")
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name
# Tiny models gain nothing from threads, and on a busy machine torch's threads wait for each other: minutes instead of seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ASYNC_TEST_S = 300.0
"""What one async test may take. Below `timeout` in pyproject.toml: so it fails by name, at the await that hangs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound every async test."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = bounded(item.obj)


P = ParamSpec("P")


def bounded(test: Callable[P, Awaitable[None]]) -> Callable[P, Awaitable[None]]:
    """Return the test with a deadline."""

    @functools.wraps(test)
    async def within_deadline(*args: P.args, **kwargs: P.kwargs) -> None:
        async with asyncio.timeout(ASYNC_TEST_S):
            await test(*args, **kwargs)

    return within_deadline
