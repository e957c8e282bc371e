"""The offline class on the real model: the same tokens as the goldens, nothing compiles."""

from jaxserve import LLM, SamplingParams
from tests.e2e.engine import GOLDENS
from tests.e2e.sizes import SIZES


def test_generate_and_chat():
    golden = next(g for g in GOLDENS["prompts"] if g["name"] == "english")
    with LLM("smollm2-135m", forbid_compile=True, **SIZES) as llm:
        greedy = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        (by_text,) = llm.generate(golden["text"], greedy)
        (by_ids,) = llm.generate(
            [golden["prompt_ids"]], SamplingParams(max_tokens=8, temperature=0)
        )
        assert by_text.outputs[0].token_ids == golden["output_ids"]
        assert by_ids.outputs[0].token_ids == golden["output_ids"][:8]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=20))
        assert "Paris" in answer.text and answer.outputs[0].finish_reason == "stop"
