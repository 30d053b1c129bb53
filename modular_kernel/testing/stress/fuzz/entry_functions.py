"""Public functions around kernels: fused_experts, checkpoint importers, and the command line.

They are looked up by name, as users import them, because testing must not import higher-level
packages.
"""

import contextlib
import io
import tempfile
from dataclasses import replace
from importlib import import_module
from random import Random
from typing import Any

import torch

from modular_kernel.settings import preserve_environment
from modular_kernel.spec.problem import ActivationSpec, Combine, Problem
from modular_kernel.testing.stress.fuzz.oracle import Oracle, matrix
from modular_kernel.testing.stress.fuzz.outcome import (
    ACCEPTED,
    RAW,
    RIGHT,
    TYPED,
    WRONG,
    FuzzOutcome,
    run_or_outcome,
)
from modular_kernel.testing.stress.fuzz.random_problems import (
    describe,
    draw_inputs,
    draw_problem,
    generator_of,
)
from modular_kernel.testing.stress.fuzz.specs import JUNK, shorten


def import_name(place: str) -> Any:
    """Return the object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def fused_experts(rng: Random) -> FuzzOutcome:
    """Call `fused_experts` on a random problem, with or without a junk argument."""
    drawn = run_or_outcome("a problem", lambda: _fused_problem(rng))
    if isinstance(drawn, FuzzOutcome):
        return drawn
    problem, inputs = drawn, draw_inputs(drawn, rng)
    config: dict[str, Any] = {
        "activation": rng.choice((str(problem.activation), problem.act)),
        "apply_router_weight_on_input": problem.apply_router_weight_on_input,
        "inplace": problem.inplace,
        "no_combine": problem.combine is Combine.TOPK_WEIGHTED,
        "routed_scaling_factor": problem.routed_scaling_factor,
    }
    options: dict[str, Any] = _options(problem)
    names = {"w1_zero_point": "w1_zp", "w2_zero_point": "w2_zp"}
    options |= {
        names.get(name, name): tensor
        for name, tensor in vars(inputs.weights).items()
        if name not in ("w1", "w2") and tensor is not None
    }
    routing = (inputs.routing.topk_weights_TK, inputs.routing.topk_ids_TK, None)
    arguments = [inputs.x_TH, inputs.weights.w1, inputs.weights.w2, routing]
    what = f"fused_experts of {describe(problem)}"
    junk = rng.random() < 0.5
    if junk:
        what += _insert_junk(rng, arguments, config, options)
    oracle = Oracle(problem, inputs.x_TH.clone(), inputs.weights, inputs.routing)
    home = "modular_kernel.integrations.fused_moe"

    def call() -> torch.Tensor:
        runner_config = import_name(f"{home}:MoeRunnerConfig")(**config)
        result: torch.Tensor = import_name(f"{home}:fused_experts")(
            *arguments, runner_config, **options
        )
        return result

    result = run_or_outcome(what, call)
    if isinstance(result, FuzzOutcome):
        return result
    if junk:
        return FuzzOutcome(ACCEPTED, what)
    fault = oracle.fault(result)
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


# Schemes without a `use_*` flag.
_NO_FLAG = (
    *("mxfp4_w4a16", "nvfp4_w4a16"),
    *("fp8_w8a16_tensor", "fp8_w8a16_channel", "fp8_w8a16_block"),
)


def _fused_problem(rng: Random) -> Problem:
    """Return a problem that fused_experts can express."""
    problem = draw_problem(rng)
    if problem.scheme.name in _NO_FLAG or problem.combine is Combine.TOPK_UNWEIGHTED:
        problem = replace(problem, quant="none", combine=Combine.SUM)
    return replace(problem, chunk_tokens=None, local_experts=None, expert_map=False)


def _options(problem: Problem) -> dict[str, Any]:
    scheme = problem.scheme
    if not scheme.quantized:
        return {}
    options: dict[str, Any] = {f"use_{scheme.name.rsplit('_', 1)[0]}": True}
    if scheme.granularity == "channel":
        options["per_channel_quant"] = True
    elif scheme.granularity in ("block", "group"):
        options["block_shape"] = [0, *scheme.group][-2:]
    return options


_WORDS = ("use_fp8", "w2_bias", "b3", "global_num_experts", "use_int4_w4a8", "W1_scale")


def _insert_junk(
    rng: Random, arguments: list[Any], config: dict[str, Any], options: dict[str, Any]
) -> str:
    """Insert one invalid argument; return its description."""
    kind = rng.randrange(4)
    values = [v for v in JUNK if v is not None and not isinstance(v, bool)]
    if kind == 0:  # an unknown option
        name = rng.choice(_WORDS)
        options[name] = True
        return f" with {name}=True"
    if kind == 1:
        name = rng.choice(sorted(config))
        # No number is valid for a flag or a text; every finite one is valid for the factor.
        kinds = (int, float, *((ActivationSpec,) if name == "activation" else ()))
        value = rng.choice([v for v in values if not isinstance(v, kinds) and v != "silu"])
        config[name] = value
        return f" with config.{name}={shorten(value)}"
    if kind == 2:
        place = rng.randrange(4)
        fits = (torch.Tensor,) if place == 0 else ()  # x may be as small as a tensor in JUNK
        arguments[place] = rng.choice([v for v in values if not isinstance(v, fits)])
        return f" with {shorten(arguments[place])} as argument {place}"
    name = rng.choice(("b1", "w1_scale", "expert_map", "a1_scale", "block_shape"))
    # (1, 2) may be a valid block shape for a matrix of one row.
    options[name] = rng.choice(
        [v for v in values if not isinstance(v, torch.Tensor) and v != (1, 2)]
    )
    return f" with {name}={shorten(options[name])}"


def importers(rng: Random) -> FuzzOutcome:
    """Import a random GPTQ or AWQ matrix: correct values, or a typed error for junk."""
    generator = generator_of(rng)
    awq = rng.random() < 0.4
    bits = 4 if awq else rng.choice((4, 8))
    group, parts = rng.choice((32, 64)), 32 // bits
    groups, rows = rng.choice((1, 1, 2, 3)), parts * rng.choice((2, 4, 8))
    depth = group * groups
    codes = torch.randint(0, 2**bits, (depth, rows), generator=generator)
    zeros = torch.randint(1, 2**bits, (depth // group, rows), generator=generator)
    if awq and rng.random() < 0.3:
        zeros = torch.full_like(zeros, 8)  # the default, so qzeros may be omitted
    arguments: dict[str, Any] = {
        "scales": torch.rand(depth // group, rows, generator=generator) + 0.1,
        "group": -1 if groups == 1 and rng.random() < 0.5 else group,
    }
    if awq:
        arguments |= {"qweight": _pack_awq(codes), "qzeros": _pack_awq(zeros)}
        if bool((zeros == 8).all()):
            arguments["qzeros"] = rng.choice((None, arguments["qzeros"]))
    else:
        arguments |= {
            "qweight": _pack_words(codes, 0, bits),
            "qzeros": _pack_words(zeros - 1, 1, bits),
        }
        arguments["bits"] = bits
    name = "from_awq" if awq else "from_gptq"
    what = f"{name} of {depth} x {rows}, {bits} bits, groups of {arguments['group']}"
    junk = rng.random() < 0.6
    if junk:
        junk_name = rng.choice(sorted(arguments))
        fits = {"bits": (4, 8), "group": (-1, group)}.get(junk_name, ())
        values = [v for v in JUNK if v is not None and not (isinstance(v, int) and v in fits)]
        arguments[junk_name] = rng.choice(values)
        what += f" with {junk_name}={shorten(arguments[junk_name])}"
    scales = arguments["scales"]
    result = run_or_outcome(
        what, lambda: import_name(f"modular_kernel.checkpoints:{name}")(**arguments)
    )
    if isinstance(result, FuzzOutcome):
        return result if junk else FuzzOutcome(WRONG, f"{what}: refused")
    if junk:
        return FuzzOutcome(ACCEPTED, what)
    has_zero_points = result.zero_point is not None
    quant = f"int{bits}_w{bits}a16_group:group={group},zero_points={str(has_zero_points).lower()}"
    problem = Problem(1, depth, rows, 1, 1, dtype=torch.float32, quant=quant)
    zero = result.zero_point[None] if has_zero_points else None
    numbers = matrix(result.w[None], result.scale[None], zero, problem)[0]
    expected = (codes - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)
    close = torch.allclose(numbers.T, expected.double(), rtol=1e-6)
    return FuzzOutcome(RIGHT, what) if close else FuzzOutcome(WRONG, what)


def _pack_awq(values: torch.Tensor) -> torch.Tensor:
    """Pack AWQ int32 words along the columns: even ones of eight in the low half, then odd ones."""
    eights = values.reshape(len(values), -1, 8)
    order = torch.cat([eights[..., 0::2], eights[..., 1::2]], dim=-1)
    return _pack_words(order.reshape(len(values), -1), 1, 4)


def _pack_words(values: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """Pack 32 / bits values per int32 word along `dim`, the first value in the lowest bits."""
    parts = 32 // bits
    moved = values.movedim(dim, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, parts).long()
    words = (groups << (torch.arange(parts) * bits)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim)


_FLAGS = (
    "--tokens", "--hidden", "--intermediate", "--experts", "--top-k", "--dtype", "--quant",
    "--activation", "--chunk-tokens", "--max-received", "--combine",
    "--ids-dtype", "--routed-scaling-factor",
    "--bias", "--inplace", "--json", "--pf-type", "--experts-type", "--machine", "--nonsense",
    "--seed", "--routing", "--level", "--help",
)  # fmt: skip
_VALUES = (
    "0", "1", "4", "-1", "2147483648", "1e3", "nan", "x", "", "silu", "swiglu_oai:limit=nan",
    "bf16",
    "fp64", "fp8_w8a8_block:block=0x0", "none", "sum", "int64", "\x1b[2J", "é", "/dev/null",
    "TorchExperts", "MoEPrepareAndFinalizeNoEP", "cpu", "cuda:9", "h200",
)  # fmt: skip


def command_line(rng: Random) -> FuzzOutcome:
    """Run `mk list`, `check`, `plan` or `compose` with random options.

    It must exit with 0, 1 or 2 and without a traceback. Nothing is launched: `compose` has no time
    to measure.
    """
    words = [rng.choice(("list", "check", "check", "plan", "compose", "nothing"))]
    for _ in range(rng.randint(0, 5)):
        words.append(rng.choice(_FLAGS))
        if rng.random() < 0.8:
            words.append(rng.choice(_VALUES))
    if words[0] == "compose":
        words += ["--budget", "0"]
    what = f"mk {' '.join(map(repr, words))}"
    printed = io.StringIO()

    def call() -> int:
        out, err = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
        # The value of --json is a file name; such files are removed with the folder.
        folder = tempfile.TemporaryDirectory()
        with out, err, preserve_environment(), folder as folder_path, contextlib.chdir(folder_path):
            try:
                import_name("modular_kernel.cli.main:run")(words)
            except SystemExit as ended:
                return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        return 0

    status = run_or_outcome(what, call)
    if isinstance(status, FuzzOutcome):  # an uncaught error of any type
        return FuzzOutcome(RAW, status.what)
    if "Traceback" in printed.getvalue() or status not in (0, 1, 2):
        return FuzzOutcome(RAW, f"{what}: exit {status}")
    if "\x1b[2J" in printed.getvalue():
        return FuzzOutcome(WRONG, f"{what}: a control sequence is printed unescaped")
    return FuzzOutcome(TYPED if status else RIGHT, what)
