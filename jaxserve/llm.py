"""The offline engine: prompts in, texts out, in the caller's process."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import msgspec
from tqdm import tqdm

from jaxserve import checkpoint
from jaxserve.config import EngineConfig, ServerConfig, resolve_for_model
from jaxserve.engine.detokenizer import DetokenizerFactory
from jaxserve.engine.in_proc_client import InProcClient
from jaxserve.engine.input_processor import COMPLETION_MAX_TOKENS, InputProcessor, SequenceRequest
from jaxserve.engine.output_processor import OutputProcessor, RequestOutput
from jaxserve.errors import RequestError, UserError
from jaxserve.messages import EngineCoreOutputs
from jaxserve.metrics import ServerMetrics
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.chat_settings import make_chat_settings
from jaxserve.server.embeddings import pooled_vector
from jaxserve.server.logprobs import LogprobsWriter
from jaxserve.server.protocol.chat import ChatMessage
from jaxserve.server.protocol.logprobs import PromptLogprob
from jaxserve.server.renderer import render_chat, render_prompts

# Fields that only matter to clients of a server.
_SERVE_ONLY = {
    *ServerConfig.__struct_fields__,
    "scheduling_policy",
    "enable_auto_tool_choice",
    "reasoning_parser",
    "tool_call_parser",
    "trust_request_chat_template",
    "data_parallel_size",  # one engine core is in this process; a server has several
}

type Message = Mapping[str, Any]
type Prompts = str | Sequence[str] | Sequence[int] | Sequence[list[int]]
type Params = SamplingParams | Sequence[SamplingParams] | None


class CompletionOutput(msgspec.Struct, frozen=True):
    """One choice.

    finish_reason: "stop" or "length".
    stop_reason: the stop string or the requested stop token id that ended it, else None.
    logprobs: if asked for, for each token itself and the others, by token id.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[dict[int, PromptLogprob]] | None = None


class GenerationOutput(msgspec.Struct, frozen=True):
    """What became of one prompt.

    outputs: its choices, SamplingParams.n of them.
    prompt_logprobs: if asked for, as `logprobs`, but None for the first token.
    """

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """The vector of one prompt."""

    prompt_token_ids: list[int]
    embedding: list[float]


