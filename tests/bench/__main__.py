"""`make bench`: the record. Absolute times belong to this machine; the ratios are what to quote."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.bench.machine import describe_machine
from tests.bench.offline import decode_rates
from tests.bench.processors import processors_cost
from tests.bench.streaming import measure


def main() -> None:
    """Measure, and print one JSON record."""
    record: dict[str, object] = {"machine": describe_machine()}
    print("offline decode …", file=sys.stderr)  # noqa: T201 - progress
    record["offline_decode"] = decode_rates()
    print("sampling parameters …", file=sys.stderr)  # noqa: T201 - progress
    record["sampling_parameters"] = processors_cost()
    print("streaming, cancel, idle …", file=sys.stderr)  # noqa: T201 - progress
    with tempfile.TemporaryDirectory() as folder:
        record |= asyncio.run(measure(Path(folder)))
    print(json.dumps(record, indent=2))  # noqa: T201 - the record


if __name__ == "__main__":
    main()
