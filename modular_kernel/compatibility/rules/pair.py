"""Rules between the two parts: activation formats, scales, ids, router weights, unwritten rows."""

from modular_kernel.compatibility.support import (
    Pairing,
    Rejection,
    Violations,
    format_sorted,
)
from modular_kernel.spec.problem import ActivationFormat, Combine, Reduce, Rows


def formats(p: Pairing) -> Violations:
    if p.pf.activation_format is not p.ex.activation_format:
        got = f"{p.pf.activation_format.value} from {p.pf_name}"
        need = f"{p.ex.activation_format.value} for {p.ex_name}"
        hint = f"choose a {p.pf.activation_format.value} experts part"
        yield Rejection("format", p.names, got, need, hint)


def dispatch_quant(p: Pairing) -> Violations:
    """Require that either prepare or the experts quantize the activations.

    With per-expert scales, only the experts can, after dispatch.
    """
    if not p.problem.scheme.dispatched_quantized:
        return
    if p.ex.quantizes_input and not p.pf.can_defer_quant:
        got = f"{p.pf_name} always quantizes before dispatch"
        yield Rejection("dispatch_quant", p.names, got, "unquantized activations")
    if not p.ex.quantizes_input and p.problem.scheme.name not in p.pf.dispatch_schemes:
        need = f"a part that dispatches {p.problem.quant}"
        yield Rejection(
            "dispatch_quant", p.names, format_sorted(p.pf.dispatch_schemes) or "none", need
        )


def scale_layout(p: Pairing) -> Violations:
    quantized = p.problem.scheme.dispatched_quantized and not p.ex.quantizes_input
    if quantized and p.pf.scale_layout != p.ex.scale_layout:
        yield Rejection("scale_layout", p.names, p.pf.scale_layout, p.ex.scale_layout)


def capacity_multiple(p: Pairing) -> Violations:
    """Require an expert capacity that is a whole number of the experts' row tiles."""
    multiple, unit = p.ex.capacity_multiple, p.pf.capacity_unit
    batched = ActivationFormat.BATCHED_EXPERTS
    if p.pf.rounds_capacity or not p.pf.activation_format is p.ex.activation_format is batched:
        return
    capacity = p.problem.parallel.world_size * -(-max(1, p.problem.tokens) // unit) * unit
    if capacity % multiple:
        need = f"a multiple of {multiple} for {p.ex_name}"
        hint = "round problem.tokens up, or use another PrepareAndFinalize"
        yield Rejection("capacity_multiple", p.names, f"{capacity} rows for an expert", need, hint)


def reduce(p: Pairing) -> Violations:
    if p.ex.reduce not in p.pf.reduces:
        need = f"one of {format_sorted([r.value for r in p.pf.reduces])}"
        yield Rejection("reduce", p.names, f"{p.ex.reduce.value} left by {p.ex_name}", need)


def keep_topk(p: Pairing) -> Violations:
    if p.problem.combine is Combine.SUM:
        return
    for name, supported in ((p.pf_name, p.pf.keep_topk), (p.ex_name, p.ex.keep_topk)):
        if not supported:
            got, need = p.problem.combine.value, "sum"
            yield Rejection("keep_topk", (name, "problem"), got, need)


def router_weight_on_input(p: Pairing) -> Violations:
    if not p.problem.apply_router_weight_on_input:
        return
    rule, k = "router_weight_on_input", p.problem.top_k
    if p.pf.multiplies_input:
        if k != 1:
            hint = "a dispatched row is shared by its pairs, so it can carry one weight only"
            yield Rejection(rule, (p.pf_name, "problem"), f"top_k={k}", "top_k=1", hint)
    elif p.pf.activation_format is ActivationFormat.BATCHED_EXPERTS:
        yield Rejection(rule, (p.pf_name, "problem"), "batched rows", "weights applied by prepare")
    elif not p.ex.weight_on_input:
        yield Rejection(rule, (p.ex_name, "problem"), "on input", "on output")


def padding(p: Pairing) -> Violations:
    if p.pf.padding is Rows.UNDEFINED and not p.ex.skips_padding:
        got = f"undefined padding rows from {p.pf_name}"
        yield Rejection("padding", p.names, got, "zero padding rows, or none")


def invalid_rows(p: Pairing) -> Violations:
    """Require zero rows for skipped pairs: contiguous reduction reads every pair's row."""
    standard = p.ex.activation_format is ActivationFormat.STANDARD
    reads = p.ex.reduce in (Reduce.CONTIGUOUS, Reduce.DELEGATE)
    if standard and reads and p.ex.invalid_rows is not Rows.ZERO:
        got = f"undefined rows of skipped pairs from {p.ex_name}"
        yield Rejection("invalid_rows", p.names, got, "zero rows")


def expert_map(p: Pairing) -> Violations:
    if p.pf.localizes_ids:
        return
    if p.problem.expert_map and not p.ex.expert_map:
        yield Rejection("expert_map", (p.ex_name, "problem"), "an expert_map", "no expert_map")
    if p.problem.e != p.problem.experts and not p.problem.expert_map:
        got = f"{p.problem.e} of {p.problem.experts} experts on this rank and no expert_map"
        hint = "set expert_map=True and pass ExpertWeights.expert_map"
        yield Rejection("expert_map", (p.pf_name, "problem"), got, "an expert_map", hint)
