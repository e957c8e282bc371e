"""Runs the real engine core over one real worker that all tests of a session share."""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxserve.config import EngineConfig, replace
from jaxserve.engine.core import EngineCore
from jaxserve.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineOutput,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
)
from jaxserve.worker.model_runner import ModelRunner
from jaxserve.worker.worker import Worker

GOLDENS = json.loads(
    (Path(__file__).parent.parent / "goldens" / "smollm2_greedy.json").read_text("utf-8")
)


class SharedExecutor:
    """An executor over a worker that is already loaded; the batch on it starts empty."""

    def __init__(self, worker: Worker, runner: ModelRunner):
        self._worker = worker
        self._runner = runner
        self.num_steps = 0
        self.num_preempted_rows = 0

    def start(self) -> EngineConfig:
        raise AssertionError("already started")

    def execute(self, plan: SchedulerOutput) -> None:
        self.num_steps += 1
        self._runner.execute(plan)

    def collect(self) -> ModelRunnerOutput:
        return self._runner.collect()

    def check(self) -> None: ...

    def shutdown(self) -> None: ...


class Engine:
    """One engine core with its own scheduler and KV cache, on the session's worker."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, worker: Worker, **changes: object
    ):
        self.executor = SharedExecutor(worker, runner)
        self._tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.num_cached_tokens: dict[str, int] = {}
        self.stats = None
        self._core = EngineCore(replace(config, **changes), self.executor, self._on_output)
        self._next_id = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Runs requests that all arrive at once; their output tokens, in order."""
        names = []
        for prompt, params in zip(prompts, sampling, strict=True):
            name = f"r{self._next_id}"
            self._next_id += 1
            names.append(name)
            self._tokens[name] = []
            message = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling=params,
                arrival_time_s=float(self._next_id),
            )
            self._core.inputs.put(self._core.make_request(message))
        self._core.take_inputs()
        while self._core.has_work:
            self._core.step()
        return [self._tokens[name] for name in names]

    def _on_output(self, client_idx: int, message: EngineOutput) -> None:
        assert isinstance(message, EngineCoreOutputs) and client_idx == 0
        self.stats = message.stats
        for output in message.outputs:
            self._tokens[output.request_id] += output.new_token_ids
            self.outputs.setdefault(output.request_id, []).append(output)
            cached = self.num_cached_tokens.setdefault(output.request_id, 0)
            self.num_cached_tokens[output.request_id] = max(cached, output.num_cached_tokens)
