"""NIXL behind a small typed face: memory that other processes may read, and reads of theirs. UCX moves the bytes.

Without NIXL's progress thread, which spins on one core: so nothing moves unless `progress`, or a look at a read, is called.
That is no loss on RDMA, where the network card reads by itself; where UCX imitates it over TCP both ends must be looked after.

NIXL cannot take a read back: once begun, it may write into its memory until it is over. Whoever gives a read up keeps its memory
for it, and the peer that it reads from, until then. See `docs/kv-transfer-nixl.md`.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from types import ModuleType
from typing import Protocol, TypeVar, cast

from pdserve.core.errors import ConfigError

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Import names of NIXL's wheels. They differ in the CUDA that they reach; KV is in host memory here, for which both do."""
INSTALL = "pip install pdserve[nixl]"
LOOPBACK_DEVICE = "lo"
_OTHER_ENGINE = "set kv_engine to zeromq"
_UCX = "UCX"
_DRAM = "DRAM"

R = TypeVar("R")
_logger = logging.getLogger(__name__)


class NixlFault(Exception):
    """NIXL or its back end refuses or fails; the text is its own."""


def installed_package() -> str | None:
    """Return the import name of the NIXL that is installed; None without one."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


def require_nixl() -> None:
    """Raise ConfigError if NIXL is not installed."""
    if installed_package() is None:
        raise ConfigError(["kv_engine: nixl is not installed"], hint=f"{INSTALL}, or {_OTHER_ENGINE}")


class _Handle(Protocol):
    def release(self) -> None: ...


class _Agent(Protocol):
    """What is used of `nixl_agent`."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_partial_agent_metadata(self, descs: object, inc_conn_info: bool, backends: list[str]) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> object: ...
    def initialize_xfer(self, operation: str, local: object, remote: object, remote_agent: str) -> _Handle: ...
    def transfer(self, handle: _Handle) -> str: ...
    def check_xfer_state(self, handle: _Handle) -> str: ...
    def get_new_notifs(self) -> object: ...


