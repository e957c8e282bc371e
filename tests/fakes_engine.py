"""A scripted engine core, a byte-level tokenizer and an app over both, for tests of the server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import httpx
import numpy as np
import tokenizers
from starlette.types import ASGIApp
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.config import EngineConfig, ModelInfo, replace
from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.output_processor import OutputProcessor
from jaxserve.errors import EngineDeadError
from jaxserve.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineInput,
    EngineOutput,
    FinishReason,
    SchedulerStats,
    TokenLogprobs,
    UtilityCall,
    UtilityResult,
    decode_engine_input,
    decode_engine_output,
    encode,
)
from jaxserve.metrics import ServerMetrics
from jaxserve.server.app import build_app
from jaxserve.server.chat_settings import make_chat_settings
from jaxserve.server.generation import ServerContext
from jaxserve.server.renderer import Renderer

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "<|im_start|>{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}"
    "{{ '\\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if shout %}!{% endif %}"
)
# With tools, calls, reasoning and a switch for it.
TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<{{ c.id }}:{{ c.function.name }} {{ c.function.arguments | tojson }}>"
    "{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
    "{% endif %}"
)
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
MODEL = "tiny"


def byte_level_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 and 257 are the special tokens of CHAT_TEMPLATE, 258 is " the"."""
    byte_chars = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    char_of = {byte: chr(byte) for byte in byte_chars}
    others = [byte for byte in range(0x100) if byte not in char_of]
    char_of |= {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    vocab = {char_of[byte]: byte for byte in range(0x100)} | {IM_START: 256, IM_END: 257}
    space = char_of[0x20]
    vocab |= {f"{space}the": 258, f"{space}t": 259, "he": 260}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[(space, "t"), ("h", "e"), (f"{space}t", "he")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in (IM_START, IM_END)])
    return Tokenizer(
        backend,
        special_tokens={"eos_token": IM_END},
        chat_templates={"default": CHAT_TEMPLATE},
        source="test",
    )


EOS = 257
VOCAB_SIZE = 300


def make_config(**flat: object) -> EngineConfig:
    """A resolved config for `byte_level_tokenizer`; a context of 200 tokens."""
    info = ModelInfo(
        path="/nowhere",
        format="gguf",
        architecture="llama",
        num_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=200,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=(EOS,),
    )
    defaults = {"info": info, "model": MODEL, "served_model_name": MODEL, "max_model_len": 200}
    return replace(EngineConfig(), **defaults | flat)


def fake_logprob(context_len: int, token_id: int) -> float:
    """The log-probability of a token behind `context_len` others: one for each of 16 places."""
    return -float((token_id + context_len) % 16) / 8


def fake_logprobs(
    context_len: int,
    token_ids: list[int],
    num_top: int,
    chosen_ids: tuple[int, ...] = (),
    vocab_size: int = VOCAB_SIZE,
) -> TokenLogprobs:
    """What the engine reports for `token_ids` behind `context_len` tokens, as float32 arrays.

    Token 13 is impossible: its log-probability is minus infinity.
    """
    rows, ranks, tops = [], [], []
    for place, token_id in enumerate(token_ids, context_len):
        by_id = [fake_logprob(place, i) for i in range(vocab_size)]
        by_id[13] = -np.inf
        best = sorted(range(vocab_size), key=lambda i: (-by_id[i], i))
        rows.append(by_id)
        ranks.append(best.index(token_id) + 1)
        tops.append(best[: vocab_size if num_top == -1 else num_top])
    table = np.array(rows, "<f4").reshape(len(token_ids), vocab_size)
    top_ids = np.array(tops, "<i4").reshape(len(token_ids), -1)
    places = np.arange(len(token_ids))
    return TokenLogprobs(
        num_tokens=len(token_ids),
        num_top=top_ids.shape[1],
        logprobs=table[places, token_ids].tobytes(),
        ranks=np.array(ranks, "<i4").tobytes(),
        top_ids=top_ids.tobytes(),
        top_logprobs=np.take_along_axis(table, top_ids, 1).tobytes(),
        chosen_logprobs=table[:, list(chosen_ids)].tobytes() if chosen_ids else b"",
    )


