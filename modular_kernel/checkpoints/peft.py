"""Loads one layer's LoRA adapter from a PEFT checkpoint, without PEFT.

    adapter = load_adapter("adapter/", 3, problem)
    pool.load("mine", adapter)

LoRA adds scaling * B @ A to the weight of a projection, with the factors A (r, columns) and B
(rows, r) of rank r. Tensor names and the rules of name patterns are those of PEFT 0.21.

If all experts are one parameter of shape (E, rows, columns), PEFT 0.19 and newer (`ParamWrapper`)
stores all experts' factors in two matrices. A is (E * r, columns) with the r rows of an expert
adjacent. B is (rows, r * E) with the r columns of an expert at a stride of E.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from modular_kernel.checkpoints.open_files import open_tensors
from modular_kernel.checkpoints.peft_config import PeftConfig, read_config
from modular_kernel.checkpoints.safetensors_files import TensorFiles
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.replay import modes
from modular_kernel.spec.lora import Adapter, AdapterSpec
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem
from modular_kernel.utils.argument_checks import expect

TENSORS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_MAX_NAME_CHARS = 512
_FACTOR_NAME = re.compile(
    r"base_model\.model\.(?P<block>(?:\w+\.)*?layers\.(?P<layer>[0-9]{1,6})\.(?:\w+\.)*?experts)\."
    r"(?:(?P<expert>[0-9]{1,6})\.(?P<name>\w+)\.|(?P<wrapped>(?:base_layer\.)*))"
    r"lora_(?P<side>[AB])\.weight"
)
# Projections by module name, for checkpoints in which each expert has its own modules.
_ROLES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
# Parameter names by projection, for checkpoints in which one parameter holds all experts.
_PARAMETER_NAMES = {"gate_up": "gate_up_proj", "up": "up_proj", "down": "down_proj"}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_Role = Literal["gate", "up", "gate_up", "down"]
_Factors = tuple[torch.Tensor, torch.Tensor]  # A (experts, r, depth) and B (experts, rows, r)
_Part = tuple[str, torch.Tensor, torch.Tensor]  # ("gate" or "up", A, B)


@modes.disable_inference_mode()
def load_adapter(
    folder: str | Path,
    layer: int,
    problem: Problem,
    *,
    ep: tuple[int, int] | None = None,
    placement: Placement | None = None,
    ignored_modules: Sequence[str] = (),
) -> Adapter:
    """Load the LoRA factors for the experts of one layer.

    folder: folder with adapter_config.json and adapter_model.safetensors.
    layer: number of the layer, from 0.
    problem: problem of the base model, whose `lora` states which factors the experts share.
    ep: (rank, ranks) of a layer without an exchange of tokens, whose problem does not contain the
        ranks. None uses `problem.parallel`.
    placement: experts of each rank of `ep`, such as `FusedMoE.placement`. None places contiguous
        blocks in rank order.
    ignored_modules: names of modules, such as "self_attn", whose tensors are ignored because they
        are loaded by other parts of the model.

    Returns the adapter of this rank's experts, on the CPU, in the dtype of the problem. The rank of
    the adapter is the maximum over projections. If gate and up have different A but the problem
    needs a common A, their ranks are added. Smaller factors are padded with zeros. B is multiplied
    by the scaling, lora_alpha / r or lora_alpha / sqrt(r). Factors are zero for projections that
    are not in the checkpoint, and for layers that layers_to_transform excludes.

    Checks names, shapes and dtypes before reading any tensor. Raises ConfigurationError for methods
    other than plain LoRA, or for another base model, WeightsError for unknown or missing tensors,
    and ShapeError or DtypeError for tensors that do not match.
    """
    expect("adapter folder", folder, str | Path)
    expect("layer", layer, int)
    expect("problem", problem, Problem)
    spec = problem.adapters
    if spec is None:
        raise ConfigurationError("lora", got="none", need="a problem with adapters")
    expect("ignored_modules", ignored_modules, list | tuple)
    for module in ignored_modules:
        expect("name in ignored_modules", module, str)
    local_experts = _find_local_experts(problem, ep, placement)
    path = Path(folder)
    config = read_config(path / CONFIG_FILE)
    with open_tensors(path / TENSORS_FILE) as files:
        source = _LayerFactors(files, config, problem, layer)
        pairs = source.find_pairs(tuple(ignored_modules))
        return _assemble_adapter(source, pairs, spec, local_experts)


def _find_local_experts(
    problem: Problem, ep: tuple[int, int] | None, placement: Placement | None
) -> list[int]:
    """Return the global ids of this rank's experts, in the order of its weights."""
    expect("placement", placement, Placement | None)
    parallel = problem.parallel
    if ep is not None:
        expect("ep: (rank, ranks)", ep, tuple[int, int])
        parallel = Parallel(ep[1], placement or "linear", ep[0])
    elif placement is not None:
        need = "ep, the rank that loads; without ep, problem.parallel has the placement"
        raise ConfigurationError("placement", got="a placement without ep", need=need)
    local_experts = list(parallel.place(problem.experts).slots[parallel.rank])
    if len(local_experts) != problem.e:
        got = f"{len(local_experts)} experts on rank {parallel.rank} of {parallel.world_size}"
        raise ConfigurationError("ep", got=got, need=f"{problem.e}, as the problem has")
    return local_experts


