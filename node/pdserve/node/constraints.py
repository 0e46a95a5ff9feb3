"""The grammars of a node's legs: compiled off the event loop and the step loop, held from `ready` until the leg is released."""

import asyncio
from collections.abc import Callable

from pdserve.core.clock import Clock
from pdserve.core.ids import LegKey
from pdserve.core.models import resolve_model_dir
from pdserve.core.node_settings import NodeSettings
from pdserve.core.work import LegOutcome, Work
from pdserve.engine.engine import Engine
from pdserve.engine.grammar import GrammarMatcher
from pdserve.grammar.compiler import GrammarCompiler, Outcome
from pdserve.grammar.compiling import CompiledGrammar
from pdserve.grammar.outcome import Cause, NotCompiled
from pdserve.grammar.vocabulary import load_vocabulary
from pdserve.kernels.logits import Matcher

MatcherOf = Callable[[Work], Matcher | None]
"""Given a leg that is ready: a matcher at the beginning of its answer, or None if nothing constrains it."""
Ready = Callable[[LegKey], None]
Failed = Callable[[LegKey, LegOutcome, NotCompiled], None]

OUTCOMES = {Cause.REFUSED: LegOutcome.REFUSED, Cause.LATE: LegOutcome.FAILED, Cause.BUSY: LegOutcome.BUSY}


def grammar_compiler(settings: NodeSettings, engine: Engine, clock: Clock) -> GrammarCompiler:
    """Return a compiler over the engine's vocabulary, which is read when the first grammar comes."""
    return GrammarCompiler(
        lambda: load_vocabulary(resolve_model_dir(settings.model), engine.vocab_size, engine.eos_token_ids), clock
    )


class Constraints:
    """What the outputs of legs must belong to.

    `begin`, `end` and the callbacks belong to the event loop's thread, `matcher` to the engine's. A leg with a grammar gets
    `ready` or `failed` once, later and never from within `begin`, unless it ends first.
    """

    def __init__(self, compiler: GrammarCompiler, ready: Ready, failed: Failed) -> None:
        self._compiler, self._ready, self._failed = compiler, ready, failed
        self._awaited: set[LegKey] = set()
        self._compiled: dict[LegKey, CompiledGrammar] = {}

    def begin(self, work: Work) -> None:
        """Have a leg's grammar compiled, if it has one."""
        grammar, leg = work.sampling.grammar, work.leg
        if grammar is None:
            return
        loop = asyncio.get_running_loop()
        self._awaited.add(leg)
        self._compiler.request(grammar, lambda outcome: _tell(loop, self._settle, leg, outcome))

    def matcher(self, work: Work) -> Matcher | None:
        """Return a matcher at the beginning of the answer, or None for a leg without a grammar. The leg is ready and not over."""
        if work.sampling.grammar is None:
            return None
        return GrammarMatcher(self._compiled[work.leg])

    def end(self, leg: LegKey) -> None:
        """Forget a leg of which no step will know any more."""
        self._awaited.discard(leg)
        self._compiled.pop(leg, None)

    def expire(self, now_s: float) -> None:
        """Fail those that wait too long."""
        self._compiler.expire(now_s)

    def gauges(self) -> dict[str, float]:
        """Return how many legs are constrained, and the compiler's gauges."""
        return {"constraints": float(len(self._awaited) + len(self._compiled))} | self._compiler.gauges()

    def check_invariants(self) -> None:
        """Raise if the books do not agree."""
        assert not self._awaited & self._compiled.keys(), "a leg that waits has no grammar yet"
        self._compiler.check_invariants()

    def close(self) -> None:
        """End the compiler's thread."""
        self._compiler.close()

    def _settle(self, leg: LegKey, outcome: Outcome) -> None:
        if leg not in self._awaited:
            return  # it ended meanwhile
        self._awaited.discard(leg)
        if isinstance(outcome, NotCompiled):
            self._failed(leg, OUTCOMES[outcome.cause], outcome)
            return
        self._compiled[leg] = outcome
        self._ready(leg)


def _tell(
    loop: asyncio.AbstractEventLoop, settle: Callable[[LegKey, Outcome], None], leg: LegKey, outcome: Outcome
) -> None:
    loop.call_soon_threadsafe(settle, leg, outcome)
