"""Writes programs that show a wrong result of an experts class with its engine and torch alone.

A program makes random inputs and weights by a seed, calls the class in the engine's own objects,
and compares the output with plain torch in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from modular_kernel.errors import UnsupportedError
from modular_kernel.integrations.engine import EngineCase
from modular_kernel.spec.problem import ActivationSpec, Problem, dtype_name


@dataclass(frozen=True)
class EngineLines:
    """The lines of a program that depend on the engine.

    They read x (T, H), router and ids (T, K), w1, w2 and what else the scheme's format has (scales
    s1 and s2, global scales g1 and g2, static scales a1 and a2 of activations), and biases b1 and
    b2 if the problem has any.

    imports: import statements.
    call: statements that set `out` (T, H).
    """

    imports: Sequence[str]
    call: Sequence[str]


def write_program(case: EngineCase, engine: EngineLines, device: str, bound: float) -> str:
    """Return the program. It exits with 1 if the relative RMS error is above `bound`."""
    problem = case.problem
    dtype, tokens, top_k = f"torch.{dtype_name(problem.dtype)}", problem.tokens, problem.top_k
    rows = 2 * problem.intermediate if problem.act.gated else problem.intermediate
    where = "" if device == "cpu" else f"torch.set_default_device({device!r}); "
    x = f"torch.randn({tokens}, {problem.hidden}).to({dtype})"
    lines = [
        f"# {case.experts}, {problem.scheme}, {case.activation}, {case.shape}",
        "import torch, torch.nn.functional as F",
        *engine.imports,
        f"{where}torch.manual_seed(0); x = {x}",
        f"router, ids = torch.rand({tokens}, {top_k}).to({dtype}).float(), {_write_ids(case)}",
        *_write_weights(problem),
    ]
    if problem.bias:
        sizes = f"({rows}, {problem.hidden})"
        lines.append(f"b1, b2 = (torch.randn({problem.e}, n).to({dtype}) / 2 for n in {sizes})")
    lines += [*engine.call, *_write_reference(problem)]
    lines += [
        "error = float((out.double() - expected).norm() / expected.norm())",
        f"print(f'relative RMS error {{error:.2e}}, allowed {bound:.2e}')",
        f"raise SystemExit(not error <= {bound:.3e})",
    ]
    return "\n".join(lines) + "\n"


def get_first_expert(problem: Problem) -> int:
    """Return the first expert on this rank."""
    return problem.e if problem.expert_map else 0


def write_expert_map(problem: Problem) -> str:
    """Return an expression for the expert_map."""
    if not problem.expert_map:
        return "None"
    experts, first = f"torch.arange({problem.experts})", get_first_expert(problem)
    return f"torch.where({experts} < {first}, -1, {experts} - {first}).int()"


def _write_ids(case: EngineCase) -> str:
    problem = case.problem
    shape = f"{problem.tokens}, {problem.experts}"
    if case.routing == "all_to_one":
        experts = f"torch.arange({problem.top_k}, dtype=torch.int32)"
        return f"{experts}.repeat({problem.tokens}, 1) + {get_first_expert(problem)}"
    scores = f"torch.rand({shape})"
    if case.routing == "empty_experts":
        scores = f"({scores} - torch.arange({problem.experts}) % 2)"
    return f"{scores}.topk({problem.top_k}).indices.int()"


def _write_reference(problem: Problem) -> list[str]:
    """Return lines that compute every expert for every token, and sum by the router weights."""
    on_input, bias = problem.apply_router_weight_on_input, problem.bias
    values = ("w1", "w2") if problem.quant == "none" else ("d1", "d2")
    x = "(router * x)" if on_input else "x"  # top-k is 1
    shape = f"{problem.tokens}, {problem.experts}"
    scores = f"torch.zeros({shape}).scatter(1, ids.long(), {'1.0' if on_input else 'router'})"
    if problem.expert_map:
        scores += f"[:, {get_first_expert(problem)}:]"
    b1, b2 = (" + b1.double()", " + b2.double()") if bias else ("", "")
    y = f"torch.einsum('bei,ehi->beh', a, {values[1]}.double()){b2}"
    return [
        f"h = torch.einsum('bh,enh->ben', {x}.double(), {values[0]}.double()){b1}",
        write_activation(problem.act),
        f"expected = torch.einsum('be,beh->bh', {scores}.double(), {y})",
    ]


def write_activation(act: ActivationSpec) -> str:
    """Return a line that computes a (..., I) from h (..., N), in float64.

    Raises UnsupportedError for an activation whose rows have another order.
    """
    if not act.gated:
        functions = {
            "silu_no_mul": "F.silu(h)",
            "gelu_no_mul": "F.gelu(h)",
            "gelu_tanh_no_mul": "F.gelu(h, approximate='tanh')",
            "relu2": "h.relu() ** 2",
        }
        return f"a = {functions[act.kind]}"
    if act.up_first:
        raise UnsupportedError("up_first", got=True, need="False")
    split = "g, u = h[..., ::2], h[..., 1::2]" if act.interleaved else "g, u = h.chunk(2, -1)"
    limit = act.limit
    clamped = f"u.clamp(-{limit}, {limit})"
    if act.kind in ("swiglu_oai", "swiglu_clamp_before"):
        split += f"; g, u = g.clamp(max={limit}), {clamped}"
    functions = {
        "silu": "F.silu(g) * u",
        "gelu": "F.gelu(g) * u",
        "gelu_tanh": "F.gelu(g, approximate='tanh') * u",
        "swiglu_oai": f"g * ({act.alpha} * g).sigmoid() * (u + 1)",
        "swiglu_clamp_before": "F.silu(g) * u",
        "swiglu_clamp_after": f"F.silu(g).clamp(max={limit}) * {clamped}",
        "situ": f"{act.alpha} * (g / {act.alpha}).tanh() * g.sigmoid() * "
        + ("u" if limit is None else f"{limit} * (u / {limit}).tanh()"),
    }
    return f"{split}; a = {functions[act.kind]}"


# ------------------------------------------------------------------------------------ weights


def _write_weights(problem: Problem) -> list[str]:
    """Return lines that make weights in the scheme's format, and their values d1 and d2."""
    rows = 2 * problem.intermediate if problem.act.gated else problem.intermediate
    hidden, e = problem.hidden, problem.e
    sizes = f"for n, k in (({rows}, {hidden}), ({hidden}, {problem.intermediate}))"
    if problem.quant == "none":
        dtype = f"torch.{dtype_name(problem.dtype)}"
        return [f"w1, w2 = ((torch.randn({e}, n, k) / k**.5).to({dtype}) {sizes})"]
    made = _FORMATS[problem.scheme.name](problem)
    lines = [f"w1, w2 = ({made.weights} {sizes})", f"s1, s2 = ({made.scales} {sizes})"]
    names, pairs = "w, s", "(w1, s1), (w2, s2)"
    if made.global_scales:
        lines.append(f"g1, g2 = ({made.global_scales} {sizes})")
        names, pairs = "w, s, g", "(w1, s1, g1), (w2, s2, g2)"
    lines.append(f"d1, d2 = ({made.values} for {names} in ({pairs}))")
    if made.static:
        lines.append(f"a1, a2 = {made.static}")
    return lines


