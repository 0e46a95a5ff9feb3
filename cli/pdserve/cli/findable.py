"""The secret of a cluster that `up` or `demo` runs, kept where a process finds it that the same user starts by hand."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pdserve.cli.report import show_warning
from pdserve.cli.supervisor import ClusterPlan
from pdserve.core.run_secret import RunFile


@contextmanager
def findable(plan: ClusterPlan) -> Iterator[Callable[[Sequence[str]], None]]:
    """Keep the secret in the user's file while the context is open. Yields what is to be told the addresses of the cluster."""
    if plan.secret is None:
        yield lambda _: None
        return
    with RunFile(plan.secret.value) as file:
        if file.fault:
            show_warning(file.fault)
        yield file.tell
