"""Hugging Face directories: config.json, safetensors, the hub."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint import load_model_info, open_weights, resolve_model
from jaxserve.checkpoint.weights import check_weight_names
from jaxserve.config import ModelInfo
from jaxserve.errors import UserError
from tests.checkpoint.gguf_files import GOLDENS, TINY_LLAMA, tiny_weights
from tests.checkpoint.numpy_llama import last_logits

INDEX = "model.safetensors.index.json"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64.0,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of tiny_llama that may be changed."""
    return Path(shutil.copytree(TINY_LLAMA, tmp_path / "model"))


def change_json(path: Path, **changes: Any) -> None:
    """A value of None removes the key."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def as_single_file(directory: Path, **changes: np.ndarray) -> None:
    weights = {}
    for shard in directory.glob("*.safetensors"):
        weights |= load_file(shard)
        shard.unlink()
    (directory / INDEX).unlink()
    save_file(weights | changes, directory / "model.safetensors")


def test_model_info() -> None:
    assert load_model_info(TINY_LLAMA) == ModelInfo(
        path=str(TINY_LLAMA),
        format="safetensors",
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=320,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=500.0,
        rope_scaling=LLAMA3,
        checkpoint_dtype="bfloat16",
        eos_token_ids=(1, 2),
        bos_token_id=0,
    )


def test_logits() -> None:
    """The reference's logits, within float32 rounding of sums over 128 terms of logits near 10."""
    golden = json.loads((GOLDENS / "tiny_llama.json").read_text())
    info, reader = load_model_info(TINY_LLAMA), open_weights(TINY_LLAMA)
    for sequence in golden["sequences"]:
        logits = last_logits(info, reader.read, sequence["ids"])
        np.testing.assert_allclose(logits, sequence["last_logits"], atol=1e-4)


def test_weights_are_read_as_stored(directory: Path) -> None:
    reader, weights = open_weights(directory), tiny_weights()
    check_weight_names(weights.keys(), reader)
    for name, weight in weights.items():
        assert reader.shape(name) == weight.shape
        got = reader.read(name)
        assert got.dtype == "bfloat16"
        np.testing.assert_array_equal(got.astype(np.float32), weight)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_single_file_of_another_type(directory: Path, dtype: str) -> None:
    as_single_file(directory, **{k: v.astype(dtype) for k, v in tiny_weights().items()})
    assert load_model_info(directory).checkpoint_dtype == dtype
    name = "model.layers.1.self_attn.q_proj.weight"
    got = open_weights(directory).read(name)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, tiny_weights()[name].astype(dtype))


