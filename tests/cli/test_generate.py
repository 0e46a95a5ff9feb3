"""The options of `pdserve generate`: what they send, what they show, and how errors name them."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdserve.cli.__main__ import run
from pdserve.cli.exit_codes import ExitCode
from pdserve.core.errors import InvalidRequest, NotServed
from pdserve.v1 import inference_pb2 as pb
from tests.cli.test_command_line import pdserve_beside
from tests.client.stub_router import SUMMARY, stub_router

TWO = (
    pb.GenerateResponse(deltas=[pb.Delta(sequence=1, text="b", token_ids=[2], logprobs=[-2.0])]),
    pb.GenerateResponse(
        deltas=[
            pb.Delta(
                text="a",
                token_ids=[1],
                logprobs=[-1.0],
                top_logprobs=[pb.TopLogprobs(token_ids=[1], logprobs=[-1.0])],
                reasoning="hm",
                tool_calls=[pb.ToolCallDelta(id="c", name="f", arguments="{}")],
            )
        ],
        finished=[
            pb.Finished(sequence=1, reason=pb.FINISH_REASON_LENGTH),
            pb.Finished(reason=pb.FINISH_REASON_STOP, stop_token_id=1),
        ],
        summary=SUMMARY,
        prompt=[pb.ScoredToken(token_id=8)],
    ),
)


@pytest.mark.asyncio
async def test_every_option_is_sent(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}')
    async with stub_router() as (router, address):
        status, out, err = await pdserve_beside(
            *("generate", "hi", "--server", address, "--template-arguments", '{"a": 1}', "--request-id", "label"),
            *("--max-tokens", "9", "--min-tokens", "2", "-n", "1", "--temperature", "0.5", "--top-k", "4"),
            *("--top-p", "0.25", "--min-p", "0.125", "--seed", "7", "--repetition-penalty", "1.5", "--stop", "x"),
            *("--presence-penalty", "-0.5", "--frequency-penalty", "0.75", "--logit-bias", "5=-1.5"),
            *("--logit-bias", "6=2", "--banned-word", "tea", "--stop-token-id", "3", "--ignore-eos", "--include-stop"),
            *("--logprobs", "2", "--prompt-logprobs", "--json-schema", str(schema), "--json", "--model", "m"),
        )
        assert (status, err) == (0, ""), out
        chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")], template_arguments='{"a": 1}')
        assert router.requests[0] == pb.GenerateRequest(
            request_id="label",
            model="m",
            chat=chat,
            n=1,
            stream=True,
            top_logprobs=2,
            prompt_logprobs=True,
            structured_output=pb.StructuredOutput(json_schema='{"type": "null"}'),
            sampling=pb.SamplingParameters(
                temperature=0.5,
                top_k=4,
                top_p=0.25,
                min_p=0.125,
                seed=7,
                repetition_penalty=1.5,
                presence_penalty=-0.5,
                frequency_penalty=0.75,
                logit_bias={5: -1.5, 6: 2.0},
                banned_words=["tea"],
            ),
            stop=pb.StopConditions(
                max_tokens=9, min_tokens=2, stop=["x"], stop_token_ids=[3], ignore_eos=True, include_stop=True
            ),
        )


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        (["--json-object"], pb.StructuredOutput(json_object=True)),
        (["--regex", "a+"], pb.StructuredOutput(regex="a+")),
        (["--choice", "yes", "--choice", "no"], pb.StructuredOutput(choice=pb.Choices(texts=["yes", "no"]))),
        (["--grammar", "FILE"], pb.StructuredOutput(grammar="start: A")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.asyncio
async def test_every_language_is_sent(arguments: list[str], sent: pb.StructuredOutput, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text("start: A")
    given = [str(tmp_path / "FILE") if argument == "FILE" else argument for argument in arguments]
    async with stub_router() as (router, address):
        status, _, err = await pdserve_beside("generate", "hi", "--server", address, *given)
        assert (status, err) == (0, "")
        assert router.requests[0].structured_output == sent


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("required", pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)),
        ("f", pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name="f")),
    ],
)
@pytest.mark.asyncio
async def test_tools_make_a_chat(choice: str, sent: pb.ToolChoice, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"a": 1}')
    async with stub_router() as (router, address):
        router.answer = TWO
        status, out, err = await pdserve_beside(
            *("generate", "hi", "--tool", str(tmp_path / "f.json"), "--tool-choice", choice, "--server", address)
        )
        assert (status, err) == (0, "")
        assert out.splitlines()[1] == "f {}"
        messages = [pb.ChatMessage(role="user", content="hi")]
        assert router.requests[0].chat == pb.ChatInput(messages=messages, tools=['{"a": 1}'], tool_choice=sent)


@pytest.mark.asyncio
async def test_several_answers_and_scores_are_shown_apart() -> None:
    async with stub_router() as (router, address):
        router.answer = TWO
        status, out, err = await pdserve_beside("generate", "hi", "-n", "2", "--logprobs", "1", "--server", address)
        assert (status, err) == (0, "")
        lines = out.splitlines()
        assert lines[:3] == ["[1] b", "[0] a", "f {}"]
        assert [line.split() for line in lines[4:]] == [
            ["prompt", "8"],
            ["answer", "0", "1", "-1.000", "1", "-1.000"],
            ["answer", "1", "2", "-2.000"],
        ]
        status, out, _ = await pdserve_beside("generate", "hi", "-n", "2", "--json", "--server", address)
        *_, told = [json.loads(line) for line in out.splitlines()]
        assert status == 0
        assert [(c["sequence"], c["text"], c["finish_reason"]) for c in told["choices"]] == [
            (0, "a", "STOP"),
            (1, "b", "LENGTH"),
        ]
        assert (told["text"], told["reasoning"]) == ("a", "hm")
        assert told["tool_calls"] == [{"id": "c", "name": "f", "arguments": "{}"}]
        assert told["tokens"][0]["top"] == [[1, -1.0]]
        assert told["prompt"] == [{"id": 8, "logprob": None, "top": []}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--n", "0"], "--n: n must be a whole number from 1"),
        (["--min-tokens", "-1"], "--min-tokens: min_tokens must be"),
        (["--logprobs", "-1"], "--logprobs: top_logprobs must be"),
        (["--logit-bias", "5"], "--logit-bias: '5' is not ID=NUMBER"),
        (["--logit-bias", "-5=1"], "--logit-bias: sampling.logit_bias: id -5"),
        (["--stop-token-id", "-1"], "--stop-token-id: stop.stop_token_ids: id -1"),
        (["--banned-word", "\udcff"], "--banned-word: the banned word is not valid UTF-8"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice exclude each other"),
        (["--json-schema", "/no/such/file"], "--json-schema: /no/such/file cannot be read (No such file"),
        (["--grammar", "/"], "--grammar: / cannot be read"),
        (["--tool", "/no/such/file"], "--tool: /no/such/file cannot be read"),
        (["--no-chat", "--tool-choice", "f"], "--tool-choice needs a chat"),
        (["--no-chat", "--template-arguments", "{}"], "--template-arguments needs a chat"),
        (["--top-k", "-1"], "--top-k: top_k must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_error_names_the_option(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hi", *arguments]) == ExitCode.USAGE
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_routers_refusal_names_the_option_too() -> None:
    async with stub_router() as (router, address):
        router.refusals.append(InvalidRequest("the value is above 100", field="sampling.temperature"))
        _, _, err = await pdserve_beside("generate", "hi", "--temperature", "101", "--server", address)
        assert err == "error: --temperature: the value is above 100\n"
        router.refusals.append(NotServed("priority is not served yet", field="priority"))
        status, _, err = await pdserve_beside("generate", "hi", "--server", address)
        assert (status, err) == (ExitCode.USAGE, "error: priority is not served yet\n")


def test_schema_may_come_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"caf\xe9")))
    assert run(["generate", "hi", "--json-schema", "-"]) == ExitCode.USAGE
    assert "--json-schema: - is not valid UTF-8 (byte 3)" in capsys.readouterr().err
