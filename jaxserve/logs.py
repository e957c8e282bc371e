"""How every process logs: one line a record on stderr, the process named in it."""

import logging
import sys

from jaxserve.errors import UserError


def setup_logging(level: str, process: str) -> None:
    """Sends all logging of this process to stderr.

    level: "debug", "info", "warning" or "error"; applies to jaxserve, libraries log warnings.
    process: a short name shown in every line, such as "api", "core" or "worker".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("jaxserve", "pallas_kernels"):
        logging.getLogger(name).setLevel(level.upper())


def print_user_error(error: UserError) -> None:
    """The two lines of an operator's mistake: the problem, then the fix."""
    print(f"error: {error.problem}\nfix: {error.fix}", file=sys.stderr, flush=True)
