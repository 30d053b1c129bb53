"""ComposedKernel: a layer that runs one of several kernels, by the number of tokens of a call.

The kernels differ in their pairing, that is, in their PrepareAndFinalize or experts class. All
kernels are built when `compose` creates the layer, so a call only looks up which kernel to run.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.errors import CapacityError, ConfigurationError, WeightsError
from modular_kernel.kernel import FusedMoEModularKernel, Plan
from modular_kernel.measure.routing_patterns import RoutingKind, draw_routing
from modular_kernel.select.pairing_choice import PairingChoice
from modular_kernel.select.selection import Pair, Segment
from modular_kernel.spec.problem import Machine, Size
from modular_kernel.tensors import ExpertWeights, Routing, check_weight_tensors
from modular_kernel.text import format_span, render_notebook_html
from modular_kernel.utils.argument_checks import expect_each
from modular_kernel.validate import count_tokens

_SEED = 5


@dataclass(frozen=True)
class KernelRange:
    """A kernel, and the largest number of tokens (`last`) of a call that uses the kernel.

    The smallest number of tokens is one more than `last` of the previous range.
    """

    last: int
    kernel: FusedMoEModularKernel


class ComposedKernel:
    """A layer with a kernel for each range of token counts. `compose` creates it.

    Over several ranks, all ranks must run the same kernel, although their numbers of tokens may
    differ. A call therefore uses the kernel for problem.tokens, unless all ranks pass `max_tokens`,
    the maximum number of tokens over ranks in this call. If all ranks pass the same tokens
    (`MeasurementOptions.replicated`), `max_tokens` is not needed.
    """

    def __init__(self, choice: PairingChoice, kernel_ranges: Sequence[KernelRange]) -> None:
        self.choice, self.kernel_ranges = choice, tuple(kernel_ranges)
        self.problem = choice.problem
        self._lookup = KernelLookup(choice, [kernel_range.last for kernel_range in kernel_ranges])

    def __repr__(self) -> str:
        return f"<composed of {self.pairing}, {self.problem} on {self.choice.machine}>"

    def _repr_html_(self) -> str:
        """Return an HTML table of the pairings by number of tokens, for notebooks."""
        rows, first = [], 0
        for kernel_range in self.kernel_ranges:
            rows.append(
                (format_span(first, kernel_range.last), *kernel_range.kernel.pairing.split(" x "))
            )
            first = kernel_range.last + 1
        caption = f"composed, {self.problem} on {self.choice.machine}"
        return render_notebook_html(caption, ("tokens", "prepare_finalize", "experts"), rows)

    @property
    def pairing(self) -> str:
        """Names of the pairings in use, in ascending order of their token counts."""
        return ", ".join(
            dict.fromkeys(kernel_range.kernel.pairing for kernel_range in self.kernel_ranges)
        )

    def kernel(self, tokens: int) -> FusedMoEModularKernel:
        """Return the kernel for this number of tokens.

        Raises CapacityError if `tokens` exceeds the maximum of the layer.
        """
        return self.kernel_ranges[self._lookup.index(tokens, tokens)].kernel

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        *,
        out: torch.Tensor | None = None,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        """Run the kernel for the number of tokens of x_TH. Return the output of the layer.

        FusedMoEModularKernel.__call__ describes the other arguments.

        max_tokens: maximum number of tokens over ranks, see ComposedKernel.
        """
        kernel_range = self.kernel_ranges[self._lookup.index(count_tokens(x_TH), max_tokens)]
        return kernel_range.kernel(x_TH, weights, routing, out=out)

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Call FusedMoEModularKernel.prepare_weights for all kernels. Return the weights."""
        weights = self.kernel_ranges[0].kernel.prepare_weights(weights)
        for kernel in (kernel_range.kernel for kernel_range in self.kernel_ranges[1:]):
            specs = kernel.experts.prepared_specs()
            if any(getattr(weights, name) is None for name in specs):
                weights = kernel.prepare_weights(weights)
        return weights

    def plan(self) -> "ComposedPlan":
        """Return a plan with allocated buffers for all kernels."""
        plans: dict[int, Plan] = {}
        for kernel_range in self.kernel_ranges:
            if id(kernel_range.kernel) not in plans:
                plans[id(kernel_range.kernel)] = kernel_range.kernel.plan()
        return ComposedPlan(
            self, [plans[id(kernel_range.kernel)] for kernel_range in self.kernel_ranges]
        )

    def destroy(self) -> None:
        """Release the resources that parts share with other ranks."""
        for kernel in {id(r.kernel): r.kernel for r in self.kernel_ranges}.values():
            destroy = getattr(kernel.prepare_finalize, "destroy", None)
            if destroy is not None:
                destroy()


