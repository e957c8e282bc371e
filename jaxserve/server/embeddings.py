"""POST /v1/embeddings: a vector for each text, made of the model's hidden states."""

import base64
import time
import uuid

import numpy as np
from starlette.types import Receive, Scope, Send

from jaxserve.engine.output_processor import RequestOutput
from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation import ServerContext, check_model
from jaxserve.server.http import cancelled_on_disconnect, collect, read_body, send_json
from jaxserve.server.protocol.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    decode_embedding_request,
)


class Embeddings:
    """The route's handler."""

    def __init__(self, context: ServerContext):
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        arrival_time_s = time.time()
        body = await read_body(scope, receive, context.config.server.max_body_bytes)
        request = decode_embedding_request(body)
        check_model(context, request.model)
        num_dimensions = self._num_dimensions(request)
        is_normalized = _is_normalized(request)
        truncation = SamplingParams(
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            truncation_side=request.truncation_side or "left",
        )
        prompts = await context.renderer.completion(
            request.input,
            add_special_tokens=request.add_special_tokens is not False,
            field="input",
            is_truncated=request.truncate_prompt_tokens is not None,
        )
        processor = context.input_processor
        sequences = [
            processor.process_pooling(
                processor.truncate(token_ids, truncation, default_max_tokens=1),
                request.pooling or context.config.model.pooling,
                arrival_time_s=arrival_time_s,
                index=index,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                prompt_param=path,
            )
            for index, (token_ids, path) in enumerate(prompts)
        ]
        async with cancelled_on_disconnect(context.llm.generate(sequences), receive) as stream:
            outputs = await collect(stream)
        num_tokens = sum(len(sequence.core.prompt_token_ids) for sequence in sequences)
        response = EmbeddingList(
            id=f"embd-{request.request_id or uuid.uuid4().hex}",
            created=int(arrival_time_s),
            model=request.model,
            data=[
                Embedding(
                    index=output.index,
                    embedding=_encode(
                        pooled_vector(output, num_dimensions, normalize=is_normalized),
                        request.encoding_format or "float",
                    ),
                )
                for output in outputs
            ],
            usage=EmbeddingUsage(num_tokens, num_tokens),
        )
        await send_json(send, response, headers=[(b"x-request-id", response.id.encode())])

    def _num_dimensions(self, request: EmbeddingRequest) -> int:
        hidden_size = self._context.config.info.hidden_size
        wanted = hidden_size if request.dimensions is None else request.dimensions
        if not 1 <= wanted <= hidden_size:
            raise RequestError(
                f"dimensions must be between 1 and {hidden_size} for this model.",
                param="dimensions",
            )
        return wanted


def _is_normalized(request: EmbeddingRequest) -> bool:
    given = {request.normalize, request.use_activation} - {None}
    if len(given) == 2:
        raise RequestError(
            "normalize and use_activation are the same option, but differ.", param="use_activation"
        )
    return given != {False}


def pooled_vector(output: RequestOutput, num_dimensions: int, *, normalize: bool) -> np.ndarray:
    """The vector of a pooling request's output, float32 [num_dimensions]."""
    assert output.embedding is not None, "the engine ended a pooling request without its vector"
    vector = np.frombuffer(output.embedding, "<f4")[:num_dimensions]
    if not normalize:
        return vector
    length = np.linalg.norm(vector.astype(np.float64))
    return (vector / length).astype("<f4") if length else vector


def _encode(vector: np.ndarray, encoding_format: str) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()
