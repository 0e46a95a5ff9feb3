"""The command tree. Commands import what they need when they run."""

import os
from typing import Annotated

import typer

from pdserve.cli.chat import chat
from pdserve.cli.demo import demo
from pdserve.cli.doctor import doctor
from pdserve.cli.generate import generate
from pdserve.cli.pull import pull
from pdserve.cli.roles import run_decode, run_prefill, run_router
from pdserve.cli.settings_options import command_of
from pdserve.cli.status import status
from pdserve.cli.up import up
from pdserve.core.build import product_version, source_commit
from pdserve.core.node_settings import DecodeSettings, PrefillSettings
from pdserve.core.router_settings import RouterSettings

CONTEXT = {"help_option_names": ["-h", "--help"]}
EPILOG = (
    "Exit status: 0 done; 1 the request or service failed; 2 wrong usage, settings or request; 3 model not to be had; "
    "4 nothing answers or no capacity, try again; 5 port taken; 130 interrupted. "
    "Start with `pdserve demo`, or `pdserve up` and `pdserve generate PROMPT`."
)

app = typer.Typer(
    name="pdserve",
    help="Language models with prompt reading and token making on separate machines.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
    rich_markup_mode="rich",
)


def show_version(wanted: bool) -> None:
    """Print version and source commit, and end."""
    if wanted:
        typer.echo(f"pdserve {product_version()} ({source_commit()})")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[  # noqa: ARG001 - the option acts through its callback
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show version and commit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also PDSERVE_DEBUG=1).")] = False,
) -> None:
    """Language models with prompt reading and token making on separate machines."""
    if debug:
        os.environ["PDSERVE_DEBUG"] = "1"


LOCAL, CLUSTER, MACHINE = "On this machine", "Processes of a cluster", "Models and machine"

app.command(rich_help_panel=LOCAL)(demo)
app.command(rich_help_panel=LOCAL)(up)
app.command(rich_help_panel=LOCAL)(generate)
app.command(rich_help_panel=LOCAL)(chat)
app.command(rich_help_panel=LOCAL)(status)
app.command(rich_help_panel=MACHINE)(pull)
app.command(rich_help_panel=MACHINE)(doctor)
app.command("router", rich_help_panel=CLUSTER)(
    command_of(RouterSettings, run_router, "Run a router: the front door of a cluster.")
)
app.command("prefill", rich_help_panel=CLUSTER)(
    command_of(PrefillSettings, run_prefill, "Run a prefill node: prompts to KV.")
)
app.command("decode", rich_help_panel=CLUSTER)(
    command_of(DecodeSettings, run_decode, "Run a decode node: KV to tokens.")
)
