"""Reads the schedule of a TPU kernel and counts what a call of it executes.

libtpu writes a kernel's schedule as text, a bundle of operations a cycle. The file to read is
`packed-bundles-post-ra.txt`: that of the final bundles leaves out those in which the compiler has
nothing to do but wait, which the hardware does by itself. `count` runs the scalar operations of a
schedule (addresses, loop counters, branches) on given scalar operands and leaves out the vectors',
so it knows how often each bundle is executed and which DMAs are started. No vector may decide on a
branch.

What it cannot know is when something stalls: a DMA that is waited for, a bank of memory that is
busy.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

GRANULE_BYTES = 32  # of a DMA's size_in_granules: a page of 524288 bytes has 16384
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*>*\s*\{(.*)", re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_OP = re.compile(r"%(\w+) = ([a-z]\w*)([\w.]*)\s*(.*)", re.DOTALL)
_DMA_KIND = re.compile(r"/\* (\w+)-to-(\w+) \*/")
_OPERAND = re.compile(r"(<no memory space>|\w+)\s+\[shape: (\w+)\[([\d,]*)\], index: (\d+)")
_MAX_STEPS = 10**8

# Address spaces that no real address reaches, so that an address tells whose it is.
_ALLOCATION_WORDS = 2**20
_OPERAND_WORDS = 2**22


class Value(NamedTuple):
    """An operand: constant + registers; a predicate may be negated."""

    constant: int
    names: tuple[str, ...] = ()
    is_negated: bool = False


@dataclass(frozen=True)
class Op:
    """A scalar operation or a DMA.

    predicate: the operation happens only where it is true.
    otherwise: the result where it is not.
    """

    result: str
    name: str
    args: tuple[Value, ...] = ()
    predicate: Value | None = None
    otherwise: Value | None = None
    detail: str = ""


class Branch(NamedTuple):
    """To the bundle `target`, where its predicate is true."""

    target: int
    predicate: Value | None


@dataclass
class Bundle:
    """What one bundle holds, as far as counting needs it.

    phis: results and the registers they are taken from, whichever was written last.
    products: dtype -> products on the matrix units.
    fills, spills: vector registers loaded from and stored to where they were spilled.
    """

    ops: list[Op] = field(default_factory=list)
    phis: list[Op] = field(default_factory=list)
    branch: Branch | None = None
    products: Counter[str] = field(default_factory=Counter)
    fills: int = 0
    spills: int = 0


class Loop(NamedTuple):
    """Bundles start..end, both included, the last of which are run after its branch back."""

    start: int
    end: int


@dataclass(frozen=True)
class Bundles(Sequence[Bundle]):
    """The bundles of a kernel, in their order.

    delay_slots: bundles after a branch that are executed before it is taken.
    """

    all: Sequence[Bundle]
    delay_slots: int

    def __getitem__(self, index: int) -> Bundle:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.all[index]

    def __len__(self) -> int:
        return len(self.all)

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """Every loop: what lies between a branch back's target and the end of its delay slots."""
        branches = ((i, bundle.branch) for i, bundle in enumerate(self.all) if bundle.branch)
        return sorted(
            Loop(branch.target, i + self.delay_slots)
            for i, branch in branches
            if branch.target <= i
        )


