"""Outputs keep to their grammars however steps are scheduled; what fails ends one request alone."""

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.engine import structured_output
from jaxserve.engine.core import EngineCore
from jaxserve.engine.executor.in_process import InProcessExecutor
from jaxserve.engine.in_proc_client import InProcClient
from jaxserve.engine.request import Request, RequestStatus
from jaxserve.engine.structured_output import Masked, StructuredOutputs
from jaxserve.grammars import (
    grammar_from_choice,
    grammar_from_json_schema,
    grammar_from_lark,
    grammar_from_regex,
)
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineOutput,
    FinishReason,
    GrammarMask,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    Shutdown,
)
from tests.fakes import FAKE_VOCAB_SIZE, FakeWorker, fake_config, fake_output, fake_request
from tests.fakes_engine import EOS, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
THE = 258
WAIT_S = 20.0
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 3},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind_of_person": {"enum": ["friendly", "fierce"]},
    },
    "required": ["first_name", "age_in_years", "kind_of_person"],
    "additionalProperties": False,
}
JSON = grammar_from_json_schema(PERSON, any_whitespace=False)
REGEX = grammar_from_regex("(a|b){3,9}the quick brown fox[0-9]{2}")
CHOICE = grammar_from_choice(["yes indeed", "yes", "no"])
OBJECT = grammar_from_json_schema({"type": "object", "maxProperties": 2})


