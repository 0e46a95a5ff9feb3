"""A request's timeline as a table with bars. The schema stands in docs/timeline.md."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve.cli.report import count
from pdserve.client.answer import Summary
from pdserve.client.timeline import Overlapped, Stage, Timeline

BAR_CELLS = 40
INNER_ORDER = ("queue", "wait", "compute")
"""In which order node durations of a stage are shown, by the last part of their names; others follow, by name."""
COLOURS = {
    "admission": "white",
    "placement": "white",
    "prefill": "cyan",
    "handover": "yellow",
    "decode": "green",
    "resume": "red",
    "answer": "white",
}


def timeline_view(summary: Summary) -> RenderableType:
    """Return the table of stages, the work beside them, and the totals."""
    timeline = summary.timeline
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage", no_wrap=True)
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    table.add_column("from request to answer", no_wrap=True)
    before_s = 0.0
    for stage in timeline.stages:
        share = stage.duration_s / timeline.e2el_s if timeline.e2el_s else 0.0
        name = stage.name if timeline.attempts < 2 or not stage.attempt else f"{stage.name} (attempt {stage.attempt})"
        colour = COLOURS.get(stage.name, "blue")
        bar = Text(bar_of(before_s, stage.duration_s, timeline.e2el_s), style=colour)
        table.add_row(Text(name, style=colour), ms(stage.duration_s), f"{share:.0%}", bar)
        for inner, duration_s in nested_in(stage):
            table.add_row(Text(f"  {inner}", style="dim"), Text(ms(duration_s), style="dim"), "", "")
        before_s += stage.duration_s
    return Group(table, Text(), *totals(summary, timeline))


def nested_in(stage: Stage) -> list[tuple[str, float]]:
    """Return the durations inside a stage in an order that does not vary, and the hop, which is what they leave."""

    def rank(duration: tuple[str, float]) -> tuple[int, str]:
        last = duration[0].rpartition(".")[2]
        return (INNER_ORDER.index(last) if last in INNER_ORDER else len(INNER_ORDER), duration[0])

    return [*sorted(stage.nodes, key=rank), ("hop", stage.hop_s)] if stage.nodes else []


def bar_of(before_s: float, duration_s: float, whole_s: float) -> str:
    """Return a bar of BAR_CELLS characters, with what lies between two moments of the whole filled in."""
    if whole_s <= 0:
        return ""
    first = min(BAR_CELLS - 1, int(before_s / whole_s * BAR_CELLS))
    last = max(first + 1, min(BAR_CELLS, round((before_s + duration_s) / whole_s * BAR_CELLS)))
    return " " * first + "█" * (last - first)


def totals(summary: Summary, timeline: Timeline) -> list[Text]:
    """Return the lines below the table."""
    usage = summary.usage
    per_token = f"then {ms(timeline.tpot_s)} ms per token, " if usage.completion_tokens > 1 else ""
    read, made = count(usage.prompt_tokens, "prompt token"), count(usage.completion_tokens, "answer token")
    lines = [
        f"first token {ms(timeline.ttft_s)} ms, {per_token}whole answer {ms(timeline.e2el_s)} ms",
        f"{read} ({usage.cached_prompt_tokens} cached), {made}",
    ]
    lines += beside_lines(timeline.overlapped)
    lines += [
        f"attempt {s.attempt} ended ({s.cause}); the answer stood still {ms(s.duration_s)} ms" for s in timeline.stalls
    ]
    return [Text(line) for line in lines]


def beside_lines(beside: Overlapped) -> list[str]:
    """Return what happened beside the stages, and is not part of their sum."""
    lines = []
    if beside.kv_bytes:
        moved = f"{beside.kv_bytes / 2**20:.1f} MiB in {count(beside.kv_frames, 'frame')}"
        place = f"place {ms(beside.place_s)} ms, wait for blocks {ms(beside.reserve_wait_s)} ms"
        lines.append(f"KV moved beside compute: {moved}, {ms(beside.exposed_transfer_s)} ms of it not hidden")
        lines.append(f"beside the stages: pack {ms(beside.pack_s)} ms, {place}")
    early = ", ".join(f"{name} {ms(duration_s)} ms" for name, duration_s in sorted(beside.nodes))
    return [*lines, f"began before their stage: {early}"] if early else lines


def ms(seconds: float) -> str:
    """Return seconds as milliseconds with one decimal."""
    return f"{seconds * 1e3:,.1f}"
