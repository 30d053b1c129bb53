"""Rules that check that the two parts of a pairing fit together, for example their formats."""

from modular_kernel.compatibility.support import (
    Rejection,
    RuleInput,
    Violations,
    format_sorted,
)
from modular_kernel.spec.problem import ActivationFormat, Combine, Reduce, RowContents


def check_formats(pairing: RuleInput) -> Violations:
    if pairing.prepare_finalize.activation_format is not pairing.experts.activation_format:
        prepared_format = pairing.prepare_finalize.activation_format.value
        got = f"{prepared_format} from {pairing.prepare_finalize_name}"
        need = f"{pairing.experts.activation_format.value} for {pairing.experts_name}"
        hint = f"choose a {prepared_format} experts part"
        yield Rejection("format", pairing.part_names, got, need, hint)


def check_dispatch_quant(pairing: RuleInput) -> Violations:
    """Require that exactly one of the two parts quantizes the activations.

    If the scheme has one activation scale per expert, the experts always quantize after dispatch.
    """
    if not pairing.problem.scheme.dispatched_quantized:
        return
    if pairing.experts.quantizes_input and not pairing.prepare_finalize.can_defer_quant:
        got = f"{pairing.prepare_finalize_name} always quantizes before dispatch"
        yield Rejection("dispatch_quant", pairing.part_names, got, "unquantized activations")
    if (
        not pairing.experts.quantizes_input
        and pairing.problem.scheme.name not in pairing.prepare_finalize.dispatch_schemes
    ):
        need = f"a part that dispatches {pairing.problem.quant}"
        yield Rejection(
            "dispatch_quant",
            pairing.part_names,
            format_sorted(pairing.prepare_finalize.dispatch_schemes) or "none",
            need,
        )


def check_scale_layout(pairing: RuleInput) -> Violations:
    quantized = pairing.problem.scheme.dispatched_quantized and not pairing.experts.quantizes_input
    if quantized and pairing.prepare_finalize.scale_layout != pairing.experts.scale_layout:
        yield Rejection(
            "scale_layout",
            pairing.part_names,
            pairing.prepare_finalize.scale_layout,
            pairing.experts.scale_layout,
        )


def check_capacity_multiple(pairing: RuleInput) -> Violations:
    """Require that the rows reserved for an expert are a multiple of the experts' row tile."""
    multiple, unit = pairing.experts.capacity_multiple, pairing.prepare_finalize.capacity_unit
    batched = ActivationFormat.BATCHED_EXPERTS
    if (
        pairing.prepare_finalize.rounds_capacity
        or not pairing.prepare_finalize.activation_format
        is pairing.experts.activation_format
        is batched
    ):
        return
    capacity = (
        pairing.problem.parallel.world_size * -(-max(1, pairing.problem.tokens) // unit) * unit
    )
    if capacity % multiple:
        need = f"a multiple of {multiple} for {pairing.experts_name}"
        hint = "round problem.tokens up, or use another PrepareAndFinalize"
        yield Rejection(
            "capacity_multiple", pairing.part_names, f"{capacity} rows for an expert", need, hint
        )


def check_reduce(pairing: RuleInput) -> Violations:
    if pairing.experts.reduce not in pairing.prepare_finalize.reduces:
        need = f"one of {format_sorted([r.value for r in pairing.prepare_finalize.reduces])}"
        yield Rejection(
            "reduce",
            pairing.part_names,
            f"{pairing.experts.reduce.value} left by {pairing.experts_name}",
            need,
        )


def check_keep_topk(pairing: RuleInput) -> Violations:
    if pairing.problem.combine is Combine.SUM:
        return
    for name, supported in (
        (pairing.prepare_finalize_name, pairing.prepare_finalize.keep_topk),
        (pairing.experts_name, pairing.experts.keep_topk),
    ):
        if not supported:
            got, need = pairing.problem.combine.value, "sum"
            yield Rejection("keep_topk", (name, "problem"), got, need)


def check_router_weight_on_input(pairing: RuleInput) -> Violations:
    if not pairing.problem.apply_router_weight_on_input:
        return
    rule, k = "router_weight_on_input", pairing.problem.top_k
    if pairing.prepare_finalize.multiplies_input:
        if k != 1:
            hint = "the K pairs of a token share one dispatched row, which carries a single weight"
            yield Rejection(
                rule, (pairing.prepare_finalize_name, "problem"), f"top_k={k}", "top_k=1", hint
            )
    elif pairing.prepare_finalize.activation_format is ActivationFormat.BATCHED_EXPERTS:
        yield Rejection(
            rule,
            (pairing.prepare_finalize_name, "problem"),
            "batched rows",
            "weights applied by prepare",
        )
    elif not pairing.experts.weight_on_input:
        yield Rejection(rule, (pairing.experts_name, "problem"), "on input", "on output")


def check_padding(pairing: RuleInput) -> Violations:
    if (
        pairing.prepare_finalize.padding is RowContents.UNDEFINED
        and not pairing.experts.skips_padding
    ):
        got = f"padding rows with undefined values from {pairing.prepare_finalize_name}"
        yield Rejection("padding", pairing.part_names, got, "padding rows that are zero")


def check_invalid_rows(pairing: RuleInput) -> Violations:
    """Require zero rows for skipped pairs, because a contiguous reduction reads every row."""
    standard = pairing.experts.activation_format is ActivationFormat.STANDARD
    reads = pairing.experts.reduce in (Reduce.CONTIGUOUS, Reduce.DELEGATE)
    if standard and reads and pairing.experts.invalid_rows is not RowContents.ZERO:
        got = f"undefined rows of skipped pairs from {pairing.experts_name}"
        yield Rejection("invalid_rows", pairing.part_names, got, "zero rows")


def check_expert_map(pairing: RuleInput) -> Violations:
    if pairing.prepare_finalize.localizes_ids:
        return
    if pairing.problem.expert_map and not pairing.experts.expert_map:
        yield Rejection(
            "expert_map", (pairing.experts_name, "problem"), "an expert_map", "no expert_map"
        )
    if pairing.problem.e != pairing.problem.experts and not pairing.problem.expert_map:
        local_experts = f"{pairing.problem.e} of {pairing.problem.experts} experts"
        got = f"{local_experts} on this rank and no expert_map"
        hint = "set expert_map=True and pass ExpertWeights.expert_map"
        yield Rejection(
            "expert_map", (pairing.prepare_finalize_name, "problem"), got, "an expert_map", hint
        )
