"""Token ids to text deltas: pieces, stop strings, finish reasons, metrics."""

import random
from typing import Any

import pytest

from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.engine.input_processor import InputProcessor, SequenceRequest
from jaxserve.engine.output_processor import OutputProcessor, RequestOutput
from jaxserve.errors import EngineDeadError
from jaxserve.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats
from jaxserve.metrics import ServerMetrics
from jaxserve.sampling_params import SamplingParams
from tests.fakes_engine import EOS, byte_level_tokenizer, fake_logprobs, make_config


class Sink:
    """Keeps everything."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)

    def fail(self, error: Exception) -> None:
        self.error = error

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [i for output in self.outputs for i in output.token_ids]


class Harness:
    """An output processor and the sequences given to it."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics("tiny")
        factory = DetokenizerFactory(byte_level_tokenizer().backend)
        self.processor = OutputProcessor(factory, self.metrics, [EOS])
        self.inputs = InputProcessor(make_config(), byte_level_tokenizer())
        self.aborted: list[str] = []
        self.now_s = 100.0

    def add(self, *, final_only: bool = False, **params: Any) -> tuple[str, Sink]:
        (request,) = self._requests(final_only, **params)
        sink = Sink()
        self.processor.add(request, sink)
        return request.core.request_id, sink

    def _requests(self, final_only: bool, **params: Any) -> list[SequenceRequest]:
        return self.inputs.process(
            [1, 2, 3], SamplingParams(**params), arrival_time_s=100.0, final_only=final_only
        )

    def step(self, *outputs: EngineCoreOutput) -> None:
        self.now_s += 0.5
        step = EngineCoreOutputs(list(outputs), SchedulerStats(num_running=9), self.now_s)
        self.aborted += self.processor.process(step)

    def say(self, request_id: str, data: bytes, finish: FinishReason | None = None) -> None:
        """A step for each byte; the last one carries the finish reason."""
        for i, byte in enumerate(data):
            is_last = i == len(data) - 1
            self.step(EngineCoreOutput(request_id, [byte], finish if is_last else None))


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_each_step_is_a_piece_and_characters_stay_whole(harness: Harness) -> None:
    request_id, sink = harness.add()
    harness.say(request_id, "aé".encode())
    assert [output.text for output in sink.outputs] == ["a", "é"]
    assert [output.token_ids for output in sink.outputs] == [[97], [195, 169]]
    harness.step(EngineCoreOutput(request_id, [0xE4], FinishReason.LENGTH))
    assert sink.outputs[-1] == RequestOutput(0, "\ufffd", [0xE4], FinishReason.LENGTH)
    assert harness.processor.num_unfinished == 0
    assert harness.aborted == []


def test_final_only_comes_whole(harness: Harness) -> None:
    request_id, sink = harness.add(final_only=True)
    harness.say(request_id, b"hello", FinishReason.LENGTH)
    assert sink.outputs == [RequestOutput(0, "hello", [*b"hello"], FinishReason.LENGTH)]


def test_end_of_sequence_is_a_token_but_no_text(harness: Harness) -> None:
    request_id, sink = harness.add(skip_special_tokens=False)
    harness.say(request_id, b"hi")
    harness.step(EngineCoreOutput(request_id, [EOS], FinishReason.STOP, EOS))
    assert (sink.text, sink.token_ids) == ("hi", [*b"hi", EOS])
    assert sink.outputs[-1].finish_reason is FinishReason.STOP
    assert sink.outputs[-1].stop_reason is None, "the model's own end"


@pytest.mark.parametrize(("include", "text"), ((False, "hi"), (True, "hiX")))
def test_a_requested_stop_token_is_named_and_text_only_on_request(
    harness: Harness, include: bool, text: str
) -> None:
    stop_id = ord("X")
    request_id, sink = harness.add(stop_token_ids=[stop_id], include_stop_str_in_output=include)
    harness.say(request_id, b"hi")
    harness.step(EngineCoreOutput(request_id, [stop_id], FinishReason.STOP, stop_id))
    assert (sink.text, sink.outputs[-1].stop_reason) == (text, stop_id)


