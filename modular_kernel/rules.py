"""Every rule that decides whether two parts can serve a problem on a machine, and `judge`.

A rule is a generator over one `Pairing`; it yields a Rejection for each way it is violated. All
rules always run. Adding a rule = one function, one line in RULES, one must-refuse case in the
tests (they fail until it is there).
"""

from collections.abc import Callable, Iterator
from functools import partial

from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.fields import expect
from modular_kernel.quant import unpackable, values_at_once
from modular_kernel.support import (
    ExpertsRequirements,
    Pairing,
    PrepareFinalizeRequirements,
    Rejection,
    Requirements,
    Verdict,
    archs_text,
    numbered,
    told,
)
from modular_kernel.types import (
    ActivationFormat,
    Combine,
    Machine,
    Problem,
    Reduce,
    Rows,
    dtype_name,
)

Violations = Iterator[Rejection]
RuleFunction = Callable[[Pairing], Violations]


def _format(p: Pairing) -> Violations:
    if p.pf.activation_format is not p.ex.activation_format:
        got = f"{p.pf.activation_format.value} from {p.pf_name}"
        need = f"{p.ex.activation_format.value} for {p.ex_name}"
        hint = f"choose a {p.pf.activation_format.value} experts part"
        yield Rejection("format", p.both, got, need, hint)


def _device(p: Pairing) -> Violations:
    for name, req in p.each():
        if p.machine.device not in req.devices:
            yield Rejection("device", (name, "machine"), p.machine.device, numbered(req.devices))
        elif req.triton and p.machine.device == "cpu" and not p.machine.interpreter:
            need = "a GPU, or Triton's CPU interpreter"
            hint = "start with TRITON_INTERPRET=1 and ml_dtypes installed"
            yield Rejection("device", (name, "machine"), "cpu", need, hint)


def _arch(p: Pairing) -> Violations:
    for name, req in p.each():
        arch = p.machine.arch
        if req.min_arch is not None and arch is not None and arch < req.min_arch:
            need = f">= {req.min_arch[0]}.{req.min_arch[1]}"
            yield Rejection("arch", (name, "machine"), f"{arch[0]}.{arch[1]}", need)


def _archs(p: Pairing) -> Violations:
    """Refuse an architecture that lacks a part's instructions."""
    for name, req in p.each():
        arch = p.machine.arch
        if req.archs is not None and arch is not None and arch not in req.archs:
            got, need = f"{arch[0]}.{arch[1]}", archs_text(req.archs)
            yield Rejection("archs", (name, "machine"), got, need)


def _package(p: Pairing) -> Violations:
    others = dict(p.machine.others)
    for name, req in p.each():
        needs = {provider.name: provider.need for provider in req.providers}
        for package in req.packages:
            if package not in p.machine.packages:
                got, need = others.get(package, "not importable"), needs.get(package, package)
                hint = req.how_to_get(package)
                yield Rejection("package", (name, "machine"), got, need, hint)


def _dtype(p: Pairing) -> Violations:
    for name, req in p.each():
        if p.problem.dtype not in req.dtypes:
            got = dtype_name(p.problem.dtype)
            yield Rejection("dtype", (name, "problem"), got, numbered(req.dtypes))


def _fp32_precision(p: Pairing) -> Violations:
    if p.problem.fp32_precision == "tf32" and not p.ex.tf32:
        hint = "use fp32_precision=ieee"
        yield Rejection("fp32_precision", (p.ex_name, "problem"), "tf32", "ieee", hint)


def _top_k(p: Pairing) -> Violations:
    for name, req in p.each():
        low, high = req.top_k
        if not low <= p.problem.top_k <= high:
            yield Rejection("top_k", (name, "problem"), str(p.problem.top_k), f"{low} to {high}")


