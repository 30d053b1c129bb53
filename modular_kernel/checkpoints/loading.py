"""A checkpoint's experts -> the weights of one layer on one rank, without a framework.

    loaded = load_experts("checkpoint/", 3, ep=(rank, world))
    kernel = make_kernel(pf, experts, loaded.problem(tokens=512), group=...)
    y_TH = kernel(x_TH, loaded.weights, routing)

A rank reads its share of the bytes. In memory there is what it keeps, and a piece of one matrix.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any, Literal

import torch

from modular_kernel.checkpoints.expert_names import ProjectionPlace
from modular_kernel.checkpoints.formats import Format
from modular_kernel.checkpoints.fp8_mxfp4 import static_scale
from modular_kernel.checkpoints.fusing import Matrix, same_order, sort_rows, stack
from modular_kernel.checkpoints.inspection import Examined, examine
from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.checkpoints.safetensors_files import open_tensors
from modular_kernel.checkpoints.slices import LayerSource
from modular_kernel.errors import ConfigurationError, InputError
from modular_kernel.models.router_config import router_of_config
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.replay import modes
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem, dtype_name, parse_dtype
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.argument_checks import Count, available_device, expect

_AT_ONCE = 1 << 22  # values of a matrix that are read, merged and copied in one step


@dataclass(frozen=True, repr=False)
class LoadedExperts:
    """The experts of one layer that one rank holds.

    weights: as `Problem` has them; their first dimension is this rank's experts, in the order of
    `placement`. problem_fields: what the checkpoint settles of a Problem; `intermediate` is this
    rank's share. placement, ep, tp: which share it is. format: how files store it. bytes_read: of
    tensors in the files. config: the config.json, and the object in it that describes the layer.

    `problem` and `partial` have the checkpoint's routed_scaling_factor: the kernel multiplies by
    it, once. A router whose weights contain it already (those of transformers' DeepSeek models do)
    needs `problem(tokens, routed_scaling_factor=1.0)`; the weights of `router` do not contain it.
    """

    weights: ExpertWeights
    problem_fields: dict[str, Any]
    placement: Placement
    ep: tuple[int, int]
    tp: tuple[int, int]
    format: Format
    bytes_read: int
    config: tuple[Path, dict[str, Any]]

    @property
    def router(self) -> RouterSpec | None:
        """The router that the config.json describes; None for a model_type whose is not known.

        ConfigurationError for values in the file that no RouterSpec has.
        """
        return router_of_config(*self.config, self.problem_fields["top_k"])

    def problem(self, tokens: int, **fields: Any) -> Problem:
        """Return the problem of a pairing whose ranks share the experts.

        tokens: the most of one call. fields: more of Problem, or others than the checkpoint's. Over
        tensor-parallel ranks a layer's result is the sum of theirs.
        """
        parallel = Parallel(self.ep[1], self._placed(), self.ep[0])
        return Problem(**{"tokens": tokens, "parallel": parallel, **self.problem_fields, **fields})

    def partial(self, tokens: int, **fields: Any) -> tuple[Problem, ExpertWeights]:
        """Return problem and weights of a pairing that exchanges nothing: this rank's part.

        It takes global ids of all tokens and skips experts that are elsewhere. The sum over all
        ranks, expert- and tensor-parallel, is the layer's result.
        """
        local = len(self.placement.slots[self.ep[0]])
        given = {"tokens": tokens, "local_experts": local, "expert_map": True}
        problem = Problem(**{**given, **self.problem_fields, **fields})
        place = self.placement.expert_map(self.ep[0], self.weights.w1.device)
        return problem, replace(self.weights, expert_map=place)

    def __repr__(self) -> str:
        """Return what it is, without its numbers."""
        held = f"{len(self.weights.w1)} of {self.placement.experts} experts in {self.format}"
        share = f"ep={self.ep}, tp={self.tp}, bytes_read={self.bytes_read}"
        return f"LoadedExperts({held}, {share})"

    def _placed(self) -> Literal["linear"] | Placement:
        return "linear" if self.placement.is_linear else self.placement


@modes.kept()
def load_experts(  # noqa: PLR0913 (each is one question)
    checkpoint: str | Path,
    layer: int,
    *,
    ep: tuple[int, int] = (0, 1),
    tp: tuple[int, int] = (0, 1),
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    placement: Literal["linear"] | Placement = "linear",
    prefix: str | None = None,
    config: str | Path | None = None,
    quantize_inputs: bool = False,
) -> LoadedExperts:
    """Load the experts of one layer that one rank holds, as the checkpoint's format has them.

    checkpoint: a folder with a config.json and safetensors (with an index or without), or one
    safetensors file. layer: its number, from 0. ep, tp: (rank, ranks) of expert and tensor
    parallelism; placement says which experts a rank holds. A tensor-parallel share is one of the
    intermediate size, in whole groups; b2 is on the first of these ranks, the others have zeros.
    dtype: of the layer, and of what is not quantized; None is the config.json's, else that of
    files that are not quantized (DtypeError if they have several), else bfloat16.
    prefix: what stands in front of "layers.N" in names of tensors, where a checkpoint has several
    models. config: another config.json than the one beside the tensors. quantize_inputs: of nvfp4
    files whose recipe rounds activations too, nvfp4_w4a4 with their input scales, instead of
    nvfp4_w4a16; ConfigurationError for others.

    Names, shapes and dtypes are checked before a tensor is read: ConfigurationError for a
    config.json, a format or a share that cannot be; WeightsError, ShapeError and DtypeError name
    file and tensor, what they got and what they need. Nothing is returned in part.
    """
    asked = _Asked(layer, ep, tp, dtype, prefix)
    expect("checkpoint", checkpoint, str | Path)
    expect("config", config, str | Path | None)
    expect("quantize_inputs", quantize_inputs, bool)
    place = available_device(device)
    with open_tensors(Path(checkpoint)) as files:
        found = examine(files, config, prefix)
        if quantize_inputs:
            found = replace(found, format=found.format.with_inputs())
        source = found.source(asked.layer)
        return _load(source, found, asked, placement, place)


@dataclass(frozen=True)
class _Asked:
    """What a caller gave, checked."""

    layer: int
    ep: tuple[int, int]
    tp: tuple[int, int]
    dtype: torch.dtype | str | None
    prefix: str | None

    def __post_init__(self) -> None:
        expect("layer", self.layer, int)
        expect("prefix", self.prefix, str | None)
        for name in ("ep", "tp"):
            expect(f"{name}: (rank, ranks)", getattr(self, name), tuple[int, int])
            rank, world = getattr(self, name)
            expect(f"{name}: ranks", world, Count)
            if not 0 <= rank < world:
                raise ConfigurationError(f"{name}: rank", got=rank, need=f"in [0, {world})")


def _load(
    source: LayerSource,
    found: Examined,
    asked: _Asked,
    placement: Literal["linear"] | Placement,
    device: torch.device,
) -> LoadedExperts:
    stored = source.check()
    given = None if asked.dtype is None else dtype_name(parse_dtype(asked.dtype))
    facts = found.problem_fields(source, asked.tp[1], dtype=given)
    facts["dtype"] = parse_dtype(facts.get("dtype", "bfloat16"))
    held = Parallel(asked.ep[1], placement, asked.ep[0]).place(facts["experts"])
    problem = Problem(tokens=1, local_experts=len(held.slots[asked.ep[0]]), **facts)
    rank = _Share(source, source.format.with_scheme(problem.scheme), problem, asked.tp)
    rank.check_cut()
    weights = rank.read(held.slots[asked.ep[0]], _allocated(problem, stored, device))
    read = source.files.bytes_read
    return LoadedExperts(
        weights, facts, held, asked.ep, asked.tp, source.format, read, found.config
    )


@dataclass(frozen=True)
class _Share:
    """What one rank reads of a layer's matrices. fine: the format as the layer holds it."""

    source: LayerSource
    fine: Format
    problem: Problem
    tp: tuple[int, int]

    @property
    def columns(self) -> Range:
        """Columns of w2, and rows of gate and of up: this rank's share of I."""
        width = self.problem.intermediate
        return self.tp[0] * width, (self.tp[0] + 1) * width

    def check_cut(self) -> None:
        """Raise the ConfigurationError of a share that goes through a packed word."""
        first, (down,) = self.source.layer.projections(0)
        hidden = self.problem.hidden
        parts = [(place, self._rows(0, self._width), (0, hidden)) for place in first]
        self.source.check_cut([*parts, (down, (0, hidden), self.columns)])

    def read(self, experts: Sequence[int], whole: dict[str, torch.Tensor]) -> ExpertWeights:
        """Read this rank's share of `experts` into the tensors of `whole`, which were made once."""
        for slot, expert in enumerate(experts):
            first, second = self.source.layer.projections(expert)
            orders = dict[str, torch.Tensor]()
            for rows in self._pieces(self._width, len(first) * self.problem.hidden):
                there = self._rows(*rows)
                parts = [(place, there, (0, self.problem.hidden)) for place in first]
                orders |= self._put(whole, "w1", slot, parts, rows)
            for rows in self._pieces(self.problem.hidden, self.problem.intermediate):
                orders |= self._put(whole, "w2", slot, [(second[0], rows, self.columns)], rows)
            if self.problem.bias:
                self._put_biases(whole, slot, first, second[0])
            if orders:
                whole["w1_order"][slot] = orders["w1"]
                sort_rows(whole, slot, orders["w2"], interleaved=self._interleaved)
        if self.fine.scheme.static:
            whole = whole | self._input_scales(experts, whole["w1"].device)
        return ExpertWeights(**whole)

    @property
    def _interleaved(self) -> bool:
        return self.source.layer.layout.interleaved

    @property
    def _width(self) -> int:
        """Rows of one projection of w1 on this rank."""
        return self.problem.intermediate * (2 if self._interleaved else 1)

    def _rows(self, start: int, stop: int) -> Range:
        """Rows in the whole projection of rows [start, stop) on this rank."""
        begin = self.tp[0] * self._width
        return begin + start, begin + stop

    def _pieces(self, rows: int, values: int) -> Iterator[Range]:
        """Yield ranges of rows of so many values, each of whole tiles and words."""
        scheme = self.fine.scheme
        tile = lcm(8, scheme.group[0] if scheme.granularity == "block" else 1)
        step = max(_AT_ONCE // values // tile, 1) * tile
        yield from ((start, min(start + step, rows)) for start in range(0, rows, step))

    def _put(
        self,
        whole: dict[str, torch.Tensor],
        name: str,
        slot: int,
        parts: Sequence[tuple[ProjectionPlace, Range, Range]],
        rows: Range,
    ) -> dict[str, torch.Tensor]:
        """Read rows of some projections, merge them, and copy each to its place in w1 or w2.

        Returns the order that their columns had, if those are in another one now, by `name`.
        """
        try:
            read = [self.source.part(self.fine, *part, order=not rows[0]) for part in parts]
            merged = self._merged(read)
            order = same_order(merged)
        except InputError as error:
            what = f"{self.source.what}: {parts[0][0].base}: {error.what}"
            raise type(error)(what, got=error.got, need=error.need) from None
        for number, matrix in enumerate(merged):
            begin = number * self._width + rows[0]
            _copy(whole, name, slot, matrix, self.fine, begin)
            if matrix.global_scale is not None:  # gate_up in one has one for both
                there = slice(None) if len(merged) == 1 else number
                whole[f"{name}_global_scale"][slot, there] = matrix.global_scale
        return {} if order is None else {name: order}

    def _merged(self, read: Sequence[Mapping[str, torch.Tensor]]) -> list[Matrix]:
        """Merge projections; each by itself, and so a view where nothing has to be unpacked."""
        dtype = self.problem.dtype
        if self.fine.scheme.granularity != "tensor":
            return [stack(self.fine, [each], dtype) for each in read]
        matrix = stack(self.fine, read, dtype)  # their scales become one
        return [replace(matrix, w=rows) for rows in matrix.w.chunk(len(read))]

    def _put_biases(
        self,
        whole: dict[str, torch.Tensor],
        slot: int,
        first: Sequence[ProjectionPlace],
        down: ProjectionPlace,
    ) -> None:
        biases = [self.source.bias_of(place, self._rows(0, self._width)) for place in first]
        whole["b1"][slot] = torch.cat([bias.to(whole["b1"].dtype) for bias in biases])
        if self.tp[0] == 0:  # its sum over ranks has it once
            whole["b2"][slot] = self.source.bias_of(down, (0, self.problem.hidden))

    def _input_scales(self, here: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        """Read those of all experts: a token is quantized before it meets any, on any rank.

        Where it is quantized behind the dispatch, those of the experts here, of each the largest.
        """
        if self.fine.scheme.scales_by_expert:
            of_expert = [self.source.layer.projections(expert) for expert in here]
            read = self.source.input_scales
            return {
                name: torch.stack([read(places[side]).amax() for places in of_expert]).to(device)
                for side, name in enumerate(("a1_scale", "a2_scale"))
            }
        places = [self.source.layer.projections(expert) for expert in range(self.problem.experts)]
        firsts = [place for first, _ in places for place in first]
        seconds = [place for _, second in places for place in second]
        given = {"a1_scale": firsts, "a2_scale": seconds}
        scales = {name: self.source.input_scales(there) for name, there in given.items()}
        return {name: static_scale(each).to(device) for name, each in scales.items()}


def _allocated(
    problem: Problem, stored: Mapping[str, frozenset[torch.dtype]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Make every tensor that the problem's weights have, but static activation scales.

    stored: dtypes in the files, by role. Where all scales, or all biases, have one dtype that the
    layer takes, that is theirs; else float32, which holds any of them.
    """

    def dtype_of(role: str, taken: Sequence[torch.dtype]) -> torch.dtype:
        found = stored.get(role, frozenset())
        return next((each for each in taken if found == {each}), taken[0])

    made = {}
    for name, spec in weight_specs(problem).items():
        if not name.startswith("a"):
            scale = name.endswith("_scale")
            dtype = dtype_of("scale", spec.dtypes) if scale else spec.dtypes[0]
            made[name] = torch.empty(spec.shape, dtype=dtype, device=device)
    if problem.bias:
        for name, size in (("b1", problem.w1_rows), ("b2", problem.hidden)):
            shape = (problem.e, size)
            dtype = dtype_of("bias", (torch.float32, problem.dtype))
            made[name] = torch.zeros(shape, dtype=dtype, device=device)
    return made


def _copy(
    whole: dict[str, torch.Tensor],
    name: str,
    slot: int,
    matrix: Matrix,
    format: Format,
    begin: int,
) -> None:
    """Copy a piece of one projection to the rows from `begin` on of w1 or w2."""
    scheme = format.scheme
    scale_step = scheme.group[0] if scheme.granularity == "block" else 1
    steps = {"": 1, "_scale": scale_step, "_zero_point": 2 if scheme.packed else 1}
    for suffix, step in steps.items():
        source = getattr(matrix, suffix.removeprefix("_") or "w")
        if source is None:
            continue
        target = whole[name + suffix]
        if source.dim():
            at = begin // step
            target[slot, at : at + len(source)] = source
        else:  # one of the whole matrix
            target[slot] = source
