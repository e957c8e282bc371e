"""jaxserve: an LLM inference engine on JAX for TPU, GPU and CPU."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.llm import LLM
    from jaxserve.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`LLM` and `SamplingParams`, imported when first used: importing jaxserve stays cheap."""
    if name == "LLM":
        from jaxserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from jaxserve.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
