"""What is JSON stays JSON when secrets are taken out of it: a kit reads its records again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import UserError
from ddtree.kit.mask import MASK, Masker

from .planted import PLANTED

NAMES = ["password", "ssl_keyfile_password", "api_key", "admin_api_key", "HF_TOKEN", "client_secret", "dsn", "cookie"]
HARMLESS = [None, True, False, 0, 12, 0.5, 123, "", "none", "auto", [], {}, "/etc/keys/file"]


def forms(document):
    """Compact, spaced and over several lines, alone and as lines of a longer file."""
    alone = [
        json.dumps(document, separators=(",", ":")),
        json.dumps(document),
        json.dumps(document, indent=1),
        json.dumps(document, ensure_ascii=False),
    ]
    return [*alone, f'{{"line": 1}}\n{alone[0]}\n{alone[1]}\n', f"a line of a log\n{alone[0]}\nanother"]


def read(text):
    """Each document of a text."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def shape(value):
    """A document without its strings and numbers: its keys, in order, its lengths and its literals."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value]
    return value if value is None or isinstance(value, bool) else "..."


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_secret_stays_after_a_telling_name(name: str) -> None:
    for value in HARMLESS:
        for document in ({name: value}, {"a": "b", name: value, "c": "d"}, {"x": {name: value}}, [{name: value}, 1]):
            for text in forms(document):
                masker = Masker(is_strict=True)
                assert masker.text(text, "sessions.jsonl") == text
            inner = json.dumps({"text": json.dumps(document)})
            assert Masker(is_strict=True).text(inner, "sessions.jsonl") == inner


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("secret", ["plain-word-1", 'a "quoted" \\ one', "two words", "ends-with-\\", "ümlaut-🙂x"])
def test_a_secret_goes_and_its_document_stays(name: str, secret: str) -> None:
    documents = [{name: secret}, {"a": "b", name: secret, "c": None}, [{name: secret, "n": 123456}]]
    for document in documents:
        for text in forms(document):
            masker = Masker()
            told = masker.text(text, "x.json")
            assert [shape(each) for each in read(told)] == [shape(each) for each in read(text)], told
            assert secret not in str(read(told)) and MASK in told
            assert {each.kind for each in masker.masked} == {f"value of {name}"}
            with pytest.raises(UserError, match="holds secrets"):
                Masker(is_strict=True).text(text, "x.json")


@pytest.mark.parametrize("number", [123456, 12345678, -87654321.5, 10**20])
def test_a_password_of_digits_becomes_a_string(number: float) -> None:
    document = {"db_password": number, "port": 123456}
    for text in forms(document):
        told = Masker().text(text, "x.json")
        assert read(told)[-1] == {"db_password": MASK, "port": 123456}


@pytest.mark.parametrize(
    ("document", "masked"),
    [
        ({"k": "-----BEGIN RSA PRIVATE KEY-----\nabc", "status": "ok"}, {"k": MASK, "status": "ok"}),
        (
            {"k": ["-----BEGIN RSA PRIVATE KEY-----", "TUlJ", "-----END RSA PRIVATE KEY-----", "after"], "n": 1},
            {"k": [MASK, MASK, MASK, "after"], "n": 1},
        ),
        ({"k": "machine m login l password netrc-7", "n": 1}, {"k": f"machine m login l password {MASK}", "n": 1}),
        ({"k": "https://discord.com/api/webhooks/1/x", "n": "b"}, {"k": MASK, "n": "b"}),
        (["https://discord.com/api/webhooks/1/x", "b"], [MASK, "b"]),
        ({"argv": ["x", "--api-key", "simple-key-1", "y"]}, {"argv": ["x", "--api-key", MASK, "y"]}),
        ({"argv": ["HF_TOKEN=two words", "y"]}, {"argv": [f"HF_TOKEN={MASK}", "y"]}),
        ({"name": "HF_TOKEN", "value": "plain-value-1"}, {"name": "HF_TOKEN", "value": MASK}),
        ({"t": 'export DB_PASSWORD="a \\ b"', "n": None}, {"t": f'export DB_PASSWORD="{MASK}"', "n": None}),
    ],
)
def test_cuts_end_where_their_string_ends(document: object, masked: object) -> None:
    text = json.dumps(document, separators=(",", ":"))
    assert json.loads(Masker().text(text, "x.json")) == masked


def test_known_values_in_numbers_escapes_and_keys() -> None:
    for secret, document in (
        ("87654321", {"a": 9876543210, "b": 1}),
        ("abc\\", {"a": "abc\\", "b": 'abc\\"x'}),
        ("\\u00", {"a": "ä", "b": "ö"}),
        ("worth", {"worth": 1, "b": "net-worth"}),
    ):
        told = Masker({"key": secret}).text(json.dumps(document), "x.json")
        assert len(json.loads(told)) == 2, told
        assert secret not in told.replace(MASK, ""), told


KEYS = st.one_of(st.sampled_from(NAMES), st.text(max_size=8), st.sampled_from(["name", "value", "auth", "user", "env"]))
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from([*PLANTED.values(), "password with blanks", "x --api-key abcdef y", 'TOKEN="a b c"', "\\", '\\"']),
    st.text(alphabet="ab\"'\\ =:,{}[]\n\t/@", max_size=16).map(lambda text: f"API_KEY={text}"),
)
SINGLE = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
DOCUMENTS = st.recursive(
    SINGLE, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=16
).filter(lambda value: isinstance(value, (dict, list)))
NESTED = st.one_of(DOCUMENTS, DOCUMENTS.map(lambda inner: {"log": json.dumps(inner), "HF_TOKEN": [inner]}))


@settings(max_examples=300, deadline=None)
@given(document=NESTED, form=st.integers(0, 4), secret=st.sampled_from(sorted(PLANTED.values())))
def test_any_document_keeps_its_form(document: object, form: int, secret: str) -> None:
    """It parses, with the same keys, lengths and literals; and a secret beside it is found."""
    text = forms({"first": document, "planted": f"so {secret} it is", "last": None})[form]
    told = Masker({"key": "a-known-value"}).text(text, "x.json")
    before, after = read(text), read(told)
    assert [shape(each) for each in after] == [shape(each) for each in before]
    assert secret not in json.dumps(after, ensure_ascii=False)
    assert MASK in after[-1]["planted"] and after[-1]["last"] is None


HIDDEN = "zX9q" + "Lm4vKw77"


@pytest.mark.parametrize(
    "text",
    [
        '{"\\u0070assword":"%s"}',
        '{"password":\n  "%s"}',
        '{"passwords":["%s","other"],"n":1}',
        '{"password":{"value":"%s"}}',
        '[{"value":"%s","name":"DB_PASSWORD"}]',
        '[{"key":"DB_PASSWORD","value":"%s"}]',
        '{"argv":[\n "x",\n "--api-key",\n "%s"\n]}',
        '[["x-api-key","%s"]]',
        '{"u":"http:\\/\\/user:%s@h\\/"}',
        json.dumps({"a": json.dumps({"b": json.dumps({"password": "%s"})})}),
        json.dumps({"a": json.dumps({"b": json.dumps(["--api-key", "%s"], indent=1)})}),
    ],
)
def test_names_tell_wherever_they_stand(text: str) -> None:
    told = Masker().text(text % HIDDEN, "x.json")
    assert HIDDEN not in told and MASK in told
    assert shape(json.loads(told)) == shape(json.loads(text % HIDDEN))


def test_a_known_value_behind_escapes() -> None:
    for inner in ('q"' + HIDDEN, HIDDEN):
        escaped = "".join(f"\\u{ord(letter):04x}" for letter in inner)
        for text in (f'{{"x":"{escaped}"}}', json.dumps({"l": json.dumps({"x": inner})})):
            assert HIDDEN not in json.dumps(json.loads(Masker({"key": inner}).text(text, "x.json")))
