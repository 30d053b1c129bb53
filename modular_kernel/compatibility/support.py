"""Requirements and capabilities that parts declare, and the verdict on a pair of parts.

`modular_kernel.compatibility.rules.judge` checks the declarations (`Requirements`) of two parts
against a problem and a machine. It returns a `Verdict` with one `Rejection` for each violation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import torch

from modular_kernel.spec.problem import (
    GATED,
    MAX_TOP_K,
    UNGATED,
    ActivationFormat,
    Machine,
    Problem,
    Reduce,
    RowContents,
)
from modular_kernel.text import escape_nonprintable, format_count, render_notebook_html
from modular_kernel.utils.argument_checks import Count
from modular_kernel.utils.optional_imports import describe_error
from modular_kernel.utils.package_probes import PackageProbe

ALL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
ALL_ACTIVATIONS = frozenset(GATED + UNGATED)


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Declarations common to both kinds of part.

    activation_format: format that prepare returns and the experts accept.
    devices: supported device types.
    triton: the part uses Triton kernels, so a CPU needs Triton's interpreter.
    min_arch: minimum compute capability, such as (9, 0).
    archs: the only supported compute capabilities. None supports all compute capabilities that are
        at least min_arch.
    packages: names of the optional packages that the part imports.
    excluded_packages: packages whose presence identifies a library of the same name that the part
        cannot use. The part's `extra_rejections` refuses a machine that has one.
    providers: probes that recognize a package by its files, for import names that several packages
        share.
    packages_source_url: URL of the source code of `packages`, if no package index has them.
    packages_extra: extra of modular-kernel that installs `packages`, if their distributions have
        other names than the packages.
    dtypes: supported dtypes of the problem.
    top_k: minimum and maximum K.
    hidden_multiple: H must be a multiple of this number.
    hidden_sizes: the only supported H; None supports any.
    inplace: the output may overwrite x.
    graph_capturable: a call neither synchronizes nor allocates, and its shapes do not depend on
        data.
    deterministic: equal input gives bitwise equal output.
    batch_invariant: if the problem requires batch invariance, the part and its reducers compute an
        output for each token that is bitwise equal to the output of a call with only this token.
    lora: the part supports LoRA adapters. A PrepareAndFinalize dispatches the adapter slots with
        the tokens; experts add the LoRA deltas in both GEMMs.
    """

    activation_format: ActivationFormat
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    triton: bool = False
    min_arch: tuple[int, int] | None = None
    archs: frozenset[tuple[int, int]] | None = None
    packages: tuple[str, ...] = ()
    excluded_packages: tuple[str, ...] = ()
    providers: tuple[PackageProbe, ...] = ()
    packages_source_url: str = ""
    packages_extra: str = ""
    dtypes: frozenset[torch.dtype] = ALL_DTYPES
    top_k: tuple[int, int] = (1, MAX_TOP_K)
    hidden_multiple: Count = 1
    hidden_sizes: frozenset[int] | None = None
    inplace: bool = True
    graph_capturable: bool = False
    deterministic: bool = True
    batch_invariant: bool = False
    lora: bool = False

    @property
    def inspected_packages(self) -> tuple[str, ...]:
        """Packages whose presence decides whether the part can run."""
        return self.packages + self.excluded_packages

    def install_hint(self, package: str) -> str:
        """Return a command or an instruction that installs one of `packages`."""
        for probe in self.providers:
            if probe.name == package:
                return probe.source
        if self.packages_source_url:
            return f"build {package} from {self.packages_source_url}, not from a package index"
        if self.packages_extra:
            return f"pip install 'modular-kernel[{self.packages_extra}]'"
        return f"pip install {package}"


