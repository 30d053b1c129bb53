"""Specification of one MoE layer (`Problem`) and of the machine that computes it (`Machine`)."""

from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Annotated, Literal, cast

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.lora import NO_ADAPTERS, AdapterSpec
from modular_kernel.spec.placement import Experts, Placement
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.utils.argument_checks import (
    MAX_INT32,
    Between,
    Count,
    OneOf,
    check_fields,
    expect,
    format_value,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Size = Annotated[int, Between(0, MAX_INT32)]
ByteCount = Annotated[int, Between(1, 2**63 - 1)]
# Maximum K of the router and of the built-in parts. Parts that wrap a library may support less.
MAX_TOP_K = 32
_DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's short name, such as "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(value: object) -> torch.dtype:
    """Return a supported dtype (one of DTYPES) from a torch.dtype or a name such as "bf16".

    Raises ConfigurationError for anything else.
    """
    if isinstance(value, torch.dtype):
        value = dtype_name(value)
    name = _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else ""
    if name not in DTYPES:
        got = value[:80] if isinstance(value, str) else format_value(value)
        raise ConfigurationError("dtype", got=got, need=f"one of {', '.join(sorted(DTYPES))}")
    return DTYPES[name]


class ActivationFormat(Enum):
    """Layout of activations between prepare and the experts, and of the experts' output."""

    STANDARD = "standard"  # tokens (T, H) with their top-k routing; vLLM also says "contiguous"
    BATCHED_EXPERTS = "batched_experts"  # (e, C, H), grouped by expert; counts_e[i] valid rows


class Reduce(Enum):
    """Reduction (router weights and sum over top-k) that the experts leave to finalize."""

    NOOP = "noop"  # none: the experts' output is (T, H)
    CONTIGUOUS = "contiguous"  # the experts' output is (T, K, H)
    NAIVE_BATCHED = "naive_batched"  # the experts' output is (e, C, H)
    DELEGATE = "delegate"  # the PrepareAndFinalize chooses its own reduction


class Combine(Enum):
    """Form of the layer's output."""

    SUM = "sum"  # (T, H): weighted by the router and summed over top-k
    TOPK_WEIGHTED = "topk_weighted"  # (T, K, H): weighted and scaled, not summed (no_combine)
    TOPK_UNWEIGHTED = "topk_unweighted"  # (T, K, H): neither weighted nor scaled


class RowContents(Enum):
    """Content of rows without a valid token."""

    ZERO = "zero"
    UNDEFINED = "undefined"


class IdSpace(Enum):
    """Numbering of top-k ids: among all experts of the model, or among the experts of this rank."""

    GLOBAL = "global"
    LOCAL = "local"


GATED = (
    "silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglu_clamp_after", "swiglu_clamp_before", "situ",
)  # fmt: skip
UNGATED = ("relu2", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul")
_ALPHA_KINDS = ("swiglu_oai", "situ")
_OPTIONAL_LIMIT_KINDS = ("gelu", "gelu_tanh", "situ")


@dataclass(frozen=True)
class ActivationSpec:
    """Activation between the two GEMMs.

    g and u are the gate and up values, v is the value of an ungated activation, and L is the limit.

    silu                 silu(g) * u
    gelu                 gelu(g) * u, exact (erf); with L, gelu(g') * u' with the g' and u' of
                         swiglu_oai
    gelu_tanh            gelu(g) * u, tanh approximation; with L, like gelu
    swiglu_oai           g' sigmoid(alpha g') (u' + 1) with g' = min(g, L), u' = clamp(u, -L, L),
                         as in gpt-oss
    swiglu_clamp_after   min(silu(g), L) * clamp(u, -L, L): the limit acts after silu
    swiglu_clamp_before  silu(min(g, L)) * clamp(u, -L, L): the limit acts before silu
    situ                 alpha tanh(g / alpha) sigmoid(g) * u'' with u'' = L tanh(u / L), or u
                         without L: SwiGLU with soft caps
    relu2                max(v, 0)^2, ungated: w1 has I rows, not 2I
    silu_no_mul          silu(v), ungated
    gelu_no_mul          gelu(v), ungated, exact
    gelu_tanh_no_mul     gelu(v), ungated, tanh approximation

    kind: one of the names above.
    alpha: required for swiglu_oai and situ; None for all other kinds.
    limit: L. Required for the swiglu_* kinds, optional for gelu, gelu_tanh and situ.
    interleaved: the rows of w1 alternate gate, up, gate, up, ... instead of having all gate rows
        first. The default is True for swiglu_oai without up_first, as in gpt-oss, and False for all
        other kinds.
    up_first: all up rows come before the gate rows; see `modular_kernel.quant.row_order`.
    """

    kind: str = "silu"
    alpha: float | None = None
    limit: float | None = None
    interleaved: bool = cast("bool", None)  # None means the kind's default; a bool once created
    up_first: bool = False

    def __post_init__(self) -> None:
        interleaved: object = self.interleaved
        if interleaved is None:
            default = self.kind == "swiglu_oai" and self.up_first is False
            object.__setattr__(self, "interleaved", default)
        check_fields(self, "activation ")
        if self.kind not in GATED + UNGATED:
            need = f"one of {', '.join(GATED + UNGATED)}"
            raise ConfigurationError("activation", got=self.kind, need=need)
        if (self.alpha is not None) != (self.kind in _ALPHA_KINDS):
            kinds = " or ".join(_ALPHA_KINDS)
            need = "a number" if self.alpha is None else f"alpha=None; only {kinds} have alpha"
            raise ConfigurationError(f"activation {self.kind} alpha", got=self.alpha, need=need)
        has_limit, needs_limit = self.limit is not None, self.kind.startswith("swiglu")
        if has_limit != needs_limit and not (has_limit and self.kind in _OPTIONAL_LIMIT_KINDS):
            kinds = ", ".join(_OPTIONAL_LIMIT_KINDS)
            need = "a number"
            if not needs_limit:
                need = f"limit=None; only swiglu_* kinds, {kinds} have a limit"
            raise ConfigurationError(f"activation {self.kind} limit", got=self.limit, need=need)
        if self.limit is not None and not self.limit > 0:
            raise ConfigurationError("activation limit", got=self.limit, need="a finite value > 0")
        if self.kind == "situ" and self.alpha is not None and not self.alpha > 0:
            raise ConfigurationError("activation alpha", got=self.alpha, need="a finite value > 0")
        if self.interleaved and not self.gated:
            raise ConfigurationError("activation interleaved", got=self.kind, need="a gated kind")
        if self.up_first and (self.interleaved or not self.gated):
            need = "a gated kind, not interleaved"
            raise ConfigurationError("activation up_first", got=self.kind, need=need)

    @property
    def gated(self) -> bool:
        """Whether w1 has gate and up rows (2I rows) instead of I rows."""
        return self.kind in GATED

    @classmethod
    def parse(cls, text: "str | ActivationSpec") -> "ActivationSpec":
        """Parse `kind[:option=value,...]`, the format of `str()`.

        Defaults: `swiglu_oai` has the values of gpt-oss (alpha 1.702, limit 7, interleaved rows),
        the two `swiglu_clamp_*` kinds have limit 7, and `situ` has alpha 4. Raises
        ConfigurationError for any other text.
        """
        if isinstance(text, ActivationSpec):
            return text
        expect("activation", text, ActivationSpec | str)
        kind, _, option_text = text.partition(":")
        pairs = [pair.partition("=")[::2] for pair in option_text.split(",") if pair]
        options: dict[str, str] = dict(pairs)
        unknown = set(options) - {"alpha", "limit", "interleaved", "up_first"}
        up_first = options.get("up_first", "false").lower()
        interleaved = options["interleaved"].lower() if "interleaved" in options else None
        flags = {up_first} if interleaved is None else {up_first, interleaved}
        if unknown or len(options) != len(pairs) or flags - {"true", "false"}:
            need = "kind[:alpha=,limit=,interleaved=true|false,up_first=true|false], each once"
            raise ConfigurationError("activation", got=text, need=need)
        default_alpha = {"swiglu_oai": 1.702, "situ": 4.0}.get(kind)
        try:
            alpha = float(options["alpha"]) if "alpha" in options else default_alpha
            default_limit = 7.0 if kind.startswith("swiglu") else None
            limit = float(options["limit"]) if "limit" in options else default_limit
        except ValueError:
            raise ConfigurationError("activation", got=text, need="numbers") from None
        layout = {} if interleaved is None else {"interleaved": interleaved == "true"}
        return cls(kind, alpha, limit, up_first=up_first == "true", **layout)

    def __str__(self) -> str:
        options = [f"{k}={v}" for k in ("alpha", "limit") if (v := getattr(self, k)) is not None]
        if self.interleaved or self.kind == "swiglu_oai":
            options.append(f"interleaved={str(self.interleaved).lower()}")
        options += ["up_first=true"] * self.up_first
        return self.kind + (":" + ",".join(options) if options else "")


@lru_cache(maxsize=64)
def _make_linear_placement(experts: int, world_size: int) -> Placement:
    """Return the linear placement. Cached, because many problems have the same sizes."""
    return Placement.linear(experts, world_size)


@dataclass(frozen=True)
class Parallel:
    """Distribution of the experts over ranks.

    world_size: number of ranks.
    placement: a Placement; or "linear", which gives each rank a contiguous block of E / world_size
        experts, and the first ranks one more if there is a remainder.
    rank: this rank.
    ranks_per_host: number of ranks on each host, if ranks are numbered host by host. None if all
        ranks are on one host.
    """

    world_size: Count = 1
    placement: Literal["linear"] | Placement = "linear"
    rank: Size = 0
    ranks_per_host: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ranks_per_host is not None and self.world_size % self.ranks_per_host:
            need = f"a divisor of world_size {self.world_size}"
            raise ConfigurationError("ranks_per_host", got=self.ranks_per_host, need=need)
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError("rank", got=self.rank, need=f"in [0, {self.world_size})")
        placement_ranks = (
            self.placement.world_size if isinstance(self.placement, Placement) else None
        )
        if placement_ranks not in (None, self.world_size):
            raise ConfigurationError(
                "placement", got=f"{placement_ranks} ranks", need=f"{self.world_size}"
            )

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.world_size // (self.ranks_per_host or self.world_size)

    def place(self, experts: int) -> Placement:
        """Return the placement of `experts` experts.

        Raises ConfigurationError if a given Placement has another number of experts.
        """
        expect("experts", experts, Count)
        if not isinstance(self.placement, Placement):
            return _make_linear_placement(experts, self.world_size)
        if self.placement.experts != experts:
            got, need = f"{self.placement.experts} experts", f"experts = {experts}"
            raise ConfigurationError("placement", got=got, need=need)
        return self.placement


@dataclass(frozen=True)
class Problem:
    """Specification of one MoE layer. `modular_kernel.tensors` explains the shape letters.

    tokens: T, the maximum number of tokens of one rank in one call. Buffers are sized for it.
    hidden: H, the hidden size.
    intermediate: I, the intermediate size of an expert on this rank.
    experts: E, the number of experts of all ranks.
    top_k: K, the number of experts per token.
    dtype: torch.float32, torch.float16 or torch.bfloat16, or its name.
    quant: name of a quantization scheme (modular_kernel.spec.quantization).
    activation: an ActivationSpec, or its text form such as "silu" (`ActivationSpec.parse`).
    local_experts: e, the number of experts whose weights this rank holds; None derives it from
        `parallel`.
    ids_dtype: dtype of the router's ids (torch.int32 or torch.int64); None allows both.
    bias: whether the weights have b1 and b2.
    expert_map: whether the weights have an expert_map.
    apply_router_weight_on_input: apply the router weight to x before GEMM 1 instead of to the
        output. b1 is then added unweighted.
    routed_scaling_factor: factor that is applied once to the combined output.
    combine: whether the output is summed over top-k.
    inplace: write the result to x and return x.
    fp32_precision: compute float32 GEMMs in full float32 ("ieee") or with TF32 tensor cores.
    chunk_tokens: split calls into chunks of at most this many tokens; None never splits.
    max_received: maximum number of rows that a rank may receive in a call; None means
        world_size * tokens.
    graph: require that calls can be captured in a CUDA graph.
    deterministic: require that equal input gives bitwise equal output.
    batch_invariant: require that the output bits of a token do not depend on the other tokens of
        its call, on their number or order, on chunk_tokens, or on `tokens`.
    asynchronous: require that dispatch can overlap with other work.
    lora: "none", or the adapter slots that the tokens of a call may select:
        "adapters=L,rank=R[,a13=shared][,outer=shared]" (modular_kernel.spec.lora).
    parallel: distribution of the experts over ranks.

    Raises ConfigurationError for a field of the wrong type or out of range, or for fields that
    contradict each other.

    >>> problem = Problem(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2)
    >>> problem.w1_rows, problem.output_shape
    (384, (64, 256))
    >>> print(problem.with_tokens(8))
    T8-H256-I192-E4-K2-bfloat16
    """

    tokens: Size
    hidden: Count
    intermediate: Count
    experts: Experts
    top_k: Count
    dtype: torch.dtype = torch.bfloat16
    quant: str = "none"
    activation: ActivationSpec | str = "silu"
    local_experts: Count | None = None
    ids_dtype: Annotated[torch.dtype, OneOf((torch.int32, torch.int64))] | None = None
    bias: bool = False
    expert_map: bool = False
    apply_router_weight_on_input: bool = False
    routed_scaling_factor: float = 1.0
    combine: Combine = Combine.SUM
    inplace: bool = False
    fp32_precision: Literal["ieee", "tf32"] = "ieee"
    chunk_tokens: Count | None = None
    max_received: Count | None = None
    graph: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    asynchronous: bool = False
    lora: AdapterSpec | str = NO_ADAPTERS
    parallel: Parallel = field(default_factory=Parallel)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", parse_dtype(self.dtype))
        object.__setattr__(self, "activation", ActivationSpec.parse(self.activation))
        object.__setattr__(self, "quant", str(QuantScheme.parse(self.quant)))
        object.__setattr__(self, "lora", str(AdapterSpec.parse(self.lora) or NO_ADAPTERS))
        check_fields(self)
        if self.adapters is not None and self.adapters.a13_shared and not self.act.gated:
            need = "a gated activation, or no a13=shared"
            raise ConfigurationError("lora a13=shared", got=self.act.kind, need=need)
        if self.adapters is not None and self.act.up_first:
            raise ConfigurationError("lora", got=str(self.act), need="no up_first=true")
        if self.local_experts is not None and self.local_experts > self.experts:
            need = f"1 to experts = {self.experts}"
            raise ConfigurationError("local_experts", got=self.local_experts, need=need)
        _ = self.placement  # raises if the placement is not possible
        if self.inplace and self.combine is not Combine.SUM:
            # (T, K, H) does not fit in x.
            need = "combine=SUM"
            raise ConfigurationError("inplace", got=f"combine={self.combine.name}", need=need)

    @cached_property
    def act(self) -> ActivationSpec:
        """The parsed activation."""
        return ActivationSpec.parse(self.activation)

    @cached_property
    def scheme(self) -> QuantScheme:
        """The parsed quantization scheme."""
        return QuantScheme.parse(self.quant)

    @cached_property
    def adapters(self) -> AdapterSpec | None:
        """The parsed LoRA spec; None without adapters."""
        return AdapterSpec.parse(self.lora)

    @cached_property
    def e(self) -> int:
        """Number of experts on this rank."""
        if self.local_experts is not None:
            return self.local_experts
        return len(self.placement.slots[self.parallel.rank])

    @cached_property
    def placement(self) -> Placement:
        """The placement of the experts on ranks."""
        return self.parallel.place(self.experts)

    @property
    def w1_rows(self) -> int:
        """Rows of one expert's w1: 2I if gated, otherwise I."""
        return self.intermediate * (2 if self.act.gated else 1)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(T, H), or (T, K, H) if top-k is kept."""
        if self.combine is Combine.SUM:
            return (self.tokens, self.hidden)
        return (self.tokens, self.top_k, self.hidden)

    def with_tokens(self, tokens: int) -> "Problem":
        """Return a copy of this problem with another number of tokens."""
        return replace(self, tokens=tokens)

    def __repr__(self) -> str:
        """Return an expression that recreates this problem, without fields that have defaults."""
        arguments = []
        for field_ in fields(self):
            value = getattr(self, field_.name)
            value = str(value) if isinstance(value, ActivationSpec) else value
            factory = field_.default_factory
            if value != (field_.default if factory is MISSING else factory()):
                text = f"Combine.{value.name}" if isinstance(value, Combine) else repr(value)
                arguments.append(f"{field_.name}={text}")
        return f"{type(self).__qualname__}({', '.join(arguments)})"

    def __str__(self) -> str:
        head = f"T{self.tokens}-H{self.hidden}-I{self.intermediate}-E{self.experts}-K{self.top_k}"
        parts = [head, dtype_name(self.dtype)]
        defaults = {f.name: f.default for f in fields(self)}
        head_fields = ("tokens", "hidden", "intermediate", "experts", "top_k", "dtype", "parallel")
        for name in (n for n in defaults if n not in head_fields):
            value = getattr(self, name)
            comparable = str(value) if isinstance(value, ActivationSpec) else value
            if comparable != defaults[name]:
                text = value.value if isinstance(value, Enum) else str(value)
                parts.append(name if value is True else f"{name}={text}")
        if self.parallel.world_size > 1:
            placement_mark = "" if self.parallel.placement == "linear" else "p"
            parts.append(f"W{self.parallel.world_size}{placement_mark}r{self.parallel.rank}")
        return "-".join(parts)


@dataclass(frozen=True)
class Machine:
    """The machine that a pairing runs on, described or detected (`modular_kernel.machine`).

    device: "cuda" or "cpu".
    arch: compute capability such as (9, 0); None on a CPU.
    packages: optional packages that can be imported.
    interpreter: whether Triton kernels run in Triton's CPU interpreter.
    name: name of the GPU.
    others: (name, reason) of each installed package that has the name of an optional package but
        belongs to a different project.
    cuda: CUDA version that torch was built for, such as (12, 8); None if unknown.
    memory: GPU memory in bytes; None if unknown or on a CPU.
    """

    device: Literal["cuda", "cpu"] = "cpu"
    arch: tuple[int, int] | None = None
    packages: frozenset[str] = frozenset()
    interpreter: bool = False
    name: str = ""
    others: tuple[tuple[str, str], ...] = ()
    cuda: tuple[int, int] | None = None
    memory: ByteCount | None = None

    def __post_init__(self) -> None:
        check_fields(self, "machine ")
        if (self.device == "cuda") != (self.arch is not None):
            need = "arch set if and only if device is cuda"
            raise ConfigurationError("machine", got=(self.device, self.arch), need=need)

    def __str__(self) -> str:
        arch = f" sm_{self.arch[0]}{self.arch[1]}" if self.arch else ""
        return f"{self.name or self.device}{arch}"
