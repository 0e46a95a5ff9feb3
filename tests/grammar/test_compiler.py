"""The compiler's thread: shared, kept, bounded, and never waited for too long. No model: most grammars here are refused."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.core.clock import ManualClock
from pdserve.core.models import resolve_model_dir
from pdserve.core.work import Grammar, GrammarKind
from pdserve.grammar import compiler as compiler_module
from pdserve.grammar.compiler import MAX_KEPT, MAX_ORDERS, GrammarCompiler, Outcome
from pdserve.grammar.compiling import CompiledGrammar
from pdserve.grammar.outcome import Cause, GrammarRefused, NotCompiled
from pdserve.grammar.vocabulary import GrammarVocabulary, load_vocabulary
from tests.grammar.walks import EOS, MODEL, VOCAB_SIZE

WAIT_S = 30.0


class Told:
    """What a request was told, once."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._event = threading.Event()

    def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._event.set()

    def wait(self) -> Outcome:
        assert self._event.wait(WAIT_S), "nobody told"
        assert len(self.outcomes) == 1
        return self.outcomes[0]

    @property
    def cause(self) -> Cause:
        outcome = self.wait()
        assert isinstance(outcome, NotCompiled)
        return outcome.cause


class Stage:
    """A compiler whose vocabulary is loaded when the test says so, and then is none: every grammar is refused."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.may_load = threading.Event()
        self.loading = threading.Event()
        self.compiler = GrammarCompiler(self._load, self.clock, limit_s=5.0)

    def _load(self) -> GrammarVocabulary:
        self.loading.set()
        assert self.may_load.wait(WAIT_S)
        raise GrammarRefused("no vocabulary")

    def request(self, number: int = 0, text: str = "") -> Told:
        told = Told()
        self.compiler.request(Grammar(GrammarKind.REGEX, text or f"a{number}"), told)
        return told


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.compiler.check_invariants()
    stage.may_load.set()
    assert stage.compiler.close(WAIT_S), "the thread goes on"


def test_a_request_returns_at_once_and_is_told_later(stage: Stage) -> None:
    told = stage.request()
    assert stage.loading.wait(WAIT_S)
    assert told.outcomes == []
    assert stage.compiler.gauges()["grammars.waiting"] == 1
    stage.may_load.set()
    assert told.wait() == NotCompiled(Cause.REFUSED, "no vocabulary")
    assert stage.compiler.gauges()["grammars.waiting"] == 0


def test_equal_grammars_are_compiled_once_and_kept(stage: Stage) -> None:
    told = [stage.request(1) for _ in range(5)]
    stage.may_load.set()
    assert {each.cause for each in told} == {Cause.REFUSED}
    at_once = stage.request(1)
    assert at_once.outcomes, "what is known is told here and now"
    assert stage.compiler.num_compiled == 1


def test_a_full_queue_refuses_at_once_but_not_who_waits_already(stage: Stage) -> None:
    told = [stage.request(number) for number in range(MAX_ORDERS)]
    assert stage.request(MAX_ORDERS).cause is Cause.BUSY
    again = stage.request(0)
    assert again.outcomes == []
    stage.may_load.set()
    assert {each.cause for each in (*told, again)} == {Cause.REFUSED}
    assert stage.request(MAX_ORDERS).cause is Cause.REFUSED, "a full queue is not kept as an outcome"


def test_who_waits_too_long_is_told_once_and_the_rest_goes_on(stage: Stage) -> None:
    early = stage.request(1)
    assert stage.loading.wait(WAIT_S)
    queued = stage.request(2)
    stage.clock.advance(4.0)
    late = stage.request(3)
    stage.compiler.expire(stage.clock.now_s())
    assert early.outcomes == []
    stage.clock.advance(1.5)
    stage.compiler.expire(stage.clock.now_s())
    assert early.cause is Cause.LATE
    assert queued.cause is Cause.BUSY, "the time went into the other one: nobody must be told to simplify it"
    assert late.outcomes == []
    stage.may_load.set()
    assert late.cause is Cause.REFUSED
    assert stage.request(1).outcomes, "what was compiled for nobody is kept all the same"
    assert stage.compiler.num_compiled == 2, "what nobody waits for any more is not begun"
    assert len(early.outcomes) == 1


def test_what_is_kept_is_bounded_by_number_and_bytes(stage: Stage) -> None:
    stage.may_load.set()
    for number in range(MAX_KEPT + 5):
        stage.request(number).wait()
    assert stage.compiler.gauges()["grammars.kept"] == MAX_KEPT
    assert stage.request(MAX_KEPT + 4).outcomes
    assert not stage.request(0).outcomes, "the least recently used goes first"
    for number in range(10):
        stage.request(text=f"{number}" * 120_000).wait()
    stage.compiler.check_invariants()
    assert stage.compiler.gauges()["grammars.kept"] <= 9


def test_a_panic_of_the_library_is_one_grammars_fault(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyo3's panics are no Exceptions; one that ended the thread would leave every later request waiting."""

    class Panic(BaseException):
        pass

    def panic(*_: object) -> CompiledGrammar:
        raise Panic("unwrap on None")

    stage.compiler._vocabulary = object()  # type: ignore[assignment]  # never looked at
    monkeypatch.setattr(compiler_module, "compile_grammar", panic)
    first, second = stage.request(1).wait(), stage.request(2).wait()
    assert first == second == NotCompiled(Cause.REFUSED, "the grammar library failed: Panic")


