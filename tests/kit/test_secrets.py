"""Planted secrets of many kinds, in every kind of file: none comes through, and what is no secret does."""

from __future__ import annotations

import base64
import json
import shlex
from pathlib import Path
from urllib.parse import quote

import pytest

from ddtree.errors import UserError
from ddtree.kit.mask import MASK, Masker, is_telling

from .planted import MIXED, PLANTED

# What only its place tells.
PLACED = {
    "url": ("https://somebody:{}@example.org/x", "correct-horse"),
    "bearer": ("Authorization: Bearer {}", MIXED),
    "basic": ("authorization: Basic {}", base64.b64encode(b"somebody:something").decode()),
    "variable": ("Environment=MY_SERVICE_TOKEN={}", "plain-looking-word"),
    "quoted variable": ('export DB_PASSWORD="{}"', "two words here"),
    "flag": ("ExecStart=/opt/x --api-key {} --port 8000", "simple-key-1"),
    "flag with equals": ("/opt/x --hf-token={} --port 8000", "simple-token-2"),
    "json": ('{{"client_secret": "{}", "other": 1}}', "json-secret-3"),
    "yaml": ("api-key: {}", "yaml-secret-4"),
    "python": ("API_KEY = '{}'", "python-secret-5"),
    "log": ("INFO starting with api_key='{}', port=8000", "log-secret-6"),
    "netrc": ("machine example.org login somebody password {}", "netrc-secret-7"),
    "curl": ("curl -u somebody:{} http://x", "curl-secret-8"),
    "name with a number": ("HF_TOKEN_2={}", "abc123abc123"),
    "mail": ("SMTP_PASS={}", "abc123abc123"),
    "a key's name": ("MASTER_KEY={}", "abc123abc123"),
    "digits": ("DB_PASSWORD={}", "123456"),
    "a quoted unit": ('Environment="A=1" "HF_TOKEN={}"', "three short words"),
    "mysql": ("mysql -P 3306 -u root -p{} db", "S3cr3tPw9"),
    "sshpass": ("sshpass -p '{}' ssh -p 22 host", "S3cr3tPw9"),
    "openssl": ("openssl rsa -passin pass:{} -in k", "S3cr3tPw9"),
    "presigned": ("https://b.example.org/x?X-Amz-Signature={}&x=1", "5d672d79c15b13162d9279b0855cfba6"),
    "key in an address": ("https://example.org/api?key={}", "AbCdEf1234567890xyz"),
    "docker": ('{{"auths": {{"x": {{"auth": "{}"}}}}}}', "dXNlcjpwYXNzd29yZA=="),
    "kubernetes": ("- name: DB_PASSWORD\n  value: {}", "S3cr3tPw9"),
    "container's json": ('{{"name": "HF_TOKEN", "value": "{}"}}', "plain-value-1"),
    "kubeconfig": ("client-key-data: {}", "LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVk="),
    "xml": ("<proxyPassword>{}</proxyPassword>", "S3cr3tPw9"),
    "block of yaml": ("password: |\n  {}", "folded-secret-9"),
    "said in a log": ("logging in with password {} now", "hunter2hunter2"),
    "list of yaml": ("api_keys:\n  - {}", "listed-secret-9"),
    "lines of toml": ('password = """\n{}"""', "long-secret-9"),
    "a line that goes on": ("ExecStart=/x \\\n --api-key \\\n {}", "long-secret-9"),
    "bytes": ("{{'password': b'{}'}}", "bytes-secret-9"),
    "pair of bytes": ("[(b'x-api-key', b'{}')]", "bytes-secret-9"),
    "base64 like a path": ("API_KEY={}", "/" + MIXED),
    "beside another secret": ("PASSWORD={}sk-" + MIXED, "hunter2-"),
    "escaped json": ('"{{\\"auth_token\\": \\"{}\\"}}"', "nested-secret-9"),
}


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize(
    "frame", ["{}", "Environment=X={}", '{{"a": ["{}"]}}', "2026-01-01 12:00:00 INFO got {}, going on", "--x={}"]
)
def test_shapes_are_masked_wherever_they_stand(kind: str, frame: str) -> None:
    secret = PLANTED[kind]
    masker = Masker()
    told = masker.text(frame.format(secret), "some.file")
    assert secret not in told and MASK in told, told
    for part in secret.replace("-", " ").replace("/", " ").split():
        assert len(part) < 20 or part not in told, told
    assert masker.masked and masker.masked[0].file == "some.file" and secret not in str(masker.masked)
    with pytest.raises(UserError, match=r"some.file holds secrets"):
        Masker(is_strict=True).text(frame.format(secret), "some.file")


