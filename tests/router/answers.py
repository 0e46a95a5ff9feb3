"""Reading whole answers in tests: one text, cut in any way, and what a client would have put together."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.router.chat.answer import AnswerReader
from pdserve.router.chat.call_format import CallFormat
from pdserve.router.chat.gains import AnswerGain, Collected
from pdserve.router.chat.hermes import HermesCalls
from pdserve.router.chat.llama3 import Llama3Calls
from pdserve.router.chat.mistral import MistralCalls
from pdserve.router.chat.think import ThinkReasoning

NAMES = ("get_weather", "add")
FORMATS: dict[str, type[CallFormat]] = {"hermes": HermesCalls, "llama3": Llama3Calls, "mistral": MistralCalls}


@dataclass
class Heard:
    """What a client put together out of all gains."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    ids: tuple[str, ...] = ()


def numbered() -> Callable[[], str]:
    """Return a source of ids that a test can foresee."""
    return map("call{:05}".format, itertools.count()).__next__


def reader_of(form: str | None, *, think: bool | None = None) -> AnswerReader:
    """Return a reader; `think` True begins inside the reasoning, None knows of no reasoning."""
    calls = None if form is None else FORMATS[form](NAMES, Collected(numbered()))
    return AnswerReader(None if think is None else ThinkReasoning(think), calls)


def heard(gains: Iterable[AnswerGain]) -> Heard:
    """Put gains together as a client would, checking that each call is opened once, in order, before its arguments."""
    whole = Heard()
    names: list[str] = []
    arguments: list[str] = []
    ids: list[str] = []
    for gain in gains:
        whole.content += gain.content
        whole.reasoning += gain.reasoning
        for call in gain.tool_calls:
            if call.index == len(names):
                assert call.id
                assert call.name
                ids.append(call.id)
                names.append(call.name)
                arguments.append("")
            else:
                assert call.index == len(names) - 1, "only the latest call gains"
                assert (call.id, call.name) == ("", "")
                assert call.arguments
            arguments[call.index] += call.arguments
    whole.calls, whole.ids = tuple(zip(names, arguments, strict=True)), tuple(ids)
    return whole


def read(reader: AnswerReader, pieces: Iterable[str]) -> Heard:
    """Return what a client hears of a text in these pieces."""
    gains = [reader.push(piece) for piece in pieces]
    return heard([*gains, reader.finish()])