def test_without_a_thread_a_request_is_told_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where address space is limited, a deep stack may not be had: the process goes on, and the next request tries again."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        assert stage.request(1).cause is Cause.BUSY
    stage.may_load.set()
    assert stage.request(1).cause is Cause.REFUSED


def test_after_close_nothing_is_taken(stage: Stage) -> None:
    stage.may_load.set()
    stage.request(1).wait()
    assert stage.compiler.close(WAIT_S)
    assert stage.request(2).cause is Cause.BUSY


DEEP = """
import json, threading
from pathlib import Path
from pdserve.core.clock import SystemClock
from pdserve.core.work import Grammar, GrammarKind
from pdserve.grammar.compiler import GrammarCompiler
from pdserve.grammar.vocabulary import load_vocabulary

rules = "".join(f"r{{i}}: r{{i + 1}}\\n" for i in range(9000))
refs = {{str(i): {{"items": {{"$ref": f"#/$defs/{{i + 1}}"}}}} for i in range(3000)}} | {{"3000": {{"type": "integer"}}}}
compiler = GrammarCompiler(lambda: load_vocabulary(Path({folder!r}), {size}, [{eos}]), SystemClock())
for grammar in (
    Grammar(GrammarKind.LARK, "start: r0\\n" + rules + 'r9000: "a"'),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({{"$ref": "#/$defs/0", "$defs": refs}}, separators=(",", ":"))),
):
    told = threading.Event()
    compiler.request(grammar, lambda outcome: (print(type(outcome).__name__), told.set()))
    told.wait(60)
"""


@pytest.mark.smollm2
def test_deep_grammars_do_not_end_the_process() -> None:
    """The library recurses along chains of rules: on a common stack, 3000 of them end the router and every node."""
    code = DEEP.format(folder=str(resolve_model_dir(MODEL)), size=VOCAB_SIZE, eos=EOS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["CompiledGrammar", "CompiledGrammar"]


@pytest.mark.smollm2
def test_rows_beyond_the_tokenizer_are_never_allowed(tmp_path: Path) -> None:
    """Embeddings are often padded to a round number; an id without text must not come."""
    wide = load_vocabulary(resolve_model_dir(MODEL), VOCAB_SIZE + 64, [EOS])
    assert wide.size == VOCAB_SIZE + 64


def test_a_model_that_cannot_be_constrained_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GrammarRefused, match="end-of-sequence"):
        load_vocabulary(tmp_path, 100, [])
    with pytest.raises(GrammarRefused, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path, 100, [1])
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(GrammarRefused, match="tokenizer"):
        load_vocabulary(tmp_path, 100, [1])
