"""A conversation to prompt text, with the model's own chat template in transformers' sandbox.

A template is code of the model folder, driven by a client's input; so rendering has a bound in time, kept even inside of
loops, and one on the length of what comes out. It runs off the event loop.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from pdserve.core.errors import InvalidRequest, ModelUnavailable
from pdserve.router.chat.messages import template_messages
from pdserve.router.request import ChatTurn, ValidChat

TEMPLATE_FILE = "chat_template.jinja"
TOOLS_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
CONFIG_FILE = "tokenizer_config.json"
RENDER_LIMIT_S = 5.0
MAX_RENDERED_CHARS = 8 << 20
MAX_REASON_CHARS = 300
Messages = list[dict[str, object]]
Tools = list[dict[Any, Any] | Callable[..., Any]]
TEMPLATE_FRAMES = "<template>"
"""File name that Jinja gives to the code of templates."""
TEMPLATE_FAULTS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError),
)
"""What a template's code may raise on content that it does not expect."""


class ChatTemplate:
    """A template and the special tokens that it may name. `tools_source` is for requests with tools, where that is another."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tools_source: str | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source, self.tools_source = source, tools_source or source
        self._special_tokens: dict[str, object] = dict(special_tokens)
        self._now_s = now_s
        self._knows_tools = False

    def render(self, chat: ValidChat) -> str:
        """Return the prompt text. Raises InvalidRequest if the template does not accept the conversation, or shows no tools."""
        messages = template_messages(chat.turns)
        tools: Tools = [dict(tool.definition) for tool in chat.shown_tools]
        with _limited(RENDER_LIMIT_S, self._now_s):
            text = self._rendered(chat, messages, tools)
            if tools and not self._knows(tools, text, chat, messages):
                raise InvalidRequest(
                    "the model's chat template shows the model no tools",
                    hint="leave tools empty, or serve a model or a --chat-template that knows tools",
                    field="chat.tools",
                )
        if len(text) > MAX_RENDERED_CHARS:
            raise _refusal(f"it makes {len(text)} characters of it, more than {MAX_RENDERED_CHARS}")
        return text

    def _knows(self, tools: Tools, text: str, chat: ValidChat, messages: Messages) -> bool:
        """Whether the template shows tools: in this conversation, whose prompt is `text`, or else in the shortest one.

        A template may show them in some turns only; the next turn of a conversation must not be refused for that. What was seen
        once is remembered.
        """
        if not self._knows_tools:
            shortest = ValidChat((ChatTurn("user", "hi"),))
            try:
                self._knows_tools = text != self._rendered(chat, messages, []) or (
                    self._rendered(shortest, template_messages(shortest.turns), tools)
                    != self._rendered(shortest, template_messages(shortest.turns), [])
                )
            except InvalidRequest:
                return False
        return self._knows_tools

    def _rendered(self, chat: ValidChat, messages: Messages, tools: Tools) -> str:
        try:
            # transformers annotates the result as text; it is a pair of lists.
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=tools or None,
                chat_template=self.tools_source if tools else self.source,
                add_generation_prompt=chat.opens_turn,
                continue_final_message=chat.continues_turn,
                **cast("dict[str, Any]", self._special_tokens | dict(chat.template_arguments)),
            )
            text = str(rendered[0][0])
            text.encode()
        except UnicodeEncodeError:
            raise _refusal("half a surrogate pair cannot be encoded") from None
        except RecursionError:
            raise _refusal("it is nested too deeply") from None
        except TEMPLATE_FAULTS as error:
            raise _refusal(" ".join(str(error).split())) from None
        return text


def load_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """Return the chat template of a model folder, or None if it has none; `file` is to be used instead.

    Raises ModelUnavailable if a file is damaged or missing.
    """
    config = read_config(folder / CONFIG_FILE)
    if file is not None:
        return ChatTemplate(_read(file), _special_tokens(config))
    given = config.get("chat_template")
    main, for_tools = folder / TEMPLATE_FILE, folder / TOOLS_TEMPLATE_FILE
    source = _read(main) if main.is_file() else _named(given, "default")
    if not source:
        return None
    tools_source = _read(for_tools) if for_tools.is_file() else _named(given, "tool_use")
    return ChatTemplate(
        source, _special_tokens(config), tools_source if isinstance(given, list) or for_tools.is_file() else None
    )


def read_config(path: Path) -> dict[str, object]:
    """Return a JSON object file; empty if there is none. Raises ModelUnavailable if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path.name} of the model is damaged: {error}", hint="fetch the model again") from None
    return content if isinstance(content, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelUnavailable(
            f"the chat template {file.name} cannot be read: {error}", hint="check the file"
        ) from None


def _named(given: object, name: str) -> str | None:
    """Return the template in `tokenizer_config.json`: text is the only one; of a list of named ones, that of the name."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        named = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
        chosen = named.get(name)
        return chosen if isinstance(chosen, str) else None
    return None


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return `bos_token` and the like; each is text, or an object with its text in `content`."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's chat template refuses the conversation: {reason[:MAX_REASON_CHARS]}",
        hint="check the roles, their order and the contents",
        field="chat.messages",
    )


@contextmanager
def _limited(limit_s: float, now_s: Callable[[], float]) -> Iterator[None]:
    """Raise InvalidRequest once the templates that run inside take longer than `limit_s`.

    A trace function sees each line of a template's code, so that a loop without output ends too.
    """
    end_s, before = now_s() + limit_s, sys.gettrace()

    def on_line(*_event: object) -> Any:
        if now_s() > end_s:
            raise InvalidRequest(
                f"the model's chat template takes longer than {limit_s:g} s for this conversation",
                hint="send fewer or shorter messages",
                field="chat.messages",
            )
        return on_line

    def on_call(frame: FrameType, *_event: object) -> Any:
        return on_line if frame.f_code.co_filename == TEMPLATE_FRAMES else None

    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