@dataclass(frozen=True)
class Execution:
    """What one call executes.

    runs: how often each bundle.
    dmas: (from, to, bytes) -> how many.
    """

    bundles: Bundles
    runs: Sequence[int]
    dmas: Counter[tuple[str, str, int]]

    @property
    def cycles(self) -> int:
        """Cycles when nothing stalls."""
        return sum(self.runs)

    @property
    def products(self) -> Counter[str]:
        """dtype -> products executed on the matrix units."""
        return self._products(range(len(self.bundles)))

    def bytes_moved(self, source: str, target: str) -> int:
        """Bytes of the DMAs from memory space to memory space."""
        return sum(
            size * count for (a, b, size), count in self.dmas.items() if (a, b) == (source, target)
        )

    def product_loops(self) -> list["LoopFigures"]:
        """The innermost loops that use the matrix units and are entered, in their order."""
        has_products = [bool(bundle.products) for bundle in self.bundles]
        found = [
            loop for loop in self.bundles.loops if any(has_products[loop.start : loop.end + 1])
        ]
        return [
            self._figures(loop)
            for loop in found
            if self.runs[loop.start] and not any(_is_inside(other, loop) for other in found)
        ]

    def _figures(self, loop: Loop) -> "LoopFigures":
        inside = range(loop.start, loop.end + 1)
        runs = self.runs

        def total(what: Callable[[Bundle], int]) -> int:
            return sum(runs[i] * what(self.bundles[i]) for i in inside)

        return LoopFigures(
            loop,
            turns=runs[loop.start],
            cycles=sum(runs[i] for i in inside),
            products=self._products(inside),
            fills=total(lambda bundle: bundle.fills),
            spills=total(lambda bundle: bundle.spills),
        )

    def _products(self, indices: range) -> Counter[str]:
        counts: Counter[str] = Counter()
        for i in indices:
            for dtype, count in self.bundles[i].products.items():
                counts[dtype] += self.runs[i] * count
        return counts


@dataclass(frozen=True)
class LoopFigures:
    """What all turns of a loop execute together, loops inside it included."""

    loop: Loop
    turns: int
    cycles: int
    products: Counter[str]
    fills: int
    spills: int


def parse(text: str, delay_slots: int) -> Bundles:
    """The bundles of a `packed-bundles-post-ra.txt`; `delay_slots` is a figure of the chip."""
    return Bundles([_parse_bundle(lines) for lines in _bundle_texts(text)], delay_slots)


def count(
    bundles: Bundles, operands: Callable[[int, str], Sequence[int] | None], core: int = 0
) -> Execution:
    """Runs a kernel's scalar operations on one core.

    Args:
        bundles: of one kernel.
        operands: (index, shape as in "s32[64]") -> the operand's elements, or None for those that
            decide on no branch.
        core: of those that share the device, this one.
    """
    return _Machine(bundles, operands, core).run()


