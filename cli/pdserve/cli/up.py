"""`pdserve up`: a local cluster, supervised."""

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.cluster_plan import ClusterOptions, PlannedCluster, plan_cluster
from pdserve.cli.cluster_tls import own_tls
from pdserve.cli.events import ConsoleReporter, Failed, JsonLogReporter, JsonReporter, Preparing, Reporter
from pdserve.cli.exit_codes import exit_code_of
from pdserve.cli.findable import findable
from pdserve.cli.model_steps import OnStep, in_steps, ready_model
from pdserve.cli.report import message_of, run_async, show_error, show_warning
from pdserve.cli.steady_reporter import SteadyReporter
from pdserve.cli.supervision import supervise
from pdserve.cli.supervisor import ClusterFailed, Supervisor, refuse_busy_port
from pdserve.core.errors import PdserveError
from pdserve.core.handed_secret import HandedSecret
from pdserve.core.models import DEFAULT_MODEL
from pdserve.core.settings import environment_warnings

Text = str | None


def up(
    model: Annotated[Text, typer.Option(help=f"Alias or model folder. Default: {DEFAULT_MODEL}.")] = None,
    prefill: Annotated[
        str, typer.Option(metavar="INTEGER", envvar="PDSERVE_UP_PREFILL", help="Prefill nodes, 1 to 64.")
    ] = "1",
    decode: Annotated[
        str, typer.Option(metavar="INTEGER", envvar="PDSERVE_UP_DECODE", help="Decode nodes, 1 to 64.")
    ] = "1",
    port: Annotated[Text, typer.Option(metavar="INTEGER", help="Router's port; 0: a free one. Default: 50051.")] = None,
    http_port: Annotated[
        Text, typer.Option(metavar="INTEGER", help="Router's HTTP port; 0: a free one; off: none. Default: 8000.")
    ] = None,
    threads: Annotated[Text, typer.Option(metavar="INTEGER", help="Engine threads of every node.")] = None,
    block_size: Annotated[Text, typer.Option(metavar="INTEGER", help="Token positions per KV block.")] = None,
    kv_blocks: Annotated[Text, typer.Option(metavar="INTEGER", help="KV blocks of every node.")] = None,
    max_model_len: Annotated[Text, typer.Option(metavar="INTEGER", help="Longest prompt plus answer, tokens.")] = None,
    dtype: Annotated[Text, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    tls_cert: Annotated[
        Text, typer.Option(metavar="FILE", help="Certificate of every process, PEM; with --tls-key.")
    ] = None,
    tls_key: Annotated[Text, typer.Option(metavar="FILE", help="Its key.")] = None,
    tls_ca: Annotated[Text, typer.Option(metavar="FILE", help="Its authority: TLS between the processes too.")] = None,
    kv_link: Annotated[
        Text, typer.Option(metavar="BANDWIDTH,LATENCY[,JITTER]", help="For experiments: a slower KV link.")
    ] = None,
    drain_s: Annotated[Text, typer.Option(metavar="SECONDS", help="Time to finish accepted work at the end.")] = None,
    log_format: Annotated[Text, typer.Option(help="text or json: log lines of the processes.")] = None,
    log_level: Annotated[Text, typer.Option(help="debug, info, warning or error.")] = None,
    hold_at: Annotated[Text, typer.Option(hidden=True, help="Test hook STAGE[:N].")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[ROLE.]NAME=VALUE", help="Any setting of `pdserve router|prefill|decode`."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file of settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines; logs on standard error.")] = False,
) -> None:
    """Run a local cluster: a router, prefill nodes and decode nodes, until Ctrl-C.

    The first Ctrl-C or SIGTERM drains, the second stops at once. A process that dies is started again at the same port.
    """
    named = {
        "model": model,
        "port": port,
        "http_port": http_port,
        "threads": threads,
        "block_size": block_size,
        "kv_blocks": kv_blocks,
        "max_model_len": max_model_len,
        "dtype": dtype,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_ca": tls_ca,
        "kv_link": kv_link,
        "drain_s": drain_s,
        "log_format": log_format,
        "log_level": log_level,
        "hold_at": hold_at,
    }
    options = ClusterOptions(prefill, decode, named, tuple(sets or ()), config)
    raise typer.Exit(run_cluster(options, as_json=as_json))


def run_cluster(options: ClusterOptions, *, as_json: bool) -> int:
    """Prepare the models, run the cluster, and return the exit status."""
    for warning in environment_warnings().values():
        show_warning(warning)
    with HandedSecret() as secret:
        try:
            planned, reporter = prepared(options, secret, as_json=as_json)
        except PdserveError as error:
            if as_json:
                JsonReporter().event(Failed(message_of(error), exit_code_of(error), error.reason, error.hint))
            raise
        try:
            return run_async(run_plan(planned, reporter))
        except ClusterFailed as error:
            show_error(str(error))
            return error.exit_code


def prepared(options: ClusterOptions, secret: HandedSecret, *, as_json: bool) -> tuple[PlannedCluster, Reporter]:
    """Return a cluster that can be started, with its models ready, and what will show it."""
    planned = plan_cluster(options, secret)
    refuse_busy_port(planned.plan.host, planned.plan.port)
    refuse_busy_port(planned.plan.host, planned.plan.http_port or 0, "--http-port")
    reporter = reporter_of(planned.log_format, as_json=as_json)
    for model in planned.models:
        ready_model(model, preparing(model, reporter))
    return planned, reporter


def reporter_of(log_format: str, *, as_json: bool) -> Reporter:
    """Return what shows events and log lines in the form that was asked for."""
    json_logs = log_format == "json"
    if as_json:
        return SteadyReporter(JsonReporter(json_logs=json_logs))
    return SteadyReporter(JsonLogReporter() if json_logs else ConsoleReporter())


def preparing(model: str, reporter: Reporter) -> OnStep:
    """Return a receiver of steps that reports them as events."""

    def tell(stage: str, fraction: float) -> None:
        reporter.event(Preparing(model, stage, fraction))

    return in_steps(tell)


async def run_plan(planned: PlannedCluster, reporter: Reporter) -> int:
    """Run the processes of a plan until a stop signal or a failure."""
    from pdserve.cli.router_probe import RouterProbe

    plan = planned.plan
    probe = RouterProbe(own_tls(plan.tls, plan.host), planned.api_key)
    try:
        with findable(plan) as on_addresses:
            return await supervise(Supervisor(plan, reporter, probe, on_addresses), reporter, plan.drain_s)
    finally:
        await probe.close()
