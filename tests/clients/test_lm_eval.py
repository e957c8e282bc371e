"""lm_eval: a multiple-choice task by loglikelihood, and one that generates, without any hub."""

import json
from pathlib import Path

import pytest

from tests.clients.shared import MODEL
from tests.e2e.live_server import LiveServer

lm_eval = pytest.importorskip("lm_eval", reason="the package lm_eval is not installed")
tasks = pytest.importorskip("lm_eval.tasks", reason="the package lm_eval is not installed")
pytestmark = pytest.mark.client("lm_eval")

DOCS = [
    {"question": "The capital of France is", "choices": ["Oslo", "Paris", "Rome"], "answer": 1},
    {"question": "One, two, three,", "choices": ["four", "nine hundred"], "answer": 0},
    {"question": "The sun rises in the", "choices": ["east", "oven", "north"], "answer": 0},
    {"question": "Water freezes to", "choices": ["a bicycle", "ice"], "answer": 1},
    {"question": "東京は日本の", "choices": ["首都", "りんご 🍎"], "answer": 0},
    {"question": "2 + 2 =", "choices": ["5", "4", "22"], "answer": 1},
]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("task") / "docs.jsonl"
    path.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS), "utf-8")
    return {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(path)},
            "cache_dir": str(path.parent / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }


def evaluate(task: dict, model: str, path: str, base_url: str, **options: object) -> dict:
    """One run with the tokenizer of the server, which is lm_eval's default when there is one."""
    arguments = {"model": MODEL, "base_url": base_url + path, "max_retries": 1, "max_length": 1024}
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments | options.pop("model_args", {}),
        tasks=[task],
        task_manager=tasks.TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **options,
    )


def loglikelihood(server: LiveServer, context: str, continuation: str) -> tuple[float, bool]:
    """By the server's own prompt log-probabilities: their sum, and whether each is the best."""
    ids = {}
    for name, text in (("context", context), ("whole", context + continuation)):
        status, answer = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert status == 200, answer
        ids[name] = answer["tokens"]
    body = {"model": MODEL, "prompt": ids["whole"], "max_tokens": 1, "prompt_logprobs": 1}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    start = len(ids["context"])
    entries = [
        entry[str(token)]
        for entry, token in zip(
            answer["choices"][0]["prompt_logprobs"][start:], ids["whole"][start:], strict=True
        )
    ]
    return sum(e["logprob"] for e in entries), all(e["rank"] == 1 for e in entries)


@pytest.mark.parametrize(
    "model_args",
    [{}, {"batch_size": 4}, {"num_concurrent": 4}, {"tokenized_requests": False}],
    ids=["plain", "batched", "concurrent", "text"],
)
def test_loglikelihood(server, base_url, task, model_args):
    choice_task = task | {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    result = evaluate(
        choice_task, "local-completions", "/v1/completions", base_url, model_args=model_args
    )
    samples = sorted(result["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    num_right = 0
    for doc, sample in zip(DOCS, samples, strict=True):
        wanted = [loglikelihood(server, doc["question"], f" {c}") for c in doc["choices"]]
        got = [tuple(response[0]) for response in sample["resps"]]
        # Both are sums of the same float32 values, computed in other steps of the engine.
        assert [g[0] for g in got] == pytest.approx([w[0] for w in wanted], abs=2e-3)
        assert [bool(g[1]) for g in got] == [w[1] for w in wanted]
        likeliest = max(range(len(wanted)), key=lambda i: wanted[i][0])
        num_right += likeliest == doc["answer"]
    assert result["results"]["tiny"]["acc,none"] == pytest.approx(num_right / len(DOCS))
    assert num_right >= 4, "no model of any use"


def generation_task(task: dict) -> dict:
    return task | {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def test_generate_by_chat(server, base_url, task):
    result = evaluate(
        generation_task(task),
        "local-chat-completions",
        "/v1/chat/completions",
        base_url,
        apply_chat_template=True,
    )
    samples = sorted(result["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    for doc, sample in zip(DOCS, samples, strict=True):
        status, answer = server.post(
            "/v1/chat/completions",
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": doc["question"]}],
                "max_tokens": 12,
                "temperature": 0,
                "stop": ["\n", "."],
            },
        )
        assert status == 200
        assert sample["resps"] == [[answer["choices"][0]["message"]["content"]]]


def test_generate_by_completions(server, base_url, task):
    result = evaluate(
        generation_task(task), "local-completions", "/v1/completions", base_url,
        model_args={"num_concurrent": 3},
    )  # fmt: skip
    samples = sorted(result["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    for doc, sample in zip(DOCS, samples, strict=True):
        _, answer = server.post(
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": doc["question"],
                "max_tokens": 12,
                "temperature": 0,
                "stop": ["\n", ".", "<|im_end|>"],
            },
        )
        assert sample["resps"] == [[answer["choices"][0]["text"]]]


def test_no_torch():
    """lm_eval needs none for a server, and this venv has none."""
    assert not list(Path(lm_eval.__file__).parents[1].glob("torch"))
