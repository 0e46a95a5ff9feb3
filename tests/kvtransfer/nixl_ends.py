"""What tests need that run NIXL."""

import pytest

from pdserve.kvtransfer.nixl_engine import INSTALL, installed_package

NEEDS_NIXL = pytest.mark.skipif(installed_package() is None, reason=f"NIXL is not installed ({INSTALL})")
