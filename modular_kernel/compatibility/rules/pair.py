"""Rules that check the two parts against each other, such as formats, scales and router weights."""

from modular_kernel.compatibility.support import (
    Rejection,
    RuleInput,
    Violations,
    format_sorted,
)
from modular_kernel.spec.problem import ActivationFormat, Combine, Reduce, RowContents


def check_formats(pair: RuleInput) -> Violations:
    if pair.prepare_finalize.activation_format is not pair.experts.activation_format:
        got = f"{pair.prepare_finalize.activation_format.value} from {pair.prepare_finalize_name}"
        need = f"{pair.experts.activation_format.value} for {pair.experts_name}"
        hint = f"choose a {pair.prepare_finalize.activation_format.value} experts part"
        yield Rejection("format", pair.part_names, got, need, hint)


def check_dispatch_quant(pair: RuleInput) -> Violations:
    """Require that exactly one of the two parts quantizes the activations.

    If the scheme has one activation scale per expert, the experts always quantize after dispatch.
    """
    if not pair.problem.scheme.dispatched_quantized:
        return
    if pair.experts.quantizes_input and not pair.prepare_finalize.can_defer_quant:
        got = f"{pair.prepare_finalize_name} always quantizes before dispatch"
        yield Rejection("dispatch_quant", pair.part_names, got, "unquantized activations")
    if (
        not pair.experts.quantizes_input
        and pair.problem.scheme.name not in pair.prepare_finalize.dispatch_schemes
    ):
        need = f"a part that dispatches {pair.problem.quant}"
        yield Rejection(
            "dispatch_quant",
            pair.part_names,
            format_sorted(pair.prepare_finalize.dispatch_schemes) or "none",
            need,
        )


def check_scale_layout(pair: RuleInput) -> Violations:
    quantized = pair.problem.scheme.dispatched_quantized and not pair.experts.quantizes_input
    if quantized and pair.prepare_finalize.scale_layout != pair.experts.scale_layout:
        yield Rejection(
            "scale_layout",
            pair.part_names,
            pair.prepare_finalize.scale_layout,
            pair.experts.scale_layout,
        )


def check_capacity_multiple(pair: RuleInput) -> Violations:
    """Require that the rows reserved for an expert are a multiple of the experts' row tile."""
    multiple, unit = pair.experts.capacity_multiple, pair.prepare_finalize.capacity_unit
    batched = ActivationFormat.BATCHED_EXPERTS
    if (
        pair.prepare_finalize.rounds_capacity
        or not pair.prepare_finalize.activation_format is pair.experts.activation_format is batched
    ):
        return
    capacity = pair.problem.parallel.world_size * -(-max(1, pair.problem.tokens) // unit) * unit
    if capacity % multiple:
        need = f"a multiple of {multiple} for {pair.experts_name}"
        hint = "round problem.tokens up, or use another PrepareAndFinalize"
        yield Rejection(
            "capacity_multiple", pair.part_names, f"{capacity} rows for an expert", need, hint
        )


def check_reduce(pair: RuleInput) -> Violations:
    if pair.experts.reduce not in pair.prepare_finalize.reduces:
        need = f"one of {format_sorted([r.value for r in pair.prepare_finalize.reduces])}"
        yield Rejection(
            "reduce",
            pair.part_names,
            f"{pair.experts.reduce.value} left by {pair.experts_name}",
            need,
        )


def check_keep_topk(pair: RuleInput) -> Violations:
    if pair.problem.combine is Combine.SUM:
        return
    for name, supported in (
        (pair.prepare_finalize_name, pair.prepare_finalize.keep_topk),
        (pair.experts_name, pair.experts.keep_topk),
    ):
        if not supported:
            got, need = pair.problem.combine.value, "sum"
            yield Rejection("keep_topk", (name, "problem"), got, need)


def check_router_weight_on_input(pair: RuleInput) -> Violations:
    if not pair.problem.apply_router_weight_on_input:
        return
    rule, k = "router_weight_on_input", pair.problem.top_k
    if pair.prepare_finalize.multiplies_input:
        if k != 1:
            hint = "the K pairs of a token share one dispatched row, which carries a single weight"
            yield Rejection(
                rule, (pair.prepare_finalize_name, "problem"), f"top_k={k}", "top_k=1", hint
            )
    elif pair.prepare_finalize.activation_format is ActivationFormat.BATCHED_EXPERTS:
        yield Rejection(
            rule,
            (pair.prepare_finalize_name, "problem"),
            "batched rows",
            "weights applied by prepare",
        )
    elif not pair.experts.weight_on_input:
        yield Rejection(rule, (pair.experts_name, "problem"), "on input", "on output")


def check_padding(pair: RuleInput) -> Violations:
    if pair.prepare_finalize.padding is RowContents.UNDEFINED and not pair.experts.skips_padding:
        got = f"padding rows with undefined values from {pair.prepare_finalize_name}"
        yield Rejection("padding", pair.part_names, got, "padding rows that are zero")


def check_invalid_rows(pair: RuleInput) -> Violations:
    """Require zero rows for skipped pairs, because a contiguous reduction reads every row."""
    standard = pair.experts.activation_format is ActivationFormat.STANDARD
    reads = pair.experts.reduce in (Reduce.CONTIGUOUS, Reduce.DELEGATE)
    if standard and reads and pair.experts.invalid_rows is not RowContents.ZERO:
        got = f"undefined rows of skipped pairs from {pair.experts_name}"
        yield Rejection("invalid_rows", pair.part_names, got, "zero rows")


def check_expert_map(pair: RuleInput) -> Violations:
    if pair.prepare_finalize.localizes_ids:
        return
    if pair.problem.expert_map and not pair.experts.expert_map:
        yield Rejection(
            "expert_map", (pair.experts_name, "problem"), "an expert_map", "no expert_map"
        )
    if pair.problem.e != pair.problem.experts and not pair.problem.expert_map:
        got = f"{pair.problem.e} of {pair.problem.experts} experts on this rank and no expert_map"
        hint = "set expert_map=True and pass ExpertWeights.expert_map"
        yield Rejection(
            "expert_map", (pair.prepare_finalize_name, "problem"), got, "an expert_map", hint
        )