def _bundle_texts(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            if lines:
                yield "\n".join(lines)
            lines = [line]
        elif lines:
            lines.append(line)
    if lines:
        yield "\n".join(lines)


def _parse_bundle(text: str) -> Bundle:
    match = _BUNDLE.match(text)
    assert match is not None, text
    bundle = Bundle()
    for part in match[1].split(";;"):
        found = _OP.search(part)
        if found is None:
            continue
        result, name, suffix, rest = found.groups()
        if name == "vmatmul":
            bundle.products[_product_dtype(suffix)] += 1
        elif name == "vld" and "_spill]" in rest:
            bundle.fills += 1
        elif name == "vst" and "_spill]" in rest:
            bundle.spills += 1
        elif name == "sphi":
            names = tuple(re.findall(r"%(\w+)", _COMMENT.sub("", rest)))
            bundle.phis.append(Op(result, name, (Value(0, names),)))
        elif name == "sbr":
            bundle.branch = _branch(rest)
        elif name == "dma" and suffix != ".done.wait":
            bundle.ops.append(_dma(result, suffix, rest))
        elif name in _KNOWN:
            bundle.ops.append(_scalar(result, name, suffix, rest))
    return bundle


def _product_dtype(suffix: str) -> str:
    found = re.search(r"\.(bf16|f32|s8|u8|s4|u4|f8\w*)\b", suffix)
    assert found is not None, suffix
    return found[1]


def _branch(rest: str) -> Branch:
    target = re.search(r"target bundleno = (\d+)", rest)
    assert target is not None, rest
    return Branch(int(target[1]), _predicate(rest))


def _predicate(text: str) -> Value | None:
    found = re.search(r"\((!?)%(p\w+)\)", text)
    return Value(0, (found[2],), found[1] == "!") if found else None


def _dma(result: str, suffix: str, rest: str) -> Op:
    named = dict(re.findall(r"/\*(\w+)=\*/([^,}\s]+)", rest))
    kind = _DMA_KIND.search(rest)
    if kind is None:
        kind = re.match(r"\.(\w+)_to_(\w+)", suffix)
    assert kind is not None, rest
    source, target = kind[1], kind[2]
    addresses = [named.get(key) for key in (source, target)]
    if None in addresses:
        addresses = [named["src"], named["dst"]]
    args = tuple(_value(str(a)) for a in (*addresses, named["size_in_granules"]))
    return Op(result, "dma", args, _predicate(rest), detail=f"{source} {target}")


def _scalar(result: str, name: str, suffix: str, rest: str) -> Op:
    detail = suffix.removeprefix(".")
    if name == "inlined_call_operand":
        found = _OPERAND.search(f"{detail} {rest}")
        assert found is not None, rest
        space, dtype, dims, index = found.groups()
        return Op(result, name, (Value(int(index)),), detail=f"{space}|{dtype}[{dims}]")
    if "/* core id */" in rest:
        return Op(result, "core")
    rest = _COMMENT.sub("", rest).split("}")[0].strip()
    predicate = otherwise = None
    found = re.search(r"\((!?)%(\w+)(?:, (%\w+))?\),?", rest)
    if found is not None:
        predicate = Value(0, (found[2],), found[1] == "!")
        otherwise = _value(found[3]) if found[3] else None
        rest = rest.replace(found[0], "")
    rest = re.sub(r"\[resolvable:\$\w+\]", "", rest)
    address = re.match(r"\[smem:(\[.*?\])\](.*)", rest)
    if address is not None:
        parts = [address[1], address[2]] if name == "sst" else [address[1]]
    else:
        parts = rest.split(",")
        if name == "scalar_lea":  # "a, b [#allocation7]": the last only says whose address it is
            parts[1] = re.sub(r"(\S)\s+\[#\w+\]\s*$", r"\1", parts[1])
    return Op(result, name, tuple(map(_value, parts)), predicate, otherwise, detail)


def _value(text: str) -> Value:
    """A register, an address, a constant, or a sum of them."""
    text = text.strip()
    constant, names = 0, []
    for part in text.strip("[]").split("+"):
        part = part.strip()
        if part.startswith(("%", "!%")):
            names.append(part.lstrip("!%"))
        elif part.startswith("#"):
            constant += _allocation(part)
        else:
            constant += int(part.removeprefix("$"), 0)
    return Value(_signed(constant), tuple(names), text.startswith("!"))


@functools.cache
def _allocation(name: str) -> int:
    """An address for an allocation, another for each."""
    return _ALLOCATION_WORDS * (next(_allocation_ids) % 2000)


_allocation_ids = iter(range(1, 10**9))


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _unsigned(value: int) -> int:
    return value % 2**32


_COMPARE: Mapping[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_COMPUTE: Mapping[str, Callable[..., int]] = {
    "smov": lambda a: a,
    "pmov": lambda a: a,
    "int_to_ptr": lambda a: a,
    "sadd": lambda a, b: _signed(a + b),
    "ssub": lambda a, b: _signed(a - b),
    "smul": lambda a, b: _signed(a * b),
    "sand": lambda a, b: a & b,
    "sor": lambda a, b: a | b,
    "sxor": lambda a, b: a ^ b,
    "sshll": lambda a, b: _signed(a << b),
    "sshrl": lambda a, b: _signed(_unsigned(a) >> b),
    "sshra": lambda a, b: a >> b,
    "scalar_lea": lambda a, b: a + b,
    "scalar_select": lambda p, a, b: a if p else b,
    "pnand": lambda a, b: not (a and b),
    "pand": lambda a, b: bool(a and b),
    "por": lambda a, b: bool(a or b),
    "pneg": lambda a: not a,
}
_KNOWN = {
    *_COMPUTE,
    *("scmp", "smin", "smax", "sdivrem", "spop", "sld", "sst", "inlined_call_operand"),
}


class _Machine:
    """The scalar unit: registers under the names of their values, SMEM, and how often each is run.

    Registers have a name a value, so a phi takes what was written last of those that share one.
    """

    def __init__(
        self,
        bundles: Bundles,
        operands: Callable[[int, str], Sequence[int] | None],
        core: int,
    ):
        self._bundles = bundles
        self._operands = operands
        self._core = core
        self._values: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._step = 0
        self._smem: dict[int, int] = {}
        self._contents: dict[int, Sequence[int]] = {}
        self._dmas: Counter[tuple[str, str, int]] = Counter()

    def run(self) -> Execution:
        bundles = self._bundles
        runs = [0] * len(bundles)
        at = 0
        jump: tuple[int, int] | None = None  # where from, and where to
        while at < len(bundles):
            bundle = bundles[at]
            runs[at] += 1
            self._step += 1
            assert self._step < _MAX_STEPS, "the kernel does not end"
            if bundle.phis or bundle.ops:
                self._execute(bundle)
            branch = bundle.branch
            if branch is not None and self._holds(branch.predicate):
                jump = at + bundles.delay_slots + 1, branch.target
            at += 1
            if jump is not None and at == jump[0]:
                at, jump = jump[1], None
        return Execution(bundles, runs, self._dmas)

    def _execute(self, bundle: Bundle) -> None:
        latest = [
            max(op.args[0].names, key=lambda name: self._written.get(name, -1))
            for op in bundle.phis
        ]
        taken = [self._values.get(name, 0) for name in latest]
        for op, value in zip(bundle.phis, taken, strict=True):
            self._set(op.result, value)
        for op in bundle.ops:
            if self._holds(op.predicate):
                self._perform(op)
            elif op.otherwise is not None:
                self._set(op.result, self._get(op.otherwise))

    def _perform(self, op: Op) -> None:
        args = [self._get(arg) for arg in op.args]
        match op.name:
            case "dma":
                self._start_dma(op.detail, *args)
            case "sst":
                self._smem[args[0]] = args[1]
            case "sld":
                self._set(op.result, self._smem.get(args[0], 0))
            case "scmp":
                kind, dtype = op.detail.split(".")[:2]
                if dtype.startswith("u"):
                    args = [_unsigned(arg) for arg in args]
                self._set(op.result, _COMPARE[kind](*args))
            case "smin" | "smax":
                key = _unsigned if op.detail.startswith("u") else _signed
                chosen = (min if op.name == "smin" else max)(*args, key=key)
                self._set(op.result, chosen)
            case "sdivrem":
                self._set(op.result, args[0] % args[1])
            case "spop":  # of what `sdivrem` left; of other units: unknown
                self._set(op.result, self._values.get(op.args[0].names[0], 0))
            case "core":
                self._set(op.result, self._core)
            case "inlined_call_operand":
                self._set(op.result, self._operand(args[0], *op.detail.split("|")))
            case name:
                self._set(op.result, _COMPUTE[name](*args))

    def _operand(self, index: int, space: str, shape: str) -> int:
        elements = self._operands(index, shape)
        if space == "<no memory space>":
            assert elements is not None, f"operand {index}, {shape}, is a scalar and not given"
            return elements[0]
        address = _OPERAND_WORDS * (index + 1)
        if elements is not None:
            self._contents[address] = self._contents[address << 4] = elements
        return address

    def _start_dma(self, kind: str, source: int, target: int, granules: int) -> None:
        spaces = kind.split(" ")
        self._dmas[spaces[0], spaces[1], granules * GRANULE_BYTES] += 1
        if spaces[1] == "smem":
            for i, element in enumerate(self._contents.get(source, ())):
                self._smem[target + i] = element

    def _holds(self, predicate: Value | None) -> bool:
        return predicate is None or bool(self._get(predicate))

    def _get(self, value: Value) -> int:
        if value.is_negated:
            return not self._values.get(value.names[0], 0)
        return value.constant + sum(self._values.get(name, 0) for name in value.names)

    def _set(self, name: str, value: int) -> None:
        self._values[name] = value
        self._written[name] = self._step


def _is_inside(inner: Loop, outer: Loop) -> bool:
    return inner != outer and outer.start <= inner.start and inner.end <= outer.end
