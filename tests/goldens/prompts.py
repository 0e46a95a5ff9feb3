"""The prompts of the goldens: for each of the 24 a list of candidates, of which the first with clear margins is taken."""

import argparse
import decimal
import doctest
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

Messages = tuple[dict[str, str], ...]
LONG_PROMPT_TOKENS = 3000
EDGES = (15, 16, 17, 31, 32, 33, 127, 128, 129)
"""Around the block sizes 16 and 32 and the chunk budget of 128 tokens."""


@dataclass(frozen=True)
class Prompt:
    """A candidate: a text, or the messages of a chat."""

    text: str | None = None
    messages: Messages | None = None


def plans(tokenizer: Tokenizer) -> Iterator[tuple[str, Iterator[Prompt]]]:
    """Yield the name of each golden with its candidates, best first."""
    yield "one token", _texts(_ONE_TOKEN)
    for number, edge in enumerate(EDGES):
        yield f"{edge} tokens", _cuts(tokenizer, edge, skip=number)
    yield "3000 tokens of prose", _cuts(tokenizer, LONG_PROMPT_TOKENS, skip=0)
    for kind, candidates in _KINDS.items():
        for number in range(len(candidates) // _CANDIDATES_EACH):
            several = candidates[number * _CANDIDATES_EACH : (number + 1) * _CANDIDATES_EACH]
            yield f"{kind} {number + 1}", _texts(several)
    for name, chats in _CHATS.items():
        yield (
            name,
            (Prompt(messages=tuple({"role": role, "content": content} for role, content in chat)) for chat in chats),
        )


def _texts(texts: list[str]) -> Iterator[Prompt]:
    return (Prompt(text=text) for text in texts)


def _cuts(tokenizer: Tokenizer, num_tokens: int, skip: int) -> Iterator[Prompt]:
    """Cut prose to exactly that many tokens, from one paragraph after the other; only cuts that encode back to themselves."""
    paragraphs = _prose()
    for start in range(skip, len(paragraphs)):
        ids = tokenizer.encode("\n\n".join(paragraphs[start:])).ids[:num_tokens]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if len(ids) == num_tokens and tokenizer.encode(text).ids == ids:
            yield Prompt(text=text)


def _prose() -> list[str]:
    """Return paragraphs of this project's licence and of long documentation texts of the standard library."""
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    texts = [module.__doc__ or "" for module in (decimal, doctest, argparse, pickletools)]
    texts = [
        licence,
        decimal.Context.__doc__ or "",
        pickletools.dis.__doc__ or "",
        doctest.testmod.__doc__ or "",
        *texts,
    ]
    blocks = [" ".join(part.split()) for text in texts for part in text.split("\n\n")]
    return [block for block in blocks if len(block) > 80]


_CANDIDATES_EACH = 4
_ONE_TOKEN = ["The", "Once", "def", "Hello", "import", "In"]
_KINDS = {
    "english": [
        "The capital of France is",
        "The first thing to know about bees is that",
        "Water boils at a lower temperature on a mountain because",
        "A good letter begins with",
        "She opened the door, looked at the empty room, and said:",
        "The old lighthouse keeper climbed the stairs every evening, and",
        "My grandmother's recipe for bread begins like this:",
        "On the last day of the voyage, the captain",
        "List three reasons why people keep gardens.\n1.",
        "Question: How many days are there in a week?\nAnswer:",
        "The opposite of hot is",
        "Monday, Tuesday, Wednesday,",
    ],
    "code": [
        "def fibonacci(n):\n    ",
        "import os\n\ndef list_files(path):\n    ",
        "class Stack:\n    def __init__(self):\n        ",
        "for i in range(10):\n    ",
        "#include <stdio.h>\n\nint main(void) {\n",
        "#include <vector>\n\nint sum(const std::vector<int>& values) {\n",
        "fn main() {\n    let numbers = vec![1, 2, 3];\n",
        'package main\n\nimport "fmt"\n\nfunc main() {\n',
        "SELECT name, COUNT(*) FROM orders\nWHERE",
        "<html>\n<head>\n<title>",
        '{"name": "Ada", "languages": ["',
        "#!/bin/sh\nset -e\nfor file in *.txt; do\n",
    ],
    "chinese": ["你好，今天天气", "北京是中国的首都，", "我喜欢读书，因为", "春天来了，"],  # noqa: RUF001 - the commas of Chinese
    "arabic": ["مرحبا، كيف", "القاهرة هي عاصمة", "في صباح يوم جميل", "الكتاب خير"],
    "emoji": ["🎉🎂🎈 Happy birthday", "🐶🐱🐭 are", "I ❤️ 🍕 and 🍣 because", "🌍🌎🌏"],
    "whitespace only": ["  \n\n\t  ", "\n\n\n", "        ", "\t\n \n"],
}
_CHATS: dict[str, list[list[tuple[str, str]]]] = {
    "chat 1": [
        [("user", "What is 2+2?")],
        [("user", "Name a colour.")],
        [("user", "Say hello.")],
        [("user", "What is the capital of Italy?")],
    ],
    "chat of several turns 1": [
        [
            ("system", "You are a helpful assistant."),
            ("user", "What is the largest planet?"),
            ("assistant", "The largest planet in our solar system is Jupiter."),
            ("user", "And the smallest?"),
        ],
        [
            ("user", "I have a dog called Max."),
            ("assistant", "Max is a lovely name for a dog!"),
            ("user", "What is my dog called?"),
        ],
        [
            ("user", "Count to three."),
            ("assistant", "One, two, three."),
            ("user", "Now count to five."),
        ],
    ],
    "chat of several turns 2": [
        [
            ("system", "You answer in one short sentence."),
            ("user", "Why is the sky blue?"),
            ("assistant", "Because air scatters blue light more than red light."),
            ("user", "Why is the sunset red?"),
            ("assistant", "Because the light crosses more air, and the blue is scattered away."),
            ("user", "Thank you!"),
        ],
        [
            ("user", "Write a word that rhymes with cat."),
            ("assistant", "Hat."),
            ("user", "Another one."),
            ("assistant", "Bat."),
            ("user", "One more, please."),
        ],
        [
            ("user", "My name is Ana."),
            ("assistant", "Nice to meet you, Ana!"),
            ("user", "I live in Lisbon."),
            ("assistant", "Lisbon is a beautiful city."),
            ("user", "Where do I live?"),
        ],
    ],
}