@dataclass(frozen=True, kw_only=True)
class PrepareFinalizeRequirements(Requirements):
    """Declarations of a PrepareAndFinalize.

    reduces: values of the experts' `reduce` that finalize supports.
    keep_topk: the output can be (T, K, H), that is, not summed over top-k.
    topk_indices_dtype: the only dtype of ids that the part accepts; None accepts any.
    localizes_ids: the dispatch produces local expert ids, or no ids at all, so the experts do not
        need an expert_map.
    multiplies_input: if the router weight applies to the input, prepare multiplies x by it, which
        requires K = 1.
    padding: content of rows without a token; None if every row has a token.
    dispatch_schemes: schemes whose activations the part quantizes before dispatch.
    can_defer_quant: the part can leave quantization to the experts.
    scale_layout: layout of the scales that the part dispatches.
    world_sizes: minimum and maximum world size; a maximum of None is no limit.
    one_host: all ranks must be on one host, because they share its memory.
    ranks_per_host: maximum number of ranks per host.
    full_hosts: if there are several hosts, each must have exactly ranks_per_host ranks.
    graph_across_hosts: graph_capturable also holds with several hosts.
    graph_on_request: graph_capturable holds only for problems with `graph`.
    linear_placement: the part supports only linear placements with equally many experts on each
        rank. If False, it looks up experts in Problem.placement and supports any placement.
    max_tokens: maximum number of tokens of a call; None is no limit.
    asynchronous: the part implements `prepare_no_receive`.
    replicated_input: every rank passes the same tokens and routing, and gets the full output. If
        False, each rank passes its own tokens, in any number.
    received_by_library: in every call, including planned and captured calls, a library allocates
        the received rows with torch's allocator, because only the library knows their number.
    bounds_received: the part's buffers can be sized for Problem.max_received rows.
    capacity_unit: in the batched format, each expert has capacity for T tokens of every rank, where
        T is rounded up to a multiple of this number.
    rounds_capacity: the part also rounds the capacity up to a multiple of the experts'
        `capacity_multiple`.
    """

    reduces: frozenset[Reduce]
    keep_topk: bool = False
    topk_indices_dtype: torch.dtype | None = None
    localizes_ids: bool = False
    multiplies_input: bool = False
    padding: RowContents | None = None
    dispatch_schemes: frozenset[str] = frozenset()
    can_defer_quant: bool = True
    scale_layout: str = "row_major"
    world_sizes: tuple[int, int | None] = (1, 1)
    one_host: bool = False
    ranks_per_host: int | None = None
    full_hosts: bool = False
    graph_across_hosts: bool = True
    graph_on_request: bool = False
    linear_placement: bool = True
    max_tokens: int | None = None
    asynchronous: bool = False
    replicated_input: bool = False
    received_by_library: bool = False
    bounds_received: bool = False
    capacity_unit: Count = 1
    rounds_capacity: bool = False

    def captures(self, problem: Problem) -> bool:
        """Return whether calls of a layer for `problem` can be captured in a CUDA graph."""
        return self.graph_capturable and (problem.graph or not self.graph_on_request)


