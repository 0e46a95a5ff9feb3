"""Python imports this at the start of the processes that a test puts this folder on the path of.

A node process then has the Triton backend on its CPU; nothing else of it changes. The router is left alone.
"""

import sys

if sys.argv[1:2] in (["prefill"], ["decode"]):
    from tests.kernels.native.on_cpu import install

    install()