@dataclass(frozen=True)
class _FactorPair:
    """The names of A and B of one projection, with their rank and scaling.

    The matrices belong to one expert, or to all experts together.

    module: the module's name, which the patterns of the config match.
    """

    module: str
    a: str
    b: str
    rank: int
    scaling: float


@dataclass(frozen=True)
class _LayerFactors:
    """The LoRA factors of one layer in a PEFT file."""

    files: TensorFiles
    config: PeftConfig
    problem: Problem
    layer: int

    def find_pairs(
        self, ignored_modules: tuple[str, ...]
    ) -> dict[_Role, dict[int | None, _FactorPair]]:
        """Return each projection's pairs by expert, or {None: pair} if one pair has all experts."""
        pairs = dict[_Role, dict[int | None, _FactorPair]]()
        for (block, expert, name), keys in self._find_keys(ignored_modules).items():
            what = f"{self.files.path.name}: {block}"
            if len(keys) < 2:
                got = f"{next(iter(keys.values()))} alone"
                raise WeightsError(what, got=got, need="lora_A, lora_B")
            role, module = self._find_role(what, expert, name, keys)
            if expert in pairs.setdefault(role, {}):
                got = f"{keys['A']}: {role} once more"
                raise WeightsError(what, got=got, need="each projection once")
            pairs[role][expert] = self._make_pair(role, f"{block}.{module}", expert, keys)
        self._check_complete(pairs)
        return pairs

    def _find_keys(
        self, ignored_modules: tuple[str, ...]
    ) -> dict[tuple[str, int | None, str], dict[str, str]]:
        """Find the names of this layer's factors.

        Returns {(module of all experts, expert or None, name): {"A": key, "B": key}}. Raises
        WeightsError for other tensors, unless they belong to `ignored_modules`.
        """
        keys_by_module = dict[tuple[str, int | None, str], dict[str, str]]()
        unknown, blocks = list[str](), set[str]()
        what = str(self.files.path)
        for key in sorted(self.files.names):
            match = _FACTOR_NAME.fullmatch(key) if len(key) <= _MAX_NAME_CHARS else None
            if match is None or match["name"] not in (None, *_ROLES):
                if not set(ignored_modules) & set(key.split(".")):
                    unknown.append(key)
            elif int(match["layer"]) == self.layer:
                expert = None if match["expert"] is None else int(match["expert"])
                blocks.add(match["block"])
                name = match["name"] or match["wrapped"]
                keys = keys_by_module.setdefault((match["block"], expert, name), {})
                if match["side"] in keys:
                    got = f"{keys[match['side']]} and {key}"
                    raise WeightsError(what, got=got, need="each matrix once")
                keys[match["side"]] = key
        if unknown:
            got = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" * (len(unknown) > 4))
            need = "LoRA factors of experts, or modules in `ignored_modules`"
            raise WeightsError(what, got=got, need=need)
        if len(blocks) > 1:
            raise WeightsError(
                what, got=" and ".join(sorted(blocks)[:3]), need="one module of experts per layer"
            )
        if blocks and not self.config.has_layer(self.layer):
            need = f"none: layers_to_transform of {CONFIG_FILE} excludes it"
            raise WeightsError(what, got=f"tensors of layer {self.layer}", need=need)
        if not blocks and self.config.has_layer(self.layer):
            got = f"no tensor of layer {self.layer}"
            raise WeightsError(what, got=got, need="its LoRA factors")
        return keys_by_module

    def _find_role(
        self, what: str, expert: int | None, name: str, keys: Mapping[str, str]
    ) -> tuple[_Role, str]:
        """Return a projection's role, and its name relative to the module of all experts.

        PEFT does not store the name of a parameter that has all experts. Its role is determined
        from the shapes of A and B.
        """
        problem = self.problem
        if expert is not None:
            role: _Role = _ROLES[name]  # type: ignore[assignment]
            if not 0 <= expert < problem.experts:
                raise WeightsError(what, got=keys["A"], need=f"experts 0 to {problem.experts - 1}")
            if role == "gate" and not problem.act.gated:
                need = f"no gate: the problem's activation is {problem.act.kind}"
                raise WeightsError(what, got=keys["A"], need=need)
            return role, f"{expert}.{name}"
        w1_role: _Role = "gate_up" if problem.act.gated else "up"
        a_shape, b_shape = (self._get_stored_shape(keys[side]) for side in "AB")
        roles: tuple[_Role, ...] = (w1_role, "down")
        matching_roles = [
            role for role in roles if (b_shape[0], a_shape[1]) == self._get_weight_shape(role)
        ]
        if len(matching_roles) != 1:
            weight_shapes = {role: self._get_weight_shape(role) for role in roles}
            valid_shapes = [
                f"(E r, {depth}) and ({rows}, r E) of {_PARAMETER_NAMES[role]}"
                for role, (rows, depth) in weight_shapes.items()
            ]
            got = f"{a_shape} and {b_shape}"
            raise ShapeError(
                self.files.qualified_name(keys["A"]), got=got, need=" or ".join(valid_shapes)
            )
        rows, depth = self._get_weight_shape(matching_roles[0])
        is_ambiguous = rows == depth or not problem.act.gated
        if is_ambiguous and not self.config.has_fused_layout:
            need = "0.19 or newer: older versions may have swapped A and B with the same shapes"
            raise ConfigurationError(
                f"{what}: peft_version", got=self.config.peft_version, need=need
            )
        return matching_roles[0], _PARAMETER_NAMES[matching_roles[0]]

    def _get_weight_shape(self, role: _Role) -> tuple[int, int]:
        """Return (rows, columns) of a projection's weight."""
        problem = self.problem
        if role == "down":
            return problem.hidden, problem.intermediate
        return problem.w1_rows if role == "gate_up" else problem.intermediate, problem.hidden

    def _get_stored_shape(self, key: str) -> tuple[int, ...]:
        shape, dtype = self.files.shape_and_dtype(key)
        if dtype not in _DTYPES:
            need = ", ".join(map(str, _DTYPES))
            raise DtypeError(self.files.qualified_name(key), got=dtype, need=need)
        if len(shape) != 2:
            raise ShapeError(self.files.qualified_name(key), got=shape, need="two dimensions")
        return shape

    def _make_pair(
        self, role: _Role, module: str, expert: int | None, keys: Mapping[str, str]
    ) -> _FactorPair:
        rank, scaling = self.config.rank_and_scaling(module)
        total_rank = rank * (self.problem.experts if expert is None else 1)
        rows, depth = self._get_weight_shape(role)
        for side, need in (("A", (total_rank, depth)), ("B", (rows, total_rank))):
            got = self._get_stored_shape(keys[side])
            if got != need:
                requirement = f"{need}, by {CONFIG_FILE} and the problem"
                raise ShapeError(self.files.qualified_name(keys[side]), got=got, need=requirement)
        return _FactorPair(module, keys["A"], keys["B"], rank, scaling)

    def _check_complete(
        self, pairs_by_role: Mapping[_Role, Mapping[int | None, _FactorPair]]
    ) -> None:
        """Raise WeightsError unless projections have all experts, and all targets exist."""
        what = f"{self.files.path}: layer {self.layer}"
        all_experts = set(range(self.problem.experts))
        for role, pairs in pairs_by_role.items():
            missing = all_experts - {*pairs} if None not in pairs else {*pairs} - {None}
            if missing and None in pairs:
                raise WeightsError(what, got=f"{role} fused and by expert", need="one of the two")
            if missing:
                got = f"{role} without experts {sorted(missing)[:8]}"  # type: ignore[type-var]
                raise WeightsError(what, got=got, need="all experts, or none")
        if "gate_up" in pairs_by_role and {"gate", "up"} & {*pairs_by_role}:
            raise WeightsError(
                what, got="gate and up both fused and separate", need="one of the two"
            )
        if not self.config.has_layer(self.layer):
            return
        present = {*pairs_by_role, *(("gate", "up") if "gate_up" in pairs_by_role else ())}
        role_by_name = {**_ROLES, "gate_up_proj": "gate_up"}
        for target in self.config.targets:
            if target in role_by_name and role_by_name[target] not in present:
                raise WeightsError(what, got=f"no {target}", need=f"all targets of {CONFIG_FILE}")

    def read(self, pairs: Mapping[int | None, _FactorPair], experts: Sequence[int]) -> _Factors:
        """Read A and B of some experts, multiply B by the scaling, and pad to the maximum rank."""
        if None in pairs:
            pair, count = pairs[None], self.problem.experts
            a, b = self.files.read(pair.a, ()), self.files.read(pair.b, ())
            a, b = a.view(count, pair.rank, -1), b.view(-1, pair.rank, count)
            return self._scale_and_cast(pair, a[list(experts)], b.permute(2, 0, 1)[list(experts)])
        expert_pairs = [pairs[expert] for expert in experts]
        factors = [
            self._scale_and_cast(pair, self.files.read(pair.a, ()), self.files.read(pair.b, ()))
            for pair in expert_pairs
        ]
        rank = max(pair.rank for pair in expert_pairs)
        a = torch.stack([_pad(a, 0, rank) for a, _ in factors])
        return a, torch.stack([_pad(b, 1, rank) for _, b in factors])

    def _scale_and_cast(self, pair: _FactorPair, a: torch.Tensor, b: torch.Tensor) -> _Factors:
        """Multiply B by the scaling in float64, and convert both factors to the problem's dtype.

        Raises WeightsError for values that overflow or are not finite.
        """
        dtype = self.problem.dtype
        factors = a.to(dtype), (b.double() * pair.scaling).to(dtype)
        for key, values in zip((pair.a, pair.b), factors, strict=True):
            if not bool(values.isfinite().all()):
                got, need = "values that are not finite", f"finite ones in {dtype}"
                raise WeightsError(self.files.qualified_name(key), got=got, need=need)
        return factors


