"""Functions that select parts by all2all backend and problem, with the names that vLLM uses.

part    = maybe_make_prepare_finalize(problem, "deepep_low_latency", group)
experts = select_gemm_impl(problem, part)
kernel  = init_prepare_finalize(problem, "deepep_low_latency", group)
"""

from collections.abc import Mapping

from modular_kernel.catalog import Catalog, check, load_catalog, make_kernel, this_machine
from modular_kernel.compatibility.support import Rejection
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import ConfigurationError, IncompatibleError
from modular_kernel.kernel import FusedMoEModularKernel
from modular_kernel.operators.kernel_cache import NO_EP
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.utils.argument_checks import expect

# The prepare/finalize part of each all2all backend. Names follow vLLM if it has the backend.
ALL2ALL: Mapping[str, str] = {
    "naive": "ReplicatedEPPrepareAndFinalize",
    "allgather_reducescatter": "AllGatherReduceScatterPrepareAndFinalize",
    "all_to_all": "TorchAll2AllPrepareAndFinalize",
    "all_to_all_batched": "TorchAll2AllBatchedPrepareAndFinalize",
    "symm_mem": "SymmMemPrepareAndFinalize",
    "pplx": "PplxPrepareAndFinalize",
    "deepep_high_throughput": "DeepEPHTPrepareAndFinalize",
    "deepep_low_latency": "DeepEPLLPrepareAndFinalize",
    "deepep_v2": "DeepEPV2PrepareAndFinalize",
    "flashinfer_cutlass": "FlashInferCutlassMoEPrepareAndFinalize",
}
# Experts parts that are tried before all other parts, in this order.
_PREFERRED = ("TritonExperts", "BatchedTritonExperts", "TorchExperts", "NaiveBatchedExperts")


def maybe_make_prepare_finalize(
    problem: Problem, all2all_backend: str | None = None, group: object | None = None
) -> PrepareAndFinalize | None:
    """Return the prepare/finalize part of an all2all backend, or None for a single rank.

    Raises ConfigurationError for an unknown backend, or for several ranks without a backend, and
    UnknownPartError if the part is not installed.
    """
    name = _select_prepare_finalize(problem, all2all_backend)
    return None if name == NO_EP else load_catalog().prepare_finalize(name)(problem, group)


def select_gemm_impl(
    problem: Problem,
    prepare_finalize: PrepareAndFinalize | None = None,
    machine: Machine | None = None,
) -> PermuteExpertsUnpermute:
    """Return an experts part that supports the problem together with a prepare/finalize part.

    In contrast, `modular_kernel.compose` selects the fastest part.

    prepare_finalize: None means MoEPrepareAndFinalizeNoEP.
    machine: None means this machine.

    Raises IncompatibleError if no part supports the problem, with the reasons for every part that
    has the activation format of prepare_finalize.
    """
    expect("problem", problem, Problem)
    expect("prepare_finalize", prepare_finalize, PrepareAndFinalize | None)
    expect("machine", machine, Machine | None)
    catalog = load_catalog()
    part_class = type(prepare_finalize) if prepare_finalize else catalog.prepare_finalize(NO_EP)
    return catalog.experts(_select_experts(problem, part_class, catalog, machine))(problem)


def init_prepare_finalize(
    problem: Problem,
    all2all_backend: str | None = None,
    group: object | None = None,
    machine: Machine | None = None,
) -> FusedMoEModularKernel:
    """Return a kernel of the backend's prepare/finalize part and a supported experts part.

    The arguments are those of `maybe_make_prepare_finalize` and `select_gemm_impl`.
    """
    catalog = load_catalog()
    part_class = catalog.prepare_finalize(_select_prepare_finalize(problem, all2all_backend))
    experts = _select_experts(problem, part_class, catalog, machine)
    return make_kernel(part_class, experts, problem, group=group, machine=machine)


def _select_prepare_finalize(problem: Problem, all2all_backend: str | None) -> str:
    expect("problem", problem, Problem)
    expect("all2all_backend", all2all_backend, str | None)
    if all2all_backend is not None and all2all_backend not in ALL2ALL:
        got, need = repr(all2all_backend)[:80], f"None or one of {', '.join(ALL2ALL)}"
        raise ConfigurationError("all2all_backend", got=got, need=need)
    world_size = problem.parallel.world_size
    if world_size == 1:
        return NO_EP
    if all2all_backend is None:
        need = f"one of {', '.join(ALL2ALL)}, because there are {world_size} ranks"
        raise ConfigurationError("all2all_backend", got=None, need=need)
    return ALL2ALL[all2all_backend]


def _select_experts(
    problem: Problem,
    prepare_finalize: type[PrepareAndFinalize],
    catalog: Catalog,
    machine: Machine | None,
) -> str:
    machine = this_machine() if machine is None else machine
    names = sorted(catalog.names("experts"), key=lambda name: name not in _PREFERRED)
    reasons: list[Rejection] = []
    for name in (*(n for n in _PREFERRED if n in names), *names):
        verdict = check(prepare_finalize, name, problem, machine)
        if verdict.ok:
            return name
        if all(rejection.rule != "format" for rejection in verdict.rejections):
            reasons += verdict.rejections
    pairing = f"{prepare_finalize.__name__} with any experts"
    raise IncompatibleError(pairing, tuple(dict.fromkeys(reasons)))
