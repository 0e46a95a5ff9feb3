"""Grammars are compiled on a thread of their own, one after another, and kept. Every queue is bounded, every wait has an end."""

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.core.clock import Clock
from pdserve.core.work import Grammar
from pdserve.grammar.compiling import CompiledGrammar, compile_grammar
from pdserve.grammar.outcome import Cause, GrammarRefused, NotCompiled
from pdserve.grammar.vocabulary import GrammarVocabulary

STACK_BYTES = 512 * 2**20
"""Address space for the thread's stack: the library recurses along chains of rules (measured: 3000 rules end a process whose
stack is 8 MiB, 8000 fit here with room). Only what is used becomes memory."""
COMPILE_LIMIT_S = 10.0
MAX_ORDERS = 64
MAX_KEPT = 64
MAX_KEPT_BYTES = 2**20
"""Of grammar text; compiled, a grammar takes up to about a hundred times its text."""

Outcome = CompiledGrammar | NotCompiled
Done = Callable[[Outcome], None]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Order:
    """A grammar that is to be compiled, and who waits for it until when."""

    waiters: list[tuple[Done, float]] = field(default_factory=list)


class GrammarCompiler:
    """Compiles what is requested. Methods may be called from any thread and return at once.

    `load` makes the vocabulary when the first grammar comes, on the compiler's thread. Without `expire`, called now and then, a
    compilation that takes too long is waited for.
    """

    def __init__(
        self, load: Callable[[], GrammarVocabulary], clock: Clock, *, limit_s: float = COMPILE_LIMIT_S
    ) -> None:
        self._load, self._clock, self._limit_s = load, clock, limit_s
        self._vocabulary: GrammarVocabulary | None = None
        self._changed = threading.Condition()  # over a lock that its holder may take again
        self._orders: OrderedDict[Grammar, _Order] = OrderedDict()
        self._kept: OrderedDict[Grammar, Outcome] = OrderedDict()
        self._kept_bytes = 0
        self._began_s = 0.0  # since when the first order is the first, which is being compiled
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self.num_compiled = 0

    def request(self, grammar: Grammar, done: Done) -> None:
        """Call `done` once with what becomes of `grammar`: here and now if that is known, else on another thread."""
        with self._changed:
            outcome = self._known(grammar)
            if outcome is None and not self._has_thread():
                outcome = NotCompiled(Cause.BUSY, "no thread could be started to compile it")
            if outcome is None:
                now_s = self._clock.now_s()
                if not self._orders:
                    self._began_s = now_s
                order = self._orders.setdefault(grammar, _Order())
                order.waiters.append((done, now_s + self._limit_s))
                self._changed.notify_all()
        if outcome is not None:
            done(outcome)

    def expire(self, now_s: float) -> None:
        """Tell those that waited too long. What they waited for is compiled all the same if that has begun, and kept."""
        late: list[tuple[Done, NotCompiled]] = []
        with self._changed:
            for grammar, order in self._orders.items():
                told = self.overdue(grammar, self._limit_s, now_s)
                late += [(done, told) for done, deadline_s in order.waiters if now_s > deadline_s]
                order.waiters = [waiter for waiter in order.waiters if now_s <= waiter[1]]
        for done, outcome in late:
            _tell(done, outcome)

    def overdue(self, grammar: Grammar, limit_s: float, now_s: float) -> NotCompiled:
        """Return what to tell one who waited `limit_s` in vain: the grammar is at fault if half of it went into compiling it."""
        with self._changed:
            is_slow = grammar == next(iter(self._orders), None) and now_s - self._began_s >= limit_s / 2
        if is_slow:
            return NotCompiled(Cause.LATE, f"it was not compiled within {limit_s:g} s; simplify it")
        return NotCompiled(Cause.BUSY, f"other grammars were compiled before it, for {limit_s:g} s")

    def gauges(self) -> dict[str, float]:
        """Return what waits, what is kept, and what was compiled."""
        with self._changed:
            waiting = sum(len(order.waiters) for order in self._orders.values())
            return {
                "grammars.waiting": float(waiting),
                "grammars.kept": float(len(self._kept)),
                "grammars.compiled_total": float(self.num_compiled),
            }

    def check_invariants(self) -> None:
        """Raise if the books do not agree."""
        with self._changed:
            assert len(self._orders) <= MAX_ORDERS, "more grammars wait than may"
            assert self._kept_bytes == sum(_size(grammar) for grammar in self._kept), "kept bytes are miscounted"
            assert self._kept_bytes <= MAX_KEPT_BYTES, "more is kept than may"

    def close(self, timeout_s: float = 1.0) -> bool:
        """End the thread, and return whether it ended in time; it holds up no process. Those that wait are not told."""
        with self._changed:
            self._is_closed = True
            self._orders.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _known(self, grammar: Grammar) -> Outcome | None:
        kept = self._kept.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            return kept
        if self._is_closed or (grammar not in self._orders and len(self._orders) >= MAX_ORDERS):
            return NotCompiled(Cause.BUSY, f"{MAX_ORDERS} other grammars wait to be compiled")
        return None

    def _has_thread(self) -> bool:
        """Start the thread with the first request, and return whether there is one."""
        if self._thread is not None:
            return True
        thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError:
            logger.exception("no thread with a stack of %d MiB can be started; see ulimit -v", STACK_BYTES >> 20)
            return False
        finally:
            threading.stack_size(before)
        self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._orders and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                grammar = next(iter(self._orders))
                is_wanted = bool(self._orders[grammar].waiters)
            outcome = self._compile(grammar) if is_wanted else None
            with self._changed:
                order = self._orders.pop(grammar, _Order())
                self._began_s = self._clock.now_s()
                if outcome is not None:
                    self._keep(grammar, outcome)
            for done, _ in order.waiters:
                _tell(done, outcome or NotCompiled(Cause.LATE, "it was given up"))

    def _compile(self, grammar: Grammar) -> Outcome:
        started_s = self._clock.now_s()
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            compiled = compile_grammar(grammar, self._vocabulary)
        except GrammarRefused as error:
            return NotCompiled(Cause.REFUSED, str(error))
        except BaseException as error:  # a panic of the library is no Exception; its grammar is at fault
            logger.exception("a grammar broke its compiler")
            return NotCompiled(Cause.REFUSED, f"the grammar library failed: {type(error).__name__}")
        finally:
            self.num_compiled += 1
            elapsed_ms = 1000 * (self._clock.now_s() - started_s)
            logger.info("a grammar of %d bytes (%s) took %.1f ms", _size(grammar), grammar.kind.name, elapsed_ms)
        return compiled

    def _keep(self, grammar: Grammar, outcome: Outcome) -> None:
        self._kept[grammar] = outcome
        self._kept_bytes += _size(grammar)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            oldest, _ = self._kept.popitem(last=False)
            self._kept_bytes -= _size(oldest)


def _size(grammar: Grammar) -> int:
    return len(grammar.text.encode(errors="replace"))


def _tell(done: Done, outcome: Outcome) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop that wanted to know has ended
        done(outcome)