class LLM:
    """A model, loaded and compiled, in this process (a notebook's too).

    Args:
      model: a known name, a .gguf file, a directory or a hub id.
      config_fields: any other field of the config, such as max_model_len=2048.

    Raises:
      UserError: the model or a field cannot be used.
    """

    def __init__(self, model: str, **config_fields: Any):
        from jaxserve.cli_flags import config_from_kwargs

        for name in config_fields:
            if name in _SERVE_ONLY:
                raise UserError(
                    f"LLM({name}=...) has no effect: it belongs to `jaxserve serve`.",
                    fix=f"Leave {name} out.",
                )
        config = config_from_kwargs(**{"model": model, "executor": "in_process"} | config_fields)
        path = checkpoint.resolve_model(model)
        config = resolve_for_model(config, checkpoint.load_model_info(path))
        if config.parallel.data_parallel_size > 1:
            raise UserError(
                f"LLM(mesh=...) has one engine core, not {config.parallel.data_parallel_size}.",
                fix=f'Use mesh="{config.parallel.mesh}", or `jaxserve serve`, which has several.',
            )
        self.tokenizer = checkpoint.load_tokenizer(path, config.chat.chat_template)
        self._template_kwargs = make_chat_settings(config.chat, self.tokenizer).template_kwargs
        self._client = InProcClient(config)
        self.config: EngineConfig = self._client.start()
        self._input_processor = InputProcessor(self.config, self.tokenizer)
        self._detokenizers = DetokenizerFactory(self.tokenizer.backend)
        self._output_processor = OutputProcessor(
            self._detokenizers,
            ServerMetrics(self.config.model.served_model_name),
            self.config.info.eos_token_ids,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the model. May be called twice."""
        self._client.shutdown()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Continues each prompt, which is a text or token ids.

        sampling_params: for all prompts, or one for each; by default 16 tokens at temperature 1.

        Raises:
          RequestError: a prompt or an option is not valid.
          EngineDeadError: the engine failed.
        """
        rendered = self._render(prompts)
        return self._generate(rendered, sampling_params, COMPLETION_MAX_TOKENS, use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Literal["last", "mean", "cls"] | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """The vector of each prompt, made of its hidden states.

        pooling: None is the config's.  dimensions: only so many first numbers, cut before the
        vector is normalized.

        Raises:
          RequestError: a prompt or an option is not valid.
          EngineDeadError: the engine failed.
        """
        hidden_size = self.config.info.hidden_size
        if dimensions is not None and not 1 <= dimensions <= hidden_size:
            raise RequestError(
                f"dimensions must be between 1 and {hidden_size} for this model.",
                param="dimensions",
            )
        kind = self.config.model.pooling if pooling is None else pooling
        if kind not in ("last", "mean", "cls"):
            raise RequestError(f"pooling must be last, mean or cls, got {kind!r}.", param="pooling")
        now_s = time.time()
        sequences = [
            [
                self._input_processor.process_pooling(
                    token_ids, kind, arrival_time_s=now_s, prompt_param=path
                )
            ]
            for token_ids, path in self._render(prompts)
        ]
        collected = self._run_with_progress(sequences, use_tqdm)
        return [
            EmbeddingOutput(
                sequence.core.prompt_token_ids,
                pooled_vector(output, dimensions or hidden_size, normalize=normalize).tolist(),
            )
            for (sequence,), (output,) in zip(sequences, collected, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[GenerationOutput]:
        """Answers one conversation, or each of several: lists of {"role": ..., "content": ...}.

        sampling_params: for all, or one for each; by default up to the model's longest context.

        Raises:
          RequestError: a message or an option is not valid.
          EngineDeadError: the engine failed.
        """
        if not messages:
            raise RequestError("messages must not be empty.", param="messages")
        is_one = isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        rendered = []
        for i, conversation in enumerate(conversations):
            chat = render_chat(
                self.tokenizer,
                _checked_messages(conversation),
                add_generation_prompt=add_generation_prompt,
                add_special_tokens=False,
                template_kwargs=chat_template_kwargs,
                default_template_kwargs=self._template_kwargs,
                max_model_len=self.config.model.max_model_len,
            )
            rendered.append((chat.token_ids, "messages" if is_one else f"messages[{i}]"))
        return self._generate(rendered, sampling_params, None, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prompt beginning."""
        return bool(self._client.call("reset_prefix_cache"))

    def _render(self, prompts: Prompts) -> list[tuple[list[int], str]]:
        """Token ids of each prompt, and its path."""
        if not isinstance(prompts, str):
            prompts = list(prompts)  # pyright: ignore[reportAssignmentType]
        return list(
            render_prompts(
                self.tokenizer,
                prompts,  # pyright: ignore[reportArgumentType]
                add_special_tokens=True,
                max_model_len=None,  # a caller may wait for what a server may not
            )
        )

    def _generate(
        self,
        prompts: list[tuple[list[int], str]],
        params: Params,
        default_max_tokens: int | None,
        use_tqdm: bool,
    ) -> list[GenerationOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts with {len(params)} sampling_params.",
                param="sampling_params",
            )
        now_s = time.time()
        sequences = [
            self._input_processor.process(
                token_ids,
                prompt_params,
                arrival_time_s=now_s,
                default_max_tokens=default_max_tokens,
                final_only=True,
                prompt_param=path,
            )
            for (token_ids, path), prompt_params in zip(prompts, params, strict=True)
        ]
        collected = self._run_with_progress(sequences, use_tqdm)
        return [
            self._output(choices[0].core.prompt_token_ids, prompt_params, outputs)
            for choices, prompt_params, outputs in zip(sequences, params, collected, strict=True)
        ]

    def _output(
        self, prompt_token_ids: list[int], params: SamplingParams, outputs: list[RequestOutput]
    ) -> GenerationOutput:
        writer = LogprobsWriter(self._detokenizers, params, as_ids=False)
        pieces = outputs[0].prompt_logprobs
        return GenerationOutput(
            prompt_token_ids=prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=output.index,
                    text=output.text,
                    token_ids=output.token_ids,
                    finish_reason=str(output.finish_reason),
                    stop_reason=output.stop_reason,
                    logprobs=None
                    if output.logprobs is None
                    else writer.ranked(output.token_ids, output.logprobs, chosen=True),
                )
                for output in outputs
            ],
            num_cached_tokens=outputs[0].num_cached_tokens,
            prompt_logprobs=None if pieces is None else writer.prompt(prompt_token_ids, pieces),
        )

    def _run_with_progress(
        self, sequences: list[list[SequenceRequest]], use_tqdm: bool
    ) -> list[list[RequestOutput]]:
        with tqdm(total=len(sequences), unit="prompt", disable=not use_tqdm) as progress:
            return self._run(sequences, progress.update, progress.set_postfix_str)

    def _run(
        self,
        sequences: list[list[SequenceRequest]],
        on_prompts_done: Callable[[int], object],
        show: Callable[[str], object],
    ) -> list[list[RequestOutput]]:
        """Steps the engine until every sequence has ended; aborts them when it is interrupted."""
        collectors = [_Collector(len(choices)) for choices in sequences]
        request_ids = [sequence.core.request_id for choices in sequences for sequence in choices]
        started_s = time.monotonic()
        num_tokens = num_done = 0
        try:
            for choices, collector in zip(sequences, collectors, strict=True):
                for sequence in choices:
                    self._output_processor.add(sequence, collector)
                    self._client.add_request(sequence.core)
            while num_unfinished := self._output_processor.num_unfinished:
                outputs = self._client.step()
                step = EngineCoreOutputs(outputs, self._client.stats, time.time())
                to_abort = self._output_processor.process(step)
                if to_abort:
                    self._client.abort(to_abort)
                num_tokens += sum(len(output.new_token_ids) for output in outputs)
                if self._output_processor.num_unfinished < num_unfinished:
                    num_done_before, num_done = num_done, sum(c.is_done for c in collectors)
                    show(f"{num_tokens / (time.monotonic() - started_s):.1f} token/s")
                    on_prompts_done(num_done - num_done_before)
        except BaseException:
            self._client.abort(self._output_processor.discard(request_ids, time.time()))
            raise
        return [[collector.outputs[i] for i in range(collector.n)] for collector in collectors]


class _Collector:
    """Keeps the choices of one prompt; each comes whole."""

    def __init__(self, n: int):
        self.n = n
        self.outputs: dict[int, RequestOutput] = {}

    @property
    def is_done(self) -> bool:
        return len(self.outputs) == self.n

    def put(self, output: RequestOutput) -> None:
        self.outputs[output.index] = output

    def fail(self, error: Exception) -> None:
        raise AssertionError(f"nobody fails offline sequences: {error!r}")


def _checked_messages(messages: object) -> list[ChatMessage]:
    try:
        return msgspec.convert(messages, list[ChatMessage], from_attributes=False)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param="messages") from error
