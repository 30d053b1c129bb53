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
from modular_kernel.quant.quantized_weights import indivisible_sizes, values_per_word
from modular_kernel.spec.problem import Problem, dtype_name


def check_dtype(pair: RuleInput) -> Violations:
    for name, requires in pair.parts():
        if pair.problem.dtype not in requires.dtypes:
            got = dtype_name(pair.problem.dtype)
            yield Rejection("dtype", (name, "problem"), got, format_sorted(requires.dtypes))


def check_fp32_precision(pair: RuleInput) -> Violations:
    if pair.problem.fp32_precision == "tf32" and not pair.experts.tf32:
        hint = "use fp32_precision=ieee"
        yield Rejection("fp32_precision", (pair.experts_name, "problem"), "tf32", "ieee", hint)


def check_top_k(pair: RuleInput) -> Violations:
    for name, requires in pair.parts():
        low, high = requires.top_k
        if not low <= pair.problem.top_k <= high:
            yield Rejection("top_k", (name, "problem"), str(pair.problem.top_k), f"{low} to {high}")


def check_hidden(pair: RuleInput) -> Violations:
    hidden = pair.problem.hidden
    for name, requires in pair.parts():
        if hidden % requires.hidden_multiple:
            need = f"a multiple of {requires.hidden_multiple}"
            yield Rejection("hidden", (name, "problem"), str(hidden), need)
        if requires.hidden_sizes is not None and hidden not in requires.hidden_sizes:
            sizes = ", ".join(map(str, sorted(requires.hidden_sizes)))
            yield Rejection("hidden", (name, "problem"), str(hidden), f"one of {sizes}")


def check_intermediate(pair: RuleInput) -> Violations:
    if pair.problem.intermediate % pair.experts.intermediate_multiple:
        need = f"a multiple of {pair.experts.intermediate_multiple}"
        got = str(pair.problem.intermediate)
        yield Rejection("intermediate", (pair.experts_name, "problem"), got, need)


def check_quant(pair: RuleInput) -> Violations:
    scheme, experts = pair.problem.scheme, pair.experts
    if scheme.name in experts.schemes or (scheme.external and experts.external_schemes):
        return
    need = format_sorted(experts.schemes)
    yield Rejection("quant", (pair.experts_name, "problem"), pair.problem.quant, need)


def check_quant_block(pair: RuleInput) -> Violations:
    group = pair.problem.scheme.group
    if not pair.experts.whole_blocks or not group:
        return
    for what, size in (
        ("hidden", pair.problem.hidden),
        ("intermediate", pair.problem.intermediate),
    ):
        if size % group[-1]:
            need = f"a multiple of the {pair.problem.quant} group {group[-1]}"
            yield Rejection("quant_block", (pair.experts_name, "problem"), f"{what}={size}", need)


def check_blocks(pair: RuleInput) -> Violations:
    scheme = pair.problem.scheme
    if (
        pair.experts.blocks is not None
        and scheme.granularity == "block"
        and scheme.group not in pair.experts.blocks
    ):
        got, need = (
            "x".join(map(str, block)) for block in (scheme.group, min(pair.experts.blocks))
        )
        yield Rejection("blocks", (pair.experts_name, "problem"), got, need)


def check_packing(pair: RuleInput) -> Violations:
    """Require row sizes that are multiples of the number of values in a packed byte or word."""
    step = values_per_word(pair.problem.scheme)
    for name in indivisible_sizes(pair.problem):
        got = f"{name}={getattr(pair.problem, name)}"
        need = (
            f"a multiple of {step}, the number of values that {pair.problem.scheme} packs together"
        )
        yield Rejection("packing", (pair.experts_name, "problem"), got, need)


def check_min_tokens(pair: RuleInput) -> Violations:
    if pair.problem.tokens < pair.experts.min_tokens:
        got, need = str(pair.problem.tokens), f">= {pair.experts.min_tokens}"
        yield Rejection("min_tokens", (pair.experts_name, "problem"), got, need)