@pytest.mark.parametrize("kind", PLACED)
def test_places_are_masked(kind: str) -> None:
    frame, secret = PLACED[kind]
    told = Masker().text(frame.format(secret) + "\n", "unit")
    assert secret not in told and MASK in told, told
    assert told.count("\n") == frame.count("\n") + 1


@pytest.mark.parametrize("secret", ["hunter-two-too", "p@ss w\"ord\\x$`%'", "äöü-secret", "s/la+sh=="])
def test_known_values_are_masked_in_every_spelling(secret: str) -> None:
    masker = Masker({"api_key": secret})
    spellings = [
        secret,
        json.dumps(secret),
        json.dumps(secret, ensure_ascii=False),
        shlex.quote(secret),
        quote(secret, safe=""),
        base64.b64encode(f"user:{secret}".encode()).decode(),
        base64.b64encode(secret.encode()).decode(),
        secret.encode().hex(),
        f'"{secret}"'.replace("%", "%%"),
    ]
    for spelling in spellings:
        told = masker.text(f"before {spelling} after", "x")
        bare = spelling.strip("\"'").rstrip("=")
        assert bare not in told and told.startswith("before ") and told.endswith(" after"), (spelling, told)
    assert secret.encode() not in masker.content(b"\xff\xfe" + secret.encode() + b"\0", "binary")


def test_a_difference_of_units_is_no_code() -> None:
    assert MIXED not in Masker().text(f"-Environment=API_KEY={MIXED}", "services/x.service.diff")


def test_variables_and_arguments() -> None:
    masker = Masker()
    masker.learn_environment({"HF_TOKEN": "worth-keeping", "HOME": "/srv/home", "SOME_KEY_FILE": "/etc/key"})
    environment = masker.environment({"HF_TOKEN": "worth-keeping", "COPY": "x worth-keeping y", "PWD": "/srv"}, "p")
    assert environment == {"HF_TOKEN": MASK, "COPY": f"x {MASK} y", "PWD": "/srv"}
    arguments = ["serve", "--api-key", "abcd-efgh", "--api-key-file", "/etc/key", "--budget", "16", "--token=abc-def-1"]
    told = masker.arguments(arguments, "p")
    assert told == ["serve", "--api-key", MASK, "--api-key-file", "/etc/key", "--budget", "16", f"--token={MASK}"]


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt_tokens": 1234567, "completion_tokens": 12, "total_tokens": 1234579, "max_new_tokens": 256}',
        '"eos_token": "<|im_end|>", "bos_token": "hello", "pad_token_id": 2, "mask_token": "word"',
        'api_key = { file = "~/.config/ddtree/qwen.key" }',
        "detect-secrets==1.5.0",
        "a" * 64 + "  data/model/model.safetensors",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "def f(token: str, key: bytes) -> str: return token",
        "self.api_key = api_key",
        "if token is None: raise ValueError",
        "LoadCredential=api_keys:/etc/ddtree/x/api_keys",
        "--api-key-file /run/credentials/x.service/api_keys",
        "2026-01-01T00:00:00+00:00 c44665b9-88a8-4d43-85e6-ce6dd44fd76d",
        "http://127.0.0.1:8000/v1/completions",
        "the password is asked for at the prompt",
        "use it with password authentication only",
        "self.forward_pass = 12345678",
        "ssh -p 2222 host; mkdir -p some/folder",
        "- name: MODEL\n  value: llama",
        "https://example.org/list?sort=key&page=2",
        "max_token_1 = 123456",
        "PWD=/srv/models",
        "num_key_value_heads: 8, tie_word_embeddings: true",
        "git@github.com:owner/name.git",
        '"merges": [["token", "ization"], ["secret", "ary"]]',
        "HF_TOKEN=/home/somebody/.cache/huggingface/token-of-somebody-1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    masker = Masker()
    assert masker.text(text, "x") == text and masker.masked == []


def test_our_own_sources_and_examples_stay() -> None:
    """A patched engine file must come out as it went in."""
    root = Path(__file__).parents[2]
    changed = []
    for path in [*sorted((root / "src" / "ddtree").rglob("*.py")), *sorted((root / "examples").rglob("*.toml"))]:
        if Masker().content(path.read_bytes(), path.name) != path.read_bytes():
            changed.append(str(path.relative_to(root)))
    assert changed == []


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((name, 1) for name in ("HF_TOKEN", "apiKey", "--api-key", "AWS_SECRET_ACCESS_KEY", "db.password")),
        *((name, 0) for name in ("TOKENS", "API_KEY_FILE", "num_key_value_heads", "max_tokens", "KEYBOARD", "monkey")),
    ],
)
def test_telling_names(name: str, is_one: int) -> None:
    assert is_telling(name) == bool(is_one)
