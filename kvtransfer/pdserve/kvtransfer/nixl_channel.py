"""NIXL for payloads, ZeroMQ for everything else: a decorator of the ZeroMQ channel, as `shared_channel` is, for RDMA fabrics.

When a dialled route stands, its end asks for NIXL. The listening end answers with a challenge, and is told, with a proof of the
cluster secret, where memory of the dialling end lies. It reads the nonce there by NIXL and says what it found: so the path is
proven before `Connected` is told. Whatever keeps the two from it is named, counted and logged, and the route carries its payloads
over TCP. From then on the dialling end packs into slots (`lend`) and sends descriptors; the listening end reads the payload, in
order with all else of the route, and gives the slot back by a message. A slot is never written to again before that, and the
memory of a lost route is never used again. Nobody ever writes into the other's memory.
"""

import hashlib
import hmac
import logging
import secrets
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.core.clock import Clock
from pdserve.core.cluster_secret import ClusterSecret, stretched
from pdserve.kvtransfer.admission import Credentials
from pdserve.kvtransfer.channel import MAX_BATCH, Arrived, Channel, ChannelEvent, Connected, Lost, Route
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.handshake import PROOF_USE
from pdserve.kvtransfer.lent_slots import LentSlots, is_slot_list, slot_list
from pdserve.kvtransfer.nixl_engine import NixlAgent, NixlFault, RegisteredMemory
from pdserve.kvtransfer.nixl_reads import Broken, NixlReads, Outcome, Seen, Taken
from pdserve.kvtransfer.settings import MAX_FRAMES_IN_SOCKET

_logger = logging.getLogger(__name__)

NUM_SLOTS = 2 * MAX_FRAMES_IN_SOCKET
NONCE_BYTES = 32
HEAD_BYTES = 4096
"""In front of the slots: the nonce."""
ARENA_BYTES = HEAD_BYTES + NUM_SLOTS * MAX_FRAME_BYTES
MAX_METADATA_BYTES = 64 << 10
MAX_ASKING = 64
"""Routes that asked and have not offered; beyond it the oldest is forgotten, and goes without."""
MAX_BROKEN = 64
PROOF_WAIT_S = 3.0
"""The other end does its part within this time, or the route goes without NIXL."""
SPIN_S = 0.02
"""NIXL has nothing to wait on. What is under way is looked after all the time for this long since anything moved …"""
NAP_S = 50e-6
"""… with naps of this length, …"""
LONG_NAPS_S = (0.001, 0.016)
"""… and then less and less often, from the first to the second."""
LABEL = b"pdserve kv nixl 1"
ASK, CHALLENGE, OFFER, SEEN, UNSEEN, DATA, FREE, BROKEN = (b"PDNX" + bytes([kind]) for kind in range(1, 9))
"""Frames between two such channels; none of them reaches the protocol above."""
_KIND_BYTES = len(ASK)
_PLACE = struct.Struct("<III")
"""Of DATA: slot, where it starts, payload bytes."""
_OFFER = struct.Struct("<32sQ")
"""Of OFFER: proof, address; NIXL's description of the memory follows."""


@dataclass(slots=True)
class _Offered:
    """The memory of a route that was dialled here."""

    memory: RegisteredMemory
    slots: LentSlots
    due_s: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    is_proven: bool = False

    @property
    def is_read(self) -> bool:
        """Whether the other end may be reading it now."""
        return not self.is_proven or bool(self.slots.taken)


