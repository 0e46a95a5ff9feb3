"""Answers libzmq's question whether a peer may come in (ZAP, https://rfc.zeromq.org/spec/27), for the listener of one context."""

from collections.abc import Iterator

import zmq

from pdserve.kvtransfer.admission import Admission

ZAP_ADDRESS = "inproc://zeromq.zap.01"
MAX_BATCH = 64
_VERSION = b"1.0"


class Doorkeeper:
    """The ZAP handler. `answer` is called when its socket is readable."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", admission: Admission) -> None:
        self._admission = admission
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ADDRESS)
        self.num_refused = 0

    def answer(self) -> None:
        """Answer what was asked, up to a batch; the rest in the next turn."""
        for envelope, request_id, mechanism, shown in self._asked():
            is_good = self._is_good(mechanism, shown)
            self.num_refused += not is_good
            status, text = (b"200", b"") if is_good else (b"400", b"not admitted")
            self.socket.send_multipart([*envelope, _VERSION, request_id, status, text, b"", b""], zmq.DONTWAIT)

    def close(self) -> None:
        """Stop answering."""
        self.socket.close(0)

    def _is_good(self, mechanism: bytes, shown: list[bytes]) -> bool:
        if mechanism == b"CURVE":
            # libzmq asks only for a peer that knew the listener's key, which is made from the cluster secret and told to nobody.
            return True
        return mechanism == b"PLAIN" and len(shown) == 2 and self._admission.admits(*shown)

    def _asked(self) -> Iterator[tuple[list[bytes], bytes, bytes, list[bytes]]]:
        """Yield (envelope, request id, mechanism, credentials)."""
        for _ in range(MAX_BATCH):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            # Envelope and an empty frame; version, request id, domain, address, identity, mechanism; credentials.
            end = frames.index(b"") + 1
            _, request_id, _, _, _, mechanism, *shown = frames[end:]
            yield frames[:end], request_id, mechanism, shown
