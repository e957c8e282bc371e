"""Streams, merging, aborts, utility calls, and the engine's death."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import EngineDeadError, RequestError
from jaxserve.messages import EngineCoreOutput, EngineOutput, FinishReason
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation import ServerContext
from tests.fakes_engine import FakeCoreClient, make_config, make_context, says


def run(coroutine: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 10))


class Engine:
    """An AsyncLLM over a fake engine core."""

    def __init__(self, text: str = "hello", **client: Any):
        self.core = FakeCoreClient(says(text), **client)
        self.context: ServerContext = make_context(self.core, make_config())
        self.llm: AsyncLLM = self.context.llm

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.llm.close()
        self.context.renderer.close()

    def generate(self, **params: Any):
        sequences = self.context.input_processor.process(
            [1, 2],
            SamplingParams(max_tokens=50) if not params else SamplingParams(**params),
            arrival_time_s=0,
        )
        return self.llm.generate(sequences)


async def settle() -> None:
    """Lets everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_stream_of_pieces() -> None:
    async def test() -> None:
        async with Engine() as engine, engine.generate() as stream:
            outputs = [output async for output in stream]
        assert [output.text for output in outputs] == ["h", "e", "l", "l", "o", ""]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert engine.core.aborted == []

    run(test())


def test_a_slow_reader_gets_everything_in_one_piece() -> None:
    async def test() -> None:
        async with Engine() as engine, engine.generate(n=2) as stream:
            while engine.core.running:
                await asyncio.sleep(0)
            await settle()
            outputs = await stream.take()
            assert outputs == [
                RequestOutput(i, "hello", [*b"hello", 257], FinishReason.STOP, None, 3)
                for i in range(2)
            ]
            assert await stream.take() == []

    run(test())


def test_leaving_the_stream_aborts_every_choice_that_runs() -> None:
    async def test() -> None:
        async with Engine("hello" * 9) as engine:
            async with engine.generate(n=3, max_tokens=50) as stream:
                assert (await anext(stream)).text == "h"
            await settle()
            assert sorted(engine.core.aborted) == ["1", "2", "3"]
            assert engine.core.running == {}

    run(test())


def test_an_exception_in_the_reader_aborts() -> None:
    async def test() -> None:
        async with Engine() as engine:
            with pytest.raises(ZeroDivisionError):
                async with engine.generate() as stream:
                    async for _ in stream:
                        raise ZeroDivisionError
            assert engine.core.aborted == ["1"]

    run(test())


def test_cancel_wakes_the_reader() -> None:
    async def test() -> None:
        async with Engine() as engine:
            engine.core.allow_steps(0)
            async with engine.generate() as stream:
                asyncio.get_running_loop().call_soon(stream.cancel)
                assert [output async for output in stream] == []
                assert stream.is_cancelled
            assert engine.core.aborted == ["1"]

    run(test())


def test_a_stop_string_aborts() -> None:
    async def test() -> None:
        async with Engine("a stop and more") as engine:
            async with engine.generate(stop="stop", max_tokens=50) as stream:
                text = "".join([output.text async for output in stream])
                assert not stream.is_cancelled
            await settle()
            assert text == "a "
            assert engine.core.aborted == ["1"]

    run(test())


def test_death_fails_what_runs_and_what_comes() -> None:
    async def test() -> None:
        async with Engine() as engine:
            async with engine.generate() as stream:
                assert (await anext(stream)).text == "h"
                engine.core.die("worker 0 was killed")
                with pytest.raises(EngineDeadError, match="worker 0 was killed"):
                    while await anext(stream):
                        pass
            assert str(await engine.llm.wait_dead()) == "worker 0 was killed"
            with pytest.raises(EngineDeadError, match="worker 0 was killed"):
                engine.generate()
            with pytest.raises(EngineDeadError):
                await engine.llm.reset_prefix_cache()

    run(test())


def test_death_before_the_receiver_knows() -> None:
    """Sending fails first; leaving the stream, which aborts, does not."""

    async def test() -> None:
        async with Engine() as engine:
            engine.core.allow_steps(0)
            async with engine.generate():
                engine.core.die("gone")
                with pytest.raises(EngineDeadError, match="gone"):
                    engine.generate()
            await engine.llm.wait_dead()

    run(test())


def test_closing_is_a_503_and_not_death() -> None:
    async def test() -> None:
        async with Engine() as engine:
            engine.core.allow_steps(0)
            async with engine.generate() as stream:
                engine.llm.close()
                with pytest.raises(RequestError, match="shutting down") as caught:
                    await anext(stream)
            assert caught.value.status == 503
            assert engine.llm.dead_error is None
            with pytest.raises(RequestError, match="shutting down"):
                engine.generate()

    run(test())


def test_a_failure_of_our_own_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenClient(FakeCoreClient):
        def start_receiving(self, handle: Callable[[EngineOutput], None]) -> None:
            output = EngineCoreOutput("1", ["not a token"])  # pyright: ignore[reportArgumentType]
            for _ in range(2):
                asyncio.get_running_loop().call_soon(handle, self._outputs([output]))

    async def test() -> None:
        context = make_context(BrokenClient(says("x")), make_config())
        sequences = context.input_processor.process([1], SamplingParams(), arrival_time_s=0)
        async with context.llm.generate(sequences) as stream:
            with pytest.raises(EngineDeadError, match="API server failed"):
                await anext(stream)
        context.renderer.close()

    run(test())
    assert caplog.text.count("cannot process the engine's output") == 1  # it ends with the first
    assert "Traceback" in caplog.text


def test_utility_calls() -> None:
    async def test() -> None:
        async with Engine() as engine:
            assert await engine.llm.reset_prefix_cache() is True
            engine.core.can_reset = False
            assert await engine.llm.reset_prefix_cache() is False
            with pytest.raises(RuntimeError, match="no such method: nonsense"):
                await engine.llm._call("nonsense")

    run(test())


def test_death_answers_utility_calls() -> None:
    async def test() -> None:
        async with Engine() as engine:
            engine.core.is_mute = True
            call = asyncio.ensure_future(engine.llm.reset_prefix_cache())
            await settle()
            engine.core.die("gone")
            with pytest.raises(EngineDeadError, match="gone"):
                await call

    run(test())
