"""These tests run in a process of their own, whose Triton interprets: `TRITON_INTERPRET=1` counts when Triton is imported.

`test_interpreter` beside this folder starts it. By hand: `TRITON_INTERPRET=1 python -m pytest tests/kernels/triton/interpreted`.
"""

import os

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.triton.checked_interpreter import install

    install()
else:
    collect_ignore_glob.append("test_*.py")