def _assemble_adapter(
    source: _LayerFactors,
    pairs_by_role: Mapping[_Role, Mapping[int | None, _FactorPair]],
    spec: AdapterSpec,
    local_experts: list[int],
) -> Adapter:
    problem = source.problem
    experts = list(range(problem.experts)) if spec.outer_shared else local_experts
    factors = {role: source.read(pairs, experts) for role, pairs in pairs_by_role.items()}
    w1_parts = _split_w1_factors(problem, factors)
    if spec.a13_shared:
        w1_parts = _merge_a(w1_parts)
    w2_parts = [("", *factors["down"])] if "down" in factors else []
    ranks = [a.shape[1] for _, a, _ in (*w1_parts, *w2_parts)]
    padded_spec = replace(spec, rank=max(ranks, default=1))
    shapes = padded_spec.shapes(len(experts), problem.w1_rows, problem.hidden, problem.intermediate)
    tensors = {
        name: torch.zeros((len(experts), *shape[2:]), dtype=problem.dtype, device="cpu")
        for name, shape in shapes.items()
    }
    num_a = tensors["lora_a13"].shape[1] // padded_spec.rank
    for projection, a, b in w1_parts:
        start = padded_spec.rank if projection == "up" and num_a == 2 else 0
        tensors["lora_a13"][:, start : start + a.shape[1]] = a
        tensors["lora_b13"][:, _get_w1_rows(problem, projection), : b.shape[2]] = b
    for _, a, b in w2_parts:
        tensors["lora_a2"][:, : a.shape[1]] = a
        tensors["lora_b2"][:, :, : b.shape[2]] = b
    if spec.outer_shared:
        for name in ("lora_a13", "lora_b2"):
            tensors[name] = _get_shared_matrix(str(source.files.path), name, tensors[name])
        for name in ("lora_b13", "lora_a2"):
            tensors[name] = tensors[name][local_experts]
    return Adapter(**tensors)