def test_weights_that_repeat_others_are_left_out(directory: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    as_single_file(directory, **buffer)
    assert open_weights(directory).names() == tiny_weights().keys()
    change_json(directory / "config.json", tie_word_embeddings=True)
    assert load_model_info(directory).tie_word_embeddings
    assert open_weights(directory).names() == tiny_weights().keys() - {"lm_head.weight"}


def test_missing_and_unused_weights_are_named(directory: Path) -> None:
    as_single_file(directory, **{"model.layers.0.mlp.gate_proj.lora_a": np.ones(1, np.float32)})
    expected = tiny_weights().keys() | {f"model.layers.2.w{i}" for i in range(8)}
    with pytest.raises(UserError) as caught:
        check_weight_names(expected, open_weights(directory))
    problem = caught.value.problem
    assert f"{directory} misses model.layers.2.w0, model.layers.2.w1" in problem
    assert "model.layers.2.w5 and 2 more and has unused" in problem
    assert "model.layers.0.mlp.gate_proj.lora_a" in problem


def test_old_spelling_of_rope(directory: Path) -> None:
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_type"} | {"type": "llama3"}
    config = directory / "config.json"
    change_json(config, rope_parameters=None, rope_theta=1234.0, rope_scaling=scaling)
    info = load_model_info(directory)
    assert (info.rope_theta, info.rope_scaling) == (1234.0, LLAMA3)
    change_json(config, rope_scaling=None, rope_theta=None)
    info = load_model_info(directory)
    assert (info.rope_theta, info.rope_scaling) == (10000.0, {})
    change_json(config, rope_scaling={"type": "linear", "factor": 2})
    assert load_model_info(directory).rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_defaults(directory: Path) -> None:
    config = directory / "config.json"
    change_json(config, head_dim=None, num_key_value_heads=None, rms_norm_eps=None)
    change_json(config, architectures=None, tie_word_embeddings=None, max_position_embeddings=None)
    info = load_model_info(directory)
    assert (info.head_dim, info.num_kv_heads, info.rms_norm_eps) == (16, 4, 1e-6)
    assert (info.tie_word_embeddings, info.max_position_embeddings) == (False, 2048)


def test_eos_ids(directory: Path) -> None:
    generation = directory / "generation_config.json"
    change_json(generation, eos_token_id=[7, 1, 7])
    assert load_model_info(directory).eos_token_ids == (7, 1)
    change_json(generation, eos_token_id=9)
    assert load_model_info(directory).eos_token_ids == (9,)
    generation.unlink()
    assert load_model_info(directory).eos_token_ids == (1, 2)
    change_json(directory / "config.json", eos_token_id=5)
    assert load_model_info(directory).eos_token_ids == (5,)
    change_json(directory / "config.json", eos_token_id=None)
    assert load_model_info(directory).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture is MixtralForCausalLM"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "architecture is LlamaForCausalLM, X"),
        ({"architectures": None, "model_type": "gpt2"}, "architecture is gpt2"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = "),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"eos_token_id": "end"}, None),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor = None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor = 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_refused_config(directory: Path, changes: dict[str, Any], problem: str | None) -> None:
    if problem is None:
        (directory / "generation_config.json").unlink()
        problem = "eos_token_id = 'end'"
    change_json(directory / "config.json", **changes)
    with pytest.raises(UserError) as caught:
        load_model_info(directory)
    assert problem in caught.value.problem
    assert str(directory / "config.json") in caught.value.problem
    assert len(str(caught.value).splitlines()) == 2


def test_architecture_that_works_is_named(directory: Path) -> None:
    change_json(directory / "config.json", architectures=["MistralForCausalLM"])
    with pytest.raises(UserError) as caught:
        load_model_info(directory)
    assert "LlamaForCausalLM" in caught.value.fix


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json"])
def test_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(UserError, match=f"{directory / name} (is missing|cannot be read)"):
        load_model_info(directory)


@pytest.mark.parametrize("size", [0, 5, 100, 5000, -1])
def test_truncated_shard(directory: Path, size: int) -> None:
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    for opener in (load_model_info, open_weights):
        with pytest.raises(UserError) as caught:
            opener(directory)
        assert f"{shard} is truncated or damaged" in caught.value.problem
        assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("content", ["{", "[]", ""])
@pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json"])
def test_damaged_json(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(UserError, match=f"{directory / name} is not"):
        load_model_info(directory)


def test_index_without_map(directory: Path) -> None:
    (directory / INDEX).write_text("{}")
    with pytest.raises(UserError, match="has no weight_map"):
        load_model_info(directory)


def test_pickled_weights_only(directory: Path) -> None:
    as_single_file(directory)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError) as caught:
        load_model_info(directory)
    assert "has neither model.safetensors nor" in caught.value.problem
    assert "*.bin" in caught.value.fix


def test_unreadable_weight_type(directory: Path) -> None:
    embedding = "model.embed_tokens.weight"
    as_single_file(directory, **{embedding: np.zeros((320, 64), np.int8)})
    with pytest.raises(UserError, match=f"{embedding} in {directory} has the type I8"):
        load_model_info(directory)
    with pytest.raises(UserError, match="has the type I8"):
        open_weights(directory).read(embedding)


def test_adapter_is_no_model(directory: Path) -> None:
    as_single_file(directory)
    save_file({"lora.a": np.ones(1, np.float32)}, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"has no weight model\.embed_tokens\.weight"):
        load_model_info(directory)


def test_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked["repo_id"] = repo_id
        asked["patterns"] = options["allow_patterns"]
        return str(TINY_LLAMA)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    path = resolve_model("some-org/tiny")
    assert path == TINY_LLAMA
    assert asked["repo_id"] == "some-org/tiny"
    assert not any("bin" in pattern for pattern in asked["patterns"])
    assert load_model_info(path).num_layers == 2


def test_hub_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library itself, without a network: a name it cannot have, and one it cannot fetch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="'no model' is no known name, file, directory or hub id"):
        resolve_model("no model")
    with pytest.raises(UserError) as caught:
        resolve_model("some-org/not-here")
    assert "'some-org/not-here' is no local file or directory" in caught.value.problem
    assert len(str(caught.value).splitlines()) == 2

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("peer closed connection\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match="from the hub: peer closed connection\n"):
        resolve_model("some-org/not-here")
