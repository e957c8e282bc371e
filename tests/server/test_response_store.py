"""The store of responses and the log of a background response."""

import asyncio

from jaxserve.server.protocol.responses import ResponseObject
from jaxserve.server.responses.store import EventLog, ResponseStore, StoredResponse


def stored(name: str, *, runs: bool = False) -> StoredResponse:
    response = ResponseObject(
        id=name,
        created_at=0,
        status="completed",
        background=runs,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="m",
        parallel_tool_calls=True,
        previous_response_id=None,
        prompt_cache_key=None,
        reasoning={},
        safety_identifier=None,
        store=True,
        temperature=1.0,
        text={},
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        user=None,
    )

    async def cancel() -> None: ...

    return StoredResponse(response, cancel=cancel if runs else None)


def held(store: ResponseStore) -> str:
    return "".join(store._responses)


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(100)
    for name in "abc":
        store.add(stored(name), 33)
    assert (held(store), store.num_bytes) == ("abc", 99)
    assert store.get("a") is not None
    store.add(stored("d"), 2)
    assert (held(store), store.num_bytes) == ("cad", 68)
    store.add(stored("e"), 99)
    assert (held(store), store.num_bytes) == ("e", 99)
    store.add(stored("f"), 101)
    assert (held(store), store.num_bytes) == ("", 0), "larger than the store"


def test_what_runs_stays() -> None:
    store = ResponseStore(10)
    running = stored("r", runs=True)
    store.add(running, 50)
    store.add(stored("a"), 5)
    assert held(store) == "r"
    running.cancel = None
    store.add(running, 4)
    store.add(stored("b"), 6)
    assert (held(store), store.num_bytes) == ("rb", 10)


def test_delete_and_unknown_ids() -> None:
    store = ResponseStore(10)
    store.add(stored("a"), 5)
    store.delete("a")
    store.delete("a")
    assert store.get("a") is None
    assert store.num_bytes == 0


def test_a_log_is_followed_by_any_number_of_readers() -> None:
    async def main() -> None:
        log = EventLog()
        log.append(b"a")

        async def read(first: int) -> bytes:
            return b"".join([data async for data in log.read(first)])

        readers = [asyncio.create_task(read(first)) for first in (0, 1, 9)]
        for event in (b"b", b"c"):
            await asyncio.sleep(0)
            log.append(event)
        await asyncio.sleep(0)
        assert not any(reader.done() for reader in readers)
        log.close()
        assert await asyncio.gather(*readers) == [b"abc", b"bc", b""]
        assert await read(2) == b"c"
        assert log.num_bytes == 3

    asyncio.run(asyncio.wait_for(main(), 5))
