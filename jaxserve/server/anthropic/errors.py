"""Errors in Anthropic's form."""

from jaxserve.errors import EngineDeadError
from jaxserve.server.http import error_of
from jaxserve.server.protocol.anthropic import AnthropicError, AnthropicErrorDetail

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, message: str, param: str | None = None) -> AnthropicError:
    """The body of an error with this status."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return AnthropicError(error=AnthropicErrorDetail(kind, message, param))


def anthropic_error_of(error: Exception) -> tuple[int, AnthropicError]:
    """The status and the body for a failed request."""
    status, body = error_of(error)
    made = anthropic_error(status, body.error.message, body.error.param)
    if isinstance(error, EngineDeadError):  # it will not recover, so it is not overloaded
        detail = AnthropicErrorDetail("api_error", made.error.message)
        return status, AnthropicError(error=detail)
    return status, made
