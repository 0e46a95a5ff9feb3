"""A tiny real process that behaves as a test tells it to, started by the supervisor in place of a pdserve process.

Usage: `python stub.py BEHAVIOUR… [supervisor's arguments]`. Behaviours:
  fail-at-start     ends with status 3 and an error line before it listens
  mute              never tells its address
  deaf              ignores SIGTERM
  crash-on-connect  ends with status 7 when someone connects
"""

import json
import os
import signal
import socket
import sys

from pdserve.cli.parent import die_with_parent


def argument(name: str) -> str:
    """Return the value after the last `--name`."""
    return sys.argv[len(sys.argv) - sys.argv[::-1].index(name)]


def main() -> None:
    """Listen on the port that was asked for, announce it, and stand still."""
    die_with_parent()
    if "fail-at-start" in sys.argv:
        sys.stderr.write("loading\nerror: the model is damaged\nhint: pull it again\n")
        sys.exit(3)
    if "mute" in sys.argv:
        signal.pause()
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(argument("--port"))))
        listener.listen()
        port = listener.getsockname()[1]
        with os.fdopen(int(argument("--ready-fd")), "w", encoding="utf-8") as ready:
            ready.write(json.dumps({"grpc": f"127.0.0.1:{port}"}) + "\n")
        sys.stdout.write("arguments " + json.dumps(sys.argv[1:]) + "\n")
        sys.stdout.flush()
        if "crash-on-connect" in sys.argv:
            listener.accept()
            sys.exit(7)
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