class NixlChannel:
    """One end. Implements `channel.Channel` and `channel.LendingChannel`. The agent is its own, and is closed with it."""

    def __init__(self, inner: Channel, agent: NixlAgent, clock: Clock, secret: ClusterSecret | None = None) -> None:
        self._inner = inner
        self._agent = agent
        self._clock = clock
        self._secret = secret
        """Without it the proof proves nothing, as in HELLO; then both ends are on loopback."""
        self._reads = NixlReads(agent)
        self._offered: dict[Route, _Offered] = {}
        self._asking: OrderedDict[Route, bytes] = OrderedDict()
        self._without: set[Route] = set()
        """Dialled routes that gave up asking: their answers may still come."""
        self._broken: deque[Route] = deque(maxlen=MAX_BROKEN)
        """Routes that were ended here, though they may still carry messages."""
        self._events: deque[ChannelEvent] = deque()
        self._released: deque[Callable[[], None]] = deque()
        """Whom to tell that their payload is free; told from within `poll`, `send_data` or `close`."""
        self._moved_s = clock.now_s()
        self._nap_s = LONG_NAPS_S[0]
        self._num_fallbacks = 0
        self._num_overflows = 0
        self._sent_bytes = 0
        self._is_closed = False

    def listen(self, host: str, port: int) -> str:
        """Accept connections."""
        return self._inner.listen(host, port)

    def connect(self, address: str, shown: Credentials | None = None) -> Route:
        """Dial once."""
        return self._inner.connect(address, shown)

    def trust(self, route: Route) -> None:
        """Pass it on."""
        self._inner.trust(route)

    def disconnect(self, route: Route) -> None:
        """Drop a route, and its memory."""
        self._events = deque(event for event in self._events if event.route != route)
        self._forget(route)
        self._inner.disconnect(route)

    def lend(self, route: Route, num_bytes: int) -> memoryview | None:
        """Return a slot of the route's memory to pack into; None if it has no memory, or no slot is free."""
        offered = self._offered.get(route)
        return None if offered is None or not offered.is_proven else offered.slots.lend(num_bytes)

    def send(self, route: Route, header: bytes) -> bool:
        """Send one frame."""
        return route not in self._broken and self._inner.send(route, header)

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        """Send a descriptor of the payload: of where it lies, if it was packed into what `lend` gave, else of a copy."""
        self._tell_released()
        offered = self._offered.get(route)
        if offered is None or not offered.is_proven:
            return route not in self._broken and self._inner.send_data(route, header, payload, on_released)
        if not payload or not offered.slots.has_room(len(payload)):
            self._num_overflows += 1
            return self._inner.send_data(route, header, payload, on_released)

        def tell(slot: int) -> bool:
            place = _PLACE.pack(slot, HEAD_BYTES + slot * MAX_FRAME_BYTES, len(payload))
            return self._inner.send(route, DATA + place + header)

        if not offered.slots.send(payload, on_released, tell):
            return False
        self._sent_bytes += len(payload)
        self._has_moved()
        return True

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        """Wait for events. While anything is under way by NIXL it returns early to look after it."""
        if self._is_closed:
            return []
        batch = self._inner.poll(0.0 if self._events else self._wait_s(timeout_s))
        for event in batch:
            self._see(event)
        if self._is_read():
            self._serve()
        outcomes = self._reads.look(self._clock.now_s())
        self._take_in(outcomes)
        self._expire(self._clock.now_s())
        self._tell_released()
        if batch or outcomes:
            self._has_moved()
        elif timeout_s != 0.0 and self._is_spinning():
            time.sleep(NAP_S)
        return [self._events.popleft() for _ in range(min(MAX_BATCH, len(self._events)))]

    def gauges(self) -> dict[str, float]:
        """Return how many routes use NIXL, and how often it was done without."""
        proven = sum(offered.is_proven for offered in list(self._offered.values()))
        return {
            **self._inner.gauges(),
            "kv_nixl_links": proven + self._reads.num_routes,
            "kv_nixl_reads": self._reads.num_running,
            "kv_nixl_bytes_total": self._sent_bytes + self._reads.num_bytes,
            "kv_nixl_fallbacks_total": self._num_fallbacks,
            "kv_nixl_overflows_total": self._num_overflows,
        }

    def wake(self) -> None:
        """End a poll."""
        self._inner.wake()

    def close(self) -> None:
        """Drop all routes, all memory, and the agent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._inner.close()
        for route in list(self._offered):
            self._forget(route)
        self._reads.close()
        self._agent.close()
        self._tell_released()

    # --- waiting -------------------------------------------------------------------------------------------------------

    def _wait_s(self, timeout_s: float | None) -> float | None:
        if self._is_busy():
            if self._is_spinning():
                return 0.0
            nap_s, self._nap_s = self._nap_s, min(2 * self._nap_s, LONG_NAPS_S[1])
            return nap_s if timeout_s is None else min(timeout_s, nap_s)
        return timeout_s

    def _is_busy(self) -> bool:
        return self._reads.is_busy or self._is_read()

    def _is_read(self) -> bool:
        return any(offered.is_read for offered in self._offered.values())

    def _is_spinning(self) -> bool:
        return self._is_busy() and self._clock.now_s() - self._moved_s < SPIN_S

    def _has_moved(self) -> None:
        self._moved_s = self._clock.now_s()
        self._nap_s = LONG_NAPS_S[0]

    # --- what arrives --------------------------------------------------------------------------------------------------

    def _see(self, event: ChannelEvent) -> None:
        if event.route in self._broken:
            return
        match event:
            case Connected(route):
                if not self._ask(route):
                    self._events.append(event)
            case Lost(route):
                self._forget(route)
                self._events.append(event)
            case Arrived(route, frames):
                is_ours = len(frames) == 1 and self._is_ours(route, frames[0])
                if not is_ours and not self._reads.comes_behind(event):
                    self._events.append(event)

    def _is_ours(self, route: Route, frame: bytes | memoryview) -> bool:
        """Deal with a frame between the two channels; False for one that the protocol above shall judge."""
        kind, body = bytes(frame[:_KIND_BYTES]), frame[_KIND_BYTES:]
        if route in self._offered:
            return self._is_answer(route, self._offered[route], kind, bytes(body))
        if kind in (CHALLENGE, SEEN, UNSEEN) and route in self._without:
            pass  # It comes after the wait for it: the route goes without, and is as good as any.
        elif kind == DATA and self._reads.may_read(route) and len(body) >= _PLACE.size:
            slot, start, num_bytes = _PLACE.unpack(body[: _PLACE.size])
            if not 0 < num_bytes <= MAX_FRAME_BYTES or start + num_bytes > ARENA_BYTES:
                return False
            self._reads.want(route, slot, start, num_bytes, bytes(body[_PLACE.size :]), self._clock.now_s())
        elif kind == ASK and not body:
            self._asking[route] = secrets.token_bytes(NONCE_BYTES)
            if len(self._asking) > MAX_ASKING:
                self._asking.popitem(last=False)
            self._inner.send(route, CHALLENGE + self._asking[route])
        elif kind == OFFER and _OFFER.size < len(body) <= _OFFER.size + MAX_METADATA_BYTES and route in self._asking:
            self._consider(route, self._asking.pop(route), bytes(body))
        else:
            return False
        return True

    def _is_answer(self, route: Route, offered: _Offered, kind: bytes, body: bytes) -> bool:
        """Deal with a frame of the listening end."""
        if kind == FREE and is_slot_list(body):
            self._released.extend(offered.slots.given_back(body))
        elif kind == BROKEN:
            self._break(route, f"the other end cannot read by NIXL: {_text(body)}")
        elif kind == CHALLENGE and len(body) == NONCE_BYTES and not offered.is_proven:
            self._offer(route, offered, body)
        elif kind in (SEEN, UNSEEN) and not offered.is_proven:
            self._judge(route, offered, kind, body)
        else:
            return False
        return True

    def _take_in(self, outcomes: list[Outcome]) -> None:
        """Hand on what came of reads, and give slots back, those of a route in one message."""
        free: dict[Route, list[int]] = {}
        for outcome in outcomes:
            match outcome:
                case Taken(route, slot):
                    free.setdefault(route, []).append(slot)
                case Seen(route, nonce):
                    self._inner.send(route, SEEN + nonce)
                case Broken(route, reason, was_proof) if was_proof:
                    self._turns_down(route, reason)
                case Broken(route, reason):
                    self._inner.send(route, BROKEN + reason.encode()[:200])
                    self._break(route, f"cannot read by NIXL: {reason}")
                case Arrived() | Connected() | Lost():
                    self._events.append(outcome)
        for route, slots in free.items():
            self._inner.send(route, FREE + slot_list(slots))

    def _serve(self) -> None:
        """Let others read here. If NIXL fails at that nobody can: routes go without, or end, by name."""
        try:
            self._agent.progress()
        except NixlFault as fault:
            for route, offered in list(self._offered.items()):
                (self._break if offered.is_proven else self._go_without)(route, f"memory cannot be read here ({fault})")

    # --- the proof -----------------------------------------------------------------------------------------------------

    def _ask(self, route: Route) -> bool:
        """Ask the other end of a new route whether it reads by NIXL; False if the route goes without."""
        try:
            memory = self._agent.register(ARENA_BYTES)
        except (NixlFault, OSError) as error:
            self._falls_back(route, f"no memory to offer ({error})")
            return False
        slots = LentSlots(
            NUM_SLOTS,
            MAX_FRAME_BYTES,
            lambda number: memory.view(HEAD_BYTES + number * MAX_FRAME_BYTES, MAX_FRAME_BYTES),
        )
        offered = self._offered[route] = _Offered(memory, slots, self._clock.now_s() + PROOF_WAIT_S)
        memory.view(0, NONCE_BYTES)[:] = offered.nonce
        if not self._inner.send(route, ASK):
            self._agent.retire(self._offered.pop(route).memory)
            return False
        return True

    def _offer(self, route: Route, offered: _Offered, challenge: bytes) -> None:
        try:
            metadata = self._agent.describe(offered.memory)
        except NixlFault as fault:
            self._go_without(route, f"the memory cannot be described ({fault})")
            return
        address = offered.memory.address
        self._inner.send(route, OFFER + _OFFER.pack(self._proofs(challenge, address, metadata)[0], address) + metadata)

    def _consider(self, route: Route, challenge: bytes, body: bytes) -> None:
        proof, address = _OFFER.unpack(body[: _OFFER.size])
        metadata = body[_OFFER.size :]
        # NIXL parses this in C++ and dials what it names: so never from who has not proven the secret.
        if not any(hmac.compare_digest(proof, good) for good in self._proofs(challenge, address, metadata)):
            self._turns_down(route, "the cluster secret differs")
            return
        try:
            self._reads.admit(route, metadata, address, NONCE_BYTES, self._clock.now_s())
        except (NixlFault, OSError) as error:
            self._reads.forget(route)
            self._turns_down(route, str(error))

    def _proofs(self, challenge: bytes, address: int, metadata: bytes) -> list[bytes]:
        """Return every proof that is good now; the first one is what this end says."""
        told = LABEL + challenge + address.to_bytes(8, "little") + metadata
        keys = [b""] if self._secret is None else [stretched(each, PROOF_USE) for each in self._secret.accepted]
        return [hmac.new(key, told, hashlib.sha256).digest() for key in keys]

    def _judge(self, route: Route, offered: _Offered, kind: bytes, body: bytes) -> None:
        if kind == SEEN and hmac.compare_digest(body, offered.nonce):
            offered.is_proven = True
            _logger.info("KV on route %s goes by NIXL", route.hex())
            self._events.append(Connected(route))
        else:
            self._go_without(route, "it reads other memory" if kind == SEEN else _text(body))

    def _expire(self, now_s: float) -> None:
        for route, offered in list(self._offered.items()):
            if not offered.is_proven and now_s >= offered.due_s:
                self._go_without(route, f"no answer within {PROOF_WAIT_S} s; is its kv_engine nixl, too?")

    def _turns_down(self, route: Route, reason: str) -> None:
        self._falls_back(route, reason)
        self._inner.send(route, UNSEEN + reason.encode()[:200])

    def _go_without(self, route: Route, reason: str) -> None:
        self._agent.retire(self._offered.pop(route).memory)
        self._without.add(route)
        self._falls_back(route, reason)
        self._events.append(Connected(route))

    def _falls_back(self, route: Route, reason: str) -> None:
        self._num_fallbacks += 1
        _logger.warning("KV on route %s goes over TCP, not by NIXL: %s", route.hex(), reason)

    # --- ends ----------------------------------------------------------------------------------------------------------

    def _break(self, route: Route, reason: str) -> None:
        """End a route whose connection may still stand. What was to be told of it is told before."""
        self._forget(route)
        self._inner.disconnect(route)
        self._broken.append(route)
        self._events.append(Lost(route, reason))

    def _forget(self, route: Route) -> None:
        """The route is gone: what it offered is of no use any more, and what was lent comes back."""
        self._asking.pop(route, None)
        self._without.discard(route)
        self._reads.forget(route)
        if (offered := self._offered.pop(route, None)) is not None:
            self._released.extend(offered.slots.give_up())
            self._agent.retire(offered.memory)

    def _tell_released(self) -> None:
        while self._released:
            self._released.popleft()()


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace")
