"""A conversation to prompt text, with the model's own chat template in transformers' sandbox."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from pdserve.core.errors import InvalidRequest, ModelUnavailable
from pdserve.router.request import ChatInput

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"


class ChatTemplate:
    """A template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, chat: ChatInput) -> str:
        """Return the prompt text. Raises InvalidRequest if the template does not accept the conversation."""
        messages = [{"role": turn.role, "content": turn.content} for turn in chat.turns]
        try:
            # transformers annotates the result as text; it is a pair of lists.
            rendered: Any = render_jinja_template(
                conversations=[messages],
                chat_template=self._source,
                add_generation_prompt=chat.add_generation_prompt is not False,
                **cast("dict[str, Any]", self._special_tokens),
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses the conversation: {error}",
                hint="check the roles, their order and the contents",
                field="chat.messages",
            ) from None
        return str(rendered[0][0])


def load_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a model folder, or None if it has none. Raises ModelUnavailable if a file is damaged."""
    config = read_config(folder / CONFIG_FILE)
    file = folder / TEMPLATE_FILE
    source = file.read_text(encoding="utf-8") if file.is_file() else _named_default(config.get("chat_template"))
    if not source:
        return None
    return ChatTemplate(source, _special_tokens(config))


def read_config(path: Path) -> dict[str, object]:
    """Return a JSON object file; empty if there is none. Raises ModelUnavailable if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path.name} of the model is damaged: {error}", hint="fetch the model again") from None
    return content if isinstance(content, dict) else {}


def _named_default(given: object) -> str | None:
    """Return the template in `tokenizer_config.json`: text, or a list of named ones of which "default" counts."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        named = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
        chosen = named.get("default")
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
