"""What the scheduler must decide, said slowly: plain lists, no deltas, everything looked up anew.

Written from the rules in the scheduler's docstrings, not from its code. Blocks are named by the
tokens they hold (no hashes), references are counted by looking at every table.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class SimRequest:
    """One request: what was asked for, then how far it is."""

    name: str
    tokens: list[int]
    max_total: int
    stop_ids: tuple[int, ...]
    min_tokens: int
    keys: Any
    rank: tuple[float, ...] = ()
    state: str = "waiting"
    computed: int = 0
    unknown: int = 0
    forced: list[int] = field(default_factory=list)
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_named: int = 0
    first_cached: int | None = None
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    def total(self) -> int:
        """Tokens it will have when all steps planned are done."""
        return len(self.tokens) + self.unknown + len(self.forced)


@dataclass
class Part:
    """What a request does in a step."""

    num_tokens: int
    samples: bool = False
    hard: bool = False


class Simulation:
    """The scheduler and its cache; `schedule` and `update` mirror the real ones."""

    def __init__(
        self, *, rows: int, budget: int, blocks: int, block_size: int, caching: bool, policy: str
    ):
        self.num_rows, self.budget, self.block_size = rows, budget, block_size
        self.caching, self.policy = caching, policy
        self.free = list(range(1, blocks))
        self.names: list[tuple[Any, int]] = []  # (contents, block), the earliest named first
        self.requests: list[SimRequest] = []
        self.running: list[SimRequest] = []
        self.preempted: list[str] = []
        self.queries = 0
        self.hits = 0

    def add(self, request: SimRequest, priority: int, arrival_s: float) -> None:
        """A new request waits."""
        place = float(len(self.requests))
        by_priority = (float(priority), arrival_s, place)
        request.rank = by_priority if self.policy == "priority" else (place,)
        self.requests.append(request)

    def waiting(self) -> list[SimRequest]:
        """Who waits, the next to run first."""
        return sorted((r for r in self.requests if r.state == "waiting"), key=lambda r: r.rank)

    def abort(self, name: str) -> None:
        """Ends a request from outside."""
        for request in self.requests:
            if request.name == name and request.state != "done":
                self.stop_running(request)
                request.state = "done"

    # --- blocks ---

    def users(self, block: int) -> int:
        """How many tables hold the block."""
        return sum(r.blocks.count(block) for r in self.requests)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens, one by one."""
        return len(range(0, num_tokens, self.block_size))

    def contents(self, request: SimRequest, idx: int) -> Any:
        """All that the KV of the request's block idx depends on."""
        return (request.keys, tuple(request.tokens[: (idx + 1) * self.block_size]))

    def name_blocks(self, request: SimRequest) -> None:
        """Blocks full of known, computed tokens can be found from now on."""
        while self.caching:
            end = (request.num_named + 1) * self.block_size
            if end > request.computed or end > len(request.tokens):
                return
            idx = request.num_named
            self.names.append((self.contents(request, idx), request.blocks[idx]))
            request.num_named += 1

    def find(self, request: SimRequest) -> list[int]:
        """Blocks with the beginning of the request's tokens, all but its last token at most."""
        found: list[int] = []
        while self.caching and (len(found) + 1) * self.block_size < len(request.tokens):
            wanted = self.contents(request, len(found))
            blocks = [block for contents, block in self.names if contents == wanted]
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def take(self, num: int) -> list[int]:
        """The first free blocks; they are somebody else's from now on, nobody finds them."""
        taken, self.free = self.free[:num], self.free[num:]
        self.names = [(contents, block) for contents, block in self.names if block not in taken]
        return taken

    def stop_running(self, request: SimRequest) -> None:
        """Row and blocks go back; the end of the table is reused first, nameless blocks before."""
        if request.state != "running":
            return
        self.name_blocks(request)
        blocks, request.blocks = request.blocks, []
        named = [block for _, block in self.names]
        for block in reversed(blocks):
            if self.users(block) == 0:
                self.free.insert(len(self.free) if block in named else 0, block)
        request.num_named = request.computed = 0
        request.row = None
        request.state = "waiting"
        self.running.remove(request)

    # --- steps ---

    def schedule(self) -> dict[int, tuple[str, int, bool]]:
        """row -> (request, tokens, samples) of the next step; who was preempted: `preempted`."""
        parts: dict[SimRequest, Part] = {}
        self.preempted = []
        for request in list(self.running):
            if request.state == "running":
                self.schedule_running(request, parts)
        while not self.preempted and self.admit_next(parts):
            pass
        for request, part in parts.items():
            request.computed += part.num_tokens
            part.samples = request.computed == request.total()
            request.unknown += part.samples
        for request, part in parts.items():
            if part.hard:
                self.name_blocks(request)
        return {
            r.row: (r.name, p.num_tokens, p.samples) for r, p in parts.items() if r.row is not None
        }

    def left(self, parts: dict[SimRequest, Part]) -> int:
        """Tokens of the budget that nobody has taken."""
        return self.budget - sum(part.num_tokens for part in parts.values())

    def schedule_running(self, request: SimRequest, parts: dict[SimRequest, Part]) -> None:
        """A running request gets what it lacks, if need be at the cost of the last in rank."""
        total = request.total()
        num_tokens = min(total - request.computed, self.left(parts))
        if total == request.max_total or num_tokens == 0:
            return
        num_blocks = self.blocks_for(request.computed + num_tokens) - len(request.blocks)
        while num_blocks > len(self.free):
            victim = max(self.running, key=lambda r: r.rank)
            parts.pop(victim, None)
            self.stop_running(victim)
            self.preempted.append(victim.name)
            if victim is request:
                return
        request.blocks += self.take(num_blocks)
        hard = total - request.computed > 1 or num_blocks > 0
        parts[request] = Part(num_tokens, hard=hard)

    def admit_next(self, parts: dict[SimRequest, Part]) -> bool:
        """The head of the queue starts, if everything it needs is there."""
        rows = set(range(self.num_rows)) - {request.row for request in self.running}
        if not self.waiting() or not rows or self.left(parts) == 0 or self.waiting()[0].unknown:
            return False
        request = self.waiting()[0]
        found = self.find(request)
        num_cached = len(found) * self.block_size
        free = [block for block in self.free if block not in found]
        if self.blocks_for(len(request.tokens)) - len(found) > len(free):
            return False
        self.free = free
        num_tokens = min(len(request.tokens) - num_cached, self.left(parts))
        request.blocks = found + self.take(self.blocks_for(num_cached + num_tokens) - len(found))
        request.num_named, request.computed = len(found), num_cached
        request.row, request.state = min(rows), "running"
        self.running.append(request)
        if request.first_cached is None:
            request.first_cached = num_cached
            if self.caching:
                self.queries += request.prompt_len
                self.hits += num_cached
        parts[request] = Part(num_tokens, hard=True)
        return True

    def force(self, name: str, tokens: list[int]) -> None:
        """These follow the request's token in flight, as far as it may grow."""
        request = next(r for r in self.requests if r.name == name)
        request.forced = tokens[: request.max_total - request.total()]

    def update(self, results: list[tuple[str, int]]) -> list[tuple[str, list[int], str | None]]:
        """Takes in (request, token) of a step; returns (request, its new tokens, why it ended)."""
        outputs = []
        for name, token in results:
            request = next(r for r in self.requests if r.name == name)
            if request.state == "done":
                continue
            tokens = [token, *request.forced]
            request.tokens += tokens
            request.forced = []
            request.unknown -= 1
            reason = self.reason(request)
            if reason:
                self.stop_running(request)
                request.state = "done"
            outputs.append((name, tokens, reason))
        return outputs

    def reason(self, request: SimRequest) -> str | None:
        """Why the last token ends the request, if it does."""
        num_before = len(request.tokens) - request.prompt_len - 1
        if request.tokens[-1] in request.stop_ids and num_before >= request.min_tokens:
            return "stop"
        return "length" if len(request.tokens) == request.max_total else None


def generate(
    prompt_len: int,
    max_total: int,
    stop_ids: tuple[int, ...],
    min_tokens: int,
    sample: Callable[[int], int],
) -> list[int]:
    """The output a request must end with, come what may; sample(position) is the token there."""
    output: list[int] = []
    for position in range(prompt_len, max_total):
        output.append(sample(position))
        if output[-1] in stop_ids and len(output) > min_tokens:
            break
    return output
