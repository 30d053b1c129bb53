"""Rules that check the problem against each part: dtypes, schemes, sizes, ranks and options."""

from collections.abc import Callable

from modular_kernel.compatibility.support import (
    PrepareFinalizeRequirements,
    Rejection,
    RuleFunction,
    RuleInput,
    Violations,
    format_sorted,
)
from modular_kernel.quant.quantized_weights import list_indivisible_sizes, values_per_word
from modular_kernel.spec.problem import Problem, dtype_name
from modular_kernel.text import format_span


def check_dtype(pairing: RuleInput) -> Violations:
    for name, requires in pairing.parts():
        if pairing.problem.dtype not in requires.dtypes:
            got = dtype_name(pairing.problem.dtype)
            yield Rejection("dtype", (name, "problem"), got, format_sorted(requires.dtypes))


def check_fp32_precision(pairing: RuleInput) -> Violations:
    if pairing.problem.fp32_precision == "tf32" and not pairing.experts.tf32:
        hint = "use fp32_precision=ieee"
        yield Rejection("fp32_precision", (pairing.experts_name, "problem"), "tf32", "ieee", hint)


def check_top_k(pairing: RuleInput) -> Violations:
    for name, requires in pairing.parts():
        low, high = requires.top_k
        if not low <= pairing.problem.top_k <= high:
            yield Rejection(
                "top_k", (name, "problem"), str(pairing.problem.top_k), format_span(low, high)
            )


def check_hidden(pairing: RuleInput) -> Violations:
    hidden = pairing.problem.hidden
    for name, requires in pairing.parts():
        if hidden % requires.hidden_multiple:
            need = f"a multiple of {requires.hidden_multiple}"
            yield Rejection("hidden", (name, "problem"), str(hidden), need)
        if requires.hidden_sizes is not None and hidden not in requires.hidden_sizes:
            sizes = ", ".join(map(str, sorted(requires.hidden_sizes)))
            yield Rejection("hidden", (name, "problem"), str(hidden), f"one of {sizes}")


def check_intermediate(pairing: RuleInput) -> Violations:
    if pairing.problem.intermediate % pairing.experts.intermediate_multiple:
        need = f"a multiple of {pairing.experts.intermediate_multiple}"
        got = str(pairing.problem.intermediate)
        yield Rejection("intermediate", (pairing.experts_name, "problem"), got, need)


def check_quant(pairing: RuleInput) -> Violations:
    scheme, experts = pairing.problem.scheme, pairing.experts
    if scheme.name in experts.schemes or (scheme.external and experts.external_schemes):
        return
    need = format_sorted(experts.schemes)
    yield Rejection("quant", (pairing.experts_name, "problem"), pairing.problem.quant, need)


def check_quant_block(pairing: RuleInput) -> Violations:
    group = pairing.problem.scheme.group
    if not pairing.experts.whole_blocks or not group:
        return
    for what, size in (
        ("hidden", pairing.problem.hidden),
        ("intermediate", pairing.problem.intermediate),
    ):
        if size % group[-1]:
            need = f"a multiple of the {pairing.problem.quant} group {group[-1]}"
            yield Rejection(
                "quant_block", (pairing.experts_name, "problem"), f"{what}={size}", need
            )


def check_blocks(pairing: RuleInput) -> Violations:
    scheme = pairing.problem.scheme
    if (
        pairing.experts.blocks is not None
        and scheme.granularity == "block"
        and scheme.group not in pairing.experts.blocks
    ):
        got, need = (
            "x".join(map(str, block)) for block in (scheme.group, min(pairing.experts.blocks))
        )
        yield Rejection("blocks", (pairing.experts_name, "problem"), got, need)


def check_packing(pairing: RuleInput) -> Violations:
    """Require row sizes that are multiples of the number of values in a packed byte or word."""
    values_per_pack = values_per_word(pairing.problem.scheme)
    for name in list_indivisible_sizes(pairing.problem):
        got = f"{name}={getattr(pairing.problem, name)}"
        scheme = pairing.problem.scheme
        need = f"a multiple of {values_per_pack}, the number of values that {scheme} packs together"
        yield Rejection("packing", (pairing.experts_name, "problem"), got, need)


