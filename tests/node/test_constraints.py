"""Grammars on the nodes: compiled while steps go on, crossed by the hand-over and a resume, refused by name, and never leaked."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.core.work import Grammar, GrammarKind, Sampling, Work
from pdserve.grammar import compiler as compiler_module
from pdserve.grammar.outcome import GrammarRefused
from pdserve.grammar.vocabulary import GrammarVocabulary, load_vocabulary
from pdserve.node import constraints as constraints_module
from tests.engine.small import prompt_of, small_engine
from tests.node.pair import DEADLINE_S, Pair, pair
from tests.node.works import leg, work

pytestmark = pytest.mark.asyncio

PATTERN = "[a-z]{3}-[0-9]{3}( [a-z]{2,4})?"
EOS = 0


class Loading:
    """The vocabulary of every desk: loaded when the test allows it, on the compiler's thread."""

    def __init__(self, folder: Path) -> None:
        self.allowed = threading.Event()
        self.allowed.set()
        self.fault = ""
        size = small_engine().vocab_size
        printable = sorted(symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol.isascii())
        vocabulary = {symbol: token_id for token_id, symbol in enumerate(["<eos>", *printable])}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(["<eos>"])
        assert self.tokenizer.get_vocab_size() < size
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self._folder, self._size = folder, size

    def __call__(self, *_: object) -> GrammarVocabulary:
        assert self.allowed.wait(DEADLINE_S)
        if self.fault:
            raise GrammarRefused(self.fault)
        return load_vocabulary(self._folder, self._size, [EOS])

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


@pytest.fixture
def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    made = Loading(tmp_path)
    monkeypatch.setattr(constraints_module, "load_vocabulary", made)
    monkeypatch.setattr(constraints_module, "resolve_model_dir", Path)
    yield made
    made.allowed.set()