class RegisteredMemory:
    """Memory that NIXL may read and write. Its one way out is `NixlAgent.retire`; `NixlAgent.close` retires all."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.registration: object = None

    def view(self, start: int, num_bytes: int) -> memoryview:
        """Return a part of it, writable."""
        return memoryview(self._memory)[start : start + num_bytes]

    def empty(self) -> None:
        """Give its pages back to the system; it reads as zeros."""
        self._memory.madvise(mmap.MADV_DONTNEED)


class Read:
    """A read that was begun. Its memory belongs to it until `is_over` returns True or raises."""

    def __init__(self, agent: "NixlAgent", handle: _Handle, status: str) -> None:
        self._agent = agent
        self._handle: _Handle | None = handle
        self._status = status

    def is_over(self) -> bool:
        """Look after it; return whether all bytes are here. Raises NixlFault if it failed: it is over then, too."""
        if self._handle is None:
            return True
        if self._status == "PROC":
            self._status = self._agent.status_of(self._handle)
        if self._status == "PROC":
            return False
        handle, self._handle = self._handle, None
        if self._status != "DONE":
            with contextlib.suppress(NixlFault):
                self._agent.release(handle)
            raise NixlFault(f"the read failed ({self._status})")
        self._agent.release(handle)
        return True


class NixlAgent:
    """This process's end of NIXL. Used by one thread."""

    def __init__(self, is_local: bool = True) -> None:
        """Start it; raise ConfigError if the package is missing or damaged, or cannot run here.

        `is_local`: only processes of this host shall reach it. UCX listens on every interface unless the environment says
        otherwise, and there is no other way to tell it.
        """
        require_nixl()
        if is_local:
            os.environ.setdefault("UCX_NET_DEVICES", LOOPBACK_DEVICE)
        api, bindings = _load()
        self._errors = _error_types(bindings)
        self.name = f"pdserve-{secrets.token_hex(16)}"
        """What the peers know it by; another for every agent, so that a restarted process is another peer."""
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[_UCX])
        try:
            self._agent: _Agent | None = self._ask(lambda: cast("_Agent", api.nixl_agent(self.name, config)))
        except (NixlFault, RuntimeError) as error:
            raise ConfigError([f"kv_engine: nixl cannot run here: {error}"], hint=_OTHER_ENGINE) from error
        if _UCX not in getattr(self._agent, "backends", {}):
            raise ConfigError(["kv_engine: this nixl has no UCX back end"], hint=_OTHER_ENGINE)
        self._memories: list[RegisteredMemory] = []

    def register(self, num_bytes: int) -> RegisteredMemory:
        """Return memory of that many bytes, zero; raise NixlFault or OSError if there is none."""
        memory = RegisteredMemory(num_bytes)
        place = [(memory.address, num_bytes, 0, "")]
        memory.registration = self._ask(lambda: self._live.register_memory(place, _DRAM))
        self._memories.append(memory)
        return memory

    def retire(self, memory: RegisteredMemory) -> None:
        """Let nobody read it any more. It reads as zeros, and its addresses stay taken while the agent lives.

        Where UCX imitates reads over TCP, it serves a late one from the address alone: there must be something, and nothing else.
        """
        if memory.registration is None:
            return
        registration, memory.registration = memory.registration, None
        try:
            self._ask(lambda: self._live.deregister_memory(registration))
        except NixlFault as fault:
            _logger.warning("NIXL keeps memory registered: %s", fault)
        memory.empty()

    def describe(self, memory: RegisteredMemory) -> bytes:
        """Return what a peer needs to read this memory, and no other."""
        return self._ask(lambda: self._live.get_partial_agent_metadata(memory.registration, True, [_UCX]))

    def add_peer(self, metadata: bytes) -> str:
        """Learn of a peer and its memory from its `describe`; return the peer's name. Only for bytes from who is trusted."""
        name = self._ask(lambda: self._live.add_remote_agent(metadata))
        return name if isinstance(name, str) else name.decode()

    def drop_peer(self, name: str) -> None:
        """Forget a peer. None of the reads from it may be unfinished: they could not be looked after any more."""
        self._ask(lambda: self._live.remove_remote_agent(name))

    def read(self, peer: str, address: int, num_bytes: int, into: RegisteredMemory, start: int) -> Read:
        """Begin to read a peer's memory; raise NixlFault if it is none of what the peer described, or the peer is gone."""
        agent = self._live
        here = self._ask(lambda: agent.get_xfer_descs([(into.address + start, num_bytes, 0)], _DRAM))
        there = self._ask(lambda: agent.get_xfer_descs([(address, num_bytes, 0)], _DRAM))
        handle = self._ask(lambda: agent.initialize_xfer("READ", here, there, peer))
        try:
            status = self._ask(lambda: agent.transfer(handle))
        except NixlFault:
            self.release(handle)
            raise
        return Read(self, handle, status)

    def progress(self) -> None:
        """Let UCX do what waits to be done."""
        self._ask(self._live.get_new_notifs)

    def status_of(self, handle: _Handle) -> str:
        """Return PROC, DONE or another word for failed."""
        try:
            return self._ask(lambda: self._live.check_xfer_state(handle))
        except NixlFault as fault:
            return str(fault)

    def release(self, handle: _Handle) -> None:
        """Free the handle of a read that is over. Must not be called for another: the back end would still use it."""
        self._ask(handle.release)

    def close(self) -> None:
        """End it: no peer reads here any more, and no read that was begun writes here any more. May be called twice."""
        if self._agent is not None:
            for memory in self._memories:
                self.retire(memory)
            # Its destructor closes every connection; only then may the memory go.
            self._agent = None
            self._memories.clear()

    @property
    def _live(self) -> _Agent:
        if self._agent is None:
            raise NixlFault("the agent is closed")
        return self._agent

    def _ask(self, act: Callable[[], R]) -> R:
        try:
            return act()
        except self._errors as error:
            raise NixlFault(f"{type(error).__name__}: {error}") from error


def _load() -> tuple[ModuleType, ModuleType]:
    """Return NIXL's interface and its bindings. What importing it does to logging is undone."""
    raises_before = logging.raiseExceptions
    package = installed_package()
    try:
        api, bindings = (importlib.import_module(f"{package}.{name}") for name in ("_api", "_bindings"))
    except ImportError as error:
        raise ConfigError([f"kv_engine: {package} is damaged: {error}"], hint=f"reinstall it: {INSTALL}") from error
    logging.raiseExceptions = raises_before
    # Its handler writes to standard output, which is ours; let it do as every other logger does.
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return api, bindings


def _error_types(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """Return the exceptions of the bindings; they have no base of their own."""
    names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return tuple(getattr(bindings, name) for name in names)
