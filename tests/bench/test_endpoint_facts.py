"""What a server says of itself is kept, but for its secrets."""

from ddtree.bench.endpoint import without_secrets


def test_secrets_are_left_out_and_names_of_settings_stay():
    told = {
        "api_key": "abc",
        "admin_api_key": None,
        "inner": [{"HF-TOKEN": "x", "ssl_keyfile_password": "y", "api_keys": ["z"]}],
        "ignored_draft_keys": ["num_target_layers"],
        "by_key": {"a": 1},
    }
    assert without_secrets(told) == {
        "api_key": "(left out)",
        "admin_api_key": None,
        "inner": [{"HF-TOKEN": "(left out)", "ssl_keyfile_password": "(left out)", "api_keys": "(left out)"}],
        "ignored_draft_keys": ["num_target_layers"],
        "by_key": {"a": 1},
    }
