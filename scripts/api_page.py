"""Makes docs/api.md from the types of the request bodies, for scripts/generate_docs."""

import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from jaxserve.server.protocol.anthropic import decode_messages_request
from jaxserve.server.protocol.chat import decode_chat_request
from jaxserve.server.protocol.completions import decode_completion_request
from jaxserve.server.protocol.decoding import BodyDecoder
from jaxserve.server.protocol.embeddings import decode_embedding_request
from jaxserve.server.protocol.responses import decode_responses_request
from jaxserve.server.protocol.tokenize import decode_detokenize_request, decode_tokenize_request

INTRO = """\
<!-- Made by scripts/generate_docs from jaxserve/server/protocol/. Do not edit. -->
# Requests

Every field of every body: what it does, what leaving it out means, and when it is a 400 beside a
value of the wrong type. Null is the same as leaving a field out. What answers look like says
`/openapi.json`, or `/docs` of a running server; how options work together says
[behaviour.md](behaviour.md).

A field that nobody knows is allowed and has no effect. One that is known from OpenAI, vLLM or other
servers but does not work here is a 400 that names it, unless its value asks for nothing.
"""
VLLM_INTRO = """\
## Beside vLLM

The fields of vLLM's bodies (its main branch, mid 2026), and what becomes of them here. "Works" is
the same field with the same meaning.
"""
PLAIN_TYPES = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any"}
SAMPLING = """\
frequency_penalty logit_bias max_tokens n presence_penalty seed stop stream stream_options
temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
allowed_token_ids prompt_logprobs logprob_token_ids bad_words add_special_tokens
response_format structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
repetition_detection thinking_token_budget stream_interval
"""
CHAT = """\
messages model logprobs top_logprobs max_completion_tokens tools tool_choice
reasoning_effort include_reasoning parallel_tool_calls echo add_generation_prompt
continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs return_prompt_text
"""
EMBEDDING = """\
model input user encoding_format dimensions use_activation embed_dtype endianness
truncate_prompt_tokens truncation_side padding add_special_tokens priority request_id
cache_salt mm_processor_kwargs messages
"""
TOKENIZE = """\
model prompt messages add_special_tokens return_token_strs add_generation_prompt
continue_final_message chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs tools
"""
# Why a field of vLLM's does not work here.
REASONS = {
    "ec_transfer_params": "there is one engine; nothing is transferred",
    "embed_dtype": "vectors are float32",
    "endianness": "vectors are little-endian",
    "kv_transfer_params": "there is one engine; nothing is transferred",
    "length_penalty": "of beam search",
    "media_io_kwargs": "models take text only",
    "messages": "give the text of the chat (`/tokenize` makes its tokens)",
    "mm_processor_kwargs": "models take text only",
    "padding": "models have no fixed length",
    "prompt_embeds": "prompts are tokens",
    "repetition_detection": "no output is ended for what it says",
    "return_mm_kwargs": "of a route that is not here",
    "return_prompt_text": "`/tokenize` and `/detokenize` give the text",
    "return_token_offsets": "of a route that is not here",
    "routed_experts_prompt_start": "experts are not reported",
    "session_id": "a hint for routers in front of several engines",
    "stream_interval": "each event has what there is when it is sent",
    "suffix": "no model with a format for it is supported yet",
    "thinking_token_budget": "reasoning has no limit of its own; use max_tokens",
    "use_beam_search": "one sequence a choice; use n",
    "vllm_xargs": "of vLLM's own extensions; use logits_processors",
    "watermarking": "outputs are not marked",
}


class Page(NamedTuple):
    """A route and its body. vllm: the fields that vLLM's body has."""

    route: str
    decoder: BodyDecoder
    vllm: Sequence[str]


