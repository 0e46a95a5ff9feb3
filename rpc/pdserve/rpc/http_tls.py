"""TLS of the HTTP port: one context for the listener's whole life, and each connection made of the files as they are then."""

import contextlib
import ssl
import weakref

from pdserve.core.certificates import TlsMaterial
from pdserve.rpc.tls import TlsSource


class RenewedContext(ssl.SSLContext):
    """A server's context whose connections each use what `source` holds when they begin.

    A context can be given another certificate but cannot forget an authority, nor the sessions that one vouched for; so other
    files make another context, and this one passes connections on to it. `max_connections` bounds the open ones, those in
    their handshake too, which nothing above TLS hears of; beyond it they are hung up on.
    """

    _source: TlsSource
    _material: TlsMaterial
    _inner: ssl.SSLContext
    _max_connections: int
    _open: "weakref.WeakSet[ssl.SSLObject]"

    @classmethod
    def of(cls, source: TlsSource, max_connections: int) -> "RenewedContext":
        """Return the context of `source`."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._source, context._max_connections = source, max_connections
        context._open = weakref.WeakSet()
        material = source.current()
        context._inner, context._material = server_context(source, material), material
        return context

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Begin a connection; asyncio and uvloop call this once for each. An OSError ends it without a word."""
        if len(self._open) >= self._max_connections:
            raise ConnectionAbortedError("too many connections are open")
        material = self._source.current()
        if material is not self._material:
            self._renew(material)
        begun = self._inner.wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        self._open.add(begun)
        return begun

    def _renew(self, material: TlsMaterial) -> None:
        """Make the context of `material`. Where its files changed again just now, the next connection tries anew."""
        with contextlib.suppress(OSError):  # ssl.SSLError is one
            self._inner, self._material = server_context(self._source, material), material


def server_context(source: TlsSource, material: TlsMaterial) -> ssl.SSLContext:
    """Return a context of `source`'s files; with authorities a client must show a certificate of theirs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert source.files.cert is not None
    context.load_cert_chain(source.files.cert, source.files.key, password="")
    if source.asks_for_certificates:
        context.load_verify_locations(cadata=material.authorities.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    return context