@dataclass(frozen=True)
class _Made:
    """Expressions for weights w of shape (e, n, k), scales s, their global scales g, and values.

    static: static scales of the activations of both GEMMs; empty if they are computed.
    """

    weights: str
    scales: str
    values: str
    global_scales: str = ""
    static: str = ""


def _expand_blocks(problem: Problem) -> tuple[str, str]:
    """Return the shape of the scales of blocks, and the scales for each value."""
    n, k = problem.scheme.group
    rows = 2 * problem.intermediate if problem.act.gated else problem.intermediate
    expanded = f"s.repeat_interleave({n}, 1).repeat_interleave({k}, 2)"
    hidden, intermediate = problem.hidden, problem.intermediate
    if rows % n or hidden % n or hidden % k or intermediate % k:  # the last blocks are smaller
        return f"-(-n // {n}), -(-k // {k})", f"{expanded}[:, :w.shape[1], :w.shape[2]]"
    return f"n // {n}, k // {k}", expanded


def _make_fp8(problem: Problem) -> _Made:
    scheme, e = problem.scheme, problem.e
    if scheme.granularity == "block":
        blocks, scale = _expand_blocks(problem)
        shape = f"{e}, {blocks}"
    elif scheme.granularity == "channel":
        shape, scale = f"{e}, n, 1", "s"
    else:
        shape, scale = f"{e}", "s[:, None, None]"
    return _Made(
        f"torch.randn({e}, n, k).to(torch.float8_e4m3fn)",
        f"(torch.rand({shape}) + .5) / k**.5",
        f"w.float() * {scale}",
        static="torch.tensor([.0125]), torch.tensor([.05])" if scheme.static else "",
    )