def _hidden(p: Pairing) -> Violations:
    hidden = p.problem.hidden
    for name, req in p.each():
        if hidden % req.hidden_multiple:
            need = f"a multiple of {req.hidden_multiple}"
            yield Rejection("hidden", (name, "problem"), str(hidden), need)
        if req.hidden_sizes is not None and hidden not in req.hidden_sizes:
            sizes = ", ".join(map(str, sorted(req.hidden_sizes)))
            yield Rejection("hidden", (name, "problem"), str(hidden), f"one of {sizes}")


def _intermediate(p: Pairing) -> Violations:
    if p.problem.intermediate % p.ex.intermediate_multiple:
        need = f"a multiple of {p.ex.intermediate_multiple}"
        got = str(p.problem.intermediate)
        yield Rejection("intermediate", (p.ex_name, "problem"), got, need)


def _quant(p: Pairing) -> Violations:
    if p.problem.scheme.name not in p.ex.schemes:
        need = numbered(p.ex.schemes)
        yield Rejection("quant", (p.ex_name, "problem"), p.problem.quant, need)


def _dispatch_quant(p: Pairing) -> Violations:
    """Someone must quantise the activations: before dispatch, or the experts after it."""
    if p.problem.scheme.activation_granularity == "none":
        return
    if p.ex.quantises_input and not p.pf.can_defer_quant:
        got = f"{p.pf_name} always quantises before dispatch"
        yield Rejection("dispatch_quant", p.both, got, "unquantised activations")
    if not p.ex.quantises_input and p.problem.scheme.name not in p.pf.dispatch_schemes:
        need = f"a part that dispatches {p.problem.quant}"
        yield Rejection("dispatch_quant", p.both, numbered(p.pf.dispatch_schemes) or "none", need)


def _scale_layout(p: Pairing) -> Violations:
    quantised = p.problem.scheme.activation_granularity != "none" and not p.ex.quantises_input
    if quantised and p.pf.scale_layout != p.ex.scale_layout:
        yield Rejection("scale_layout", p.both, p.pf.scale_layout, p.ex.scale_layout)


def _quant_block(p: Pairing) -> Violations:
    group = p.problem.scheme.group
    if not p.ex.whole_blocks or not group:
        return
    for what, size in (("hidden", p.problem.hidden), ("intermediate", p.problem.intermediate)):
        if size % group[-1]:
            need = f"a multiple of the {p.problem.quant} group {group[-1]}"
            yield Rejection("quant_block", (p.ex_name, "problem"), f"{what}={size}", need)


def _blocks(p: Pairing) -> Violations:
    scheme = p.problem.scheme
    if (
        p.ex.blocks is not None
        and scheme.granularity == "block"
        and scheme.group not in p.ex.blocks
    ):
        got, need = ("x".join(map(str, block)) for block in (scheme.group, min(p.ex.blocks)))
        yield Rejection("blocks", (p.ex_name, "problem"), got, need)


def _packing(p: Pairing) -> Violations:
    """Values of a row share a byte or a word, so a row is a multiple of them."""
    step = values_at_once(p.problem.scheme)
    for name in unpackable(p.problem):
        got = f"{name}={getattr(p.problem, name)}"
        need = f"a multiple of {step}: {p.problem.scheme} packs so many values together"
        yield Rejection("packing", (p.ex_name, "problem"), got, need)


def _min_tokens(p: Pairing) -> Violations:
    if p.problem.tokens < p.ex.min_tokens:
        got, need = str(p.problem.tokens), f">= {p.ex.min_tokens}"
        yield Rejection("min_tokens", (p.ex_name, "problem"), got, need)


def _max_experts(p: Pairing) -> Violations:
    if p.ex.max_experts is not None and p.problem.experts > p.ex.max_experts:
        got, need = str(p.problem.experts), f"<= {p.ex.max_experts}"
        yield Rejection("max_experts", (p.ex_name, "problem"), got, need)