def constrained(session: int, *, pattern: str = PATTERN, temperature: float = 1.3, **changes: object) -> Work:
    sampling = Sampling(temperature=temperature, seed=5, grammar=Grammar(GrammarKind.REGEX, pattern))
    made = replace(
        work(session, max_tokens=24, sampling=sampling, stop_token_ids=frozenset({EOS})), prompt_ids=prompt_of(13)
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # rows of many types


async def test_every_sequence_obeys_across_the_handover(loading: Loading) -> None:
    async with pair() as nodes:
        made = constrained(1, num_sequences=4)
        outputs = (await nodes.outputs(made))[1]
        texts = {loading.text([token for token in ids if token != EOS]) for ids in outputs.values()}
        assert len(texts) > 1, "seeds tell"
        assert all(re.fullmatch(PATTERN, text) for text in texts), texts


async def test_a_resume_after_any_token_gives_the_undisturbed_answer(loading: Loading) -> None:
    """The matcher is rebuilt from the ids that the router accepted; a state that began anew would start the pattern again."""
    async with pair() as nodes:
        whole = (await nodes.outputs(constrained(1)))[1][0]
        assert len(whole) > 7
        for cut in range(1, len(whole)):
            resumed = constrained(10 + cut, output_ids=tuple(whole[:cut]))
            assert (await nodes.outputs(resumed))[10 + cut][0] == whole[cut:], f"cut at {cut}"


async def test_no_step_waits_for_a_grammar(loading: Loading) -> None:
    loading.allowed.clear()
    async with pair() as nodes:
        nodes.submit(constrained(1))
        plain = replace(work(2, max_tokens=6), prompt_ids=prompt_of(9))
        nodes.submit(plain)
        await nodes.until(lambda: "released" in nodes.decode.of(2).events)
        assert nodes.decode.of(2).outcome == "FINISHED"
        job = nodes.prefill.desk._scheduler._jobs[leg(1)]  # type: ignore[union-attr]  # the prefill node's scheduler
        await nodes.until(lambda: job.num_left == 1)
        assert nodes.prefill.of(1).tokens == {}, "the last chunk waits, the rest of the prompt does not"
        loading.allowed.set()
        await nodes.finish()
        assert re.fullmatch(PATTERN, loading.text([t for t in nodes.output(1)[0] if t != EOS]))


async def test_a_received_sequence_waits_for_its_grammar_beside_those_that_run(loading: Loading) -> None:
    """The decode node's compiler may be the slower one: the sequence is adopted, and does not run yet."""
    may_load = threading.Event()

    def load() -> GrammarVocabulary:
        assert may_load.wait(DEADLINE_S)
        return loading()

    async with pair() as nodes:
        nodes.decode.desk._constraints._compiler._load = load
        nodes.submit(constrained(1))
        await nodes.until(lambda: "adopted" in nodes.decode.of(1).events)
        plain = replace(work(2, max_tokens=6), prompt_ids=prompt_of(9))
        nodes.submit(plain)
        await nodes.until(lambda: nodes.decode.of(2).outcome == "FINISHED")
        assert len(nodes.output(2)[0]) == 6
        assert len(nodes.decode.of(1).tokens[0]) == 1, "only the first token, which the prefill node made"
        may_load.set()
        await nodes.finish()
        assert re.fullmatch(PATTERN, loading.text([t for t in nodes.output(1)[0] if t != EOS]))


async def test_a_cancel_while_the_grammar_is_compiled_leaves_nothing(loading: Loading) -> None:
    loading.allowed.clear()
    async with pair() as nodes:
        nodes.submit(constrained(1))
        nodes.cancel(leg(1))
        await nodes.finish()
        assert gauge(nodes, "constraints") == [0, 0]
        loading.allowed.set()
        assert re.fullmatch(PATTERN, loading.text(await answer(nodes, constrained(2)))), "the compiler goes on"


async def test_what_cannot_be_compiled_is_refused_by_name(loading: Loading) -> None:
    async with pair() as nodes:
        nodes.submit(constrained(1, pattern="(a"))
        await nodes.finish()
        ends = {(node.of(1).outcome, node.of(1).reason) for node in (nodes.prefill, nodes.decode)}
        assert ("REFUSED", "grammar_refused") in ends
        assert ends <= {("REFUSED", "grammar_refused"), ("FAILED", "peer_aborted")}, "the first tells the other"


async def test_a_model_without_a_vocabulary_refuses_by_name(loading: Loading) -> None:
    loading.fault = "no vocabulary"
    async with pair() as nodes:
        nodes.submit(constrained(1, transfer_id=None, decode=None))
        await nodes.finish()
        assert (nodes.prefill.of(1).outcome, nodes.prefill.of(1).reason) == ("REFUSED", "grammar_refused")


async def test_a_grammar_that_takes_too_long_fails_its_leg(loading: Loading) -> None:
    loading.allowed.clear()
    async with pair() as nodes:
        nodes.submit(constrained(1))
        for node in (nodes.prefill, nodes.decode):
            node.desk.tick(node.desk._clock.now_s() + 60.0)
        await nodes.finish()
        assert (nodes.prefill.of(1).outcome, nodes.prefill.of(1).reason) == ("FAILED", "grammar_too_slow")
        loading.allowed.set()


async def test_a_full_queue_is_nobodys_failure(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_ORDERS", 1)
    loading.allowed.clear()
    async with pair() as nodes:
        nodes.submit(constrained(1))
        nodes.submit(constrained(2, pattern="[a-z]+"))
        await nodes.until(lambda: nodes.prefill.of(2).outcome != "" and nodes.decode.of(2).outcome != "")
        assert (nodes.prefill.of(2).outcome, nodes.prefill.of(2).reason) == ("BUSY", "grammar_queue_full")
        loading.allowed.set()


async def answer(nodes: Pair, made: Work) -> list[int]:
    session = made.leg.session.session_id
    return [token for token in (await nodes.outputs(made))[session][0] if token != EOS]


def gauge(nodes: Pair, name: str) -> list[float]:
    return [node.desk.gauges()[name] for node in (nodes.prefill, nodes.decode)]
