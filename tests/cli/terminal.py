"""`pdserve chat` on a real (pseudo) terminal, and someone who sits at it."""

import asyncio
import codecs
import os
import pty
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

DEADLINE_S = 30.0
AGAIN_S = 2.0
CHAT = (sys.executable, "-P", "-m", "pdserve.cli", "chat")
FOREGROUND = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Person:
    """Someone at a terminal, who types and reads."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    async def read_until(self, text: str) -> str:
        """Read on until `text` comes; return what came before it, and forget it."""
        while text not in self.seen:
            if not await self._reads_on(DEADLINE_S):
                pytest.fail(f"{text!r} did not come after {self.seen!r}")
        before, _, self.seen = self.seen.partition(text)
        return before

    async def interrupt_until(self, text: str) -> None:
        """Type Ctrl-C, again each time nothing comes of it, until `text` does.

        Between showing its prompt and waiting for a key, CPython's `input` hears of a signal only with the next key.
        """
        for _ in range(round(DEADLINE_S / AGAIN_S)):
            self.type("\x03")
            while await self._reads_on(AGAIN_S):
                if text in self.seen:
                    self.seen = self.seen.partition(text)[2]
                    return
        pytest.fail(f"{text!r} did not come after {self.seen!r}")

    async def _reads_on(self, wait_s: float) -> bool:
        """Read what comes next; False if nothing does in time."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._terminal, readable.set_result, None)
        try:
            async with asyncio.timeout(wait_s):
                await readable
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._terminal)
        self.seen += self._decoder.decode(os.read(self._terminal, 4096))
        return True


@asynccontextmanager
async def terminal_chat(address: str, *arguments: str) -> AsyncIterator[tuple[Person, asyncio.subprocess.Process]]:
    """Run `pdserve chat` on a terminal of its own, of which it is the foreground: Ctrl-C typed is a signal."""
    terminal, side = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FOREGROUND, *CHAT, "--server", address, *arguments),
        stdin=side,
        stdout=side,
        stderr=side,
        env=os.environ | {"TERM": "dumb", "COLUMNS": "200"},
    )
    os.close(side)
    try:
        yield Person(terminal), process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(terminal)
