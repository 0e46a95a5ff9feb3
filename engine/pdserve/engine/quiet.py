"""transformers without its progress bars and advice: they would stand between our own lines. Errors still come through."""

from collections.abc import Callable

import transformers


def quieten_transformers() -> None:
    """Silence bars and warnings of transformers in this process."""
    measures: list[Callable[[], None]] = [
        transformers.logging.set_verbosity_error,
        transformers.logging.disable_progress_bar,
    ]
    for measure in measures:
        measure()