class RecordingExecutor(InProcessExecutor):
    """Writes down what is called, and the plans; `during_collect` runs while a step does."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.calls: list[str] = []
        self.plans: list[SchedulerOutput] = []
        self.during_collect: Callable[[int], None] = lambda step_id: None
        self.start()

    def execute(self, plan: SchedulerOutput) -> None:
        self.calls.append(f"execute {plan.step_id}")
        self.plans.append(plan)
        super().execute(plan)

    def sample(self, mask: GrammarMask) -> None:
        self.calls.append(f"sample {mask.step_id}")
        super().sample(mask)

    def collect(self) -> ModelRunnerOutput:
        output = super().collect()
        self.calls.append(f"collect {output.step_id}")
        self.during_collect(output.step_id)
        return output


class Engine:
    """An engine core on a fake worker that keeps to masks, with what it emitted."""

    def __init__(
        self,
        *,
        worker: Callable = FakeWorker,
        tokenizer: Callable[[], Tokenizer] = lambda: TOKENIZER,
        **config: object,
    ):
        resolved = fake_config(**config)
        self.executor = RecordingExecutor(resolved, worker)
        self.outputs: dict[str, list[EngineCoreOutput]] = defaultdict(list)
        self.stats = SchedulerStats()
        self.core = EngineCore(resolved, self.executor, self._emit, tokenizer=tokenizer)

    def _emit(self, client_idx: int, message: EngineOutput) -> None:
        assert isinstance(message, EngineCoreOutputs)
        self.stats = message.stats
        for output in message.outputs:
            self.outputs[output.request_id].append(output)

    def add(self, request_id: str, grammar: str | None = None, **fields: Any) -> None:
        fields = {"max_tokens": 200, "stop_token_ids": (EOS,), "prompt": [1, 2, 3]} | fields
        request = fake_request(request_id, grammar=grammar, **fields)
        self.core.inputs.put(self.core.make_request(request))

    def run_until_idle(self) -> None:
        self.core.take_inputs()
        while self.core.has_work or self.core.is_compiling:
            self.core.step() if self.core.has_work else self.core.sleep()

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def text(self, request_id: str) -> str:
        """Without a stop token at the end."""
        tokens = self.tokens(request_id)
        if self.outputs[request_id][-1].stop_reason is not None:
            tokens = tokens[:-1]
        return TOKENIZER.decode(tokens, skip_special_tokens=False)

    def end(self, request_id: str) -> tuple[FinishReason | None, int | None]:
        """Why a request ended; nothing came after its end."""
        *others, last = self.outputs[request_id]
        assert all(output.finish_reason is None for output in others)
        return last.finish_reason, last.stop_reason


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == PERSON["required"]
        and len(value["first_name"]) <= 3
        and 0 <= value["age_in_years"] <= 99
        and value["kind_of_person"] in ("friendly", "fierce")
    )


CHECKS: dict[str, Callable[[str], Any]] = {
    JSON: is_person,
    REGEX: re.compile("(a|b){3,9}the quick brown fox[0-9]{2}").fullmatch,
    CHOICE: ["yes indeed", "yes", "no"].__contains__,
    OBJECT: lambda text: isinstance(json.loads(text), dict),
}


def run_mixed_load(**config: object) -> Engine:
    engine = Engine(**config)
    for i in range(24):
        grammar = [JSON, REGEX, None, CHOICE, OBJECT][i % 5]
        fields: dict[str, Any] = {"logprobs": 1} if i % 7 == 0 else {}
        max_tokens = 400 if grammar else 30
        engine.add(f"r{i}", grammar, prompt=[i] * (3 * i + 1), max_tokens=max_tokens, **fields)
    engine.run_until_idle()
    return engine


@pytest.fixture(scope="module")
def plain_tokens() -> dict[str, list[int]]:
    """What the mixed load generates with one step at a time and room for all."""
    engine = run_mixed_load(async_scheduling=False, max_num_batched_tokens=4096, max_num_seqs=24)
    return {request_id: engine.tokens(request_id) for request_id in engine.outputs}


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("num_kv_blocks", [512, 32])
def test_every_output_matches_however_steps_are_scheduled(
    plain_tokens: dict[str, list[int]], async_scheduling: bool, num_kv_blocks: int
) -> None:
    """32 blocks are too few for all at once: requests are preempted and computed again."""
    engine = run_mixed_load(async_scheduling=async_scheduling, num_kv_blocks=num_kv_blocks)
    for i in range(24):
        request_id, grammar = f"r{i}", [JSON, REGEX, None, CHOICE, OBJECT][i % 5]
        assert engine.tokens(request_id) == plain_tokens[request_id]
        reason, stop_reason = engine.end(request_id)
        if grammar is None:
            assert engine.tokens(request_id)[:30] == fake_output([i] * (3 * i + 1), 30)
        elif reason is FinishReason.STOP:
            assert stop_reason == EOS
            assert CHECKS[grammar](engine.text(request_id)), engine.text(request_id)
        else:
            assert reason is FinishReason.LENGTH and grammar == OBJECT
    assert (engine.stats.num_preemptions > 0) == (num_kv_blocks == 32)
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.num_used_kv_blocks) == (0, 0, 0)
    assert sum(engine.end(f"r{i}")[0] is FinishReason.STOP for i in range(24)) > 15


def test_the_mask_is_made_while_the_forward_pass_runs() -> None:
    """After the plan is sent, and after the results it needs are in."""
    engine = Engine()
    engine.add("a", grammar_from_regex("[a-z]{3}"))
    engine.run_until_idle()
    assert engine.executor.calls == [
        "execute 0", "sample 0", "execute 1", "collect 0", "sample 1", "execute 2", "collect 1",
        "sample 2", "execute 3", "collect 2", "sample 3", "execute 4", "collect 3", "sample 4",
        "collect 4",
    ]  # fmt: skip
    engine = Engine(async_scheduling=False)
    engine.add("a", grammar_from_regex("[a-z]"))
    engine.run_until_idle()
    assert engine.executor.calls == [
        "execute 0", "sample 0", "collect 0", "execute 1", "sample 1", "collect 1",
    ]  # fmt: skip


# --- forced tokens ---


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_forced_tokens_save_steps_and_change_nothing(async_scheduling: bool) -> None:
    """With logprobs each token is sampled: same tokens, many more steps."""
    steps, tokens = [], []
    for fields in ({}, {"logprobs": 0}):
        engine = Engine(async_scheduling=async_scheduling)
        engine.add("a", JSON, **fields)
        engine.run_until_idle()
        steps.append(len(engine.executor.plans))
        tokens.append(engine.tokens("a"))
        assert bool(any(plan.forced_tokens for plan in engine.executor.plans)) == (not fields)
    assert tokens[0] == tokens[1]
    num_tokens = len(tokens[0])
    assert steps[1] >= num_tokens
    assert steps[0] < 0.4 * num_tokens


@pytest.mark.parametrize(("jump_ahead_tokens", "room"), [(1, 1), (4, 1), (6, 3), (64, 30)])
def test_forced_tokens_fill_steps_that_have_room(jump_ahead_tokens: int, room: int) -> None:
    """Steps of three rows are padded to four tokens. All three are forced ten tokens at once."""
    engine = Engine(jump_ahead_tokens=jump_ahead_tokens)
    grammar = grammar_from_regex("(one|two) and three")
    engine.add("compiles the grammar, so the others are admitted at once", grammar)
    engine.run_until_idle()
    engine.executor.plans.clear()
    for name in "abc":
        engine.add(name, grammar)
    engine.run_until_idle()
    assert {engine.text(name) for name in "abc"} <= {"one and three", "two and three"}
    plans = engine.executor.plans
    forced = [sum(len(tokens) for _, tokens in plan.forced_tokens) for plan in plans]
    assert next(filter(None, forced)) == room


@pytest.mark.parametrize(
    "fields",
    [
        {"logprob_token_ids": (1,)},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"bad_words": ((1, 2),)},
        {"logit_bias": ((5, 1.0),)},
        {"logits_processors": (("p", ()),)},
        {"allowed_token_ids": tuple(range(FAKE_VOCAB_SIZE))},
    ],
)
def test_options_that_look_at_every_token_see_every_token(fields: dict) -> None:
    engine = Engine()
    engine.add("a", grammar_from_choice(["a long text without any choice"]), **fields)
    engine.run_until_idle()
    assert engine.text("a") == "a long text without any choice"
    assert not any(plan.forced_tokens for plan in engine.executor.plans)


def test_a_forced_token_may_be_a_stop_token() -> None:
    """Then it is sampled, and ends the request."""
    engine = Engine()
    engine.add("a", grammar_from_choice(["one two three"]), stop_token_ids=(EOS, ord("w")))
    engine.run_until_idle()
    assert engine.end("a") == (FinishReason.STOP, ord("w"))
    assert engine.text("a") == "one t"


def test_forced_tokens_end_at_the_length_limit() -> None:
    engine = Engine()
    engine.add("a", grammar_from_choice(["one two three"]), max_tokens=5)
    engine.run_until_idle()
    assert engine.end("a") == (FinishReason.LENGTH, None)
    assert engine.text("a") == "one tw"
    assert len(engine.executor.plans) == 1


# --- ends ---


def test_any_stop_token_of_the_request_ends_a_complete_output() -> None:
    """Even if llguidance knows another: 256 ends this one, and the model's own does not."""
    engine = Engine()
    engine.add("a", CHOICE, stop_token_ids=(256,))
    engine.run_until_idle()
    assert engine.end("a") == (FinishReason.STOP, 256)
    assert CHECKS[CHOICE](engine.text("a"))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_complete_output_ends_without_any_stop_token(async_scheduling: bool) -> None:
    engine = Engine(async_scheduling=async_scheduling)
    engine.add("a", grammar_from_regex("[0-9]{2}"), stop_token_ids=())
    engine.add("empty", grammar_from_regex(""), stop_token_ids=())
    engine.add("plain", max_tokens=9)
    engine.run_until_idle()
    assert engine.end("a") == engine.end("empty") == (FinishReason.STOP, None)
    assert re.fullmatch("[0-9]{2}", engine.text("a"))
    (output,) = engine.outputs["empty"]
    assert (output.new_token_ids, output.num_cached_tokens) == ([], 0)
    assert output.queued_s > 0 and output.scheduled_s > 0
    assert engine.tokens("plain") == fake_output([1, 2, 3], 9)


