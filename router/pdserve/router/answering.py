"""From a client's call to its answer, whatever the transport: check, admit, tokenize, open, take what comes, leave.

The gRPC front and the HTTP front are thin: they make the same `GenerateCall` and write the same parcels.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TypeVar

from pdserve.core.api_keys import NOBODY, Caller, Owner
from pdserve.core.build import ProcessInfo
from pdserve.core.clock import Clock
from pdserve.core.errors import NoNodes, PdserveError, SlowReader
from pdserve.router import journal
from pdserve.router.admission import Admission
from pdserve.router.instructions import Answer, Fail, Finish
from pdserve.router.mailbox import Parcel
from pdserve.router.membership import Membership
from pdserve.router.meters import Meters
from pdserve.router.open_session import OpenSession
from pdserve.router.placement import length_limits
from pdserve.router.request import GenerateCall, TextInput, TokenInput, ValidInput, ValidRequest
from pdserve.router.sessions import Sessions
from pdserve.router.structured import GrammarDoor
from pdserve.router.timeline import TimelineRecorder
from pdserve.router.tokenizer import TextModel
from pdserve.router.validation import check_model, label_fault, resolve_lengths, validate
from pdserve.rpc.process_gauges import process_gauges

MAX_INLINE_CHARS = 4096
"""Texts up to this length are tokenized on the event loop (well under a millisecond); longer ones on a thread."""
MAX_INLINE_ENTRIES = 10_000
"""Whole answers that name more tokens are put into a message or into JSON on a thread: tens of milliseconds and more."""

T = TypeVar("T")


class Reply:
    """One call's open session, as its front reads it."""

    def __init__(self, entry: OpenSession, meters: Meters, clock: Clock, process: ProcessInfo) -> None:
        self._entry, self._meters, self._clock, self._process = entry, meters, clock, process
        self._gained_s: dict[int, float] = {}
        self._finished: list[Finish] = []
        self.is_over = False

    @property
    def request(self) -> ValidRequest:
        """What is answered."""
        return self._entry.request

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return self._entry.session.facts.prompt_ids

    @property
    def processes(self) -> tuple[ProcessInfo, ...]:
        """The processes that make the answer: this router, and the nodes of the last attempt."""
        return (self._process, *self._entry.processes)

    async def take(self) -> Parcel:
        """Wait for what comes next and return it; a request that does not stream gets all at once.

        Raises the session's error if it ends badly and nothing else is to be shown; else the parcel holds it.
        """
        is_whole = not self.request.stream
        parcel = await self._entry.mailbox.take(whole=is_whole)
        self._meter(parcel)
        if isinstance(parcel.end, Fail):
            parcel = replace(parcel, end=Fail(told_to(self._entry.session.facts.caller, parcel.end.error)))
        if isinstance(parcel.end, Fail) and (is_whole or not parcel.gains):
            raise parcel.end.error
        return parcel

    def _meter(self, parcel: Parcel) -> None:
        self._finished += parcel.finished
        self.is_over = parcel.end is not None
        match parcel.end:
            case Answer():
                self._meters.answered(parcel.end, self._finished)
            case Fail(error):
                self._meters.failed(error)
            case _:
                pass
        if not self.request.stream:
            return
        now_s = self._clock.now_s()
        for gain in parcel.gains:
            before_s = self._gained_s.get(gain.sequence)
            if gain.shown.tokens:
                self._gained_s[gain.sequence] = now_s
                if before_s is not None:
                    self._meters.gained(now_s - before_s, len(gain.shown.tokens))


