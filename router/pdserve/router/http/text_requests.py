"""`POST /tokenize` and `POST /detokenize`, in vLLM's form."""

from collections.abc import Mapping

from pdserve.router.http.chat_request import CHAT_PARAMS, TemplateFields
from pdserve.router.http.errors import JsonObject
from pdserve.router.http.fields import Strict, Uint32s, parse
from pdserve.router.request import TextInput
from pdserve.router.text_calls import DetokenizeCall, TokenizeCall, Tokenized

TEXT_PARAMS: Mapping[str, str] = {**CHAT_PARAMS, "input": "prompt", "text": "prompt", "token_ids": "tokens"}
"""What clients of these paths call the contract's fields."""


class TokenizeTextFields(Strict):
    """A text to cut into tokens."""

    prompt: str
    model: str = ""
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatFields(TemplateFields):
    """A conversation to render and cut into tokens."""

    model: str = ""
    return_token_strs: bool = False


class DetokenizeFields(Strict):
    """Tokens to make a text of."""

    tokens: Uint32s
    model: str = ""


def parse_tokenize(body: JsonObject) -> tuple[TokenizeCall, bool]:
    """Return the call, and whether the tokens' names are wanted. Raises InvalidRequest or NotServed."""
    if "messages" in body:
        chat = parse(TokenizeChatFields, body)
        return TokenizeCall(chat.model, chat.chat()), chat.return_token_strs
    text = parse(TokenizeTextFields, body)
    return TokenizeCall(text.model, TextInput(text.prompt), text.add_special_tokens), text.return_token_strs


def parse_detokenize(body: JsonObject) -> DetokenizeCall:
    """Return the call. Special tokens are shown, as vLLM does. Raises InvalidRequest or NotServed."""
    fields = parse(DetokenizeFields, body)
    return DetokenizeCall(fields.model, tuple(fields.tokens), show_special_tokens=True)


def tokenized_json(tokenized: Tokenized, *, with_names: bool) -> JsonObject:
    """Return the answer of `/tokenize`."""
    return {
        "count": len(tokenized.token_ids),
        "max_model_len": tokenized.max_model_len,
        "tokens": list(tokenized.token_ids),
        "token_strs": list(tokenized.tokens) if with_names else None,
    }
