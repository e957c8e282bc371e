"""Which of several engine cores gets a request: one that is no busier, and knows its beginning."""

from collections.abc import Sequence

from jaxserve.messages import SchedulerStats

# An engine core that knows a prompt's beginning may have so many requests more than the idlest one,
# and such a part of the mean. Less would scatter prefixes by chance; more would cost more waiting
# than the cache saves work.
_SLACK = 4
_SLACK_OF_MEAN = 0.2


class _Engine:
    """One engine core, as it was when it last reported, and what it was sent since.

    max_blocks: how many KV blocks it has.
    blocks: hashes of the prompt blocks that it has got, the least recently used first: what its
      prefix cache holds, as far as one can know from outside.
    """

    def __init__(self) -> None:
        self.max_blocks = 0
        self._stats = SchedulerStats()
        self.num_sent = 0
        self.blocks: dict[bytes, None] = {}

    @property
    def load(self) -> int:
        """Requests that run, wait, or are on their way."""
        on_their_way = self.num_sent - self._stats.num_requests
        return self._stats.num_running + self._stats.num_waiting + on_their_way

    def observe(self, stats: SchedulerStats) -> None:
        """It has reported."""
        self._stats = stats

    def num_known(self, block_hashes: Sequence[bytes]) -> int:
        """How many blocks of a prompt, from the first, it has."""
        for idx, block_hash in enumerate(block_hashes):
            if block_hash not in self.blocks:
                return idx
        return len(block_hashes)

    def send(self, block_hashes: Sequence[bytes]) -> None:
        """It gets a request."""
        self.num_sent += 1
        for block_hash in reversed(block_hashes):  # a block without those before it is of no use
            self.blocks.pop(block_hash, None)
            self.blocks[block_hash] = None
        while len(self.blocks) > self.max_blocks:
            del self.blocks[next(iter(self.blocks))]


class Placement:
    """Chooses an engine core for one request after the other.

    Of those that are about as busy as the idlest one, the one that knows most of the prompt; of
    those that know as much, the idlest; of those, the one that has got the fewest so far.
    """

    def __init__(self, num_engines: int):
        self._engines = [_Engine() for _ in range(num_engines)]

    def set_num_kv_blocks(self, engine_idx: int, num_kv_blocks: int) -> None:
        """An engine core is ready. All must be before `choose`."""
        self._engines[engine_idx].max_blocks = num_kv_blocks

    def choose(self, block_hashes: Sequence[bytes]) -> int:
        """The engine core that gets a request whose prompt has these full blocks."""
        loads = [engine.load for engine in self._engines]
        slack = max(_SLACK, _SLACK_OF_MEAN * sum(loads) / len(loads))
        limit = min(loads) + slack

        def cost(idx: int) -> tuple[int, int, int]:
            engine = self._engines[idx]
            return -engine.num_known(block_hashes), loads[idx], engine.num_sent

        chosen = min((idx for idx, load in enumerate(loads) if load <= limit), key=cost)
        self._engines[chosen].send(block_hashes)
        return chosen

    def observe(self, engine_idx: int, stats: SchedulerStats) -> None:
        """An engine core has reported."""
        self._engines[engine_idx].observe(stats)

    def forget_prefixes(self) -> None:
        """The prefix caches are being emptied."""
        for engine in self._engines:
            engine.blocks.clear()
