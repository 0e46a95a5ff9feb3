"""API keys: what a file of them may say, what a header may hold, and that no key is ever shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.api_keys import (
    LONGEST_KEY,
    MAX_FAULTS,
    MAX_FILE_BYTES,
    ApiKeys,
    Caller,
    Owner,
    Scope,
    bearer_key,
    key_fault,
    operator_key,
    parse_keys,
)
from pdserve.core.errors import ConfigError

KEY, OTHER, THIRD = "k" * 31 + "1", "k" * 31 + "2", "k" * 31 + "3"
ANN = Caller(Owner("ann"), Scope.USE)


def faults_of(text: str | bytes, shortest: int = 1, taken: ApiKeys | None = None) -> list[str]:
    raw = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(ConfigError) as error:
        parse_keys(raw, shortest=shortest, taken=taken)
    return error.value.faults


def test_a_file_gives_each_key_its_owner_and_scope() -> None:
    text = f"# people\n\nann use {KEY}\r\n  ann\tuse   {OTHER}  \n   # machines\nprometheus operate {THIRD}"
    keys = parse_keys(text.encode(), shortest=16)
    assert len(keys) == 3
    assert keys.find(KEY) == keys.find(OTHER) == ANN, "two keys of an owner are good at once"
    assert keys.find(THIRD) == Caller(Owner("prometheus"), Scope.OPERATE)
    assert keys.owners == ("ann", "prometheus")
    for stranger in ("", KEY[:-1], KEY + "x", KEY.upper(), f" {KEY}", "é", "\udc80"):
        assert keys.find(stranger) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (KEY, "has 1 words"),
        (f"ann {KEY}", "has 2 words"),
        (f"ann use {KEY} more", "has 4 words"),
        (f"{KEY}{KEY}! use {KEY}", "the owner must be 1 to 64"),
        (f"-ann use {KEY}", "the owner must be 1 to 64"),
        (f"api-key use {KEY}", "that name is taken"),
        (f"cluster-secret operate {KEY}", "that name is taken"),
        (f"ann {KEY} use", "the scope must be use or operate"),
        (f"ann USE {KEY}", "the scope must be use or operate"),
        (f"ann use {KEY}é", "must be printable ASCII"),
        (f"ann use {KEY}\x07", "must be printable ASCII"),
        ("ann use " + KEY * LONGEST_KEY, f"at most {LONGEST_KEY}"),
        ("ann use " + KEY[:15], "at least 16 characters off loopback"),
        (f"bob use {OTHER}", "the key of line 1 again"),
        (f"bob use {THIRD}", "this key is given as api_key too"),
    ],
)
def test_faults_are_told_by_line_and_never_show_a_key(line: str, words: str) -> None:
    faults = faults_of(f"ann use {OTHER}\n\n{line}\n", 16, ApiKeys.of([THIRD], ANN))
    assert len(faults) == 1
    assert faults[0].startswith("line 3: ")
    assert words in faults[0]
    assert "kkk" not in faults[0]


def test_all_lines_are_told_at_once_and_a_wrong_file_does_not_fill_the_screen() -> None:
    assert [fault.partition(":")[0] for fault in faults_of("a\nb use short\nc d e f", 16)] == [
        "line 1",
        "line 2",
        "line 3",
    ]
    faults = faults_of("word\n" * 1000)
    assert len(faults) == MAX_FAULTS + 1
    assert faults[-1] == f"and {1000 - MAX_FAULTS} more"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "holds no key"),
        (b"# nobody\n\n", "holds no key"),
        (b"ann use " + KEY.encode() + b"\nbob use \xff\xfe" + KEY.encode(), "line 2: is not UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), "holds more than"),
    ],
)
def test_a_file_that_is_none_is_told(raw: bytes, words: str) -> None:
    (fault,) = faults_of(raw)
    assert words in fault
    assert "kkk" not in fault


@given(st.binary(max_size=400))
def test_no_bytes_break_the_parser_or_are_repeated_by_it(raw: bytes) -> None:
    marked = raw + b"\nann use sesame-sesame sesame-sesame\n"
    assert "sesame" not in "".join(faults_of(marked))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ([f"Bearer {KEY}"], KEY),
        ([f"bearer {KEY}"], KEY),
        ([f"BEARER   {KEY} "], KEY),
        ([], None),
        ([""], None),
        (["Bearer"], None),
        (["Bearer "], None),
        ([KEY], None),
        ([f"Basic {KEY}"], None),
        ([f"Bearer{KEY}"], None),
        ([f"Bearer\t{KEY}"], None),
        ([f"Bearer {KEY} {KEY}"], None),
        ([f"Bearer {KEY}, Bearer {KEY}"], None),
        ([f"Bearer {KEY}é"], None),
        ([f"Bearer {KEY}\x00"], None),
        (["Bearer " + KEY * LONGEST_KEY], None),
        ([f"Bearer {KEY}", f"Bearer {KEY}"], None),
        ([f"Bearer {KEY}", "Bearer other"], None),
        ([f"Bearer {KEY}".encode()], None),
    ],
)
def test_only_one_bearer_key_is_a_key(values: list[str | bytes], key: str | None) -> None:
    assert bearer_key(values) == key


@given(st.lists(st.one_of(st.text(), st.binary(), st.text().map(lambda text: f"Bearer {text}")), max_size=3))
def test_no_header_breaks_the_reader(values: list[str | bytes]) -> None:
    key = bearer_key(values)
    if key is not None:
        assert len(values) == 1
        assert key in values[0]
        assert not key_fault(key)


def test_keys_do_not_show_themselves() -> None:
    keys = ApiKeys.of([KEY], ANN) | ApiKeys.of([OTHER], Caller(Owner("bob"), Scope.OPERATE))
    assert repr(keys) == str(keys) == "ApiKeys(<2 keys>)"
    assert (keys.find(KEY), keys.find(OTHER)) == (ANN, Caller(Owner("bob"), Scope.OPERATE))


def test_the_operators_key_is_made_from_the_secret() -> None:
    """By `printf 'pdserve operator key 1' | openssl dgst -sha256 -hmac sesame`: clients of other versions find the same."""
    assert operator_key(b"sesame") == "533e8a019ed3dec2939b426af0fb93bb66870b17aa6f9c783f82962a6a9ef812"
    assert key_fault(operator_key(b"")) == ""