def check_min_tokens(pairing: RuleInput) -> Violations:
    if pairing.problem.tokens < pairing.experts.min_tokens:
        got, need = str(pairing.problem.tokens), f">= {pairing.experts.min_tokens}"
        yield Rejection("min_tokens", (pairing.experts_name, "problem"), got, need)


def check_max_experts(pairing: RuleInput) -> Violations:
    if (
        pairing.experts.max_experts is not None
        and pairing.problem.experts > pairing.experts.max_experts
    ):
        got, need = str(pairing.problem.experts), f"<= {pairing.experts.max_experts}"
        yield Rejection("max_experts", (pairing.experts_name, "problem"), got, need)


def check_addressing(pairing: RuleInput) -> Violations:
    tokens = min(pairing.problem.tokens, pairing.problem.chunk_tokens or pairing.problem.tokens)
    widest = max(pairing.problem.w1_rows, pairing.problem.hidden)
    elements = tokens * pairing.problem.top_k * widest
    if pairing.experts.max_elements is not None and elements > pairing.experts.max_elements:
        need = f"<= {pairing.experts.max_elements} (32-bit offsets)"
        hint = "set chunk_tokens" if pairing.experts.chunking else ""
        yield Rejection(
            "addressing", (pairing.experts_name, "problem"), f"{elements} elements", need, hint
        )


def check_world_size(pairing: RuleInput) -> Violations:
    low, high = pairing.prepare_finalize.world_sizes
    world = pairing.problem.parallel.world_size
    if world < low or (high is not None and world > high):
        need = f">= {low}" if high is None else format_span(low, high)
        yield Rejection("world_size", (pairing.prepare_finalize_name, "problem"), str(world), need)


def check_hosts(pairing: RuleInput) -> Violations:
    """Require numbers of hosts and of ranks per host that the part supports."""
    parallel, limit, parties = (
        pairing.problem.parallel,
        pairing.prepare_finalize.ranks_per_host,
        (pairing.prepare_finalize_name, "problem"),
    )
    hosts = parallel.hosts
    per_host = parallel.world_size // hosts
    if pairing.prepare_finalize.one_host and hosts != 1:
        yield Rejection("hosts", parties, f"{hosts} hosts", "at most 1")
    if limit is not None and per_host > limit:
        hint = "set Parallel.ranks_per_host"
        yield Rejection("hosts", parties, f"{per_host} ranks on a host", f"at most {limit}", hint)
    elif pairing.prepare_finalize.full_hosts and hosts != 1 and per_host != limit:
        got = f"{per_host} on each of {hosts} hosts"
        yield Rejection("hosts", parties, got, f"{limit} ranks on each of several hosts")
    if pairing.problem.graph and hosts != 1 and not pairing.prepare_finalize.graph_across_hosts:
        need = "graph=False: across hosts the CPU waits for row counts"
        yield Rejection("hosts", parties, "graph=True", need)


def check_max_received(pairing: RuleInput) -> Violations:
    if pairing.problem.max_received is not None and not pairing.prepare_finalize.bounds_received:
        need = "max_received=None, because its buffers hold all tokens of every rank"
        got = f"max_received={pairing.problem.max_received}"
        yield Rejection("max_received", (pairing.prepare_finalize_name, "problem"), got, need)


def check_placement(pairing: RuleInput) -> Violations:
    world, experts = pairing.problem.parallel.world_size, pairing.problem.experts
    if not pairing.prepare_finalize.linear_placement:
        return
    if experts % world:
        need = f"a multiple of world_size {world}"
        yield Rejection(
            "placement", (pairing.prepare_finalize_name, "problem"), f"experts={experts}", need
        )
    if not pairing.problem.placement.is_linear:
        yield Rejection(
            "placement", (pairing.prepare_finalize_name, "problem"), "another placement", "linear"
        )


def check_capacity(pairing: RuleInput) -> Violations:
    if (
        pairing.prepare_finalize.max_tokens is not None
        and pairing.problem.tokens > pairing.prepare_finalize.max_tokens
    ):
        got, need = (
            f"tokens={pairing.problem.tokens}",
            f"<= {pairing.prepare_finalize.max_tokens} per rank",
        )
        yield Rejection("capacity", (pairing.prepare_finalize_name, "problem"), got, need)


