"""Command-line options that describe a Problem, shared by all verbs."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, get_type_hints

import typer

from modular_kernel.cli.file_options import FileUse
from modular_kernel.cli.output import note
from modular_kernel.cli.presets import facts, reads_file
from modular_kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from modular_kernel.spec.placement import Placement
    from modular_kernel.spec.problem import Problem

# A layer small enough to run quickly on any machine.
DEFAULTS: dict[str, object] = {
    "tokens": 16,
    "hidden": 64,
    "intermediate": 128,
    "experts": 8,
    "top_k": 2,
    "dtype": "bfloat16",
}

PfType = Annotated[str | None, typer.Option(help="Name of a PrepareAndFinalize (see mk list).")]
ExpertsType = Annotated[str | None, typer.Option(help="Name of an experts part (see mk list).")]
Prepared = Annotated[
    bool,
    typer.Option("--prepared", help="Use prepared weights (kernel.prepare_weights)."),
]
AsJson = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE]", help="Print JSON instead of text; with a file, write it there."
    ),
    FileUse.WRITE_OR_STDOUT,
]


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


def _sized(text: str, name: str) -> Any:
    return _option(f"{text}  [default: {DEFAULTS[name]}, or the model's]")


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """Options of a Problem. None means the model's value, else the default."""

    tokens: Annotated[int | None, _option("Maximum number of tokens per call.  [default: 16]")] = (
        None
    )
    hidden: Annotated[int | None, _sized("Hidden size.", "hidden")] = None
    intermediate: Annotated[int | None, _sized("Intermediate size.", "intermediate")] = None
    experts: Annotated[int | None, _sized("Number of experts of the model.", "experts")] = None
    top_k: Annotated[int | None, _sized("Number of experts per token (top-k).", "top_k")] = None
    dtype: Annotated[str | None, _option("float32, float16 or bfloat16.  [default: bfloat16]")] = (
        None
    )
    quant: Annotated[str | None, _option("Quantization scheme.  [default: none]")] = None
    activation: Annotated[
        str | None,
        _option("kind[:alpha=..,limit=..,interleaved=..].  [default: silu, or the model's]"),
    ] = None
    world_size: Annotated[int | None, _option("Number of expert-parallel ranks.")] = None
    ranks_per_host: Annotated[
        int | None, _option("Consecutive ranks per host.  [default: all ranks on one host]")
    ] = None
    placement: Annotated[
        str | None,
        _option("linear, round_robin, copies, or experts by rank: 0,2/1,3.  [default: linear]"),
    ] = None
    model: Annotated[
        str | None, _option("A name listed by `mk models`, or the path of a config.json.")
    ] = None
    local_experts: Annotated[int | None, _option("Number of experts on this rank.")] = None
    ids_dtype: Annotated[
        str | None, _option("dtype of the top-k ids: int32 or int64.  [default: either]")
    ] = None
    bias: Annotated[bool | None, _option("Both GEMMs have a bias.", "--bias/--no-bias")] = None
    expert_map: Annotated[
        bool, _option("Use an expert_map from global expert ids to local experts.", "--expert-map")
    ] = False
    router_weight_on_input: Annotated[
        bool | None,
        _option(
            "Apply the router weight to the input or to the output.  [default: output, or as in "
            "the model]",
            "--router-weight-on-input/--router-weight-on-output",
        ),
    ] = None
    routed_scaling_factor: Annotated[
        float | None, _option("Scaling factor of the routed output.")
    ] = None
    combine: Annotated[str | None, _option("sum, topk_weighted or topk_unweighted.")] = None
    inplace: Annotated[bool, _option("Write the output in place over the input.", "--inplace")] = (
        False
    )
    fp32_precision: Annotated[str | None, _option("ieee or tf32.")] = None
    chunk_tokens: Annotated[int | None, _option("Split calls into chunks of this many tokens.")] = (
        None
    )
    max_received: Annotated[
        int | None, _option("Maximum number of rows that a rank receives per call.")
    ] = None
    graph: Annotated[bool, _option("Require CUDA graph capture.", "--graph")] = False
    deterministic: Annotated[bool, _option("Require deterministic results.", "--deterministic")] = (
        False
    )
    batch_invariant: Annotated[bool, _option("Require batch invariance.", "--batch-invariant")] = (
        False
    )
    asynchronous: Annotated[bool, _option("Require asynchronous dispatch.", "--asynchronous")] = (
        False
    )
    lora: Annotated[
        str | None,
        _option("LoRA adapters: adapters=L,rank=R[,a13=shared][,outer=shared].  [default: none]"),
    ] = None

    def problem(self) -> "Problem":
        """Return the problem that these options describe.

        Raises ConfigurationError naming the first invalid option.
        """
        from modular_kernel.spec.problem import Parallel, Problem

        from_model = {} if self.model is None else facts(self.model)
        no_dtype = self.model is not None and self.dtype is None and "dtype" not in from_model
        if no_dtype and reads_file(str(self.model)):
            note(f"{self.model} has no dtype; using {DEFAULTS['dtype']} (see --dtype)")
        values: dict[str, Any] = DEFAULTS | from_model
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: value for name, value in options.items() if value is not None}
        values.pop("model", None)
        if "router_weight_on_input" in values:
            values["apply_router_weight_on_input"] = values.pop("router_weight_on_input")
        world_size = values.pop("world_size", 1)
        placement = _placement(values.pop("placement", "linear"), values["experts"], world_size)
        ranks_per_host = values.pop("ranks_per_host", None)
        values["parallel"] = Parallel(world_size, placement, ranks_per_host=ranks_per_host)
        if "combine" in values:
            values["combine"] = _combine(values["combine"])
        if "ids_dtype" in values:
            values["ids_dtype"] = _ids_dtype(values["ids_dtype"])
        return Problem(**values)


