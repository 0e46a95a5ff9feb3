"""Whether a port can be bound, asked before anything long or noisy begins."""

import socket

from pdserve.core.errors import AddressInUse


def check_port(host: str, port: int, option: str) -> None:
    """Raise AddressInUse, naming `option`, if `host`:`port` cannot be bound now. Port 0 is always free.

    The port may still be taken before it is bound in earnest; the binding itself is what counts, this only tells it early.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            if port:
                probe.listen(1)
    except OSError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}",
            hint=f"choose another {option}, or --host; 0 takes a free port",
        ) from None
