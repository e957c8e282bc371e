"""Errors of a chat, for routes whose bodies have other names for what the chat was made from."""

import re
from collections.abc import Iterable

from jaxserve.errors import RequestError


def renamed(error: RequestError, names: Iterable[tuple[re.Pattern[str], str]]) -> RequestError:
    """The error, as one that names the field as the client did.

    names: what `param` begins with, and what stands for that in the client's body.
    """
    if error.param is None:
        return error
    param = error.param
    for pattern, name in names:
        param = pattern.sub(name, param, count=1)
    message = error.message
    if message.startswith(error.param):
        message = param + message[len(error.param) :]
    return RequestError(
        message, param=param, status=error.status, retry_after_s=error.retry_after_s
    )