def _addressing(p: Pairing) -> Violations:
    tokens = min(p.problem.tokens, p.problem.chunk_tokens or p.problem.tokens)
    widest = max(p.problem.w1_rows, p.problem.hidden)
    elements = tokens * p.problem.top_k * widest
    if p.ex.max_elements is not None and elements > p.ex.max_elements:
        need = f"<= {p.ex.max_elements} (32-bit offsets)"
        hint = "set chunk_tokens" if p.ex.chunking else ""
        yield Rejection("addressing", (p.ex_name, "problem"), f"{elements} elements", need, hint)


def _world_size(p: Pairing) -> Violations:
    low, high = p.pf.world_sizes
    world = p.problem.parallel.world_size
    if world < low or (high is not None and world > high):
        need = f"{low} to {high}" if high is not None else f">= {low}"
        yield Rejection("world_size", (p.pf_name, "problem"), str(world), need)


def _hosts(p: Pairing) -> Violations:
    hosts = p.problem.parallel.hosts
    if p.pf.one_host and hosts > 1:
        yield Rejection("hosts", (p.pf_name, "problem"), f"{hosts} hosts", "at most 1")


def _placement(p: Pairing) -> Violations:
    world, experts = p.problem.parallel.world_size, p.problem.experts
    if not p.pf.linear_placement:
        return
    if experts % world:
        need = f"a multiple of world_size {world}"
        yield Rejection("placement", (p.pf_name, "problem"), f"experts={experts}", need)
    if not p.problem.placement.is_linear:
        yield Rejection("placement", (p.pf_name, "problem"), "another placement", "linear")


def _capacity(p: Pairing) -> Violations:
    if p.pf.max_tokens is not None and p.problem.tokens > p.pf.max_tokens:
        got, need = f"tokens={p.problem.tokens}", f"<= {p.pf.max_tokens} per rank"
        yield Rejection("capacity", (p.pf_name, "problem"), got, need)