PAGES = (
    Page("POST /v1/chat/completions", decode_chat_request, (CHAT + SAMPLING).split()),
    Page(
        "POST /v1/completions",
        decode_completion_request,
        ("model prompt echo logprobs suffix prompt_embeds " + SAMPLING).split(),
    ),
    Page("POST /v1/embeddings", decode_embedding_request, EMBEDDING.split()),
    Page("POST /tokenize", decode_tokenize_request, TOKENIZE.split()),
    Page("POST /detokenize", decode_detokenize_request, ["model", "tokens"]),
    Page("POST /v1/responses", decode_responses_request, []),
    Page("POST /v1/messages", decode_messages_request, []),
)


def api_page() -> str:
    """The whole text of docs/api.md."""
    parts = [INTRO]
    shown: dict[type, None] = {}
    for page in PAGES:
        parts.append(f"## {page.route}\n\n{_table(page.decoder.kind, page.decoder.unsupported)}\n")
        if page.decoder.unsupported:
            names = ", ".join(sorted(page.decoder.unsupported))
            parts.append(f"Known, but a 400: {names}.\n")
        shown |= dict.fromkeys(_parts_of(page.decoder.kind))
    parts.append("## Parts of bodies\n")
    for kind in sorted(shown, key=lambda kind: kind.__name__):
        summary = " ".join((kind.__doc__ or "").split())
        parts.append(f"### {kind.__name__}\n\n{summary}\n\n{_table(kind, {})}\n")
    parts.append(VLLM_INTRO)
    parts += [_comparison(page) for page in PAGES if page.vllm]
    return "\n".join(parts)


def _table(kind: type[msgspec.Struct], refused: dict[str, Any]) -> str:
    """The fields of a body; one that another API calls so but this route refuses is left out."""
    lines = ["| field | type | what | default | 400 when |", "|---|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        if field.encode_name in refused:
            continue
        meta = _meta(field.type)
        extra = (meta.extra or {}) if meta else {}
        default = extra.get("default", "") or ("required" if field.required else "")
        cells = (
            f"`{field.encode_name}`",
            type_text(field.type),
            meta.description or "" if meta else "",
            default,
            extra.get("error", ""),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _meta(hint: Any) -> msgspec.Meta | None:
    found = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    return found[0] if found else None


def type_text(hint: Any) -> str:
    """A type in words; null, which every optional field takes, is left out."""
    if hint in PLAIN_TYPES:
        return PLAIN_TYPES[hint]
    if isinstance(hint, typing.TypeAliasType):
        return type_text(hint.__value__)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_text(args[0])
    if origin is Literal:
        return ", ".join(str(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        names = [type_text(arg) for arg in args if arg not in (types.NoneType, msgspec.UnsetType)]
        return " or ".join(dict.fromkeys(names))
    if origin is list:
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return "object" if args[1] is Any else f"object of {type_text(args[1])}"
    name = getattr(hint, "__name__", str(hint))
    return f"[{name}](#{name.lower()})" if _is_struct(hint) else name


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _parts_of(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """The structs within a body, in the order in which they are met."""
    found: dict[type[msgspec.Struct], None] = {}

    def visit(hint: Any) -> None:
        if isinstance(hint, typing.TypeAliasType):
            visit(hint.__value__)
        elif _is_struct(hint):
            if hint not in found:
                found[hint] = None
                for field in msgspec.structs.fields(hint):
                    visit(field.type)
        else:
            for arg in typing.get_args(hint):
                visit(arg)

    for field in msgspec.structs.fields(kind):
        visit(field.type)
    return list(found)


def _comparison(page: Page) -> str:
    decoder = page.decoder
    fields = {field.encode_name for field in msgspec.structs.fields(decoder.kind)}
    lines = [f"### vLLM's {page.route}\n", "| field | here | why |", "|---|---|---|"]
    for name in sorted(dict.fromkeys(page.vllm)):
        if name in fields and name not in decoder.unsupported:
            here, why = "works", ""
        elif name in decoder.unsupported:
            here, why = "a 400, unless it asks for nothing", REASONS[name]
        else:
            here, why = "has no effect", REASONS[name]
        lines.append(f"| {name} | {here} | {why} |")
    return "\n".join(lines) + "\n"