class ComposedPlan:
    """The plans of all kernels of a ComposedKernel.

    A call allocates nothing. It can be captured in a CUDA graph if the parts of its kernel can be
    captured. As with Plan, the next call overwrites the returned tensor.
    """

    def __init__(self, kernel: ComposedKernel, plans: Sequence[Plan]) -> None:
        self.kernel, self.problem = kernel, kernel.problem
        self.plans = tuple(plans)
        self._lookup = kernel._lookup

    def __repr__(self) -> str:
        return f"<plans of {self.kernel.pairing}, {self.problem}: {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of the workspaces of all plans, without the outputs."""
        return sum(plan.nbytes for plan in {id(p): p for p in self.plans}.values())

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        *,
        out: torch.Tensor | None = None,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        """Run the plan for the number of tokens of x_TH. Return the output of the layer.

        FusedMoEModularKernel.__call__ describes the other arguments.

        max_tokens: maximum number of tokens over ranks, see ComposedKernel.
        """
        plan = self.plans[self._lookup.index(count_tokens(x_TH), max_tokens)]
        return plan(x_TH, weights, routing, out=out)

    def warm_up(self, weights: ExpertWeights, tokens: Iterable[int] | None = None) -> int:
        """Call the plan once for each number of tokens, so that later calls compile nothing.

        Returns the number of calls. All ranks must call this method.

        tokens: token counts of the calls; None uses `list_warm_up_token_counts`.
        """
        if not isinstance(weights, ExpertWeights):
            raise WeightsError("weights", got=type(weights).__name__, need="ExpertWeights")
        check_weight_tensors(weights)
        token_counts = list_warm_up_token_counts(self.problem.tokens)
        if tokens is not None:
            token_counts = expect_each("tokens to warm up", tokens, Size)
        device = weights.w1.device
        generator = torch.Generator(device).manual_seed(_SEED)
        for tokens_of_call in token_counts:
            shape = (tokens_of_call, self.problem.hidden)
            x_TH = torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(
                self.problem.dtype
            )
            routing = draw_routing(
                self.problem.with_tokens(tokens_of_call), RoutingKind("uniform"), generator
            )
            self(x_TH, weights, routing, max_tokens=tokens_of_call)
        return len(token_counts)


class KernelLookup:
    """Finds the kernel range of a call.

    range_ends: `KernelRange.last` of all ranges, ascending.
    """

    def __init__(self, choice: PairingChoice, range_ends: Sequence[int]) -> None:
        self._range_ends = list(range_ends)
        # The last range ends before problem.tokens if no pairing is valid for larger token counts.
        self._max_tokens = min(choice.problem.tokens, self._range_ends[-1])
        self._has_equal_tokens_on_ranks = (
            choice.problem.parallel.world_size == 1 or choice.replicated
        )

    def index(self, tokens: int, max_tokens: int | None) -> int:
        """Return the index of the range for a call.

        tokens: number of tokens of this rank.
        max_tokens: maximum number of tokens over ranks, see ComposedKernel.

        Raises ConfigurationError if `max_tokens` is less than `tokens`, and CapacityError if no
        kernel supports so many tokens.
        """
        if max_tokens is None:
            max_tokens = tokens if self._has_equal_tokens_on_ranks else self._max_tokens
        elif type(max_tokens) is not int or max_tokens < tokens:
            raise ConfigurationError("max_tokens", got=max_tokens, need=f">= {tokens}, x's")
        if max_tokens > self._max_tokens:
            raise CapacityError(
                "tokens", got=max_tokens, need=f"<= {self._max_tokens}, the kernel's"
            )
        return bisect_left(self._range_ends, max_tokens)


def list_warm_up_token_counts(max_tokens: int) -> tuple[int, ...]:
    """Return the token counts n and n + 1 for all powers of two n, and 1.5 n and 1.5 n + 1.

    They include odd numbers and multiples of 16 of every magnitude, for which Triton compiles
    different specializations. Counts above `max_tokens` are omitted, and `max_tokens` is added.
    """
    token_counts = {max_tokens}
    power = 1
    while power <= max_tokens:
        token_counts |= {
            n for n in (power, power + 1, power * 3 // 2, power * 3 // 2 + 1) if n <= max_tokens
        }
        power *= 2
    return tuple(sorted(token_counts - {0}))


def build_composed_kernel(
    choice: PairingChoice, machine: Machine, group: object | None
) -> ComposedKernel:
    """Build all kernels of the choice, each for the maximum number of tokens that it runs.

    A pairing has one kernel, unless its dispatched shape does not depend on the number of tokens of
    a call. The cost of a call then depends on problem.tokens, so the pairing has one kernel for
    each bucket (number of tokens at which pairings were compared). All ranks must call this
    function.
    """
    problem, kernels = choice.problem, dict[tuple[Pair, int], FusedMoEModularKernel]()
    managers: dict[str, object] = {}  # by name of the PrepareAndFinalize

    def get_kernel(pair: Pair, tokens: int) -> FusedMoEModularKernel:
        key = pair, tokens
        if key not in kernels:
            sized_problem, part_group = problem.with_tokens(tokens), managers.get(pair[0], group)
            kernels[key] = make_kernel(*pair, sized_problem, group=part_group, machine=machine)
            manager = getattr(kernels[key].prepare_finalize, "manager", None)
            if manager is not None:  # all kernels of a part share its communicator
                managers[pair[0]] = manager
        return kernels[key]

    max_tokens: dict[Pair, int] = {}
    for segment in choice.segments:
        max_tokens[segment.pair] = max(max_tokens.get(segment.pair, 0), segment.last)
    kernel_ranges = []
    for segment in choice.segments:
        kernel = get_kernel(segment.pair, max_tokens[segment.pair])
        if _has_fixed_dispatch_shape(kernel):
            ends = _list_bucket_ends(segment, choice.tokens)
            kernel_ranges += [KernelRange(last, get_kernel(segment.pair, last)) for last in ends]
        else:
            kernel_ranges.append(KernelRange(segment.last, kernel))
    return ComposedKernel(choice, kernel_ranges)


def _has_fixed_dispatch_shape(kernel: FusedMoEModularKernel) -> bool:
    """Return whether the dispatched shape does not depend on the number of tokens of a call."""
    tokens = kernel.problem.tokens
    part = kernel.prepare_finalize
    return tokens > 1 and part.dispatch_shape(1) == part.dispatch_shape(tokens)


def _list_bucket_ends(segment: Segment, tokens: Sequence[int]) -> list[int]:
    """Return the token counts of the buckets inside a segment, and its last token count."""
    return [*(t for t in tokens if segment.first <= t < segment.last), segment.last]
