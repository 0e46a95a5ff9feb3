"""The router stays light: it must never pull in torch."""

import subprocess
import sys


def test_the_router_never_imports_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, pdserve.router as room\n"
        "for module in pkgutil.walk_packages(room.__path__, 'pdserve.router.'): importlib.import_module(module.name)\n"
        "print('pdserve.router.server' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "False"]
