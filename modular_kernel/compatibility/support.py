"""Capability as data: what a part declares, and what comes out when it is judged.

A part declares a `Requirements`; `modular_kernel.compatibility.rules.judge`, the only evaluator,
returns a `Verdict` that holds every violated rule as a `Rejection`, never only the first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from modular_kernel.spec.problem import (
    GATED,
    UNGATED,
    ActivationFormat,
    Machine,
    Problem,
    Reduce,
    Rows,
)
from modular_kernel.text import counted, notebook_html, printable
from modular_kernel.utils.argument_checks import Count
from modular_kernel.utils.optional_imports import reason
from modular_kernel.utils.package_probes import Provider

ALL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
ALL_ACTIVATIONS = frozenset(GATED + UNGATED)


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What both kinds of part declare.

    devices: device types it runs on. triton: its kernels are Triton's, so that on a CPU it needs
    the interpreter. min_arch: least compute capability; archs: the only ones, None for any.
    packages: optional packages it imports; providers: those of them that are told by what is in
    them. packages_from: where sources are, if a package index does not have them by that name.
    packages_extra: the extra of this distribution that brings those not named as they are imported.
    top_k: least and greatest K. hidden_multiple, hidden_sizes: H must be a multiple of the
    first and, if given, one of the second. graph_capturable: no sync, no allocation, no shape
    that depends on data. deterministic: bitwise equal output for equal input. batch_invariant: if
    the problem asks for it, a token's bits are those that it has in a call of its own (what
    reducers do for a part counts as the part's). lora: it carries adapters: their slots travel
    with the tokens, or their deltas are added in both products.
    """

    activation_format: ActivationFormat
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    triton: bool = False
    min_arch: tuple[int, int] | None = None
    archs: frozenset[tuple[int, int]] | None = None
    packages: tuple[str, ...] = ()
    providers: tuple[Provider, ...] = ()
    packages_from: str = ""
    packages_extra: str = ""
    dtypes: frozenset[torch.dtype] = ALL_DTYPES
    top_k: tuple[int, int] = (1, 16)
    hidden_multiple: Count = 1
    hidden_sizes: frozenset[int] | None = None
    inplace: bool = True
    graph_capturable: bool = False
    deterministic: bool = True
    batch_invariant: bool = False
    lora: bool = False

    def how_to_get(self, package: str) -> str:
        """Say how to install one of `packages`."""
        for provider in self.providers:
            if provider.name == package:
                return provider.source
        if self.packages_from:
            return f"build {package} from {self.packages_from}, not from a package index"
        if self.packages_extra:
            return f"pip install 'modular-kernel[{self.packages_extra}]'"
        return f"pip install {package}"


@dataclass(frozen=True, kw_only=True)
class PrepareFinalizeRequirements(Requirements):
    """What a PrepareAndFinalize declares.

    reduces: which of the experts' Reduce duties its finalize can take over; keep_topk: it can
    return (T, K, H). topk_indices_dtype: the only id dtype it takes, or None. localizes_ids: its
    dispatch leaves local ids or none, so experts need no expert_map. multiplies_input: it applies
    the router weight to x itself (K = 1 only) when the weight goes on the input.
    padding: what rows without a token hold, None if there are none. dispatch_schemes: schemes
    whose activations it quantizes before dispatch; can_defer_quant: it can leave that to the
    experts; scale_layout: of the scales it dispatches. world_sizes: least and greatest (None: no
    bound). linear_placement: needs E divisible by ranks, in blocks. max_tokens: its own bound.
    replicated_input: every rank passes the same tokens and routing, and every rank gets the
    output of all of them; otherwise each rank passes its own tokens, as many as it likes.
    one_host: ranks share the memory of one host, so that none may be on another. ranks_per_host:
    the most on one host; full_hosts: of several, each has just so many. graph_across_hosts: what
    graph_capturable says holds between hosts too.
    received_by_library: a library receives the rows, into memory that it takes from torch's
    allocator in every call, a plan's and a captured one's too; it alone knows who sent how many.
    bounds_received: its buffers may be made for Problem.max_received rows.
    capacity_unit: of batched rows, an expert has room for T of each rank, T rounded up to a
    multiple of this. rounds_capacity: it rounds that room up to what the experts want.
    """

    reduces: frozenset[Reduce]
    keep_topk: bool = False
    topk_indices_dtype: torch.dtype | None = None
    localizes_ids: bool = False
    multiplies_input: bool = False
    padding: Rows | None = None
    dispatch_schemes: frozenset[str] = frozenset()
    can_defer_quant: bool = True
    scale_layout: str = "row_major"
    world_sizes: tuple[int, int | None] = (1, 1)
    one_host: bool = False
    ranks_per_host: int | None = None
    full_hosts: bool = False
    graph_across_hosts: bool = True
    linear_placement: bool = False
    max_tokens: int | None = None
    asynchronous: bool = False
    output_is_reduced: bool = True
    replicated_input: bool = False
    received_by_library: bool = False
    bounds_received: bool = False
    capacity_unit: Count = 1
    rounds_capacity: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsRequirements(Requirements):
    """What a PermuteExpertsUnpermute declares.

    reduce: the duty it leaves to finalize; keep_topk: it can leave (T, K, H) rows unreduced.
    up_first: it takes a gated w1 whose up rows come first, and none whose gate rows do.
    weight_on_input: it can apply the router weight on GEMM 1. invalid_rows: what output rows of
    skipped pairs hold. skips_padding: it never reads rows that stand for no token. schemes:
    quantizations it runs; quantizes_input: it wants unquantized activations. whole_blocks: H and
    I must be multiples of the scheme's group. min_tokens: least T it is right for.
    max_elements: bound on T * K * max(N, H) where offsets are 32 bit, None if 64 bit.
    blocks: (rows, depth) of weight blocks that it takes where the scheme has them, None for any.
    capacity_multiple: of batched rows, an expert's room must be a multiple of this.
    library_allocates: a library takes memory from torch's allocator in every call, a plan's and a
    captured one's too. hides_nan: activations whose clamp, a library's, turns a NaN of weights,
    scales or biases into its limit; a NaN of x or of a router weight is kept there, too.
    """

    reduce: Reduce
    keep_topk: bool = False
    activations: frozenset[str] = ALL_ACTIVATIONS
    interleaved: bool = True
    up_first: bool = False
    bias: bool = True
    weight_on_input: bool = True
    expert_map: bool = False
    chunking: bool = False
    invalid_rows: Rows = Rows.UNDEFINED
    skips_padding: bool = True
    schemes: frozenset[str] = frozenset({"none"})
    quantizes_input: bool = False
    scale_layout: str = "row_major"
    whole_blocks: bool = False
    intermediate_multiple: Count = 1
    min_tokens: int = 0
    max_experts: int | None = None
    max_elements: int | None = None
    blocks: frozenset[tuple[int, int]] | None = None
    capacity_multiple: Count = 1
    library_allocates: bool = False
    hides_nan: frozenset[str] = frozenset()
    tf32: bool = False


