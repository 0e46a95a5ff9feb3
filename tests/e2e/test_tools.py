"""Tool calls and reasoning through real processes. A grammar makes the tiny model write what is to be read."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
import pytest_asyncio

from pdserve.client import Chat, Grammar, NamedTool, Options, Turn
from pdserve.core.work import FinishReason
from tests.e2e.cluster import Cluster, first_of, start_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <tool_call> </think> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"digits": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 6}},
    "required": ["digits"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("count", "count_down")
)
USER = (Turn("user", "count"),)
CALL = r'"<tool_call>" "{\"name\": \"" /[a-z]{3}/ "\", \"arguments\": {\"a\": [" /[0-9]{1,4}/ "]}}" "</tool_call>"'
FREELY = Grammar(
    "start: THOUGHT TEXT CALL CALL\n"
    r"THOUGHT: /<think>\n[a-z]{4,6}\n<\/think>\n\n/"
    "\nTEXT: /[A-Z]{5}/\n"
    f"CALL: {CALL}"
)


@pytest_asyncio.fixture(scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    file = tmp_path_factory.mktemp("template") / "tools.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    return ("--chat-template", str(file))


@pytest_asyncio.fixture(scope="module")
async def cluster(
    tiny: Path, router: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    async with start_cluster(tiny, tmp_path_factory.mktemp("tools"), router=router) as running:
        yield running
        await running.leak_oracle()


async def test_a_free_answer_is_read_into_reasoning_content_and_calls(cluster: Cluster) -> None:
    options = Options(structured_output=FREELY, temperature=1.0, seed=5, n=2, max_tokens=400)
    read, raw = [
        await cluster.answer(Chat(USER, TOOLS, parse_output=parse_output), options) for parse_output in (None, False)
    ]
    assert read.token_ids == raw.token_ids
    for parsed, plain in zip(read.choices, raw.choices, strict=True):
        (thought, content), calls = (
            plain.text.split("</think>\n\n"),
            re.findall("<tool_call>(.*?)</tool_call>", plain.text),
        )
        assert parsed.reasoning == thought.removeprefix("<think>\n").removesuffix("\n")
        assert parsed.text == content[:5]
        told = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in parsed.tool_calls]
        assert told == [json.loads(call) for call in calls]
        assert len({call.id for call in parsed.tool_calls}) == 2


@pytest.mark.parametrize("choice", ["required", NamedTool("count_down")])
async def test_a_call_that_must_be_made_is_made(cluster: Cluster, choice: Literal["required"] | NamedTool) -> None:
    options = Options(temperature=1.0, seed=2, n=4, max_tokens=400)
    answer = await cluster.answer(Chat(USER, TOOLS, choice), options)
    names = set()
    for one in answer.choices:
        (call,) = one.tool_calls
        names.add(call.name)
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert (one.text, one.reasoning) == ("", "")
        assert one.finished is not None
        assert one.finished.reason is FinishReason.STOP
    assert names <= ({"count", "count_down"} if choice == "required" else {"count_down"})


async def test_the_walk_of_a_tool(cluster: Cluster) -> None:
    """Call, answer of the tool, and on."""
    asked = await cluster.answer(Chat(USER, TOOLS, "required"), Options(temperature=1.0, seed=2, max_tokens=400))
    (call,) = asked.choices[0].tool_calls
    turns = (*USER, Turn("assistant", None, tool_calls=(call,)), Turn("tool", "done", tool_call_id=call.id))
    assert len((await cluster.answer(Chat(turns, TOOLS), Options(max_tokens=2))).token_ids) == 2


async def test_a_call_outlives_its_decode_node(tiny: Path, tmp_path: Path, router: tuple[str, ...]) -> None:
    """What was told before the kill is not told again, and the call is whole."""
    chat, options = Chat(USER, TOOLS, "required"), Options(temperature=1.0, seed=3, max_tokens=400)
    async with start_cluster(tiny, tmp_path, router=router, decode=(("--hold-at", "decoding:30"), ())) as running:
        tasks = [asyncio.create_task(running.answer(chat, options)) for _ in range(2)]
        await running.until_held("decode0")
        await first_of(tasks)
        running.nodes["decode0"].kill()
        answers = await asyncio.gather(*tasks)
        calls = [answer.choices[0].tool_calls[0] for answer in answers]
        assert calls[0].arguments == calls[1].arguments
        jsonschema.validate(json.loads(calls[0].arguments), SCHEMA)
        assert sorted(answer.summary.timeline.attempts for answer in answers if answer.summary) == [1, 2]
        await running.leak_oracle()
