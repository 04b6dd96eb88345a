"""Reading a request's body: JSON in UTF-8 of bounded shape, then a model that knows every field."""

import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from ddtree.server.api_error import ApiError
from ddtree.server.request_error import from_validation

MAX_FIELDS = 1024
"""Fields of one object; keeps the list of pydantic's findings short."""

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The body as a ``model``.

    Raises:
        ApiError: 400 with the field at fault.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":  # also keeps web pages of others out: browsers send this type only after asking
        raise ApiError(415, "send the body with Content-Type: application/json", code="unsupported_media_type")
    content = parse_json(await request.body())
    try:
        return model.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise from_validation([finding | {"loc": ("body", *finding["loc"])} for finding in found[:1]]) from None


def parse_json(raw: bytes) -> Any:
    """JSON without the liberties that Python's reader takes.

    Raises:
        ApiError: 400 with what is wrong.
    """
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number)
        if b"\\ud" in raw.lower():  # half of a surrogate pair cannot be written in UTF-8
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON ({error.msg} at {error.pos})", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError:  # a number with thousands of digits
        raise ApiError(400, "the body has a number that is too long", code="invalid_json") from None
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_FIELDS:
        raise ApiError(400, f"an object in the body has more than {MAX_FIELDS} fields", code="invalid_json")
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise ApiError(400, f"{_printable(twice)}: this field is given twice", code="invalid_json")
    return fields


def _no_number(name: str) -> Any:
    raise ApiError(400, f"the body has {name}, which is no number of JSON", code="invalid_json")


def _printable(text: str) -> str:
    return text[:100].encode("utf-8", "replace").decode()
