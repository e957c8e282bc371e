"""Llama in GGUF: ModelInfo, weights under their names, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize, quantize

from jaxserve.checkpoint import load_model_info, open_weights
from jaxserve.checkpoint.weights import check_weight_names
from jaxserve.config import ModelInfo
from jaxserve.errors import UserError
from tests.checkpoint.gguf_files import GOLDENS, TINY_LLAMA, tiny_gguf, tiny_weights, write_gguf
from tests.checkpoint.numpy_llama import last_logits


def test_demo_model_info(demo_model_path: Path) -> None:
    assert load_model_info(demo_model_path) == ModelInfo(
        path=str(demo_model_path),
        format="gguf",
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        checkpoint_dtype="float32",
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_demo_model_logits(demo_model_path: Path) -> None:
    """First-step logits of the reference, through a forward pass in numpy float32.

    Two float32 implementations differ by rounding: the last sum alone, over 576 products for a
    logit of about 20, by some 2**-23 * sqrt(576) * 20 = 6e-5; a wrong rotary order by units.
    """
    golden = json.loads((GOLDENS / "smollm2_greedy.json").read_text())
    info, reader = load_model_info(demo_model_path), open_weights(demo_model_path)
    entry = next(p for p in golden["prompts"] if p["name"] == "english")
    logits = last_logits(info, reader.read, entry["prompt_ids"])
    first = entry["first_logits"]
    np.testing.assert_allclose(logits[first["top_ids"]], first["top_values"], atol=3e-4)
    np.testing.assert_allclose(logits[golden["probe_ids"]], first["probe_values"], atol=3e-4)
    assert int(logits.argmax()) == entry["output_ids"][0]


def test_tiny_equals_its_directory(tmp_path: Path) -> None:
    """The same model as GGUF: same ModelInfo, same weights in the same order of rows."""
    path = tiny_gguf(tmp_path / "tiny.gguf")
    info, expected = load_model_info(path), load_model_info(TINY_LLAMA)
    for field in ModelInfo.__struct_fields__:
        if field not in ("path", "format", "checkpoint_dtype"):
            assert getattr(info, field) == getattr(expected, field), field
    reader, weights = open_weights(path), tiny_weights()
    check_weight_names(weights.keys(), reader)
    for name, weight in weights.items():
        assert reader.shape(name) == weight.shape
        np.testing.assert_array_equal(reader.read(name), weight)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_quantized_tiny(tmp_path: Path, kind: Kind) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    info, reader = load_model_info(path), open_weights(path)
    for name, weight in tiny_weights().items():
        got = reader.read(name)
        assert got.dtype == ("float32" if weight.ndim == 1 else info.checkpoint_dtype)
        expected = weight if weight.ndim == 1 else dequantize(quantize(weight, kind), kind)
        np.testing.assert_array_equal(got.astype(np.float32), expected)
    assert {"F16": "float16", "BF16": "bfloat16"}.get(kind.name, "float32") == info.checkpoint_dtype


def test_tied_embeddings(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tied.gguf", without=("output.weight",))
    assert load_model_info(path).tie_word_embeddings
    assert "lm_head.weight" not in open_weights(path).names()


def test_bias_of_rotated_projection(tmp_path: Path) -> None:
    bias = np.arange(64, dtype=np.float32)
    path = tiny_gguf(tmp_path / "bias.gguf", more={"blk.0.attn_q.bias": bias})
    assert load_model_info(path).attention_bias
    got = open_weights(path).read("model.layers.0.self_attn.q_proj.bias")
    # Head 0 in the file: 0..15; its even entries are the first half of the rotary pairs.
    np.testing.assert_array_equal(got[:16], [*range(0, 16, 2), *range(1, 16, 2)])
    np.testing.assert_array_equal(got[16:32], got[:16] + 16)


def test_missing_and_unused_weights_are_named(tmp_path: Path) -> None:
    more = {"blk.0.ffn_up.scale": np.ones(1, np.float32)}
    path = tiny_gguf(tmp_path / "part.gguf", without=("blk.1.ffn_up.weight",), more=more)
    with pytest.raises(UserError) as caught:
        check_weight_names(tiny_weights().keys(), open_weights(path))
    assert str(path) in caught.value.problem
    assert "misses model.layers.1.mlp.up_proj.weight and" in caught.value.problem
    assert "unused blk.0.ffn_up.scale" in caught.value.problem


def test_no_llama3_scaling(tmp_path: Path) -> None:
    plain = tiny_gguf(tmp_path / "plain.gguf", without=("rope_freqs.weight",))
    assert load_model_info(plain).rope_scaling == {}
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert load_model_info(tiny_gguf(tmp_path / "ones.gguf", more=ones)).rope_scaling == {}


def test_linear_scaling(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    path = tiny_gguf(tmp_path / "a.gguf", metadata=linear, without=("rope_freqs.weight",))
    assert load_model_info(path).rope_scaling == {"rope_type": "linear", "factor": 2.5}
    old = {"llama.rope.scale_linear": 4.0}
    path = tiny_gguf(tmp_path / "b.gguf", metadata=old, without=("rope_freqs.weight",))
    assert load_model_info(path).rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_published_llama3_factors(tmp_path: Path) -> None:
    """Without the original length in the metadata, that of the published models is taken."""
    factors = np.full(8, 8.0, np.float32)
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(8) / 8)
    for i, wavelength in enumerate(wavelengths):
        smooth = min(max((8192 / wavelength - 1) / 3, 0), 1)
        factors[i] = 1 / ((1 - smooth) / 8 + smooth)
    metadata = {
        "llama.rope.freq_base": 500000.0,
        "llama.rope.scaling.original_context_length": None,
    }
    path = tiny_gguf(tmp_path / "x.gguf", metadata=metadata, more={"rope_freqs.weight": factors})
    assert load_model_info(path).rope_scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    }


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"llama.block_count": None}, "lacks the metadata llama.block_count"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.attention.sliding_window": 4096}, "sliding window"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({"llama.attention.value_length": 32}, "llama.attention.value_length = 32"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv is a value for each layer"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = yarn"),
        ({"llama.rope.scaling.original_context_length": 32}, "not those of Llama 3"),
        ({"llama.rope.freq_base": 10000.0}, "not those of Llama 3"),
        ({"split.count": 3}, "is one of 3 parts"),
    ],
)
def test_refused_metadata(tmp_path: Path, metadata: dict[str, Any], problem: str) -> None:
    path = tiny_gguf(tmp_path / "x.gguf", metadata=metadata)
    for opener in (load_model_info, open_weights):
        with pytest.raises(UserError) as caught:
            opener(path)
        assert problem in caught.value.problem
        assert str(path) in caught.value.problem
        assert len(str(caught.value).splitlines()) == 2


def test_refused_scaling_type(tmp_path: Path) -> None:
    path = tiny_gguf(
        tmp_path / "x.gguf",
        metadata={"llama.rope.scaling.type": "yarn"},
        without=("rope_freqs.weight",),
    )
    with pytest.raises(UserError, match="rope scaling of type 'yarn' is not supported"):
        load_model_info(path)


def test_wrong_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, architecture="gemma3")
    with pytest.raises(UserError) as caught:
        load_model_info(path)
    assert "has the architecture 'gemma3'" in caught.value.problem
    assert "'llama'" in caught.value.fix


def test_vocabulary_file(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "vocab.gguf", {"llama.attention.head_count": 4} | {"llama.embedding_length": 64}
    )
    with pytest.raises(UserError, match=r"has no tensor token_embd\.weight"):
        load_model_info(path)
