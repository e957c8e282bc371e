"""The coordinator: `python -m jaxserve.engine.coordinator_process`, where engine cores are several.

What API servers send goes through it: a request to the engine core that `Placement` chooses, all
else to every engine core, in the order it came. Engine cores report each step to it, and answer the
API servers themselves.
"""

import logging
import sys

import zmq

from jaxserve import processes
from jaxserve.config import decode_config
from jaxserve.engine.placement import Placement
from jaxserve.engine.request import hash_prompt_blocks
from jaxserve.logs import setup_logging
from jaxserve.messages import (
    CoordinatorStart,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    Shutdown,
    UtilityCall,
    decode_coordinator_start,
    decode_engine_input,
    decode_engine_output,
)

logger = logging.getLogger(__name__)

_LAST_WORDS_TIMEOUT_MS = 1000


class Coordinator:
    """Passes messages on. One thread; blocked while nothing comes."""

    def __init__(self, start: CoordinatorStart):
        self._context = zmq.Context()
        self._input = self._socket(zmq.PULL)
        self._input.bind(start.input_address)
        self._stats = self._socket(zmq.PULL)
        self._stats.bind(start.stats_address)
        self._engines = [self._socket(zmq.PUSH) for _ in start.engine_addresses]
        for engine, address in zip(self._engines, start.engine_addresses, strict=True):
            engine.connect(address)
        cache = decode_config(start.config).cache
        self._hash_blocks = cache.enable_prefix_caching
        self._block_size = 0
        self._placement = Placement(len(self._engines))
        self._num_ready = 0
        self._is_running = True

    def run(self) -> None:
        """Until an API server sends Shutdown, which is passed on first."""
        # What comes in waits for this, so whoever gets an answer knows that all are connected.
        while self._num_ready < len(self._engines):
            self._take_report(self._stats.recv())
        poller = zmq.Poller()
        poller.register(self._input, zmq.POLLIN)
        poller.register(self._stats, zmq.POLLIN)
        while self._is_running:
            ready = dict(poller.poll())
            if self._stats in ready:
                self._take_report(self._stats.recv())
            elif self._input in ready:  # only when all reports are taken
                self._pass_on(self._input.recv())

    def close(self) -> None:
        """Sends what is queued."""
        self._input.close(linger=0)
        self._stats.close(linger=0)
        for engine in self._engines:
            engine.close(linger=_LAST_WORDS_TIMEOUT_MS)
        self._context.term()

    def _take_report(self, data: bytes) -> None:
        message = decode_engine_output(data)
        if isinstance(message, EngineReady):
            config = decode_config(message.config)
            self._block_size = config.cache.block_size
            rank = config.parallel.data_parallel_rank
            self._placement.set_num_kv_blocks(rank, config.cache.num_kv_blocks)
            self._num_ready += 1
        elif isinstance(message, EngineCoreOutputs):
            self._placement.observe(message.engine_idx, message.stats)
        # An engine core that dies says so here too; the API servers and the first process act.

    def _pass_on(self, data: bytes) -> None:
        message = decode_engine_input(data)
        if isinstance(message, EngineCoreRequest):
            self._engines[self._placement.choose(self._hashes(message))].send(data)
            return
        if isinstance(message, UtilityCall) and message.method == "reset_prefix_cache":
            self._placement.forget_prefixes()
        for engine in self._engines:
            engine.send(data)
        self._is_running = not isinstance(message, Shutdown)

    def _hashes(self, request: EngineCoreRequest) -> list[bytes]:
        if not self._hash_blocks:
            return []
        tokens, salt = request.prompt_token_ids, request.cache_salt
        return hash_prompt_blocks(tokens, self._block_size, salt, request.lora_name)

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        return socket


def main() -> None:
    start_message, life_fd = processes.become_child()
    start = decode_coordinator_start(start_message)
    processes.exit_with_parent(life_fd, "coordinator")
    setup_logging(decode_config(start.config).server.log_level, "coordinator")
    coordinator = Coordinator(start)
    try:
        coordinator.run()
    except Exception:
        logger.exception("the coordinator failed")
        sys.exit(1)
    coordinator.close()


if __name__ == "__main__":
    main()
