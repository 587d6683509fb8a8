"""Small HTML forms: bounded in size, number of fields and time."""

import asyncio
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

MAX_BYTES = 64 * 1024
_MAX_FIELDS = 200
_TIMEOUT_S = 30.0
_KIND = "application/x-www-form-urlencoded"


class BadForm(Exception):
    """A body that is not a small form; the message says why."""


class FormTooLarge(BadForm):
    """A form with too many bytes."""


async def read_form(request: Request, max_bytes: int = MAX_BYTES, timeout_s: float = _TIMEOUT_S) -> dict[str, str]:
    """Return a form's fields, without surrounding whitespace; of repeated ones the last. Raises BadForm."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _KIND:
        raise BadForm(f"It has the content type {kind[:100]!r} instead of {_KIND}.")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise FormTooLarge(f"It has more than {max_bytes} bytes.")
        fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except TimeoutError as error:
        raise BadForm(f"It did not arrive within {timeout_s:g} s.") from error
    except ClientDisconnect as error:
        raise BadForm("The connection closed before it arrived.") from error
    except ValueError as error:  # not UTF-8, or too many fields
        raise BadForm("It cannot be read.") from error
    return {name: value.strip() for name, value in fields}
