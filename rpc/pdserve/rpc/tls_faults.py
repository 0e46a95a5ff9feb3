"""Why two ends do not come together when TLS is in question, read off gRPC's words for it."""

from enum import Enum, auto


class TlsFault(Enum):
    """What is wrong, as seen from the end that dials."""

    PLAIN_PORT = auto()
    """TLS was spoken to a port that does not speak it."""
    TLS_PORT = auto()
    """The port closed a plain connection before a word, as one that speaks TLS does."""
    AUTHORITY = auto()
    """The certificate that was shown is signed by nobody who is trusted here."""
    NAME = auto()
    """It does not name the host that was dialled."""
    EXPIRED = auto()
    """It is past its end, or not yet valid."""
    PURPOSE = auto()
    """It is not for servers."""
    OWN_CERTIFICATE = auto()
    """The port closed the connection after the handshake, as one does that wants a certificate, or another one."""
    NO_HTTP2 = auto()
    """The port speaks TLS, but not what gRPC speaks inside: that of an HTTP front, for example."""
    BROKEN_OFF = auto()
    """The port closed the connection within the handshake."""


NOT_CONNECTED = "failed to connect to all addresses"
"""In gRPC's words for a call that never had a connection."""
CLOSED = ("Socket closed", "Connection reset", "Broken pipe")
WORDS = {
    "WRONG_VERSION_NUMBER": TlsFault.PLAIN_PORT,
    "HTTP_REQUEST": TlsFault.PLAIN_PORT,
    "certificate has expired": TlsFault.EXPIRED,
    "certificate is not yet valid": TlsFault.EXPIRED,
    "unsupported certificate purpose": TlsFault.PURPOSE,
    "CERTIFICATE_VERIFY_FAILED": TlsFault.AUTHORITY,
    "Hostname Verification Check failed": TlsFault.NAME,
    "ALPN": TlsFault.NO_HTTP2,
    "CERTIFICATE_REQUIRED": TlsFault.OWN_CERTIFICATE,
    "ALERT_UNKNOWN_CA": TlsFault.OWN_CERTIFICATE,
    "ALERT_BAD_CERTIFICATE": TlsFault.OWN_CERTIFICATE,
}
"""Parts of gRPC's and BoringSSL's words; the first that fits counts."""


def tls_fault(details: str, *, speaks_tls: bool) -> TlsFault | None:
    """Return what `details` of a failed call say of TLS; None if it has nothing to do with it. `speaks_tls`: this end did."""
    if NOT_CONNECTED not in details:
        return None
    is_closed = any(word in details for word in CLOSED)
    if not speaks_tls:
        return TlsFault.TLS_PORT if is_closed else None
    found = next((fault for word, fault in WORDS.items() if word in details), None)
    if found is None and is_closed:
        return TlsFault.BROKEN_OFF if "Handshake read failed" in details else TlsFault.OWN_CERTIFICATE
    return found
