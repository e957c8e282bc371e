"""A process that starts an engine, generates once, tells its engine core's pid, and waits."""

import asyncio
import sys

from jaxserve.engine.core_client import AsyncCoreClient
from jaxserve.messages import EngineCoreOutputs, EngineOutput
from tests.fakes import fake_config, fake_request


class ReceivingClient(AsyncCoreClient):
    """Keeps what comes until it is asked for. It receives from the first `recv` on."""

    _messages: asyncio.Queue[EngineOutput] | None = None

    async def recv(self) -> EngineOutput:
        """The next message; waits for it."""
        if self._messages is None:
            self._messages = asyncio.Queue()
            self.start_receiving(self._messages.put_nowait)
        return await self._messages.get()


async def run(worker_class: str) -> None:
    client = ReceivingClient(fake_config(), worker_class=worker_class)
    starting = asyncio.create_task(client.start())
    while not starting.done() and "StuckLoad" not in worker_class:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    if starting.done():
        await starting
        client.send(fake_request("a", [1, 2, 3]))
        num_tokens = 0
        while num_tokens < 4:
            message = await client.recv()
            assert isinstance(message, EngineCoreOutputs)
            num_tokens += sum(len(output.new_token_ids) for output in message.outputs)
    print(client.pids[0], flush=True)
    await (client.recv() if starting.done() else starting)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