def _capacity_multiple(p: Pairing) -> Violations:
    """Keep a tile of rows from reaching into the next expert's."""
    multiple, unit = p.ex.capacity_multiple, p.pf.capacity_unit
    batched = ActivationFormat.BATCHED_EXPERTS
    if p.pf.rounds_capacity or not p.pf.activation_format is p.ex.activation_format is batched:
        return
    room = p.problem.parallel.world_size * -(-max(1, p.problem.tokens) // unit) * unit
    if room % multiple:
        need = f"a multiple of {multiple} for {p.ex_name}"
        hint = "give the problem that many tokens more, or another PrepareAndFinalize"
        yield Rejection("capacity_multiple", p.both, f"{room} rows for an expert", need, hint)


def _ids_dtype(p: Pairing) -> Violations:
    need, got = p.pf.topk_indices_dtype, p.problem.ids_dtype
    if need is not None and got is not None and need != got:
        hint = "have the router emit that dtype"
        parties = (p.pf_name, "problem")
        yield Rejection("ids_dtype", parties, dtype_name(got), dtype_name(need), hint)


def _reduce(p: Pairing) -> Violations:
    if p.ex.reduce not in p.pf.reduces:
        need = f"one of {numbered([r.value for r in p.pf.reduces])}"
        yield Rejection("reduce", p.both, f"{p.ex.reduce.value} left by {p.ex_name}", need)


def _keep_topk(p: Pairing) -> Violations:
    if p.problem.combine is Combine.SUM:
        return
    for name, able in ((p.pf_name, p.pf.keep_topk), (p.ex_name, p.ex.keep_topk)):
        if not able:
            got, need = p.problem.combine.value, "sum"
            yield Rejection("keep_topk", (name, "problem"), got, need)


def _router_weight_on_input(p: Pairing) -> Violations:
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


def _activation(p: Pairing) -> Violations:
    act = p.problem.act
    if act.kind not in p.ex.activations:
        need = numbered(p.ex.activations)
        yield Rejection("activation", (p.ex_name, "problem"), act.kind, need)
    if act.interleaved and not p.ex.interleaved:
        got, need = "interleaved gate and up rows", "up" if p.ex.up_first else "gate"
        yield Rejection("activation", (p.ex_name, "problem"), got, f"{need} rows first")
    elif act.gated and not act.interleaved and act.up_first != p.ex.up_first:
        got, need = ("up", "gate") if act.up_first else ("gate", "up")
        hint = "modular_kernel.row_order puts up rows first" if p.ex.up_first else ""
        parties = (p.ex_name, "problem")
        yield Rejection("activation", parties, f"{got} rows first", f"{need} rows first", hint)


def _bias(p: Pairing) -> Violations:
    if p.problem.bias and not p.ex.bias:
        yield Rejection("bias", (p.ex_name, "problem"), "b1 and b2", "no biases")


def _padding(p: Pairing) -> Violations:
    if p.pf.padding is Rows.UNDEFINED and not p.ex.skips_padding:
        got = f"undefined padding rows from {p.pf_name}"
        yield Rejection("padding", p.both, got, "zero padding rows, or none")


def _invalid_rows(p: Pairing) -> Violations:
    """Contiguous reduction reads every pair's row, so a skipped pair's row has to be zero."""
    standard = p.ex.activation_format is ActivationFormat.STANDARD
    reads = p.ex.reduce in (Reduce.CONTIGUOUS, Reduce.DELEGATE)
    if standard and reads and p.ex.invalid_rows is not Rows.ZERO:
        got = f"undefined rows of skipped pairs from {p.ex_name}"
        yield Rejection("invalid_rows", p.both, got, "zero rows")


def _expert_map(p: Pairing) -> Violations:
    if p.pf.localises_ids:
        return
    if p.problem.expert_map and not p.ex.expert_map:
        yield Rejection("expert_map", (p.ex_name, "problem"), "an expert_map", "no expert_map")
    if p.problem.e != p.problem.experts and not p.problem.expert_map:
        got = f"{p.problem.e} of {p.problem.experts} experts here and no expert_map"
        hint = "set expert_map=True and give ExpertWeights.expert_map"
        yield Rejection("expert_map", (p.pf_name, "problem"), got, "an expert_map", hint)


def _chunking(p: Pairing) -> Violations:
    if p.problem.chunk_tokens is not None and not p.ex.chunking:
        got = f"chunk_tokens={p.problem.chunk_tokens}"
        yield Rejection("chunking", (p.ex_name, "problem"), got, "chunk_tokens=None")


def _property(rule: str, wanted: Callable[[Problem], bool], declared: str) -> RuleFunction:
    """Make a rule for a property that, if the problem wants it, both parts must declare."""

    def check(p: Pairing) -> Violations:
        for name, req in p.each():
            if wanted(p.problem) and not getattr(req, declared):
                yield Rejection(rule, (name, "problem"), f"not {declared}", declared)

    return check


def _batch_invariant(p: Pairing) -> Violations:
    """Both parts promise it, and nothing that the problem fixes makes tokens depend on others."""
    if not p.problem.batch_invariant:
        return
    rule, scheme = "batch_invariant", p.problem.scheme
    for name, req in p.each():
        if not req.batch_invariant:
            got = "sums that may depend on the other tokens of a call"
            yield Rejection(rule, (name, "problem"), got, "batch_invariant")
    if scheme.activation_granularity == "tensor" and not scheme.static:
        got = f"{scheme}: one activation scale, computed from all tokens of a call"
        yield Rejection(rule, ("problem",), got, "a scale per token, per group, or static")
    if p.problem.placement.has_copies:
        got = "copies of an expert, which take turns by a token's place in the call"
        yield Rejection(rule, ("problem",), got, "each expert on one rank")


def _asynchronous(p: Pairing) -> Violations:
    if p.problem.asynchronous and not p.pf.asynchronous:
        got, need = "no prepare_no_receive", "prepare_no_receive"
        yield Rejection("asynchronous", (p.pf_name, "problem"), got, need)


def _lora(p: Pairing) -> Violations:
    """Both parts carry adapters: their slots beside the tokens, their deltas in the products."""
    for name, req in p.each():
        if p.problem.adapters is not None and not req.lora:
            moves = isinstance(req, PrepareFinalizeRequirements)
            hint = "tokens lose their slots on the way" if moves else "products without deltas"
            yield Rejection("lora", (name, "problem"), str(p.problem.lora), "no adapters", hint)
    if p.problem.adapters is not None and p.problem.scheme.act_order:
        # h lies as w2's columns do, which no adapter was trained on.
        yield Rejection("lora", ("problem",), p.problem.quant, "columns in their order")


RULES: dict[str, RuleFunction] = {
    "format": _format,
    "device": _device,
    "arch": _arch,
    "archs": _archs,
    "package": _package,
    "dtype": _dtype,
    "fp32_precision": _fp32_precision,
    "top_k": _top_k,
    "hidden": _hidden,
    "intermediate": _intermediate,
    "quant": _quant,
    "dispatch_quant": _dispatch_quant,
    "scale_layout": _scale_layout,
    "quant_block": _quant_block,
    "blocks": _blocks,
    "packing": _packing,
    "min_tokens": _min_tokens,
    "max_experts": _max_experts,
    "addressing": _addressing,
    "world_size": _world_size,
    "hosts": _hosts,
    "placement": _placement,
    "capacity": _capacity,
    "capacity_multiple": _capacity_multiple,
    "ids_dtype": _ids_dtype,
    "reduce": _reduce,
    "keep_topk": _keep_topk,
    "router_weight_on_input": _router_weight_on_input,
    "activation": _activation,
    "bias": _bias,
    "padding": _padding,
    "invalid_rows": _invalid_rows,
    "expert_map": _expert_map,
    "chunking": _chunking,
    "inplace": _property("inplace", lambda problem: problem.inplace, "inplace"),
    "graph": _property("graph", lambda problem: problem.graph, "graph_capturable"),
    "deterministic": _property("deterministic", lambda p: p.deterministic, "deterministic"),
    "batch_invariant": _batch_invariant,
    "asynchronous": _asynchronous,
    "lora": _lora,
}


def judge(
    pf: type[PrepareAndFinalize],
    experts: type[PermuteExpertsUnpermute],
    problem: Problem,
    machine: Machine,
) -> Verdict:
    """Judge one pairing. Pure: reads the two declarations and the arguments, nothing else."""
    expect("problem", problem, Problem)
    expect("machine", machine, Machine)
    pairing = Pairing(
        pf.__name__, pf.requires, experts.__name__, experts.requires, problem, machine
    )
    rejections = [r for rule in RULES.values() for r in rule(pairing)]
    rejections += told(pf.__name__, partial(pf.extra_rejections, problem, machine))
    rejections += told(experts.__name__, partial(experts.extra_rejections, problem, machine))
    return Verdict(pf.__name__, experts.__name__, problem, machine, tuple(rejections))


def unavailable(name: str, requires: Requirements, machine: Machine) -> tuple[Rejection, ...]:
    """Say why one part cannot run on `machine` whatever it is paired with; empty if it can."""
    any_problem, fmt = Problem(1, 1, 1, 1, 1), requires.activation_format
    pf = PrepareFinalizeRequirements(activation_format=fmt, reduces=frozenset(Reduce))
    ex = ExpertsRequirements(activation_format=fmt, reduce=Reduce.NOOP)
    if isinstance(requires, ExpertsRequirements):
        pairing = Pairing("", pf, name, requires, any_problem, machine)
    else:
        assert isinstance(requires, PrepareFinalizeRequirements)
        pairing = Pairing(name, requires, "", ex, any_problem, machine)
    found = [r for rule in (_device, _arch, _archs, _package) for r in rule(pairing)]
    return tuple(r for r in found if name in r.parties)