def fake_embedding(token_ids: list[int], pooling: str) -> list[float]:
    """The vector of a prompt: 8 numbers that depend on its tokens and on the pooling."""
    kind = ("last", "mean", "cls").index(pooling)
    return [float(sum(token_ids) % 7 + 1), float(len(token_ids)), 0.5, float(kind), 0, 0, 0, -1.0]


class _Running:
    def __init__(self, request: EngineCoreRequest, script: Iterable[int]):
        self.request = request
        self.script: Iterator[int] = iter(script)
        self.num_tokens = 0


class FakeCoreClient:
    """Generates what `script` says for a request, a token a step for every running request, with
    the engine core's rules for max_tokens and stop token ids. Every message is encoded and decoded
    as on the wire.

    The script may end early: the request then waits for its abort. `step_s`: pause before a step.
    """

    def __init__(self, script: Callable[[EngineCoreRequest], Iterable[int]], *, step_s: float = 0):
        self._script = script
        self._step_s = step_s
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._answers: list[EngineOutput] = []
        self._death: str | None = None
        self.running: dict[str, _Running] = {}
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.can_reset = True
        self.is_mute = False
        self.max_steps: int | None = None

    def send(self, message: EngineInput) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        match decode_engine_input(encode(message)):
            case EngineCoreRequest() as request:
                assert request.request_id not in self.running
                self.requests.append(request)
                self.running[request.request_id] = _Running(request, self._script(request))
            case AbortRequests(request_ids):
                self.aborted += request_ids
                for request_id in request_ids:
                    self.running.pop(request_id, None)
                self._answers.append(self._outputs([]))
            case UtilityCall() if self.is_mute:
                pass
            case UtilityCall(call_id, "reset_prefix_cache"):
                self._answers.append(UtilityResult(call_id, self.can_reset))
            case UtilityCall(call_id, method):
                self._answers.append(UtilityResult(call_id, error=f"no such method: {method}"))
        self._changed.set()

    def start_receiving(self, handle: Callable[[EngineOutput], None]) -> None:
        async def run() -> None:
            message = None
            while not isinstance(message, EngineDead):
                message = await self._next_message()
                handle(message)

        self._task = asyncio.create_task(run(), name="fake engine core")

    async def _next_message(self) -> EngineOutput:
        while True:
            if self._death is not None:
                return EngineDead(self._death)
            if self._answers:
                return self._answers.pop(0)
            if self.running and self.num_steps != self.max_steps:
                await asyncio.sleep(self._step_s)
                return decode_engine_output(encode(self._step()))
            self._changed.clear()
            await self._changed.wait()

    def allow_steps(self, num_steps: int | None) -> None:
        """Stops after so many more steps; None: never."""
        self.max_steps = None if num_steps is None else self.num_steps + num_steps
        self._changed.set()

    def die(self, reason: str) -> None:
        """From now on the engine core is dead."""
        self._death = reason
        self._changed.set()

    def _step(self) -> EngineCoreOutputs:
        self.num_steps += 1
        outputs = []
        for request_id, running in list(self.running.items()):
            token_id = next(running.script, None)
            if token_id is None:
                continue
            sampling = running.request.sampling
            running.num_tokens += 1
            reason = None
            if token_id in sampling.stop_token_ids and running.num_tokens > sampling.min_tokens:
                reason = FinishReason.STOP
            elif running.num_tokens == sampling.max_tokens:
                reason = FinishReason.LENGTH
            stop_reason = token_id if reason is FinishReason.STOP else None
            first = {}
            if running.num_tokens == 1:
                first = {"num_cached_tokens": 3, "queued_s": 1.0, "scheduled_s": 2.0}
            extras = _extras(running.request, running.num_tokens, token_id)
            output = EngineCoreOutput(
                request_id, [token_id], reason, stop_reason, **first, **extras
            )
            outputs.append(output)
            if reason is not None:
                del self.running[request_id]
        return self._outputs(outputs)

    def _outputs(self, outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
        stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=2,
            num_kv_blocks=9,
            num_used_kv_blocks=2,
            num_preemptions=4,
            prefix_cache_queries=50,
            prefix_cache_hits=6,
            num_steps=self.num_steps,
            num_compiles_after_ready=1,
        )
        return EngineCoreOutputs(outputs, stats, time.time())