def _make_int8(problem: Problem) -> _Made:
    blocks, scale = "n, 1", "s"
    if problem.scheme.granularity == "block":
        blocks, scale = _expand_blocks(problem)
    return _Made(
        f"torch.randint(-127, 128, ({problem.e}, n, k), dtype=torch.int8)",
        f"(torch.rand({problem.e}, {blocks}) + .5) / (73 * k**.5)",
        f"w.float() * {scale}",
    )


def _make_groups(problem: Problem) -> _Made:
    """Integers with a scale per group. Two 4-bit integers are packed in a byte."""
    e, group, dtype = problem.e, problem.scheme.group[0], f"torch.{dtype_name(problem.dtype)}"
    width, std, values = "k", 74, "w.float() - 128"
    if problem.scheme.packed:
        width, std = "k // 2", 5
        values = "torch.stack((w & 15, w >> 4), -1).flatten(2).float() - 8"
    return _Made(
        f"torch.randint(0, 256, ({e}, n, {width}), dtype=torch.uint8)",
        f"((torch.rand({e}, n, k // {group}) + .5) / ({std} * k**.5)).to({dtype})",
        f"({values}) * s.float().repeat_interleave({group}, 2)",
    )


_E2M1 = "torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])"
_CODES = "torch.stack((w & 15, w >> 4), -1).flatten(2).long()"


def _make_mxfp4(problem: Problem) -> _Made:
    e = problem.e
    return _Made(
        f"torch.randint(0, 256, ({e}, n, k // 2), dtype=torch.uint8)",
        f"torch.randint(120, 124, ({e}, n, k // 32), dtype=torch.uint8)",
        f"{_E2M1}[{_CODES}] * (2.0 ** (s.float() - 127)).repeat_interleave(32, 2)",
    )


def _make_nvfp4(problem: Problem) -> _Made:
    e = problem.e
    return _Made(
        f"torch.randint(0, 256, ({e}, n, k // 2), dtype=torch.uint8)",
        f"(torch.rand({e}, n, k // 16) * 100 + 50).to(torch.float8_e4m3fn)",
        f"{_E2M1}[{_CODES}] * s.float().repeat_interleave(16, 2) * g[:, None, None]",
        global_scales=f"(torch.rand({e}) + .5) / (300 * k**.5)",
        static=f"torch.full(({e},), .002), torch.full(({e},), .01)"
        if problem.scheme.static
        else "",
    )


_FORMATS: Mapping[str, Callable[[Problem], _Made]] = {
    "fp8_w8a8_tensor": _make_fp8,
    "fp8_w8a8_channel": _make_fp8,
    "fp8_w8a8_block": _make_fp8,
    "int8_w8a8_channel": _make_int8,
    "int8_w8a8_block": _make_int8,
    "int8_w8a16_group": _make_groups,
    "int4_w4a16_group": _make_groups,
    "mxfp4_w4a16": _make_mxfp4,
    "nvfp4_w4a16": _make_nvfp4,
    "nvfp4_w4a4": _make_nvfp4,
}
