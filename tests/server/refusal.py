"""What every refusal looks like."""

from __future__ import annotations

import httpx


def refused(response: httpx.Response, status: int, *words: str, param: str | None = None) -> bool:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert all(word in error["message"] for word in words), error
    assert param is None or error["param"] == param, error
    assert len(response.content) < 2000
    return True
