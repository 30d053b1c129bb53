"""Options that describe a `Problem`, and other options that several verbs share."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from modular_kernel.cli.command import IntegerList, option
from modular_kernel.cli.file_options import STDOUT, FilePath, FileUse
from modular_kernel.cli.output import print_note
from modular_kernel.cli.presets import (
    format_model_name,
    is_path,
    load_problem_fields,
    read_layer_schemes,
)
from modular_kernel.errors import ConfigurationError
from modular_kernel.text import format_count

if TYPE_CHECKING:
    from modular_kernel.spec.placement import Placement
    from modular_kernel.spec.problem import Problem

# Default number of experts, and its maximum if there is one for each rank of a described machine.
_DEFAULT_EXPERTS, _MAX_DEFAULT_EXPERTS = 8, 1024

# Values of the fields of a Problem that neither an option nor a model sets. They describe a layer
# that runs quickly on a CPU, even in Triton's interpreter.
DEFAULTS: dict[str, object] = {
    "tokens": 16,
    "hidden": 64,
    "intermediate": 128,
    "experts": _DEFAULT_EXPERTS,
    "top_k": 2,
    "dtype": "bfloat16",
}

# Sizes of a layer that is not run, or that runs on a GPU. Every kernel accepts them: many kernels
# support only multiples of 128, and some exchanges only the hidden sizes of published models.
DESCRIBED_DEFAULTS = DEFAULTS | {"hidden": 2048, "intermediate": 1024}

_SIZES = ("hidden", "intermediate", "experts", "top_k")  # fields that describe a layer

_MAX_TOKENS = (1 << 20) - 1
TOKENS_LIST = IntegerList(_MAX_TOKENS, "1,16,128")  # the type of --tokens-list
PfType = Annotated[str | None, option("Name of a PrepareAndFinalize (see mk list).")]
ExpertsType = Annotated[str | None, option("Name of an experts part (see mk list).")]
Prepared = Annotated[bool, option("Use prepared weights (kernel.prepare_weights).")]
AsJson = Annotated[
    str | None,
    option(
        "Print JSON instead of text; with a file, write JSON to it and print text.",
        "--json",
        metavar="[FILE]",
        type=FilePath(FileUse.WRITE_OR_STDOUT, as_text=True),
        flag_value=STDOUT,
    ),
]


def _size_option(help: str, name: str, defaults: Mapping[str, object] = DEFAULTS) -> Any:
    """Return an option whose help ends with the default value."""
    return option(f"{help}  [default: {defaults[name]}, or the model's]")


def _device_size_option(help: str, name: str) -> Any:
    """Return an option whose help ends with the default values on a GPU and on a CPU."""
    values = f"{DESCRIBED_DEFAULTS[name]}, on a CPU {DEFAULTS[name]}"
    return option(f"{help}  [default: {values}, or the model's]")


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """Options of a `Problem`.

    None stands for the value that --model gives, or else for the value in `defaults`.
    """

    defaults = MappingProxyType(DEFAULTS)  # not annotated, so not an option

    tokens: Annotated[int | None, option("Maximum number of tokens per call.  [default: 16]")] = (
        None
    )
    hidden: Annotated[int | None, _size_option("Hidden size.", "hidden")] = None
    intermediate: Annotated[int | None, _size_option("Intermediate size.", "intermediate")] = None
    experts: Annotated[int | None, _size_option("Number of experts of the model.", "experts")] = (
        None
    )
    top_k: Annotated[int | None, _size_option("Number of experts per token (top-k).", "top_k")] = (
        None
    )
    dtype: Annotated[
        str | None, option("dtype of x: float32, float16 or bfloat16.  [default: bfloat16]")
    ] = None
    quant: Annotated[
        str | None, option("Quantization scheme, such as fp8_w8a8_block.  [default: none]")
    ] = None
    activation: Annotated[
        str | None,
        option(
            "Activation of the experts: kind[:alpha=..,limit=..,interleaved=..].  [default: silu, "
            "or the model's]"
        ),
    ] = None
    world_size: Annotated[int | None, option("Number of expert-parallel ranks.")] = None
    ranks_per_host: Annotated[
        int | None, option("Number of consecutive ranks per host.  [default: all ranks]")
    ] = None
    placement: Annotated[
        str | None,
        option(
            "Placement of experts on ranks: linear, round_robin, copies, or the experts of each "
            "rank, such as 0,2/1,3.  [default: linear]"
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            "Use the sizes and properties of this model: a name of `mk models` or a config.json."
        ),
    ] = None
    local_experts: Annotated[int | None, option("Number of experts on this rank.")] = None
    ids_dtype: Annotated[
        Literal["int32", "int64"] | None, option("dtype of the top-k ids.  [default: either]")
    ] = None
    bias: Annotated[bool | None, option("Both GEMMs have a bias.", "--bias/--no-bias")] = None
    expert_map: Annotated[
        bool, option("Pass an expert_map from global expert ids to local experts.")
    ] = False
    router_weight_on_input: Annotated[
        bool | None,
        option(
            "Apply the router weight to the input or to the output.  [default: output, or as in "
            "the model]",
            "--router-weight-on-input/--router-weight-on-output",
        ),
    ] = None
    routed_scaling_factor: Annotated[
        float | None, option("Scaling factor of the routed output.")
    ] = None
    combine: Annotated[
        Literal["sum", "topk_weighted", "topk_unweighted"] | None,
        option(
            "Output: the sum over the top-k experts (tokens, hidden), or their rows (tokens, "
            "top-k, hidden), weighted or not.  [default: sum]"
        ),
    ] = None
    inplace: Annotated[bool, option("Overwrite the input with the output.")] = False
    fp32_precision: Annotated[
        Literal["ieee", "tf32"] | None,
        option("Precision of GEMMs in float32.  [default: ieee]"),
    ] = None
    chunk_tokens: Annotated[int | None, option("Split calls into chunks of this many tokens.")] = (
        None
    )
    max_received: Annotated[
        int | None, option("Maximum number of rows that dispatch sends to a rank per call.")
    ] = None
    graph: Annotated[bool, option("Require CUDA graph capture.")] = False
    deterministic: Annotated[bool, option("Require deterministic results.")] = False
    batch_invariant: Annotated[
        bool, option("Require that the output of a token does not depend on the other tokens.")
    ] = False
    asynchronous: Annotated[bool, option("Require asynchronous dispatch.")] = False
    lora: Annotated[
        str | None,
        option(
            "LoRA adapters: their number and rank, such as adapters=8,rank=16. Append ,a13=shared "
            "or ,outer=shared for shared factors.  [default: none]"
        ),
    ] = None

    def choose_defaults(self) -> Mapping[str, object]:
        """Return the values of the fields that neither an option nor a model sets."""
        return self.defaults

    @property
    def has_expert_for_each_rank(self) -> bool:
        """Whether the default number of experts is the number of ranks."""
        return False

    @property
    def is_default_layer(self) -> bool:
        """Whether no option sets a size of the layer."""
        return self.model is None and all(getattr(self, name) is None for name in _SIZES)

    def describe_layer(self) -> str:
        """Return the name of the layer: its model, or that its sizes are defaults or options."""
        if self.model is not None:
            return format_model_name(self.model)
        if self.is_default_layer:
            return "the default (for another: --model NAME, or --hidden N ...)"
        return "layer of the given sizes, the others by default"

    def _make_too_few_experts_error(self, experts: int, world_size: int) -> ConfigurationError:
        """Return the error for fewer experts than ranks, which says where both numbers are from."""
        got = f"{format_count(experts, 'expert')} for {world_size} ranks"
        fewer_ranks = f"at most {format_count(experts, 'rank')} (--world-size {experts})"
        if self.experts is not None:
            need = f"--experts {world_size} or more, or {fewer_ranks}"
            return ConfigurationError("--experts", got=got, need=need)
        if self.model is not None:
            need = (
                f"{fewer_ranks}, or a smaller --machine. More ranks need copies of experts "
                "(--placement, such as 0/1/0/1 for 2 experts on 4 ranks; not in mk plan) or tensor "
                "parallelism within each expert (tp_group of FusedMoE; not estimated)"
            )
            return ConfigurationError(f"--model {self.describe_layer()}", got=got, need=need)
        need = f"a --model with as many experts, --experts {world_size}, or {fewer_ranks}"
        return ConfigurationError("default layer without --model", got=got, need=need)

    def problem(self) -> "Problem":
        """Return the problem that these options describe.

        Raises ConfigurationError with the name of the option if a value is invalid.
        """
        import torch

        from modular_kernel.spec.problem import Combine, Parallel, Problem

        model_fields: dict[str, object] = {}
        if self.model is not None:
            model_fields = load_problem_fields(
                self.model, quant=self.quant, activation=self.activation
            )
        lacks_dtype = self.model is not None and self.dtype is None and "dtype" not in model_fields
        if lacks_dtype and is_path(str(self.model)):
            print_note(f"{self.model} has no dtype; using {DEFAULTS['dtype']} (see --dtype)")
        values: dict[str, Any] = {**self.choose_defaults(), **model_fields}
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: value for name, value in options.items() if value is not None}
        values.pop("model", None)
        if "router_weight_on_input" in values:
            values["apply_router_weight_on_input"] = values.pop("router_weight_on_input")
        if self.ranks_per_host not in (None, 1) and self.world_size is None:
            need = "--world-size N in addition"
            raise ConfigurationError("--ranks-per-host", got=self.ranks_per_host, need=need)
        world_size = values.pop("world_size", 1)
        if "/" not in values.get("placement", "") and world_size > values["experts"]:
            raise self._make_too_few_experts_error(values["experts"], world_size)
        placement = _parse_placement(
            values.pop("placement", "linear"), values["experts"], world_size
        )
        ranks_per_host = values.pop("ranks_per_host", None)
        values["parallel"] = Parallel(world_size, placement, ranks_per_host=ranks_per_host)
        if "combine" in values:
            values["combine"] = Combine(values["combine"])
        if "ids_dtype" in values:
            values["ids_dtype"] = {"int32": torch.int32, "int64": torch.int64}[values["ids_dtype"]]
        return Problem(**values)


@dataclass(frozen=True, kw_only=True)
class DescribedProblemOptions(ProblemOptions):
    """Options of a `Problem` that is not run, or that runs only on a GPU."""

    hidden: Annotated[int | None, _size_option("Hidden size.", "hidden", DESCRIBED_DEFAULTS)] = None
    intermediate: Annotated[
        int | None, _size_option("Intermediate size.", "intermediate", DESCRIBED_DEFAULTS)
    ] = None
    experts: Annotated[
        int | None,
        option(
            "Number of experts of the model.  [default: the model's; otherwise 8, or one for each "
            "rank if there are more than 8 ranks]"
        ),
    ] = None

    defaults = MappingProxyType(DESCRIBED_DEFAULTS)

    def choose_defaults(self) -> Mapping[str, object]:
        """Return the defaults, with an expert for each rank if there are more than 8 ranks."""
        if not self.has_expert_for_each_rank:
            return self.defaults
        return {**self.defaults, "experts": self.world_size}

    @property
    def has_expert_for_each_rank(self) -> bool:
        """Whether the default number of experts is the number of ranks."""
        is_default = self.model is None and self.experts is None
        return is_default and _DEFAULT_EXPERTS < (self.world_size or 1) <= _MAX_DEFAULT_EXPERTS

    def describe_layer(self) -> str:
        name = super().describe_layer()
        if not self.has_expert_for_each_rank:
            return name
        return f"{name}; it has an expert for each of {self.world_size} ranks"


@dataclass(frozen=True, kw_only=True)
class MeasuredProblemOptions(ProblemOptions):
    """Options of a `Problem` that is timed, whose default sizes depend on the device."""

    hidden: Annotated[int | None, _device_size_option("Hidden size.", "hidden")] = None
    intermediate: Annotated[
        int | None, _device_size_option("Intermediate size.", "intermediate")
    ] = None

    def with_default_sizes(self, device: str) -> "MeasuredProblemOptions":
        """Return the options with the default sizes of the device, and print a default layer.

        device: "cuda" or "cpu".
        """
        if self.model is not None:
            return self
        defaults = DESCRIBED_DEFAULTS if device == "cuda" else DEFAULTS
        print_default_layer(self, defaults)
        unset = {name for name in ("hidden", "intermediate") if getattr(self, name) is None}
        return replace(self, **{name: defaults[name] for name in unset})  # type: ignore[arg-type]


def print_default_layer(options: ProblemOptions, defaults: Mapping[str, object]) -> None:
    """Print a note with the default sizes of the layer if the options set none of them."""
    if not options.is_default_layer:
        return
    sizes = "H{hidden}-I{intermediate}-E{experts}-K{top_k}".format(**defaults)
    print_note(f"layer: {sizes} (default; for another: --model NAME, or --hidden N ...)")


def split_by_scheme(
    options: ProblemOptions,
) -> list[tuple[tuple[int, ...] | None, ProblemOptions]]:
    """Return (layers, options) for each quantization scheme in the layers of a config.json.

    Returns [(None, options)] if there is only one scheme, or if --quant sets it.
    """
    if options.model is None or options.quant is not None:
        return [(None, options)]
    groups = read_layer_schemes(options.model, options.activation)
    if len(groups) < 2:
        return [(None, options)]
    return [(group.layers, replace(options, quant=group.scheme)) for group in groups]


def _parse_placement(
    placement: str, experts: int, world_size: int
) -> "Placement | Literal['linear']":
    if placement == "linear":
        return "linear"
    from modular_kernel.testing.cases.ranks import parse_placement

    return parse_placement(placement, experts, world_size)


def parse_schemes(text: str) -> list[str]:
    """Parse a comma-separated list of quantization schemes, and drop duplicates.

    The options of a scheme are also separated by commas: `name:option=value,option=value`.
    """
    from modular_kernel.spec.quantization import QuantScheme

    schemes: list[str] = []
    for item in text.split(","):
        is_option_of_last = "=" in item and ":" not in item and schemes
        schemes[-1:] = [f"{schemes[-1]},{item}"] if is_option_of_last else [*schemes[-1:], item]
    return list(dict.fromkeys(str(QuantScheme.parse(scheme)) for scheme in schemes))


def make_not_prepared_error(schemes: str, parts: str) -> ConfigurationError:
    """Return the error for --prepared if no part prepares weights of these schemes."""
    got = f"{schemes}, not prepared by {parts}"
    example = "mxfp4_w4a16 in bfloat16 by TritonExperts for sm_90, without batch_invariant"
    return ConfigurationError(
        "--prepared", got=got, need=f"a scheme with prepared weights, such as {example}"
    )


def refuse_combination(
    option: str, groups: Iterable[object], allowed: Collection[str] = ()
) -> None:
    """Raise ConfigurationError if an option is set that cannot be combined with `option`.

    groups: option dataclasses, whose fields must have their default values.
    allowed: names of the fields that may have any value.
    """
    for group in groups:
        for field in fields(group):  # type: ignore[arg-type]
            if field.name not in allowed and getattr(group, field.name) != field.default:
                name = f"--{field.name.replace('_', '-')}"
                raise ConfigurationError(
                    name, got=f"{name} together with {option}", need="only one of them"
                )
