"""`pdserve pull`: get a model ready before it is needed."""

from typing import Annotated

import typer

from pdserve.core.models import DEFAULT_MODEL


def pull(
    model: Annotated[
        str, typer.Argument(help="Built-in alias, or a Hugging Face model folder to check.")
    ] = DEFAULT_MODEL,
    force: Annotated[bool, typer.Option("--force", help="Prepare again, even if it is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Fetch, verify and convert a model into the user's cache. A second run only says where it is."""
    from pdserve.cli.model_steps import ProgressBars, ready_model
    from pdserve.cli.report import errors_as_json, output, write_json

    with errors_as_json(as_json), ProgressBars() as progress:
        folder = ready_model(model, progress, force=force)
    if as_json:
        write_json({"model": model, "folder": str(folder)})
    else:
        output().print(f"{model} is ready: {folder}", soft_wrap=True)
