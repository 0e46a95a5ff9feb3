"""Looks at the file of the cluster secret for as long as a process runs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.core.secret_file import SecretWatch

LOOK_S = 1.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def watched(watch: SecretWatch | None, look_s: float = LOOK_S) -> AsyncIterator[None]:
    """Look every `look_s` while the context is open; nothing happens without a file."""
    if watch is None:
        yield
        return
    looking = asyncio.create_task(_look(watch, look_s), name="cluster secret file")
    looking.add_done_callback(_tell)
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait([looking])


async def _look(watch: SecretWatch, look_s: float) -> None:
    while True:
        await asyncio.sleep(look_s)
        # A mounted folder may be slow to answer; streams must not miss their beats for it.
        await asyncio.to_thread(watch.look)


def _tell(looking: "asyncio.Task[None]") -> None:
    if not looking.cancelled() and looking.exception() is not None:
        logger.error("the cluster secret is not read any more", exc_info=looking.exception())