def _placement(text: str, experts: int, world_size: int) -> "Placement | Literal['linear']":
    if text == "linear":
        return "linear"
    from modular_kernel.testing.cases.ranks import parse_placement

    return parse_placement(text, experts, world_size)


def _combine(text: str) -> object:
    from modular_kernel.spec.problem import Combine

    known = [c.value for c in Combine]
    if text not in known:
        raise ConfigurationError("combine", got=repr(text), need=f"one of {', '.join(known)}")
    return Combine(text)


def _ids_dtype(text: str) -> object:
    import torch

    known = {"int32": torch.int32, "int64": torch.int64}
    if text not in known:
        raise ConfigurationError("ids_dtype", got=repr(text), need="int32 or int64")
    return known[text]


def not_prepared_error(quants: str, parts: str) -> ConfigurationError:
    """Return the error for --prepared if none of the named parts prepares weights of `quants`."""
    got = f"{quants}, not prepared by {parts}"
    example = "mxfp4_w4a16 in bfloat16 by TritonExperts for sm_90, without batch_invariant"
    return ConfigurationError(
        "--prepared", got=got, need=f"a scheme with prepared weights, such as {example}"
    )


def refuse_combination(option: str, groups: Iterable[object], taken: Collection[str] = ()) -> None:
    """Raise ConfigurationError if an option of `groups` is set that `option` would ignore.

    groups: option dataclasses. taken: names of fields that may be combined with `option`.
    """
    for group in groups:
        for field in fields(group):  # type: ignore[arg-type]
            if field.name not in taken and getattr(group, field.name) != field.default:
                name = f"--{field.name.replace('_', '-')}"
                raise ConfigurationError(
                    name, got=f"{name} together with {option}", need="only one of the two options"
                )


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a command by one option per field.

    Returns a wrapper whose signature typer reads. It builds the dataclasses and calls `command`.
    """
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    own = inspect.signature(command).parameters.values()
    # The options that only this command has come first in its help.
    for parameter in sorted(own, key=lambda p: _is_group(p.annotation)):
        group = parameter.annotation
        if _is_group(group):
            groups[parameter.name] = group
            parameters += _options_of(group)
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in fields(group)})
        command(**values)

    flat.__dict__["__signature__"] = inspect.Signature(parameters)
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat


def _is_group(annotation: object) -> TypeGuard[type]:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _options_of(group: type) -> list[inspect.Parameter]:
    kind, hints = inspect.Parameter.KEYWORD_ONLY, get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name])
        for f in fields(group)
    ]
