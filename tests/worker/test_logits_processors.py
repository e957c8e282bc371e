"""Logits processors of other packages: found by name, refused when they are not as they must be."""

import importlib.metadata
import sys
import types

import jax.numpy as jnp
import pytest

from jaxserve.errors import UserError
from jaxserve.worker.logits_processors import GROUP, load_logits_processors


class Processor:
    """Multiplies logits by its arguments' sum."""

    def __init__(self, num_args: object = 2):
        self.num_args = num_args

    def __call__(self, logits, args):
        return logits * args.sum(axis=1, keepdims=True)


class OfAnotherType(Processor):
    def __call__(self, logits, args):
        return logits.astype(jnp.bfloat16)


class OfAnotherShape(Processor):
    def __call__(self, logits, args):
        return logits[:, :-1]


class Raising(Processor):
    def __call__(self, logits, args):
        raise KeyError("no such\nthing")


class Branching(Processor):
    def __call__(self, logits, args):
        return logits if args[0, 0] > 0 else -logits


@pytest.fixture
def install(monkeypatch):
    """Makes objects entry points of a package."""

    def install(**objects: object) -> None:
        module = types.ModuleType("some_processors")
        vars(module).update(objects)
        monkeypatch.setitem(sys.modules, "some_processors", module)
        entries = importlib.metadata.EntryPoints(
            importlib.metadata.EntryPoint(name, f"some_processors:{name}", GROUP)
            for name in objects
        )
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda **wanted: entries.select(**wanted)
        )

    return install


def test_installed_processors_are_found_by_name(install):
    install(second=Processor(0), first=Processor(4))
    found = load_logits_processors(vocab_size=7)
    assert [(p.name, p.num_args) for p in found] == [("first", 4), ("second", 0)]
    logits, args = jnp.ones((2, 7)), jnp.ones((2, 4))
    assert (found[0].function(logits, args) == 4).all()


def test_without_any_there_is_none():
    assert load_logits_processors(vocab_size=7) == ()


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (Processor(5), "its num_args is 5, not 0 to 4"),
        (Processor("2"), "its num_args is '2', not 0 to 4"),
        (object(), "AttributeError: 'object' object has no attribute 'num_args'"),
        (OfAnotherType(), "it returns ShapeDtypeStruct(shape=(1, 7), dtype=bfloat16)"),
        (OfAnotherShape(), "it returns ShapeDtypeStruct(shape=(1, 6), dtype=float32)"),
        (Raising(), "KeyError: 'no such\\nthing'"),
        (Branching(), "TracerBoolConversionError: "),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_is_no_processor_is_refused(install, bad, problem):
    install(good=Processor(), bad=bad)
    with pytest.raises(UserError) as caught:
        load_logits_processors(vocab_size=7)
    assert "The logits processor 'bad' of some_processors:bad cannot be used: " in str(
        caught.value.problem
    )
    assert problem in caught.value.problem and "\n" not in caught.value.problem
    assert caught.value.fix == "Repair or uninstall some_processors:bad."


def test_a_package_that_cannot_be_imported_is_refused(install, monkeypatch):
    install(bad=Processor())
    monkeypatch.setitem(sys.modules, "some_processors", None)
    with pytest.raises(UserError, match="ModuleNotFoundError: import of some_processors halted"):
        load_logits_processors(vocab_size=7)