def _extras(request: EngineCoreRequest, num_tokens: int, token_id: int) -> dict:
    """What a request asks for beside its `num_tokens`-th token."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    extras: dict = {}
    if sampling.logprobs is not None:
        place = len(prompt) + num_tokens - 1
        extras["logprobs"] = fake_logprobs(
            place, [token_id], sampling.logprobs, sampling.logprob_token_ids
        )
    if sampling.prompt_logprobs is not None and num_tokens == 1:
        # As from two chunks of a prefill.
        cut = (len(prompt) + 1) // 2
        pieces = (prompt[1:cut], 1), (prompt[cut:], cut)
        extras["prompt_logprobs"] = [
            fake_logprobs(place, piece, sampling.prompt_logprobs)
            for piece, place in pieces
            if piece
        ]
    if sampling.pooling:
        vector = fake_embedding(prompt, sampling.pooling)
        extras["embedding"] = np.array(vector, "<f4").tobytes()
    return extras


def says(text: str) -> Callable[[EngineCoreRequest], Iterable[int]]:
    """A script: the bytes of `text`, then the end-of-sequence token."""
    return lambda request: [*text.encode(), EOS]


def echoes(request: EngineCoreRequest) -> Iterable[int]:
    """A script: the prompt's own tokens, then the end-of-sequence token."""
    return [*request.prompt_token_ids, EOS]


def make_context(core: FakeCoreClient, config: EngineConfig) -> ServerContext:
    """What `serve` builds, over a fake engine core. Needs a running event loop."""
    tokenizer = byte_level_tokenizer()
    if config.chat.chat_template:
        tokenizer = tokenizer.with_chat_template(config.chat.chat_template, "test")
    metrics = ServerMetrics(config.model.served_model_name)
    detokenizers = DetokenizerFactory(tokenizer.backend)
    llm = AsyncLLM(
        core,
        OutputProcessor(detokenizers, metrics, config.info.eos_token_ids),
        max_num_queued=config.server.max_num_queued_reqs,
        max_num_queued_tokens=config.server.max_num_queued_tokens,
    )
    llm.start()
    chat = make_chat_settings(config.chat, tokenizer)
    return ServerContext(
        config=config,
        llm=llm,
        input_processor=InputProcessor(config, tokenizer),
        renderer=Renderer(tokenizer, config.model.max_model_len, chat.template_kwargs),
        chat=chat,
        detokenizers=detokenizers,
        metrics=metrics,
        created_s=1_700_000_000,
    )


class FakeServer:
    """An app over a fake engine core, and a client for it that buffers streams."""

    def __init__(self, core: FakeCoreClient, context: ServerContext, client: httpx.AsyncClient):
        self.core = core
        self.context = context
        self.client = client

    @property
    def app(self) -> ASGIApp:
        return build_app(self.context)

    async def post(self, path: str, **body: object) -> httpx.Response:
        """POSTs a body with the model filled in."""
        return await self.client.post(path, json={"model": MODEL} | body)


@contextlib.asynccontextmanager
async def fake_server(
    script: Callable[[EngineCoreRequest], Iterable[int]] = echoes,
    *,
    step_s: float = 0,
    **config_fields: object,
) -> AsyncIterator[FakeServer]:
    """The whole API server without sockets. An exception in the app is raised in the test."""
    core = FakeCoreClient(script, step_s=step_s)
    context = make_context(core, make_config(**config_fields))
    transport = httpx.ASGITransport(build_app(context))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield FakeServer(core, context, client)
    finally:
        context.llm.close()
        context.renderer.close()