@dataclass(frozen=True)
class Planned:
    """A part that other stacks' tables have by this name, and this one not yet; and why."""

    name: str
    kind: str
    why: str


@dataclass(frozen=True)
class Rejection:
    """One violated rule. parties: the parts (or "problem", "machine") that disagree."""

    rule: str
    parties: tuple[str, ...]
    got: str
    need: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        parties = " / ".join(self.parties)
        return printable(f"[{self.rule}] {parties}: got {self.got}, need {self.need}{hint}")


@dataclass(frozen=True)
class Pairing:
    """What a rule sees: two parts' declarations, a problem and a machine."""

    pf_name: str
    pf: PrepareFinalizeRequirements
    ex_name: str
    ex: ExpertsRequirements
    problem: Problem
    machine: Machine

    def each(self) -> tuple[tuple[str, Requirements], ...]:
        """Yield both parts, for rules that judge them alike."""
        return (self.pf_name, self.pf), (self.ex_name, self.ex)

    @property
    def both(self) -> tuple[str, str]:
        return self.pf_name, self.ex_name


Violations = Iterator[Rejection]  # of one rule, by one pairing
RuleFunction = Callable[[Pairing], Violations]


@dataclass(frozen=True)
class Verdict:
    """The judgement of one pairing: `.ok`, and every reason if not. True where it is valid."""

    prepare_finalize: str
    experts: str
    problem: Problem
    machine: Machine
    rejections: tuple[Rejection, ...]

    @property
    def ok(self) -> bool:
        return not self.rejections

    def __bool__(self) -> bool:
        return self.ok

    @property
    def pairing(self) -> str:
        return f"{self.prepare_finalize} x {self.experts}"

    def __repr__(self) -> str:
        """Return the verdict in a line; `rejections` has the reasons."""
        rules = ", ".join(dict.fromkeys(rejection.rule for rejection in self.rejections))
        return f"<{self.pairing}, {self.problem}: {f'refused: {rules}' if rules else 'valid'}>"

    def _repr_html_(self) -> str:
        """Return a table of the reasons, for notebooks."""
        rows = ((r.rule, " / ".join(r.parties), r.got, r.need, r.hint) for r in self.rejections)
        caption = f"{str(self).splitlines()[0]}, {self.problem}"
        return notebook_html(caption, ("rule", "parties", "got", "need", "hint"), rows)

    def __str__(self) -> str:
        if self.ok:
            return f"{self.pairing}: valid"
        lines = [f"{self.pairing}: refused, {counted(len(self.rejections), 'reason')}"]
        return "\n".join([*lines, *(f"  - {r}" for r in self.rejections)])


def told(part: str, ask: Callable[[], Iterable[object]]) -> tuple[Rejection, ...]:
    """Return a part's own rejections.

    Where its code raises or returns another thing, one that says so: a fault in one package leaves
    every other pairing judged.
    """
    try:
        found = tuple(ask())
    except Exception as error:  # noqa: BLE001  another package's code
        got = reason(error)
    else:
        if not found:
            return ()
        given = tuple(r for r in found if isinstance(r, Rejection))
        if len(given) == len(found):
            return given
        got = repr(found)[:200]
    need = "extra_rejections to return rejections"
    return (Rejection("extra_rejections", (part,), got, need),)


def archs_text(archs: frozenset[tuple[int, int]]) -> str:
    """Compute capabilities for a message: "9.0 or 10.0"."""
    return " or ".join(f"{major}.{minor}" for major, minor in sorted(archs))


def numbered(values: Sequence[object] | frozenset[object]) -> str:
    """Sorted values for a message."""
    return ", ".join(sorted(str(v).removeprefix("torch.") for v in values))