def check_ids_dtype(pairing: RuleInput) -> Violations:
    need, got = pairing.prepare_finalize.topk_indices_dtype, pairing.problem.ids_dtype
    if need is not None and got is not None and need != got:
        hint = "have the router emit that dtype"
        parties = (pairing.prepare_finalize_name, "problem")
        yield Rejection("ids_dtype", parties, dtype_name(got), dtype_name(need), hint)


def check_activation(pairing: RuleInput) -> Violations:
    act = pairing.problem.act
    if act.kind not in pairing.experts.activations:
        need = format_sorted(pairing.experts.activations)
        yield Rejection("activation", (pairing.experts_name, "problem"), act.kind, need)
    if act.interleaved and not pairing.experts.interleaved:
        got, need = "interleaved gate and up rows", "up" if pairing.experts.up_first else "gate"
        yield Rejection("activation", (pairing.experts_name, "problem"), got, f"{need} rows first")
    elif act.gated and not act.interleaved and act.up_first != pairing.experts.up_first:
        got, need = ("up", "gate") if act.up_first else ("gate", "up")
        hint = (
            "modular_kernel.quant.row_order puts up rows first" if pairing.experts.up_first else ""
        )
        parties = (pairing.experts_name, "problem")
        yield Rejection("activation", parties, f"{got} rows first", f"{need} rows first", hint)


def check_bias(pairing: RuleInput) -> Violations:
    if pairing.problem.bias and not pairing.experts.bias:
        yield Rejection("bias", (pairing.experts_name, "problem"), "b1 and b2", "no biases")


def check_chunking(pairing: RuleInput) -> Violations:
    if pairing.problem.chunk_tokens is not None and not pairing.experts.chunking:
        got = f"chunk_tokens={pairing.problem.chunk_tokens}"
        yield Rejection("chunking", (pairing.experts_name, "problem"), got, "chunk_tokens=None")


def make_property_rule(
    rule: str, is_required: Callable[[Problem], bool], declared: str
) -> RuleFunction:
    """Return a rule for a property that both parts must have if the problem requires it.

    rule: name of the rule.
    is_required: whether a problem requires the property.
    declared: field of Requirements that says whether a part has the property.
    """

    def check(pairing: RuleInput) -> Violations:
        if not is_required(pairing.problem):
            return
        for name, requires in pairing.parts():
            if not getattr(requires, declared):
                yield Rejection(rule, (name, "problem"), f"not {declared}", declared)

    return check


def check_batch_invariant(pairing: RuleInput) -> Violations:
    """Require batch invariance of both parts, and scales and a placement that allow it."""
    if not pairing.problem.batch_invariant:
        return
    rule, scheme = "batch_invariant", pairing.problem.scheme
    for name, requires in pairing.parts():
        if not requires.batch_invariant:
            got = "sums that may depend on the other tokens of the call"
            yield Rejection(rule, (name, "problem"), got, "batch_invariant")
    if scheme.activation_granularity == "tensor" and not scheme.static:
        got = f"{scheme}, which computes one activation scale from all tokens of a call"
        yield Rejection(rule, ("problem",), got, "a static scale, or a scale per token or group")
    if pairing.problem.placement.has_copies:
        got = "copies of experts, which are chosen by a token's position in the call"
        yield Rejection(rule, ("problem",), got, "each expert on one rank")


def check_asynchronous(pairing: RuleInput) -> Violations:
    if pairing.problem.asynchronous and not pairing.prepare_finalize.asynchronous:
        got, need = "no prepare_no_receive", "prepare_no_receive"
        yield Rejection("asynchronous", (pairing.prepare_finalize_name, "problem"), got, need)


def check_lora(pairing: RuleInput) -> Violations:
    """Require a dispatch that carries adapter slots, and GEMMs that add LoRA deltas."""
    if pairing.problem.adapters is None:
        return
    for name, requires in pairing.parts():
        if not requires.lora:
            is_dispatch = isinstance(requires, PrepareFinalizeRequirements)
            hint = (
                "the dispatch does not carry adapter slots"
                if is_dispatch
                else "its GEMMs do not add LoRA deltas"
            )
            yield Rejection(
                "lora", (name, "problem"), str(pairing.problem.lora), "no adapters", hint
            )
    if pairing.problem.scheme.act_order:
        # The activation output has the sorted column order of w2, but adapters are not sorted.
        yield Rejection("lora", ("problem",), pairing.problem.quant, "no act_order")
