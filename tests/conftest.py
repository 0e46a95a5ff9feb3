"""What holds for every test: clusters that run side by side must not meet at the default HTTP port."""

import os

os.environ.setdefault("PDSERVE_HTTP_PORT", "0")