def check_max_experts(pair: RuleInput) -> Violations:
    if pair.experts.max_experts is not None and pair.problem.experts > pair.experts.max_experts:
        got, need = str(pair.problem.experts), f"<= {pair.experts.max_experts}"
        yield Rejection("max_experts", (pair.experts_name, "problem"), got, need)


def check_addressing(pair: RuleInput) -> Violations:
    tokens = min(pair.problem.tokens, pair.problem.chunk_tokens or pair.problem.tokens)
    widest = max(pair.problem.w1_rows, pair.problem.hidden)
    elements = tokens * pair.problem.top_k * widest
    if pair.experts.max_elements is not None and elements > pair.experts.max_elements:
        need = f"<= {pair.experts.max_elements} (32-bit offsets)"
        hint = "set chunk_tokens" if pair.experts.chunking else ""
        yield Rejection(
            "addressing", (pair.experts_name, "problem"), f"{elements} elements", need, hint
        )


def check_world_size(pair: RuleInput) -> Violations:
    low, high = pair.prepare_finalize.world_sizes
    world = pair.problem.parallel.world_size
    if world < low or (high is not None and world > high):
        need = f"{low} to {high}" if high is not None else f">= {low}"
        yield Rejection("world_size", (pair.prepare_finalize_name, "problem"), str(world), need)


def check_hosts(pair: RuleInput) -> Violations:
    """Require numbers of hosts and of ranks per host that the part supports."""
    parallel, limit, parties = (
        pair.problem.parallel,
        pair.prepare_finalize.ranks_per_host,
        (pair.prepare_finalize_name, "problem"),
    )
    hosts = parallel.hosts
    per_host = parallel.world_size // hosts
    if pair.prepare_finalize.one_host and hosts != 1:
        yield Rejection("hosts", parties, f"{hosts} hosts", "at most 1")
    if limit is not None and per_host > limit:
        hint = "set Parallel.ranks_per_host"
        yield Rejection("hosts", parties, f"{per_host} ranks on a host", f"at most {limit}", hint)
    elif pair.prepare_finalize.full_hosts and hosts != 1 and per_host != limit:
        got = f"{per_host} on each of {hosts} hosts"
        yield Rejection("hosts", parties, got, f"{limit} ranks on each of several hosts")
    if pair.problem.graph and hosts != 1 and not pair.prepare_finalize.graph_across_hosts:
        need = "graph=False: across hosts the CPU waits for row counts"
        yield Rejection("hosts", parties, "graph=True", need)


def check_max_received(pair: RuleInput) -> Violations:
    if pair.problem.max_received is not None and not pair.prepare_finalize.bounds_received:
        need = "max_received=None, because its buffers hold all tokens of every rank"
        got = f"max_received={pair.problem.max_received}"
        yield Rejection("max_received", (pair.prepare_finalize_name, "problem"), got, need)


def check_placement(pair: RuleInput) -> Violations:
    world, experts = pair.problem.parallel.world_size, pair.problem.experts
    if not pair.prepare_finalize.linear_placement:
        return
    if experts % world:
        need = f"a multiple of world_size {world}"
        yield Rejection(
            "placement", (pair.prepare_finalize_name, "problem"), f"experts={experts}", need
        )
    if not pair.problem.placement.is_linear:
        yield Rejection(
            "placement", (pair.prepare_finalize_name, "problem"), "another placement", "linear"
        )


def check_capacity(pair: RuleInput) -> Violations:
    if (
        pair.prepare_finalize.max_tokens is not None
        and pair.problem.tokens > pair.prepare_finalize.max_tokens
    ):
        got, need = (
            f"tokens={pair.problem.tokens}",
            f"<= {pair.prepare_finalize.max_tokens} per rank",
        )
        yield Rejection("capacity", (pair.prepare_finalize_name, "problem"), got, need)


def check_ids_dtype(pair: RuleInput) -> Violations:
    need, got = pair.prepare_finalize.topk_indices_dtype, pair.problem.ids_dtype
    if need is not None and got is not None and need != got:
        hint = "have the router emit that dtype"
        parties = (pair.prepare_finalize_name, "problem")
        yield Rejection("ids_dtype", parties, dtype_name(got), dtype_name(need), hint)


