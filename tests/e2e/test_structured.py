"""Structured output through real processes: the first token is made on prefill, the rest on decode, and the whole obeys."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import pytest
import pytest_asyncio
import torch
from llguidance import LLMatcher, LLTokenizer

from pdserve.client import Answer, Options
from pdserve.client.language import Grammar, JsonObject, JsonSchema, Language, OneOf, Regex
from pdserve.core.errors import GrammarNotServed, InvalidRequest, PdserveError
from pdserve.core.work import FinishReason
from pdserve.grammar.compiling import SCHEMA_OPTIONS
from tests.e2e.cluster import DEADLINE_S, Cluster, first_of, start_cluster
from tests.e2e.tiny_model import EOS_ID, _reference, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DIGITS = "[0-9]{4}-[0-9]{4} ok"
COLOURS = ("red", "green", "greenish blue")
LARK = 'start: "(" item ("," item){2,4} ")"\nitem: /[a-z]{1,3}/'
TOO_WIDE = {"type": "object", "properties": {f"field{number}": {"type": "string"} for number in range(1500)}}
"""Compiles, but its second token has more alternatives than the library follows."""
MAX_TOKENS = 600


def obeys(language: Language, text: str) -> bool:
    match language:
        case JsonSchema():
            jsonschema.validate(json.loads(text), PERSON)
            return True
        case Regex(pattern):
            return re.fullmatch(pattern, text) is not None
        case OneOf(texts):
            return text in texts
        case Grammar():
            return re.fullmatch(r"\([a-z]{1,3}(,[a-z]{1,3}){2,4}\)", text) is not None
        case JsonObject():
            return isinstance(json.loads(text), dict)


LANGUAGES = [JsonSchema(PERSON), Regex(DIGITS), OneOf(COLOURS), Grammar(LARK)]
NAMES = ["schema", "regex", "choice", "grammar"]


@pytest_asyncio.fixture(scope="module")
async def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with start_cluster(tiny, tmp_path_factory.mktemp("structured")) as running:
        yield running
        await running.leak_oracle()


@torch.inference_mode()
def expected_tokens(folder: Path, prompt: list[int], language: Language) -> list[int]:
    """Return what plain `transformers` answers when the library says which tokens it may choose from."""
    model: Any = _reference(folder)
    tokenizer = LLTokenizer(str(folder / "tokenizer.json"), n_vocab=model.config.vocab_size, eos_token=EOS_ID)
    match language:
        case JsonSchema():
            source = LLMatcher.grammar_from_json_schema(json.dumps(PERSON), overrides=SCHEMA_OPTIONS)
        case Regex(pattern):
            source = LLMatcher.grammar_from_regex(pattern)
        case OneOf(texts):
            source = LLMatcher.grammar_from_regex("|".join(map(re.escape, texts)))
        case Grammar(text):
            source = LLMatcher.grammar_from_lark(text)
        case _:
            raise AssertionError(language)

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        matcher = LLMatcher(tokenizer, source)
        matcher.consume_tokens(ids[len(prompt) :].tolist())
        return [token_id for token_id, weight in enumerate(matcher.compute_logit_bias()) if weight]

    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
        pad_token_id=EOS_ID,
    )
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


@pytest.mark.parametrize("language", LANGUAGES, ids=NAMES)
async def test_greedy_answers_are_those_of_transformers_under_the_same_grammar(
    cluster: Cluster, tiny: Path, language: Language
) -> None:
    prompt = prompt_ids("an answer with a form")
    answer = await cluster.answer(tuple(prompt), Options(max_tokens=MAX_TOKENS, structured_output=language))
    assert obeys(language, answer.text)
    assert answer.token_ids == expected_tokens(tiny, prompt, language)
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.STOP
    assert answer.summary is not None
    assert answer.summary.timeline.attempts == 1


@pytest.mark.parametrize("language", LANGUAGES, ids=NAMES)
async def test_sampled_answers_obey_and_differ(cluster: Cluster, language: Language) -> None:
    options = Options(max_tokens=MAX_TOKENS, structured_output=language, temperature=1.5, seed=7, n=3)
    answer = await cluster.answer("draw", options)
    texts = [choice.text for choice in answer.choices]
    assert all(obeys(language, text) for text in texts), texts
    assert len(set(texts)) > 1
    again = await cluster.answer("draw", options)
    assert [choice.text for choice in again.choices] == texts


async def test_without_the_mask_nothing_obeys(cluster: Cluster) -> None:
    """What the tests above rely on: left alone, this model would never write any of it."""
    answer = await cluster.answer(tuple(prompt_ids("an answer with a form")), Options(max_tokens=40))
    assert not answer.text.startswith(("{", "(", "red", "green"))
    assert not re.match("[0-9]", answer.text)


async def test_an_answer_cut_by_its_length_is_a_beginning(cluster: Cluster) -> None:
    options = Options(max_tokens=3, structured_output=Regex(DIGITS))
    answer = await cluster.answer("cut", options)
    assert re.fullmatch("[0-9]{3}", answer.text)
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.LENGTH


async def test_a_grammar_of_one_token_never_reaches_decode(cluster: Cluster) -> None:
    before = await cluster.gauge("decode0", "forwards")
    answer = await cluster.answer("one", Options(max_tokens=1, structured_output=OneOf(("x", "y"))))
    assert answer.text in ("x", "y")
    assert await cluster.gauge("decode0", "forwards") == before


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        (Options(structured_output=JsonSchema({"not": {}})), GrammarNotServed, "structured_output.json_schema"),
        (Options(structured_output=JsonSchema("{")), GrammarNotServed, "structured_output.json_schema"),
        (Options(structured_output=Regex("(a")), GrammarNotServed, "structured_output.regex"),
        (Options(structured_output=Grammar("start: other")), GrammarNotServed, "structured_output.grammar"),
        (Options(structured_output=OneOf(("a", ""))), InvalidRequest, "structured_output.choice.texts[1]"),
        (Options(structured_output=Regex("a+"), min_tokens=2), InvalidRequest, "stop.min_tokens"),
        (Options(structured_output=Regex("a+"), ignore_eos=True), InvalidRequest, "stop.ignore_eos"),
        (Options(structured_output=Regex("a+"), banned_words=("b",)), InvalidRequest, "sampling.banned_words"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    cluster: Cluster, options: Options, kind: type[PdserveError], field: str
) -> None:
    with pytest.raises(kind) as caught:
        await cluster.answer("refused", options)
    assert caught.value.field == field


async def test_a_grammar_that_the_library_gives_up_fails_its_own_request_only(cluster: Cluster) -> None:
    """A limit in mid-answer ends one row, by name and for good; the step and its other rows go on."""
    prompt = prompt_ids("an answer with a form")
    alone = await cluster.answer(tuple(prompt), Options(max_tokens=200))
    beside = asyncio.create_task(cluster.answer(tuple(prompt), Options(max_tokens=200)))
    with pytest.raises(InvalidRequest, match="grammar"):
        await cluster.answer("wide", Options(max_tokens=50, structured_output=JsonSchema(TOO_WIDE)))
    assert (await beside).token_ids == alone.token_ids
    assert await cluster.gauge("decode0", "failed_steps") == 0


@pytest.mark.parametrize(
    ("fields", "language"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
            JsonSchema(PERSON),
        ),
        ({"guided_json": PERSON}, JsonSchema(PERSON)),
        ({"structured_outputs": {"regex": DIGITS}}, Regex(DIGITS)),
        ({"guided_choice": COLOURS}, OneOf(COLOURS)),
        ({"structured_outputs": {"grammar": LARK}}, Grammar(LARK)),
    ],
    ids=["response_format", "guided_json", "regex", "choice", "grammar"],
)
async def test_over_http_every_spelling_holds(cluster: Cluster, fields: dict[str, Any], language: Language) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=DEADLINE_S) as http:
        messages = [{"role": "user", "content": "answer"}]
        body = {"messages": messages, "max_tokens": MAX_TOKENS, "seed": 3, **fields}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert obeys(language, answer["choices"][0]["message"]["content"])
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_over_http_a_refusal_names_the_clients_own_field(cluster: Cluster) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"not": {}}}}
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=DEADLINE_S) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "response_format": schema})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "grammar_not_served")
    assert error["param"].startswith("response_format")
    assert '"not"' in error["message"]


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.deep), 3])
async def test_a_decode_node_killed_in_mid_answer_changes_nothing(tiny: Path, tmp_path: Path, n: int) -> None:
    """The state of each grammar is rebuilt from token ids: the resumed answers are the undisturbed ones, token by token."""
    options = Options(max_tokens=MAX_TOKENS, structured_output=JsonSchema(PERSON), temperature=1.0, seed=11, n=n)
    async with start_cluster(tiny, tmp_path, decode=(("--hold-at", "decoding:8"), ())) as running:
        tasks = [asyncio.create_task(running.answer("a person", options)) for _ in range(2)]
        await running.until_held("decode0", n)
        await first_of(tasks)
        running.nodes["decode0"].kill()
        answers: list[Answer] = await asyncio.gather(*tasks)
        tokens = [[choice.token_ids for choice in answer.choices] for answer in answers]
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) == n
        assert all(len(ids) > 9 for ids in tokens[0])
        for choice in answers[0].choices:
            jsonschema.validate(json.loads(choice.text), PERSON)
        assert sorted(answer.summary.timeline.attempts for answer in answers if answer.summary) == [1, 2]
        await running.leak_oracle()


async def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing(cluster: Cluster) -> None:
    wide = JsonSchema({**TOO_WIDE, "title": "seen for the first time"})
    task = asyncio.create_task(cluster.answer("gone", Options(max_tokens=9, structured_output=wide, timeout_s=0.02)))
    with pytest.raises((PdserveError, grpc.aio.AioRpcError)):
        await task
    await cluster.leak_oracle()
