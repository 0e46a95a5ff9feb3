"""What holds for every test: clusters side by side do not meet at the default HTTP port, and torch computes in one thread."""

import os

os.environ.setdefault("PDSERVE_HTTP_PORT", "0")
# Tiny models gain nothing from threads, and on a busy machine torch's threads wait for each other: minutes instead of seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
