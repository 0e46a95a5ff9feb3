"""Asks a running router everything with OpenAI's own client, and checks what comes back.

It needs an environment of its own (`make outside` makes it):

    pip install openai jsonschema
    python examples/openai_check.py --base-url http://127.0.0.1:8000/v1
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable

import jsonschema
import openai

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Checks:
    """Every check is a method; `model` is the served one."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client, self.model = client, model

    def chat(self, **fields):
        return self.client.chat.completions.create(
            **{"model": self.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0, **fields}
        )

    def completion(self, **fields):
        return self.client.completions.create(
            **{"model": self.model, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, **fields}
        )

    def check_models(self) -> None:
        assert self.model in [model.id for model in self.client.models.list()]
        assert self.client.models.retrieve(self.model).id == self.model

    def check_chat_whole_is_streamed(self) -> None:
        whole = self.chat()
        text, usage, reason = "", None, None
        for chunk in self.chat(stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)
        assert reason == whole.choices[0].finish_reason
        assert usage == whole.usage
        assert whole.pdserve["timeline"]["e2el_s"] > 0

    def check_completion_whole_is_streamed(self) -> None:
        whole = self.completion()
        text = "".join(chunk.choices[0].text for chunk in self.completion(stream=True))
        assert text == whole.choices[0].text
        assert whole.usage.completion_tokens == 12

    def check_prompts_and_n(self) -> None:
        prompts = ["One, two,", "Red, green,"]
        answer = self.completion(prompt=prompts, n=2, temperature=1, seed=3, max_tokens=6)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        again = self.completion(prompt=prompts, n=2, temperature=1, seed=3, max_tokens=6)
        assert [choice.text for choice in answer.choices] == [choice.text for choice in again.choices]
        assert answer.choices[0].text != answer.choices[1].text, "sequences draw noise of their own"
        streamed = [""] * 4
        for chunk in self.completion(prompt=prompts, n=2, temperature=1, seed=3, max_tokens=6, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == [choice.text for choice in answer.choices]

    def check_logprobs(self) -> None:
        content = self.chat(logprobs=True, top_logprobs=3, max_tokens=5).choices[0].logprobs.content
        assert len(content) == 5
        assert all(entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 3 for entry in content)
        scores = self.completion(logprobs=2, echo=True, max_tokens=3).choices[0].logprobs
        assert scores.token_logprobs[0] is None
        assert all(logprob <= 0 for logprob in scores.token_logprobs[1:])
        assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset)

    def check_stop_and_limits(self) -> None:
        whole = self.completion(max_tokens=24).choices[0].text
        stop = whole[4:7]
        cut = self.completion(max_tokens=24, stop=[stop]).choices[0]
        assert (cut.finish_reason, cut.text) == ("stop", whole[: whole.index(stop)])
        assert cut.stop_reason == stop
        kept = self.completion(max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
        assert kept.text == cut.text + stop
        assert self.chat(max_completion_tokens=2, max_tokens=openai.NOT_GIVEN).usage.completion_tokens == 2

    def check_bias_and_penalties(self) -> None:
        token = self.completion(max_tokens=1, logprobs=0, extra_body={"return_token_ids": True}).choices[0].token_ids[0]
        other = self.completion(max_tokens=1, logit_bias={str(token): -100}, extra_body={"return_token_ids": True})
        assert other.choices[0].token_ids != [token]
        forced = self.completion(max_tokens=2, extra_body={"allowed_token_ids": [token], "return_token_ids": True})
        assert forced.choices[0].token_ids == [token, token]
        self.completion(presence_penalty=1.0, frequency_penalty=0.5, extra_body={"repetition_penalty": 1.1, "top_k": 5})

    def check_json_schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        answer = self.chat(
            messages=[{"role": "user", "content": "Describe Ann, 31, as JSON."}], response_format=form, max_tokens=200
        )
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)

    def check_json_object(self) -> None:
        answer = self.chat(response_format={"type": "json_object"}, max_tokens=120)
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content), dict)

    def check_choice_and_regex(self) -> None:
        choice = self.chat(extra_body={"guided_choice": ["yes", "no"]}).choices[0].message.content
        assert choice in ("yes", "no")
        number = self.chat(extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}).choices[0].message.content
        assert len(number) == 3
        assert number.isdigit()

    def check_tools(self) -> None:
        """A tool that must be called; models whose format no router knows are refused by name."""
        fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 120}
        try:
            whole = self.chat(**fields)
        except openai.BadRequestError as error:
            assert error.param in ("tools", "tool_choice"), error
            print("    (this model has no tool format:", error.body["message"], ")")
            return
        call = whole.choices[0].message.tool_calls[0]
        assert (call.function.name, whole.choices[0].finish_reason) == ("get_weather", "tool_calls")
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
        name, arguments = "", ""
        for chunk in self.chat(**fields, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
        assert (name, arguments) == (call.function.name, call.function.arguments)

    def check_errors(self) -> None:
        for kind, fields in (
            (openai.BadRequestError, {"temperature": -1}),
            (openai.BadRequestError, {"max_tokens": 10**6}),
            (openai.NotFoundError, {"model": "gpt-9"}),
            (openai.BadRequestError, {"extra_body": {"temprature": 1}}),
        ):
            try:
                self.chat(**fields)
            except kind as error:
                assert error.param, error
                assert error.request_id
            else:
                raise AssertionError(f"{fields} was served")

    def check_a_stream_can_be_left(self) -> None:
        with self.chat(stream=True, max_tokens=400, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))

    def check_many_at_once(self) -> None:
        async def ask_all() -> list[str]:
            async with openai.AsyncOpenAI(base_url=self.client.base_url, api_key=self.client.api_key) as client:

                async def ask() -> str:
                    answer = await client.completions.create(
                        model=self.model, prompt="One, two,", max_tokens=8, temperature=0
                    )
                    return answer.choices[0].text

                return await asyncio.gather(*(ask() for _ in range(8)))

        assert len(set(asyncio.run(ask_all()))) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--only", default="", help="part of a check's name")
    given = parser.parse_args()
    client = openai.OpenAI(base_url=given.base_url, api_key=given.api_key, max_retries=0, timeout=120)
    checks = Checks(client, client.models.list().data[0].id)
    failed = 0
    for name in dir(checks):
        check: Callable[[], None] = getattr(checks, name)
        if not name.startswith("check_") or given.only not in name:
            continue
        began_s = time.monotonic()
        try:
            check()
        except Exception as error:  # noqa: BLE001 - every check is reported
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}")
        else:
            print(f"ok     {name} ({time.monotonic() - began_s:.1f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
