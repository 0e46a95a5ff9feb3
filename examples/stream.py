"""The client of threads: streams an answer, and shows what it cost. Start a cluster first: `pdserve up`."""

import sys

from pdserve.client import Chat, Client, Delta, Options, Turn
from pdserve.core.errors import PdserveError

ADDRESS = "127.0.0.1:50051"


def main() -> None:
    question = " ".join(sys.argv[1:]) or "What is 2+2?"
    chat = Chat((Turn("system", "Be brief."), Turn("user", question)))
    try:
        with Client(ADDRESS) as client, client.generate(chat, Options(max_tokens=64, timeout_s=120)) as parts:
            for part in parts:
                if isinstance(part, Delta):
                    print(part.text, end="", flush=True)
            summary = parts.answer.summary
    except PdserveError as error:
        sys.exit(f"{error.reason}: {error}")
    if summary is not None:
        print(f"\n{summary.usage.completion_tokens} tokens, the first after {summary.timeline.ttft_s:.3f} s")


if __name__ == "__main__":
    main()
