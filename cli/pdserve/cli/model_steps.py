"""Getting a model ready, with every long step shown."""

from collections.abc import Callable
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pdserve.cli.report import errors_output
from pdserve.core.errors import ModelUnavailable
from pdserve.core.models import ALIASES, resolve_model_dir

OnStep = Callable[[str, float], None]
"""Told the stage's name and its fraction done, 0 to 1."""


def ready_model(model: str, on_step: OnStep, *, force: bool = False) -> Path:
    """Return the folder of `model`, fetched and converted if it is an alias that is not prepared yet.

    `force` prepares an alias again. Raises ModelUnavailable if it cannot be had. What is ready already costs no import of
    the engine.
    """
    if not force or model not in ALIASES:
        try:
            return resolve_model_dir(model)
        except ModelUnavailable:
            if model not in ALIASES:
                raise
    from pdserve.engine.prepare import prepare_model

    return prepare_model(model, on_step, force=force)


def in_steps(tell: OnStep, step: float = 0.1) -> OnStep:
    """Return a receiver that passes on the start and the end of a stage, and every `step` of it in between."""
    told: tuple[str, float] = ("", 0.0)

    def on_step(stage: str, fraction: float) -> None:
        nonlocal told
        last_stage, last_fraction = told
        if stage != last_stage or fraction >= last_fraction + step or fraction >= 1.0 > last_fraction:
            told = (stage, fraction)
            tell(stage, fraction)

    return on_step


class ProgressBars:
    """A bar per stage on a terminal, else a line per step. Use as a context manager; call it with steps."""

    def __init__(self) -> None:
        console = errors_output()
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
            console=console,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._is_terminal = console.is_terminal
        self._lines = in_steps(lambda stage, fraction: console.print(f"{stage} {fraction:.0%}"), 0.25)

    def __enter__(self) -> "ProgressBars":
        if self._is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that `stage` is done to `fraction`, 0 to 1."""
        if not self._is_terminal:
            self._lines(stage, fraction)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=1.0)
        self._bars.update(self._tasks[stage], completed=fraction)