def test_stop_string_over_several_tokens_aborts(harness: Harness) -> None:
    request_id, sink = harness.add(stop=["END", "never"])
    harness.say(request_id, b"abENxENDzz")
    assert sink.text == "abENx"
    assert [output.text for output in sink.outputs] == ["a", "b", "ENx", ""]
    assert sink.outputs[-1].finish_reason is FinishReason.STOP
    assert sink.outputs[-1].stop_reason == "END"
    assert sink.token_ids == [*b"abENxEND"], "tokens behind the match are not counted"
    assert harness.aborted == [request_id]


def test_stop_string_in_the_first_token(harness: Harness) -> None:
    request_id, sink = harness.add(stop="a")
    harness.step(EngineCoreOutput(request_id, [97]))
    assert (sink.text, sink.outputs[-1].stop_reason) == ("", "a")
    assert harness.aborted == [request_id]


def test_stop_string_with_a_split_character(harness: Harness) -> None:
    request_id, sink = harness.add(stop="語")
    harness.say(request_id, "日本語x".encode())
    assert (sink.text, sink.outputs[-1].stop_reason) == ("日本", "語")


def test_stop_string_included(harness: Harness) -> None:
    request_id, sink = harness.add(stop="END", include_stop_str_in_output=True)
    harness.say(request_id, b"abEND")
    assert sink.text == "abEND"


def test_held_text_comes_with_the_end(harness: Harness) -> None:
    request_id, sink = harness.add(stop="END")
    harness.say(request_id, b"abEN", FinishReason.LENGTH)
    assert sink.text == "abEN"
    assert harness.aborted == []


def test_stop_string_in_the_last_token_needs_no_abort(harness: Harness) -> None:
    request_id, sink = harness.add(stop="END")
    harness.say(request_id, b"abEND", FinishReason.LENGTH)
    assert (sink.text, sink.outputs[-1].finish_reason) == ("ab", FinishReason.STOP)
    assert harness.aborted == []


def test_several_tokens_in_a_step_stop_at_the_right_one(harness: Harness) -> None:
    request_id, sink = harness.add(stop="b")
    harness.step(EngineCoreOutput(request_id, [*b"xxabcd"], FinishReason.LENGTH))
    assert (sink.text, sink.token_ids) == ("xxa", [*b"xxab"])


def test_min_tokens_keep_stop_strings_from_ending_the_text(harness: Harness) -> None:
    request_id, sink = harness.add(stop="a", min_tokens=3)
    harness.say(request_id, b"aaaba")
    assert (sink.text, len(sink.token_ids)) == ("aaab", 5)


def test_a_sequence_that_ended_here_gets_nothing_more(harness: Harness) -> None:
    """The engine core was a step ahead when the stop string matched."""
    request_id, sink = harness.add(stop="b")
    harness.say(request_id, b"ab")
    num_outputs = len(sink.outputs)
    harness.step(EngineCoreOutput(request_id, [99], FinishReason.LENGTH))
    assert len(sink.outputs) == num_outputs
    assert harness.aborted == [request_id]


def test_discard_names_what_still_runs(harness: Harness) -> None:
    first, _ = harness.add()
    second, sink = harness.add()
    harness.say(first, b"a", FinishReason.LENGTH)
    assert harness.processor.discard([first, second], harness.now_s) == [second]
    harness.step(EngineCoreOutput(second, [97]))
    assert sink.outputs == []


def test_fail_all(harness: Harness) -> None:
    _, sink = harness.add()
    error = EngineDeadError("worker died")
    harness.processor.fail_all(error)
    assert sink.error is error
    assert harness.processor.num_unfinished == 0


def test_pieces_add_up_to_the_whole_text(harness: Harness) -> None:
    """The same random tokens as a stream, in larger steps and at once give the same text."""
    rng = random.Random(3)
    for _ in range(200):
        stop = ["ab", "ba", "abb"][: rng.randint(0, 3)]
        data = [rng.choice([97, 98, 32, 0xE4, 0xB8, 0xAD, EOS]) for _ in range(12)]
        texts = set()
        for size, final_only in ((1, False), (1, True), (3, False), (12, True)):
            request_id, sink = harness.add(stop=stop, final_only=final_only)
            for i in range(0, 12, size):
                finish = FinishReason.LENGTH if i + size == 12 else None
                harness.step(EngineCoreOutput(request_id, data[i : i + size], finish))
            last = sink.outputs[-1]
            texts.add((sink.text, tuple(sink.token_ids), last.finish_reason, last.stop_reason))
        assert len(texts) == 1, (data, stop, texts)


