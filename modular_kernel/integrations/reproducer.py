"""Writes standalone programs that reproduce a wrong result of an engine's experts class.

A program imports only the engine and torch. It draws inputs and weights from a fixed seed, calls
the class through the engine's API, and compares the output with a float64 reference in torch. Apart
from imports, it has at most ten statements.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from modular_kernel.errors import UnsupportedError
from modular_kernel.integrations.engine import EngineCase
from modular_kernel.spec.problem import ActivationSpec, Problem, dtype_name


@dataclass(frozen=True)
class EngineLines:
    """The lines of a program that depend on the engine.

    The lines use the variables x (T, H), router and ids (T, K), w1 and w2. Depending on the scheme,
    they also use the scales s1 and s2 and the global scales g1 and g2. If the problem has biases,
    they use b1 and b2.

    imports: import statements.
    call: statements that set `out` (T, H).
    """

    imports: Sequence[str]
    call: Sequence[str]


def write_program(case: EngineCase, engine: EngineLines, device: str, bound: float) -> str:
    """Return the source of the program, which fails if the relative RMS error exceeds `bound`."""
    problem = case.problem
    dtype, tokens, top_k = f"torch.{dtype_name(problem.dtype)}", problem.tokens, problem.top_k
    generator = "generator=torch.manual_seed(0)"
    if device != "cpu":
        generator = f'device="{device}", generator=torch.Generator("{device}").manual_seed(0)'
    error = "float((out - expected).norm() / expected.norm())"
    lines = [
        f"# {case.experts}, {problem.scheme}, {case.activation}, {case.shape}",
        "from functools import partial",
        "import torch, torch.nn.functional as F",
        *engine.imports,
        "",
        f"rand = partial(torch.randn, {generator})",
        "x, router, ids = (",
        f"    rand({tokens}, {problem.hidden}).to({dtype}),",
        f"    rand({tokens}, {top_k}).sigmoid().to({dtype}).float(),",
        f"    {_write_ids(case, device)},",
        ")",
        *_write_weights(problem),
        *engine.call,
        *_write_reference(problem),
        f"assert (error := {error}) <= {bound:.3e}, (",
        f'    f"relative RMS error {{error:.2e}}, allowed {bound:.2e}"',
        ")",
    ]
    return "\n".join(lines) + "\n"


def get_first_expert(problem: Problem) -> int:
    """Return the first expert on this rank."""
    return problem.e if problem.expert_map else 0


def write_expert_map(problem: Problem, device: str) -> str:
    """Return an expression for the expert_map."""
    if not problem.expert_map:
        return "None"
    values = f"[*{problem.e} * [-1], *range({problem.e})]"
    return f"torch.tensor({values}, dtype=torch.int32{write_device_argument(device)})"


def write_device_argument(device: str) -> str:
    """Return the source of the argument `device` of a function that makes a tensor; "" on a CPU."""
    return "" if device == "cpu" else f', device="{device}"'


def _write_ids(case: EngineCase, device: str) -> str:
    problem = case.problem
    if case.routing == "all_to_one":
        first = get_first_expert(problem)
        experts = f"torch.arange({first}, {first + problem.top_k}{write_device_argument(device)})"
        return f"{experts}.repeat({problem.tokens}, 1).int()"
    scores = f"rand({problem.tokens}, {problem.experts})"
    if case.routing == "empty_experts":
        offsets = f"torch.arange({problem.experts}{write_device_argument(device)})"
        scores = f"({scores} - 99 * ({offsets} % 2))"
    return f"{scores}.topk({problem.top_k}).indices.int()"


def _write_reference(problem: Problem) -> list[str]:
    """Return lines that run every expert on every token, and compute the weighted sum."""
    act = problem.act
    on_input = problem.apply_router_weight_on_input  # only with top_k = 1
    values = ("w1", "w2") if problem.quant == "none" else ("d1", "d2")
    x = "(router * x)" if on_input else "x"
    scores = f"F.one_hot(ids.long(), {problem.experts})"
    scores = f"{scores}.sum(1)" if on_input else f"({scores} * router[..., None]).sum(1)"
    if problem.expert_map:
        scores += f"[:, {get_first_expert(problem)}:]"
    b1, b2 = (" + b1.double()", " + b2.double()") if problem.bias else ("", "")
    h = f'torch.einsum("bh,enh->ben", {x}.double(), {values[0]}.double()){b1}'
    if act.gated:
        halves = "unflatten(-1, (-1, 2)).unbind(-1)" if act.interleaved else "chunk(2, -1)"
        h = f"g, u = ({h}).{halves}" if b1 else f"g, u = {h}.{halves}"
    else:
        h = f"h = {h}"
    y = f'torch.einsum("bei,ehi->beh", {write_activation(act)}, {values[1]}.double()){b2}'
    return [
        h,
        "expected = torch.einsum(",
        '    "be,beh->bh",',
        f"    {scores}.double(),",
        f"    {y},",
        ")",
    ]


def write_activation(act: ActivationSpec) -> str:
    """Return an expression of h (..., I), or of the gate g and up u (..., I), in float64.

    Raises UnsupportedError for an activation whose rows have another order.
    """
    if not act.gated:
        return {
            "silu_no_mul": "F.silu(h)",
            "gelu_no_mul": "F.gelu(h)",
            "gelu_tanh_no_mul": 'F.gelu(h, approximate="tanh")',
            "relu2": "h.relu() ** 2",
        }[act.kind]
    if act.up_first:
        raise UnsupportedError("up_first", got=True, need="False")
    limit, alpha = act.limit, act.alpha
    gate, up = f"g.clamp(max={limit})", f"u.clamp(-{limit}, {limit})"
    return {
        "silu": "F.silu(g) * u",
        "gelu": "F.gelu(g) * u",
        "gelu_tanh": 'F.gelu(g, approximate="tanh") * u',
        "swiglu_oai": f"F.silu({alpha} * {gate}) / {alpha} * ({up} + 1)",
        "swiglu_clamp_before": f"F.silu({gate}) * {up}",
        "swiglu_clamp_after": f"F.silu(g).clamp(max={limit}) * {up}",
        "situ": f"{alpha} * (g / {alpha}).tanh() * g.sigmoid() * "
        + ("u" if limit is None else f"{limit} * (u / {limit}).tanh()"),
    }[act.kind]


# ------------------------------------------------------------------------------------ weights


def _write_weights(problem: Problem) -> list[str]:
    """Return the lines of a statement that makes weights in the scheme's format, and biases.

    The values of quantized weights are d1 and d2.
    """
    rows = 2 * problem.intermediate if problem.act.gated else problem.intermediate
    hidden, e = problem.hidden, problem.e
    dtype = f"torch.{dtype_name(problem.dtype)}"
    expressions = {"w": f"(rand({e}, n, k) / k**0.5).to({dtype})"}
    values = ""
    if problem.quant != "none":
        expressions, values = _FORMATS[problem.scheme.name](problem)
    if problem.bias:
        expressions["b"] = f"rand({e}, n).to({dtype}) / 2"
    names = list(expressions)
    tensors = ", ".join(names) + ("," if len(names) == 1 else "")
    results = f"({', '.join([*names, values])})" if values else f"({tensors})"
    targets = [name + "{0}" for name in [*names, *(["d"] if values else [])]]
    if targets == ["w{0}"]:
        sizes = f"(({rows}, {hidden}), ({hidden}, {problem.intermediate}))"
        return [f"w1, w2 = ({expressions['w']} for n, k in {sizes})"]
    variables = ", ".join(f"({', '.join(targets)})".format(n) for n in (1, 2))
    lines = [
        f"{variables} = (",
        f"    {results}",
        f"    for n, k in (({rows}, {hidden}), ({hidden}, {problem.intermediate}))",
    ]
    lines += [f"    for {name} in [{expression}]" for name, expression in expressions.items()]
    return [*lines, ")"]


# (expressions of the tensors of one GEMM by name, expression of the values of the weights). The
# tensors are the weights w of shape (e, n, k), the scales s and the global scales g.
_Format = tuple[dict[str, str], str]


def _expand_blocks(problem: Problem) -> tuple[str, str]:
    """Return expressions for the shape of block scales, and for the expanded scales."""
    n, k = problem.scheme.group
    rows = 2 * problem.intermediate if problem.act.gated else problem.intermediate
    expanded = f"s.repeat_interleave({n}, 1).repeat_interleave({k}, 2)"
    hidden, intermediate = problem.hidden, problem.intermediate
    if rows % n or hidden % n or hidden % k or intermediate % k:  # the last blocks are smaller
        return f"-(-n // {n}), -(-k // {k})", f"{expanded}[:, :n, :k]"
    return f"n // {n}, k // {k}", expanded


def _make_fp8(problem: Problem) -> _Format:
    scheme, e = problem.scheme, problem.e
    if scheme.granularity == "block":
        blocks, scale = _expand_blocks(problem)
        shape = f"{e}, {blocks}"
    elif scheme.granularity == "channel":
        shape, scale = f"{e}, n, 1", "s"
    else:
        shape, scale = f"{e}", "s[:, None, None]"
    expressions = {
        "w": f"rand({e}, n, k).to(torch.float8_e4m3fn)",
        "s": f"(rand({shape}).sigmoid() + 0.5) / k**0.5",
    }
    return expressions, f"w.float() * {scale}"


def _make_int8(problem: Problem) -> _Format:
    blocks, scale = "n, 1", "s"
    if problem.scheme.granularity == "block":
        blocks, scale = _expand_blocks(problem)
    expressions = {
        "w": f"(rand({problem.e}, n, k) * 40).clamp(-127, 127).to(torch.int8)",
        "s": f"(rand({problem.e}, {blocks}).sigmoid() + 0.5) / (40 * k**0.5)",
    }
    return expressions, f"w.float() * {scale}"


def _write_bytes(shape: str) -> str:
    """Return an expression for uniformly distributed bytes."""
    return f"(rand({shape}) * 1e4).int().to(torch.uint8)"


_CODES = "torch.stack((w & 15, w >> 4), -1).flatten(2)"  # the two 4-bit codes of each byte


def _make_groups(problem: Problem) -> _Format:
    """Return expressions for integers with a scale per group. A byte packs two 4-bit integers."""
    e, group, dtype = problem.e, problem.scheme.group[0], f"torch.{dtype_name(problem.dtype)}"
    width, std, values = "k", 74, "(w.float() - 128)"
    if problem.scheme.packed:
        width, std, values = "k // 2", 5, f"({_CODES}.float() - 8)"
    expressions = {
        "w": _write_bytes(f"{e}, n, {width}"),
        "s": f"((rand({e}, n, k // {group}).sigmoid() + 0.5) / ({std} * k**0.5)).to({dtype})",
    }
    return expressions, f"{values} * s.float().repeat_interleave({group}, 2)"


_E2M1 = "[0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]"
_FP4_VALUES = f"x.new_tensor({_E2M1}).float()[{_CODES}.long()]"


def _make_mxfp4(problem: Problem) -> _Format:
    e = problem.e
    expressions = {
        "w": _write_bytes(f"{e}, n, k // 2"),
        "s": f"rand({e}, n, k // 32).clamp(-2, 2).add(122).to(torch.uint8)",
    }
    return expressions, f"{_FP4_VALUES} * (2.0 ** (s.float() - 127)).repeat_interleave(32, 2)"


def _make_nvfp4(problem: Problem) -> _Format:
    e = problem.e
    expressions = {
        "w": _write_bytes(f"{e}, n, k // 2"),
        "s": f"(rand({e}, n, k // 16).sigmoid() * 100 + 50).to(torch.float8_e4m3fn)",
        "g": f"(rand({e}).sigmoid() + 0.5) / (300 * k**0.5)",
    }
    return expressions, f"{_FP4_VALUES} * s.float().repeat_interleave(16, 2) * g[:, None, None]"


_FORMATS: Mapping[str, Callable[[Problem], _Format]] = {
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