def test_min_tokens_under_a_grammar() -> None:
    engine = Engine()
    for i in range(10):
        engine.add(f"r{i}", grammar_from_regex("[ab]{1,6}"), min_tokens=4, prompt=[i])
        # What cannot be reached is not waited for.
        engine.add(f"short{i}", grammar_from_regex("[ab]"), min_tokens=4, prompt=[i])
    engine.run_until_idle()
    for i in range(10):
        assert 4 <= len(engine.text(f"r{i}")) <= 6
        assert engine.end(f"short{i}") == (FinishReason.STOP, None)
        assert engine.text(f"short{i}") in ("a", "b")


def test_a_stop_token_that_is_text_is_barred_before_min_tokens() -> None:
    engine = Engine()
    for i in range(10):
        stops = (EOS, ord("a"))
        grammar = grammar_from_regex("[ab]{3}[abc]{9}")
        engine.add(f"r{i}", grammar, prompt=[i], min_tokens=3, stop_token_ids=stops)
    engine.run_until_idle()
    for i in range(10):
        assert engine.text(f"r{i}").startswith("bbb")
        assert engine.end(f"r{i}") in ((FinishReason.STOP, ord("a")), (FinishReason.STOP, EOS))


def test_allowed_tokens_and_a_grammar_both_hold(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    allowed = (*b"bcd", EOS)
    engine.add("a", grammar_from_regex("[abc]{20}"), allowed_token_ids=allowed)
    engine.add("stuck", grammar_from_regex("[bc]{2}x"), allowed_token_ids=allowed)
    engine.add("plain", max_tokens=40)
    engine.run_until_idle()
    assert re.fullmatch("[bc]{20}", engine.text("a"))
    assert engine.end("a") == (FinishReason.STOP, EOS)
    assert engine.end("stuck") == (FinishReason.ABORT, None)
    (warning,) = abort_warnings(caplog)
    assert warning.startswith("its other options forbid")
    assert engine.tokens("plain") == fake_output([1, 2, 3], 40)


# --- failures ---


def abort_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why requests are aborted: warnings about those requests alone, and nothing else is logged."""
    start = "one request is aborted, and no other, for its grammar: "
    messages = [record.getMessage() for record in caplog.records]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert all(message.startswith(start) for message in messages)
    return [message.removeprefix(start) for message in messages]


class StubbornWorker(FakeWorker):
    """Ignores the mask of a row whose prompt begins with 666."""

    def sample(self, mask: GrammarMask) -> None:
        bits = np.frombuffer(mask.bits, np.uint8).reshape(len(mask.rows), -1).copy()
        bits[[self.rows[row].token_ids[0] == 666 for row in mask.rows]] = 0xFF
        super().sample(GrammarMask(mask.step_id, mask.rows, bits.tobytes()))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_token_that_does_not_match_ends_that_request_alone(
    async_scheduling: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(worker=StubbornWorker, async_scheduling=async_scheduling)
    for request_id, grammar in (("c", None), ("a", JSON), ("b", JSON)):
        prompt = [666] if request_id == "b" else [1, 2, 3]
        engine.add(request_id, grammar, max_tokens=70, prompt=prompt)
    engine.run_until_idle()
    assert engine.end("a") == (FinishReason.STOP, EOS) and is_person(engine.text("a"))
    assert engine.end("b") == (FinishReason.ABORT, None)
    assert engine.tokens("c") == fake_output([1, 2, 3], 70)
    assert len(abort_warnings(caplog)) == 1


def test_a_grammar_that_cannot_be_compiled_ends_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    engine.add("bad", "start: nothing")
    engine.add("unknown", grammar_from_lark("start: <|no_such_token|>"))
    engine.add("good", CHOICE)
    engine.run_until_idle()
    assert engine.outputs["bad"] == [EngineCoreOutput("bad", [], FinishReason.ABORT)]
    assert engine.end("unknown") == (FinishReason.ABORT, None)
    assert CHECKS[CHOICE](engine.text("good"))
    warnings = abort_warnings(caplog)
    assert len(warnings) == 2
    assert any(w.startswith("The grammar is not valid: at 1(8): unknown name") for w in warnings)


def test_a_tokenizer_that_cannot_be_loaded_ends_requests_with_a_grammar(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load() -> Tokenizer:
        raise OSError("tokenizer.json is gone")

    engine = Engine(tokenizer=load)
    engine.add("a", CHOICE)
    engine.add("b", max_tokens=3)
    engine.run_until_idle()
    assert engine.end("a") == (FinishReason.ABORT, None)
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "tokenizer.json is gone" in record.getMessage()
    assert engine.tokens("b") == fake_output([1, 2, 3], 3)


# --- compiling ---


class SlowTokenizer:
    """Loads when it is let go."""

    def __init__(self) -> None:
        self.may_load = threading.Event()

    def __call__(self) -> Tokenizer:
        assert self.may_load.wait(WAIT_S)
        return TOKENIZER


@pytest.fixture
def slow() -> Iterator[SlowTokenizer]:
    slow = SlowTokenizer()
    yield slow
    slow.may_load.set()


def test_compiling_blocks_nobody_else(slow: SlowTokenizer) -> None:
    engine = Engine(tokenizer=slow)
    engine.add("a", CHOICE)
    engine.add("b", max_tokens=5)
    engine.core.take_inputs()
    assert engine.core.has_work and engine.core.is_compiling
    while engine.core.has_work:
        engine.core.step()
    assert engine.tokens("b") == fake_output([1, 2, 3], 5)
    assert (engine.stats.num_waiting, engine.stats.num_running) == (1, 0)
    slow.may_load.set()
    engine.run_until_idle()
    assert CHECKS[CHOICE](engine.text("a"))
    assert engine.stats.num_waiting == 0


def test_an_abort_while_compiling(slow: SlowTokenizer) -> None:
    engine = Engine(tokenizer=slow)
    engine.add("a", CHOICE)
    engine.core.inputs.put(AbortRequests(["a"]))
    engine.core.take_inputs()
    assert not engine.core.has_work and not engine.core.is_compiling
    # The id may be used again, also before the first grammar is compiled.
    engine.add("a", JSON)
    slow.may_load.set()
    engine.run_until_idle()
    assert engine.end("a") == (FinishReason.STOP, EOS) and is_person(engine.text("a"))


def test_a_shutdown_while_compiling(slow: SlowTokenizer) -> None:
    engine = Engine(tokenizer=slow)
    for i in range(9):
        engine.add(f"a{i}", grammar_from_choice([str(i)]))
    engine.core.inputs.put(Shutdown())
    started_s = time.monotonic()
    engine.core.run()
    engine.core.shutdown()
    assert time.monotonic() - started_s < 1
    assert not engine.outputs


def test_equal_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    try_grammar = structured_output.try_grammar

    def count(grammar: str, tokenizer: Any) -> Any:
        if grammar in CHECKS:  # not what another test left to a thread
            compiled.append(grammar)
        return try_grammar(grammar, tokenizer)

    monkeypatch.setattr(structured_output, "try_grammar", count)
    monkeypatch.setattr(structured_output, "_MAX_CACHED_GRAMMARS", 2)
    grammars = StructuredOutputs(lambda: TOKENIZER, FAKE_VOCAB_SIZE)
    for grammar in (CHOICE, JSON, CHOICE, REGEX, CHOICE, JSON):
        assert not grammars.compile(grammar).result().is_error()
    # The least recently asked for is forgotten.
    assert compiled == [CHOICE, JSON, REGEX, JSON]


def test_in_process_client_waits_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    try_grammar = structured_output.try_grammar

    def try_slowly(grammar: str, tokenizer: Any) -> Any:
        time.sleep(0.3 if grammar == CHOICE else 0.0)
        return try_grammar(grammar, tokenizer)

    monkeypatch.setattr(structured_output, "try_grammar", try_slowly)
    monkeypatch.setattr("jaxserve.engine.core.load_tokenizer", lambda path: TOKENIZER)
    client = InProcClient(fake_config(executor="in_process"), worker_class="tests.fakes:FakeWorker")
    client.start()
    client.add_request(fake_request("a", [1], max_tokens=99, stop_token_ids=(EOS,), grammar=CHOICE))
    client.add_request(fake_request("bad", [1], grammar="start: nothing"))
    outputs: dict[str, list[EngineCoreOutput]] = defaultdict(list)
    while client.has_work:
        for output in client.step():
            outputs[output.request_id].append(output)
    assert outputs["bad"] == [EngineCoreOutput("bad", [], FinishReason.ABORT)]
    tokens = [token for output in outputs["a"] for token in output.new_token_ids]
    assert CHECKS[CHOICE](TOKENIZER.decode(tokens[:-1], skip_special_tokens=False))
    client.shutdown()


# --- masks ---


def make_masks(
    grammars: StructuredOutputs, *cases: tuple[str, list[int], dict[str, Any]]
) -> tuple[Masked, list[Request], np.ndarray]:
    """The masks after some output: (grammar, output, sampling) a row; which tokens each allows."""
    requests = []
    for idx, (grammar, output, sampling) in enumerate(cases):
        message = fake_request(f"r{idx}", [1, 2], max_tokens=99, grammar=grammar, **sampling)
        request = Request.from_message(message, now_s=0.0, block_size=16, hash_blocks=False)
        request.matcher = grammars.compile(grammar).result().deep_copy()
        request.token_ids += output
        requests.append(request)
    masked = grammars.mask(5, [(2 * idx, request) for idx, request in enumerate(requests)])
    assert (masked.mask.step_id, masked.mask.rows) == (5, list(range(0, 2 * len(cases), 2)))
    data = np.frombuffer(masked.mask.bits, np.uint8).reshape(len(cases), -1)
    return masked, requests, np.unpackbits(data, axis=1, bitorder="little").astype(bool)


@pytest.mark.parametrize("vocab_size", [200, 261, 300, 1000])
def test_masks_allow_what_may_come_next(vocab_size: int) -> None:
    """Also where the tokenizer has fewer tokens than the model has logits, or more."""
    grammars = StructuredOutputs(lambda: TOKENIZER, vocab_size)
    stops = {"stop_token_ids": (EOS, 256)}
    cases = [
        (grammar_from_regex("[ab]( the|c)?"), list(b"a"), stops),
        (grammar_from_regex("[ab]( the|c)?"), [], stops),
        (grammar_from_regex("(.|\n)*"), [THE], stops),
    ]
    masked, _, allowed = make_masks(grammars, *cases)
    assert not masked.ended and not masked.forced
    assert allowed.shape[1] == -(-vocab_size // 32) * 32
    expected = [{ord(" "), 259, THE, ord("c"), EOS, 256}, {ord("a"), ord("b")}, None]
    for line, tokens in zip(allowed, expected, strict=True):
        found = {int(token) for token in np.flatnonzero(line[:vocab_size])}
        if tokens is not None:
            assert found == {token for token in tokens if token < vocab_size}
        else:
            assert {*range(0x20, 0x7F), EOS, 256, THE} - found <= set(range(vocab_size, 300))
            assert found <= set(range(261))


def test_masks_of_finished_requests_allow_everything() -> None:
    grammars = StructuredOutputs(lambda: TOKENIZER, 300)
    _, requests, _ = make_masks(grammars, (CHOICE, [], {}), (CHOICE, [], {}))
    requests[0].status = RequestStatus.FINISHED
    masked = grammars.mask(6, list(enumerate(requests)))
    words = np.frombuffer(masked.mask.bits, np.uint32).reshape(2, -1)
    assert (words[0] == 0xFFFFFFFF).all() and not (words[1] == 0xFFFFFFFF).any()
    requests[1].status = RequestStatus.FINISHED
    assert set(grammars.mask(7, list(enumerate(requests))).mask.bits) == {0xFF}


def test_a_mask_before_forced_tokens_allows_the_first_alone() -> None:
    grammars = StructuredOutputs(lambda: TOKENIZER, 300)
    text = grammar_from_choice(["x the one", "y"])
    masked, requests, allowed = make_masks(grammars, (text, list(b"x"), {}), (text, [], {}))
    assert masked.forced == [(requests[0], list(b" one"))]
    assert np.flatnonzero(allowed[0]).tolist() == [THE]
    assert np.flatnonzero(allowed[1]).tolist() == [ord("x"), ord("y")]