class Answering:
    """What every front does for a client."""

    def __init__(
        self,
        process: ProcessInfo,
        model: TextModel,
        membership: Membership,
        admission: Admission,
        sessions: Sessions,
        grammars: GrammarDoor,
        clock: Clock,
        threads: Executor,
        unread_s: float,
        more_gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        """Make it of its parts. `unread_s` is how long a client may leave a message with the transport."""
        self.unread_s = unread_s
        self.process, self.model, self.membership = process, model, membership
        self.admission, self.sessions, self.clock = admission, sessions, clock
        self._grammars, self._threads, self._more_gauges = grammars, threads, more_gauges
        self._num_clients = 0
        self.meters = Meters(model.name, self.all_gauges)

    @contextmanager
    def client(self) -> Iterator[None]:
        """Count a client for as long as its call is open."""
        self._num_clients += 1
        try:
            yield
        finally:
            self._num_clients -= 1

    @asynccontextmanager
    async def session(
        self, call: GenerateCall, caller: Caller, received_s: float, deadline_s: float | None = None
    ) -> AsyncIterator[Reply]:
        """Check, admit and tokenize a request, and hold its session open; whoever leaves early cancels it. Raises PdserveError.

        `received_s` and `deadline_s` are on the router's monotonic clock.
        """
        try:
            entry = await self._open(call, caller, received_s, deadline_s)
        except PdserveError as error:
            self.refused(call.request_id, error, caller.owner)
            raise told_to(caller, error) from None
        reply = Reply(entry, self.meters, self.clock, self.process)
        slow: SlowReader | None = None
        try:
            yield reply
        except SlowReader as error:
            slow = error
            raise
        finally:
            if not reply.is_over:
                self._meter_left(slow)
            self.sessions.client_left(entry, slow)

    def _meter_left(self, slow: SlowReader | None) -> None:
        if slow is None:
            self.meters.cancelled()
        else:
            self.meters.failed(slow)

    def refused(self, label: str, error: PdserveError, owner: Owner = NOBODY) -> None:
        """Tell of a request that got no session. The label may be anything."""
        self.meters.refused(error)
        journal.refused(label if label_fault(label) is None else "", owner, error)

    async def until_taken(self, sending: Awaitable[object]) -> None:
        """Hand something to a transport; raise SlowReader if the client takes nothing for too long. (gRPC does so by itself.)"""
        try:
            async with asyncio.timeout(self.unread_s):
                await sending
        except TimeoutError:
            raise SlowReader(f"the client read nothing for {self.unread_s:g} s", hint="read the answer") from None

    async def encode(self, given: ValidInput) -> tuple[int, ...]:
        """Return the ids of an input that was checked. Long inputs do not hold up the event loop."""
        limits = length_limits(self.membership.loads())
        if limits is not None:
            self.model.check_size(given, limits.longest)
        match given:
            case TokenInput(ids):
                return ids
            case TextInput(text) if len(text) <= MAX_INLINE_CHARS:
                return self.model.encode(given)
            case _:
                return await self.on_thread(lambda: self.model.encode(given))

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Run what is too long for the event loop on one of the tokenizer's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def put_into_words(self, num_entries: int, make: Callable[[], T]) -> T:
        """Return what `make` makes of a whole answer; a large one is made on a thread, and the loop serves others meanwhile."""
        return make() if num_entries <= MAX_INLINE_ENTRIES else await self.on_thread(make)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, tokens; 0 while no node is ready."""
        limits = length_limits(self.membership.loads())
        return 0 if limits is None else limits.longest

    def why_not_ready(self, caller: Caller) -> str:
        """Return why requests cannot be served now; "" if they can. Only operators are told of single nodes."""
        if self.admission.is_draining:
            return "draining"
        if self.membership.is_ready:
            return ""
        return self.membership.why_empty() if caller.is_operator else "no prefill and decode node are ready"

    def check_model(self, name: str) -> None:
        """Raise UnknownModel for a model that is not served here; "" stands for the only one."""
        check_model(name, self.model.name)

    def gauges(self) -> dict[str, float]:
        """Return what the fronts hold, and whether they take new work."""
        return {
            "clients": float(self._num_clients),
            "violations": float(len(self.sessions.check_invariants())),
            "draining": float(self.admission.is_draining),
        }

    def all_gauges(self) -> dict[str, float]:
        """Return the gauges of everything behind the fronts as well."""
        return (
            self.gauges()
            | self.sessions.gauges()
            | self.membership.gauges()
            | self._grammars.gauges()
            | dict(self._more_gauges())
            | process_gauges()
        )

    async def _open(
        self, call: GenerateCall, caller: Caller, received_s: float, deadline_s: float | None
    ) -> OpenSession:
        request = await self._checked(call)
        timeline = TimelineRecorder(received_s)
        self.admission.admit(self.sessions.num_waiting, request.n)
        try:
            prompt_ids = await self.encode(request.input)
            max_tokens = self._max_tokens(request, len(prompt_ids))
            await self._grammars.check(call, request.sampling.grammar)
        except BaseException:  # a cancelled call leaves as well
            self.admission.leave(self.clock.now_s(), request.n)
            raise
        return self.sessions.open(
            request,
            prompt_ids,
            max_tokens,
            [self.model.output(request, prompt_ids) for _ in range(request.n)],
            timeline,
            received_s,
            deadline_s,
            caller,
        )

    async def _checked(self, call: GenerateCall) -> ValidRequest:
        if not call.banned_words:
            return validate(call, self.model.served)
        # Encoding a word takes up to a millisecond, and there may be hundreds.
        return await self.on_thread(lambda: validate(call, self.model.served))

    def _max_tokens(self, request: ValidRequest, num_prompt_ids: int) -> int:
        loads = self.membership.loads()
        limits = length_limits(loads)
        if limits is None:
            raise NoNodes(
                "no prefill and decode node of equal identity are ready",
                retry_after_s=1.0,
                operators_hint=self.membership.why_empty(),
            )
        eos = frozenset().union(*(self.membership.eos_token_ids(load.incarnation) for load in loads))
        return resolve_lengths(num_prompt_ids, request, limits, eos, self.model.vocab_size)


def told_to(caller: Caller, error: PdserveError) -> PdserveError:
    """Return the error as this caller is told it."""
    return error.for_operator() if caller.is_operator else error
