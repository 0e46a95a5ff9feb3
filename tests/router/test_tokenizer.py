"""The text side of a model folder: loading, encoding, templates; what is missing or damaged is named."""

import json
from pathlib import Path

import pytest

from pdserve.core.errors import InvalidRequest, ModelUnavailable
from pdserve.router.request import ChatTurn, TextInput, TokenInput, ValidChat
from pdserve.router.tokenizer import load_text_model
from tests.router.models import CHAT_TEMPLATE, byte_level_tokenizer, write_model_folder

CHAT = ValidChat((ChatTurn("user", "hi"),))


def test_text_tokens_and_chat_become_ids(tmp_path: Path) -> None:
    model = load_text_model(str(write_model_folder(tmp_path / "tiny")))
    tokenizer = byte_level_tokenizer()
    assert model.name == "tiny"
    assert model.encode(TextInput("the é")) == tuple(tokenizer.encode("the é").ids)
    assert model.encode(TokenInput((1, 2))) == (1, 2)
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.encode(CHAT) == tuple(tokenizer.encode(rendered, add_special_tokens=False).ids)
    closed = ValidChat(CHAT.turns, opens_turn=False)
    assert tokenizer.decode(list(model.encode(closed)), skip_special_tokens=False).endswith("<|im_end|>\n")


def test_the_vocabulary_is_that_of_the_embedding(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 999}}), encoding="utf-8")
    assert load_text_model(str(folder)).served.vocab_size == 999


@pytest.mark.parametrize("named", [False, True], ids=["text", "list of named ones"])
def test_a_template_may_stand_in_the_tokenizers_config(tmp_path: Path, named: bool) -> None:
    folder = write_model_folder(tmp_path / "tiny", template=None)
    assert not load_text_model(str(folder)).served.has_chat_template
    template: object = [{"name": "default", "template": CHAT_TEMPLATE}] if named else CHAT_TEMPLATE
    config = {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load_text_model(str(folder))
    assert model.served.has_chat_template
    assert model.encode(CHAT)


def test_a_template_sees_the_special_tokens(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tiny", template="{{ bos_token }}{{ eos_token }}")
    assert load_text_model(str(folder)).encode(CHAT) == (1, 2)


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
    ],
    ids=["raise_exception", "type", "undefined", "division", "syntax", "sandbox"],
)
def test_a_template_that_fails_is_the_requests_error(tmp_path: Path, template: str) -> None:
    model = load_text_model(str(write_model_folder(tmp_path / "tiny", template=template)))
    with pytest.raises(InvalidRequest) as caught:
        model.encode(ValidChat((ChatTurn("poet", "hi"),)))
    assert caught.value.field == "chat.messages"


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable):
        load_text_model(str(tmp_path / "nothing"))
    folder = write_model_folder(tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelUnavailable, match=r"tokenizer_config\.json"):
        load_text_model(str(folder))
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelUnavailable, match="damaged"):
        load_text_model(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelUnavailable, match=r"no tokenizer\.json"):
        load_text_model(str(folder))