@dataclass(frozen=True, kw_only=True)
class ExpertsRequirements(Requirements):
    """Declarations of a PermuteExpertsUnpermute.

    reduce: the reduction that the experts leave to finalize.
    keep_topk: the experts can leave (T, K, H) rows unreduced.
    activations: supported values of ActivationSpec.kind.
    interleaved: the experts support interleaved gate and up rows.
    up_first: a gated w1 must have its up rows first. If False, its gate rows must be first.
    bias: the experts support b1 and b2.
    weight_on_input: the experts can apply the router weight in GEMM 1.
    expert_map: the experts support ExpertWeights.expert_map.
    chunking: calls may be split along their tokens.
    invalid_rows: content of the output rows of skipped pairs.
    skips_padding: the experts never read rows without a token.
    schemes: names of the supported quantization schemes.
    external_schemes: the experts also support every scheme that another package provides.
    quantizes_input: the experts take unquantized activations and quantize them.
    scale_layout: layout of the activation scales that the experts read.
    whole_blocks: H and I must be multiples of the scheme's group.
    intermediate_multiple: I must be a multiple of this number.
    min_tokens: minimum T.
    max_experts: maximum E; None is no limit.
    max_elements: limit of T * K * max(N, H), for parts with 32-bit offsets; None for parts with
        64-bit offsets.
    blocks: supported (rows, columns) of weight blocks in block schemes; None supports any.
    capacity_multiple: in the batched format, each expert's capacity must be a multiple of this.
    library_allocates: in every call, including planned and captured calls, a library allocates
        with torch's allocator.
    nan_clamping_activations: activations for which a library's clamp turns a NaN in weights, scales
        or biases into the limit. A NaN in x or in a router weight is still propagated.
    tf32: float32 GEMMs may use TF32.
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
    invalid_rows: RowContents = RowContents.UNDEFINED
    skips_padding: bool = True
    schemes: frozenset[str] = frozenset({"none"})
    external_schemes: bool = False
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
    nan_clamping_activations: frozenset[str] = frozenset()
    tf32: bool = False


@dataclass(frozen=True)
class PlannedPart:
    """A part that is planned but not implemented.

    kind: "prepare_finalize" or "experts".
    blocked_on: what must exist before the part can be implemented.
    """

    name: str
    kind: str
    blocked_on: str


@dataclass(frozen=True)
class Rejection:
    """One violated rule.

    rule: name of the rule.
    parties: the conflicting inputs: names of parts, "problem" or "machine".
    got: what was found.
    need: what the rule requires.
    hint: what the user can do; may be empty.
    """

    rule: str
    parties: tuple[str, ...]
    got: str
    need: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        parties = " / ".join(self.parties)
        return escape_nonprintable(
            f"[{self.rule}] {parties}: got {self.got}, need {self.need}{hint}"
        )


@dataclass(frozen=True)
class RuleInput:
    """Input of a rule: the declarations of two parts, a problem and a machine."""

    prepare_finalize_name: str
    prepare_finalize: PrepareFinalizeRequirements
    experts_name: str
    experts: ExpertsRequirements
    problem: Problem
    machine: Machine

    def parts(self) -> tuple[tuple[str, Requirements], ...]:
        """Return (name, requirements) of both parts."""
        return (
            (self.prepare_finalize_name, self.prepare_finalize),
            (self.experts_name, self.experts),
        )

    @property
    def part_names(self) -> tuple[str, str]:
        return self.prepare_finalize_name, self.experts_name


Violations = Iterator[Rejection]  # what one rule yields for one pairing
RuleFunction = Callable[[RuleInput], Violations]


@dataclass(frozen=True)
class Verdict:
    """The result of `judge` for one pairing, which is truthy if there are no rejections."""

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
        """Return the pairing, the problem and the violated rules in one line."""
        rules = ", ".join(dict.fromkeys(rejection.rule for rejection in self.rejections))
        return f"<{self.pairing}, {self.problem}: {f'refused: {rules}' if rules else 'valid'}>"

    def _repr_html_(self) -> str:
        """Return the rejections as an HTML table, for notebooks."""
        rows = ((r.rule, " / ".join(r.parties), r.got, r.need, r.hint) for r in self.rejections)
        caption = f"{str(self).splitlines()[0]}, {self.problem}"
        return render_notebook_html(caption, ("rule", "parties", "got", "need", "hint"), rows)

    def __str__(self) -> str:
        if self.ok:
            return f"{self.pairing}: valid"
        lines = [f"{self.pairing}: refused, {format_count(len(self.rejections), 'reason')}"]
        return "\n".join([*lines, *(f"  - {r}" for r in self.rejections)])


class Verdicts(tuple[Verdict, ...]):
    """Verdicts of several pairings, shown as a grid in notebooks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return an HTML grid of pairings; each cell shows "ok" or the violated rules."""
        names = dict.fromkeys(verdict.experts for verdict in self)
        cells = {(v.prepare_finalize, v.experts): v for v in self}
        header_html = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
        body_html = ""
        for pf_name in dict.fromkeys(verdict.prepare_finalize for verdict in self):
            row_verdicts = (cells.get((pf_name, name)) for name in names)
            row_html = "".join(f"<td>{_format_cell(verdict)}</td>" for verdict in row_verdicts)
            body_html += f"<tr><th>{escape(pf_name)}</th>{row_html}</tr>"
        return f"<table><tr>{header_html}</tr>{body_html}</table>"


def _format_cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    rules = dict.fromkeys(rejection.rule for rejection in verdict.rejections)
    return "ok" if verdict.ok else escape(", ".join(rules))


def collect_rejections(
    part: str, get_rejections: Callable[[], Iterable[object]]
) -> tuple[Rejection, ...]:
    """Return the rejections that a part's `extra_rejections` returns.

    If `extra_rejections` raises, or returns anything but rejections, the result is one rejection
    that describes the failure, so that other pairings can still be judged.

    part: class name of the part.
    get_rejections: calls `extra_rejections`.
    """
    try:
        results = tuple(get_rejections())
    except Exception as error:  # noqa: BLE001  another package's code
        got = describe_error(error)
    else:
        if not results:
            return ()
        rejections = tuple(result for result in results if isinstance(result, Rejection))
        if len(rejections) == len(results):
            return rejections
        got = repr(results)[:200]
    need = "a tuple of Rejection objects from extra_rejections"
    return (Rejection("extra_rejections", (part,), got, need),)


def format_archs(archs: frozenset[tuple[int, int]]) -> str:
    """Return compute capabilities as text, such as "9.0 or 10.0"."""
    return " or ".join(f"{major}.{minor}" for major, minor in sorted(archs))


def format_sorted(values: Sequence[object] | frozenset[object]) -> str:
    """Return values as text, sorted and separated by commas."""
    return ", ".join(sorted(str(v).removeprefix("torch.") for v in values))
