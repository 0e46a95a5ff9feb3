"""The native backend; importing it raises ImportError where no library was built for this processor."""

from pdserve.kernels import kv_write
from pdserve.kernels.backends import Backend
from pdserve.kernels.native.attention import NativePlan, paged_attention
from pdserve.kernels.native.library import native_library
from pdserve.kernels.native.summary import summarize

if native_library() is None:
    raise ImportError("no native library was built for this processor")

BACKEND = Backend(
    name="native",
    devices=frozenset({"cpu"}),
    write_kv=kv_write.write_kv,
    attend=paged_attention,
    plan=NativePlan,
    summarize=summarize,
    has_forward=True,
)
