"""The sizes that tests of the real model have in common, so that its programs compile once."""

SIZES: dict[str, str | int] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "block_size": 16,
    "num_kv_blocks": 400,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
}
MESH_SIZES = SIZES | {"max_model_len": 256, "num_kv_blocks": 120, "max_num_batched_tokens": 16}


def flags_of(sizes: dict[str, str | int]) -> list[str]:
    """As arguments of `jaxserve serve`."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