def test_metrics(harness: Harness) -> None:
    metrics = harness.metrics
    first, sink = harness.add(max_tokens=3)
    second, _ = harness.add(stop="b")
    harness.step(EngineCoreOutput(first, [97], None, None, 2, 100.0, 100.25))
    harness.step(EngineCoreOutput(first, [97, 97]), EngineCoreOutput(second, [98]))
    harness.step(EngineCoreOutput(first, [97], FinishReason.LENGTH))
    harness.processor.discard([harness.add()[0]], harness.now_s)
    harness.add()
    harness.processor.fail_all(EngineDeadError("dead"))
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (6, 5)
    assert metrics.stats[0].num_running == 9
    assert sink.outputs[0].num_cached_tokens == 2
    assert _histogram(metrics.time_to_first_token) == (2, 0.5 + 1.0)
    assert _histogram(metrics.inter_token_latency) == (3, 0.5 / 2 * 2 + 0.5)
    assert _histogram(metrics.e2e_latency) == (2, 1.0 + 1.5)
    assert _histogram(metrics.queue_time) == (1, 0.25)
    text = metrics.render().decode()
    for reason in ("stop", "length", "abort", "error"):
        labels = f'finished_reason="{reason}",model_name="tiny"'
        assert f"jaxserve:request_success_total{{{labels}}} 1.0" in text, text


def _histogram(histogram) -> tuple[float, float]:
    return sum(histogram.counts), histogram.total


def test_histogram_buckets_are_cumulative_with_inclusive_bounds() -> None:
    metrics = ServerMetrics("tiny")
    for value in (0.001, 0.0011, 99.0):
        metrics.inter_token_latency.observe(value)
    lines = metrics.render().decode().splitlines()
    for bound, count in (("0.001", 1), ("0.0025", 2), ("10.0", 2), ("+Inf", 3)):
        labels = f'le="{bound}",model_name="tiny"'
        assert f"jaxserve:inter_token_latency_seconds_bucket{{{labels}}} {count}.0" in lines


def test_a_slow_reader_gets_what_came_beside_the_tokens_too(harness: Harness) -> None:
    """Outputs that pile up are merged: log-probabilities in order, the prompt's once."""
    request_id, sink = harness.add(logprobs=0, prompt_logprobs=0)
    pieces = [fake_logprobs(3 + i, [token_id], 0) for i, token_id in enumerate(b"abc")]
    prompt = [fake_logprobs(1, [2, 3], 0)]
    for token_id, piece in zip(b"abc", pieces, strict=True):
        first = prompt if token_id == ord("a") else None
        output = EngineCoreOutput(request_id, [token_id], logprobs=piece, prompt_logprobs=first)
        harness.step(output)
    merged, *later = sink.outputs
    for output in later:
        merged.merge(output)
    assert (merged.text, merged.token_ids) == ("abc", [*b"abc"])
    assert merged.logprobs == pieces
    assert merged.prompt_logprobs == prompt


def test_what_comes_beside_tokens_waits_for_their_text(harness: Harness) -> None:
    request_id, sink = harness.add(logprobs=0)
    for byte in "é".encode():
        piece = fake_logprobs(3, [byte], 0)
        harness.step(EngineCoreOutput(request_id, [byte], logprobs=piece))
    (output,) = sink.outputs
    assert [piece.num_tokens for piece in output.logprobs or ()] == [1, 1]


def test_a_request_for_its_prompt_ends_without_a_token(harness: Harness) -> None:
    request_id, sink = harness.add(max_tokens=0, prompt_logprobs=0, stop="a")
    prompt = [fake_logprobs(1, [2, 3], 0)]
    harness.step(EngineCoreOutput(request_id, [97], FinishReason.STOP, EOS, prompt_logprobs=prompt))
    assert sink.outputs == [
        RequestOutput(0, "", [], FinishReason.LENGTH, None, 0, None, prompt),
    ]
    assert harness.metrics.generation_tokens == 0
    request_id, sink = harness.add(max_tokens=0, prompt_logprobs=0)
    harness.step(EngineCoreOutput(request_id, [], FinishReason.ABORT))
    assert sink.outputs[0].finish_reason is FinishReason.ABORT, "the engine gave up, it is no end"
