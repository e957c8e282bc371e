"""The three kinds of failure: the operator's, the request's, and ours (an assertion)."""


class UserError(Exception):
    """What the operator asked for cannot be done.

    Printed as two lines (the problem, then the fix) with exit code 2 and no traceback.
    `problem` names the flag and its value; `fix` names a value that works.
    """

    def __init__(self, problem: str, *, fix: str):
        super().__init__(f"{problem}\n{fix}")
        self.problem = problem
        self.fix = fix


class RequestError(Exception):
    """A request that cannot be served: an OpenAI-style error body with this status.

    `param` is the path of the field at fault, such as `messages[2].content`, or None.
    `retry_after_s`: when the same request may be taken, for a Retry-After header.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.retry_after_s = retry_after_s


class EngineDeadError(Exception):
    """The engine cannot run another step. `str()` is the root cause, for clients and the log."""
