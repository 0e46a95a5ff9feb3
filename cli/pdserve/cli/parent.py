"""Children that never outlive their supervisor, however it dies; see `pdserve.core.parent`."""

from pdserve.core.parent import PARENT_VARIABLE, die_with_parent

__all__ = ["PARENT_VARIABLE", "die_with_parent"]