def _get_w1_rows(problem: Problem, projection: str) -> slice:
    """Return the rows of gate or up in w1."""
    rows = problem.w1_rows
    if not problem.act.gated:
        return slice(rows)
    if problem.act.interleaved:
        return slice(int(projection == "up"), rows, 2)
    return slice(rows // 2) if projection == "gate" else slice(rows // 2, rows)


def _split_w1_factors(problem: Problem, factors: Mapping[_Role, _Factors]) -> list[_Part]:
    """Return the factors of gate and of up. If they are stored together, both have the same A."""
    if "gate_up" in factors:
        a, b = factors["gate_up"]
        return [
            (projection, a, b[:, _get_w1_rows(problem, projection)])
            for projection in ("gate", "up")
        ]
    roles: tuple[_Role, ...] = ("gate", "up")
    return [(role, *factors[role]) for role in roles if role in factors]


def _merge_a(w1_parts: list[_Part]) -> list[_Part]:
    """Give gate and up a common A, without changing B @ A.

    If they have different A, the common A has the rows of both, and each B is padded with zeros.
    """
    if len(w1_parts) < 2 or torch.equal(w1_parts[0][1], w1_parts[1][1]):
        return w1_parts
    (_, a_gate, b_gate), (_, a_up, b_up) = w1_parts
    a = torch.cat([a_gate, a_up], 1)
    b_gate = _pad(b_gate, 2, a.shape[1])
    b_up = torch.cat([torch.zeros_like(b_up[:, :, :1]).expand(-1, -1, a_gate.shape[1]), b_up], 2)
    return [("gate", a, b_gate), ("up", a, b_up)]


def _pad(values: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    """Append zeros to a dimension up to `size`."""
    shape = list(values.shape)
    shape[dimension] = size - shape[dimension]
    return torch.cat([values, values.new_zeros(shape)], dimension)


def _get_shared_matrix(what: str, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return the matrix that all experts share, (1, ...). Raises WeightsError if experts differ."""
    if not torch.equal(values, values[:1].expand_as(values)):
        got = f"{name} that differs between experts"
        raise WeightsError(what, got=got, need="the same for all experts, because of outer=shared")
    return values[:1].contiguous()