def check_activation(pair: RuleInput) -> Violations:
    act = pair.problem.act
    if act.kind not in pair.experts.activations:
        need = format_sorted(pair.experts.activations)
        yield Rejection("activation", (pair.experts_name, "problem"), act.kind, need)
    if act.interleaved and not pair.experts.interleaved:
        got, need = "interleaved gate and up rows", "up" if pair.experts.up_first else "gate"
        yield Rejection("activation", (pair.experts_name, "problem"), got, f"{need} rows first")
    elif act.gated and not act.interleaved and act.up_first != pair.experts.up_first:
        got, need = ("up", "gate") if act.up_first else ("gate", "up")
        hint = "modular_kernel.quant.row_order puts up rows first" if pair.experts.up_first else ""
        parties = (pair.experts_name, "problem")
        yield Rejection("activation", parties, f"{got} rows first", f"{need} rows first", hint)


def check_bias(pair: RuleInput) -> Violations:
    if pair.problem.bias and not pair.experts.bias:
        yield Rejection("bias", (pair.experts_name, "problem"), "b1 and b2", "no biases")


def check_chunking(pair: RuleInput) -> Violations:
    if pair.problem.chunk_tokens is not None and not pair.experts.chunking:
        got = f"chunk_tokens={pair.problem.chunk_tokens}"
        yield Rejection("chunking", (pair.experts_name, "problem"), got, "chunk_tokens=None")


def make_property_rule(
    rule: str, is_required: Callable[[Problem], bool], declared: str
) -> RuleFunction:
    """Return a rule for a property that both parts must have if the problem requires it.

    rule: name of the rule.
    is_required: whether a problem requires the property.
    declared: field of Requirements that says whether a part has the property.
    """

    def check(pair: RuleInput) -> Violations:
        if not is_required(pair.problem):
            return
        for name, requires in pair.parts():
            if not getattr(requires, declared):
                yield Rejection(rule, (name, "problem"), f"not {declared}", declared)

    return check


def check_batch_invariant(pair: RuleInput) -> Violations:
    """Require batch invariance of both parts, and scales and a placement that allow it."""
    if not pair.problem.batch_invariant:
        return
    rule, scheme = "batch_invariant", pair.problem.scheme
    for name, requires in pair.parts():
        if not requires.batch_invariant:
            got = "sums that may depend on the other tokens of the call"
            yield Rejection(rule, (name, "problem"), got, "batch_invariant")
    if scheme.activation_granularity == "tensor" and not scheme.static:
        got = f"{scheme}, which computes one activation scale from all tokens of a call"
        yield Rejection(rule, ("problem",), got, "a static scale, or a scale per token or group")
    if pair.problem.placement.has_copies:
        got = "copies of experts, which are chosen by a token's position in the call"
        yield Rejection(rule, ("problem",), got, "each expert on one rank")


def check_asynchronous(pair: RuleInput) -> Violations:
    if pair.problem.asynchronous and not pair.prepare_finalize.asynchronous:
        got, need = "no prepare_no_receive", "prepare_no_receive"
        yield Rejection("asynchronous", (pair.prepare_finalize_name, "problem"), got, need)


def check_lora(pair: RuleInput) -> Violations:
    """Require LoRA support: the dispatch carries adapter slots, and the GEMMs add LoRA deltas."""
    if pair.problem.adapters is None:
        return
    for name, requires in pair.parts():
        if not requires.lora:
            is_dispatch = isinstance(requires, PrepareFinalizeRequirements)
            hint = (
                "the dispatch does not carry adapter slots"
                if is_dispatch
                else "its GEMMs do not add LoRA deltas"
            )
            yield Rejection("lora", (name, "problem"), str(pair.problem.lora), "no adapters", hint)
    if pair.problem.scheme.act_order:
        # The activation output has the column order of w2. Adapters have the original order.
        yield Rejection("lora", ("problem",), pair.problem.quant, "no act_order")
