"""Rules on the problem: dtypes, schemes, sizes, ranks, options."""

from collections.abc import Callable

from modular_kernel.compatibility.support import (
    Pairing,
    PrepareFinalizeRequirements,
    Rejection,
    RuleFunction,
    Violations,
    format_sorted,
)
from modular_kernel.quant.quantized_weights import indivisible_sizes, values_per_word
from modular_kernel.spec.problem import Problem, dtype_name


def dtype(p: Pairing) -> Violations:
    for name, req in p.parts():
        if p.problem.dtype not in req.dtypes:
            got = dtype_name(p.problem.dtype)
            yield Rejection("dtype", (name, "problem"), got, format_sorted(req.dtypes))


def fp32_precision(p: Pairing) -> Violations:
    if p.problem.fp32_precision == "tf32" and not p.ex.tf32:
        hint = "use fp32_precision=ieee"
        yield Rejection("fp32_precision", (p.ex_name, "problem"), "tf32", "ieee", hint)


def top_k(p: Pairing) -> Violations:
    for name, req in p.parts():
        low, high = req.top_k
        if not low <= p.problem.top_k <= high:
            yield Rejection("top_k", (name, "problem"), str(p.problem.top_k), f"{low} to {high}")


def hidden(p: Pairing) -> Violations:
    hidden = p.problem.hidden
    for name, req in p.parts():
        if hidden % req.hidden_multiple:
            need = f"a multiple of {req.hidden_multiple}"
            yield Rejection("hidden", (name, "problem"), str(hidden), need)
        if req.hidden_sizes is not None and hidden not in req.hidden_sizes:
            sizes = ", ".join(map(str, sorted(req.hidden_sizes)))
            yield Rejection("hidden", (name, "problem"), str(hidden), f"one of {sizes}")


def intermediate(p: Pairing) -> Violations:
    if p.problem.intermediate % p.ex.intermediate_multiple:
        need = f"a multiple of {p.ex.intermediate_multiple}"
        got = str(p.problem.intermediate)
        yield Rejection("intermediate", (p.ex_name, "problem"), got, need)


def quant(p: Pairing) -> Violations:
    scheme = p.problem.scheme
    if scheme.name in p.ex.schemes or (scheme.external and p.ex.external_schemes):
        return
    need = format_sorted(p.ex.schemes)
    yield Rejection("quant", (p.ex_name, "problem"), p.problem.quant, need)


def quant_block(p: Pairing) -> Violations:
    group = p.problem.scheme.group
    if not p.ex.whole_blocks or not group:
        return
    for what, size in (("hidden", p.problem.hidden), ("intermediate", p.problem.intermediate)):
        if size % group[-1]:
            need = f"a multiple of the {p.problem.quant} group {group[-1]}"
            yield Rejection("quant_block", (p.ex_name, "problem"), f"{what}={size}", need)


def blocks(p: Pairing) -> Violations:
    scheme = p.problem.scheme
    if (
        p.ex.blocks is not None
        and scheme.granularity == "block"
        and scheme.group not in p.ex.blocks
    ):
        got, need = ("x".join(map(str, block)) for block in (scheme.group, min(p.ex.blocks)))
        yield Rejection("blocks", (p.ex_name, "problem"), got, need)


def packing(p: Pairing) -> Violations:
    """Require row sizes that are multiples of the number of values in a packed byte or word."""
    step = values_per_word(p.problem.scheme)
    for name in indivisible_sizes(p.problem):
        got = f"{name}={getattr(p.problem, name)}"
        need = f"a multiple of {step}, the number of values that {p.problem.scheme} packs together"
        yield Rejection("packing", (p.ex_name, "problem"), got, need)


def min_tokens(p: Pairing) -> Violations:
    if p.problem.tokens < p.ex.min_tokens:
        got, need = str(p.problem.tokens), f">= {p.ex.min_tokens}"
        yield Rejection("min_tokens", (p.ex_name, "problem"), got, need)


def max_experts(p: Pairing) -> Violations:
    if p.ex.max_experts is not None and p.problem.experts > p.ex.max_experts:
        got, need = str(p.problem.experts), f"<= {p.ex.max_experts}"
        yield Rejection("max_experts", (p.ex_name, "problem"), got, need)


def addressing(p: Pairing) -> Violations:
    tokens = min(p.problem.tokens, p.problem.chunk_tokens or p.problem.tokens)
    widest = max(p.problem.w1_rows, p.problem.hidden)
    elements = tokens * p.problem.top_k * widest
    if p.ex.max_elements is not None and elements > p.ex.max_elements:
        need = f"<= {p.ex.max_elements} (32-bit offsets)"
        hint = "set chunk_tokens" if p.ex.chunking else ""
        yield Rejection("addressing", (p.ex_name, "problem"), f"{elements} elements", need, hint)


def world_size(p: Pairing) -> Violations:
    low, high = p.pf.world_sizes
    world = p.problem.parallel.world_size
    if world < low or (high is not None and world > high):
        need = f"{low} to {high}" if high is not None else f">= {low}"
        yield Rejection("world_size", (p.pf_name, "problem"), str(world), need)


