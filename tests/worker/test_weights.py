"""Loading: every tensor in its place, in the right type, and clear words when one is not."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from jaxserve.config import ModelInfo
from jaxserve.errors import UserError
from jaxserve.worker import weights
from jaxserve.worker.sharding import make_mesh
from jaxserve.worker.weights import load_params, param_shapes
from pallas_kernels.matmul import Int8Weights

L, D, F, V, N, K, H = 2, 12, 10, 9, 4, 2, 3
MESH = make_mesh(jax.local_devices()[:1])


@dataclasses.dataclass
class Checkpoint:
    """A directory that can be written again after its tensors were changed."""

    info: ModelInfo
    tensors: dict[str, np.ndarray]

    def load(self, dtype: str = "float32", quantization: str = "none") -> dict[str, Any]:
        directory = Path(self.info.path)
        save_file(self.tensors, directory / "model.safetensors")
        tied = self.info.tie_word_embeddings
        (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
        params = load_params(self.info, jnp.dtype(dtype), MESH, quantization)
        arrays = jax.tree.leaves(params)
        assert all(array.devices() == {MESH.devices.item()} for array in arrays)
        return jax.tree.map(np.asarray, params)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two layers, with biases and an LM head of their own."""
    info = ModelInfo(
        path=str(tmp_path),
        format="safetensors",
        architecture="LlamaForCausalLM",
        num_layers=L,
        hidden_size=D,
        intermediate_size=F,
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        vocab_size=V,
        max_position_embeddings=32,
        rms_norm_eps=1e-6,
        rope_theta=100.0,
        attention_bias=True,
    )
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes["lm_head.weight"] = (V, D)
    for i in range(L):
        layer = f"model.layers.{i}."
        for name, size in (("q", N * H), ("k", K * H), ("v", K * H), ("o", D)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (size, N * H if name == "o" else D)
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (size,)
        shapes[layer + "mlp.gate_proj.weight"] = shapes[layer + "mlp.up_proj.weight"] = (F, D)
        shapes[layer + "mlp.down_proj.weight"] = (D, F)
        shapes[layer + "input_layernorm.weight"] = (D,)
        shapes[layer + "post_attention_layernorm.weight"] = (D,)
    rng = np.random.default_rng(0)
    return Checkpoint(
        info, {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    )


def test_every_tensor_is_in_its_place(checkpoint):
    params = checkpoint.load()
    left = dict(checkpoint.tensors)

    def expect(name: str, got: np.ndarray) -> None:
        np.testing.assert_array_equal(got, left.pop(name), name)

    expect("model.embed_tokens.weight", params["embed"])
    expect("model.norm.weight", params["final_norm"])
    expect("lm_head.weight", params["lm_head"])
    for i in range(L):
        layer = {n.removeprefix("layers."): p[i] for n, p in params.items() if "layers." in n}
        prefix = f"model.layers.{i}."
        for kind, packed in (("weight", layer["qkv"]), ("bias", layer["qkv_bias"])):
            q = [packed[n // (N // K), n % (N // K)] for n in range(N)]
            expect(f"{prefix}self_attn.q_proj.{kind}", np.concatenate(q))
            k, v = ([packed[head, at] for head in range(K)] for at in (-2, -1))
            expect(f"{prefix}self_attn.k_proj.{kind}", np.concatenate(k))
            expect(f"{prefix}self_attn.v_proj.{kind}", np.concatenate(v))
        expect(prefix + "self_attn.o_proj.weight", layer["attn_out"])
        expect(prefix + "self_attn.o_proj.bias", layer["attn_out_bias"])
        expect(prefix + "mlp.gate_proj.weight", layer["gate_up"][0, 0])
        expect(prefix + "mlp.up_proj.weight", layer["gate_up"][0, 1])
        expect(prefix + "mlp.down_proj.weight", layer["down"])
        expect(prefix + "input_layernorm.weight", layer["attn_norm"])
        expect(prefix + "post_attention_layernorm.weight", layer["mlp_norm"])
    assert not left


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")]
)
@pytest.mark.parametrize(("tied", "bias"), [(False, True), (True, False)])
def test_shapes_are_known_without_reading(checkpoint, dtype, quantization, tied, bias):
    checkpoint.info = replace(checkpoint.info, tie_word_embeddings=tied, attention_bias=bias)
    if not bias:
        checkpoint.tensors = {n: t for n, t in checkpoint.tensors.items() if "bias" not in n}
    params = checkpoint.load(dtype, quantization)
    shapes = param_shapes(checkpoint.info, jnp.dtype(dtype), MESH, quantization)
    facts = [jax.tree.map(lambda a: (a.shape, a.dtype.name), tree) for tree in (params, shapes)]
    assert facts[0] == facts[1]
    assert ("lm_head" in params, "layers.qkv_bias" in params) == (not tied, bias)


def test_matrices_are_quantized_by_channel(checkpoint):
    """Those that products are with; each value is within half a step of the largest / 127."""
    checkpoint.tensors["lm_head.weight"][3] = 0
    whole, quantized = checkpoint.load(), checkpoint.load(quantization="int8")
    matrices = {"layers.qkv", "layers.attn_out", "layers.gate_up", "layers.down", "lm_head"}
    assert {n for n, p in quantized.items() if isinstance(p, Int8Weights)} == matrices
    for name, array in whole.items():
        if name not in matrices:
            np.testing.assert_array_equal(quantized[name], array, name)
            continue
        values, scales = quantized[name]
        peaks = np.abs(array).max(axis=-1)
        np.testing.assert_allclose(scales, peaks / 127, rtol=1e-6)
        assert (np.abs(values.astype(int)).max(axis=-1) == np.where(peaks > 0, 127, 0)).all()
        error = np.abs(values * scales[..., None].astype(np.float64) - array)
        assert (error <= 0.5001 * scales[..., None]).all(), name
    checkpoint.info = replace(checkpoint.info, tie_word_embeddings=True)
    del checkpoint.tensors["lm_head.weight"]
    assert isinstance(checkpoint.load(quantization="int8")["embed"], Int8Weights)


def test_values_are_rounded_to_the_nearest_bfloat16(checkpoint):
    step = 2.0**-7  # between bfloat16 numbers from 1 to 2; a half goes to the even one
    cases = {1 + 0.49 * step: 1, 1 + 0.5 * step: 1, 1 + 0.51 * step: 1 + step}
    cases |= {1 + 1.5 * step: 1 + 2 * step, -3.0: -3.0}
    checkpoint.tensors["model.norm.weight"][: len(cases)] = list(cases)
    params = checkpoint.load("bfloat16")
    got = params["final_norm"].astype(np.float32)[: len(cases)]
    assert got.tolist() == list(cases.values())


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_a_smaller_type_is_widened_exactly(checkpoint, stored):
    checkpoint.tensors = {n: t.astype(stored) for n, t in checkpoint.tensors.items()}
    down = checkpoint.load()["layers.down"]
    assert down.dtype == np.float32
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(down[1], checkpoint.tensors[name].astype(np.float32))


# --- checkpoints that do not fit -----------------------------------------------------------------


def test_missing_and_unused_tensors_are_named(checkpoint):
    norm = checkpoint.tensors.pop("model.layers.1.input_layernorm.weight")
    checkpoint.tensors["model.layers.2.input_layernorm.weight"] = norm
    with pytest.raises(UserError) as caught:
        checkpoint.load()
    problem = caught.value.problem
    assert checkpoint.info.path in problem
    assert "misses model.layers.1.input_layernorm.weight" in problem
    assert "unused model.layers.2.input_layernorm.weight" in problem


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"attention_bias": False}, ("unused", "model.layers.0.self_attn.k_proj.bias")),
        ({"num_layers": 1}, ("unused", "model.layers.1.input_layernorm.weight")),
        ({"num_layers": 3}, ("misses", "model.layers.2.input_layernorm.weight")),
    ],
    ids=str,
)
def test_a_config_of_another_model_is_refused(checkpoint, change, names):
    checkpoint.info = replace(checkpoint.info, **change)
    with pytest.raises(UserError) as caught:
        checkpoint.load()
    assert all(name in caught.value.problem for name in names)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.embed_tokens.weight", (V + 1, D), (V, D)),
        ("lm_head.weight", (D, V), (V, D)),
        ("model.norm.weight", (1,), (D,)),  # would broadcast
        ("model.layers.1.input_layernorm.weight", (1, D), (D,)),
        ("model.layers.0.self_attn.o_proj.weight", (D, N * H + 1), (D, N * H)),
        ("model.layers.1.mlp.down_proj.weight", (F, D), (D, F)),
        ("model.layers.1.mlp.up_proj.weight", (F + 1, D), (1, 2, F, D)),
        ("model.layers.1.self_attn.q_proj.weight", (N * H + 1, D), (K, N // K + 2, H, D)),
        ("model.layers.0.self_attn.k_proj.weight", (2 * K * H, D), (K, N // K + 2, H, D)),
        ("model.layers.0.self_attn.v_proj.bias", (K * H - 1,), (K, N // K + 2, H)),
    ],
)
def test_a_misshapen_tensor_is_named(checkpoint, name, shape, wanted):
    checkpoint.tensors[name] = np.ones(shape, np.float32)
    with pytest.raises(UserError) as caught:
        checkpoint.load()
    problem = caught.value.problem
    assert checkpoint.info.path in problem
    assert f"{name} {shape}" in problem and str(wanted) in problem
    assert "config" in caught.value.fix


@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 100, 64)])
def test_a_cpu_takes_what_is_read_without_a_copy(shape):
    read = weights._empty_lines(shape, np.dtype(jnp.bfloat16))
    read[...] = 1
    put = jax.device_put(read, jax.local_devices()[0])
    assert put.shape == shape and put.unsafe_buffer_pointer() == read.ctypes.data