def hosts(p: Pairing) -> Violations:
    """Require a distribution of ranks over hosts that the part supports."""
    parallel, limit, parties = p.problem.parallel, p.pf.ranks_per_host, (p.pf_name, "problem")
    hosts = parallel.hosts
    per_host = parallel.world_size // hosts
    if p.pf.one_host and hosts != 1:
        yield Rejection("hosts", parties, f"{hosts} hosts", "at most 1")
    if limit is not None and per_host > limit:
        hint = "set Parallel.ranks_per_host"
        yield Rejection("hosts", parties, f"{per_host} ranks on a host", f"at most {limit}", hint)
    elif p.pf.full_hosts and hosts != 1 and per_host != limit:
        got = f"{per_host} on each of {hosts} hosts"
        yield Rejection("hosts", parties, got, f"{limit} ranks on each of several hosts")
    if p.problem.graph and hosts != 1 and not p.pf.graph_across_hosts:
        need = "graph=False: across hosts the CPU waits for row counts"
        yield Rejection("hosts", parties, "graph=True", need)


def max_received(p: Pairing) -> Violations:
    if p.problem.max_received is not None and not p.pf.bounds_received:
        need = "None: its buffers have room for all tokens of every rank"
        got = f"max_received={p.problem.max_received}"
        yield Rejection("max_received", (p.pf_name, "problem"), got, need)


def placement(p: Pairing) -> Violations:
    world, experts = p.problem.parallel.world_size, p.problem.experts
    if not p.pf.linear_placement:
        return
    if experts % world:
        need = f"a multiple of world_size {world}"
        yield Rejection("placement", (p.pf_name, "problem"), f"experts={experts}", need)
    if not p.problem.placement.is_linear:
        yield Rejection("placement", (p.pf_name, "problem"), "another placement", "linear")


def capacity(p: Pairing) -> Violations:
    if p.pf.max_tokens is not None and p.problem.tokens > p.pf.max_tokens:
        got, need = f"tokens={p.problem.tokens}", f"<= {p.pf.max_tokens} per rank"
        yield Rejection("capacity", (p.pf_name, "problem"), got, need)


def ids_dtype(p: Pairing) -> Violations:
    need, got = p.pf.topk_indices_dtype, p.problem.ids_dtype
    if need is not None and got is not None and need != got:
        hint = "have the router emit that dtype"
        parties = (p.pf_name, "problem")
        yield Rejection("ids_dtype", parties, dtype_name(got), dtype_name(need), hint)


def activation(p: Pairing) -> Violations:
    act = p.problem.act
    if act.kind not in p.ex.activations:
        need = format_sorted(p.ex.activations)
        yield Rejection("activation", (p.ex_name, "problem"), act.kind, need)
    if act.interleaved and not p.ex.interleaved:
        got, need = "interleaved gate and up rows", "up" if p.ex.up_first else "gate"
        yield Rejection("activation", (p.ex_name, "problem"), got, f"{need} rows first")
    elif act.gated and not act.interleaved and act.up_first != p.ex.up_first:
        got, need = ("up", "gate") if act.up_first else ("gate", "up")
        hint = "modular_kernel.quant.row_order puts up rows first" if p.ex.up_first else ""
        parties = (p.ex_name, "problem")
        yield Rejection("activation", parties, f"{got} rows first", f"{need} rows first", hint)


def bias(p: Pairing) -> Violations:
    if p.problem.bias and not p.ex.bias:
        yield Rejection("bias", (p.ex_name, "problem"), "b1 and b2", "no biases")


def chunking(p: Pairing) -> Violations:
    if p.problem.chunk_tokens is not None and not p.ex.chunking:
        got = f"chunk_tokens={p.problem.chunk_tokens}"
        yield Rejection("chunking", (p.ex_name, "problem"), got, "chunk_tokens=None")


def required_property(
    rule: str, is_required: Callable[[Problem], bool], declared: str
) -> RuleFunction:
    """Make a rule for a property that both parts must declare if the problem requires it."""

    def check(p: Pairing) -> Violations:
        if not is_required(p.problem):
            return
        for name, req in p.parts():
            if not getattr(req, declared):
                yield Rejection(rule, (name, "problem"), f"not {declared}", declared)

    return check


def batch_invariant(p: Pairing) -> Violations:
    """Require that both parts declare it, and that no scale or placement depends on the batch."""
    if not p.problem.batch_invariant:
        return
    rule, scheme = "batch_invariant", p.problem.scheme
    for name, req in p.parts():
        if not req.batch_invariant:
            got = "sums that may depend on the other tokens of a call"
            yield Rejection(rule, (name, "problem"), got, "batch_invariant")
    if scheme.activation_granularity == "tensor" and not scheme.static:
        got = f"{scheme}: one activation scale, computed from all tokens of a call"
        yield Rejection(rule, ("problem",), got, "a scale per token, per group, or static")
    if p.problem.placement.has_copies:
        got = "expert copies, chosen by a token's position in the call"
        yield Rejection(rule, ("problem",), got, "each expert on one rank")


def asynchronous(p: Pairing) -> Violations:
    if p.problem.asynchronous and not p.pf.asynchronous:
        got, need = "no prepare_no_receive", "prepare_no_receive"
        yield Rejection("asynchronous", (p.pf_name, "problem"), got, need)


def lora(p: Pairing) -> Violations:
    """Require adapter support: dispatch of the slots, and deltas in the GEMMs."""
    if p.problem.adapters is None:
        return
    for name, req in p.parts():
        if not req.lora:
            is_dispatch = isinstance(req, PrepareFinalizeRequirements)
            hint = (
                "the dispatch does not carry adapter slots"
                if is_dispatch
                else "its GEMMs do not add LoRA deltas"
            )
            yield Rejection("lora", (name, "problem"), str(p.problem.lora), "no adapters", hint)
    if p.problem.scheme.act_order:
        # h is ordered like w2's columns, but adapters are trained in the original order.
        yield Rejection("lora", ("problem",), p.problem.quant, "no act_order")
