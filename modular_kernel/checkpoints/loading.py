"""Loading of one layer's experts from a checkpoint, without a framework.

    loaded = load_experts("checkpoint/", 3, ep=(rank, world))
    kernel = make_kernel(pf, experts, loaded.problem(tokens=512), group=...)
    y_TH = kernel(x_TH, loaded.weights, routing)

A rank reads only its shard of the bytes. Besides the shard, memory holds a piece of one matrix.
Unquantized files can be quantized while they are loaded (`quantize`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any, Literal

import torch

from modular_kernel.checkpoints.expert_names import ProjectionLocation
from modular_kernel.checkpoints.formats import Format
from modular_kernel.checkpoints.fp8_mxfp4 import static_scale
from modular_kernel.checkpoints.fusing import Matrix, fuse, projection_rows, same_order, sort_rows
from modular_kernel.checkpoints.inspection import CheckpointInfo, read_checkpoint_info
from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.checkpoints.open_files import open_tensors
from modular_kernel.checkpoints.padding import fill_padding
from modular_kernel.checkpoints.slices import LayerSource
from modular_kernel.errors import ConfigurationError, InputError
from modular_kernel.models.router_config import router_of_config
from modular_kernel.quant.expert_pieces import quantize_expert
from modular_kernel.quant.quantized_weights import weight_specs
from modular_kernel.replay import modes
from modular_kernel.spec.intermediate_split import split_intermediate
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem, dtype_name, parse_dtype
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.argument_checks import Count, available_device, expect
from modular_kernel.utils.progress import logged

_VALUES_PER_STEP = 1 << 22  # values of a matrix that are read, fused and copied in one step


@dataclass(frozen=True, repr=False)
class LoadedExperts:
    """The experts of one layer that one rank holds.

    weights: of this rank's experts, in the order of `placement`.
    problem_fields: fields of Problem that the checkpoint determines; `intermediate` is this rank's,
        with the padding.
    placement, ep, tp: the share that was loaded.
    columns: the columns [first, last) of I that this rank holds. They come first in its weights;
        the remaining ones are padding, whose weights are 0.
    format: how the files store the weights.
    bytes_read: bytes of tensor data that were read.
    config: path of the config.json, and its object that describes the layer.
    intermediate: I of a whole expert, before it is split over TP ranks.

    `problem` and `partial` include the checkpoint's routed_scaling_factor, by which the kernel then
    multiplies. If the router's weights already contain the factor, as in transformers' DeepSeek
    models, use `problem(tokens, routed_scaling_factor=1.0)`. The weights of `router` do not contain
    it.
    """

    weights: ExpertWeights
    problem_fields: dict[str, Any]
    placement: Placement
    ep: tuple[int, int]
    tp: tuple[int, int]
    columns: Range
    format: Format
    bytes_read: int
    config: tuple[Path, dict[str, Any]]
    intermediate: int

    @property
    def router(self) -> RouterSpec | None:
        """The router that the config.json describes, or None if it is not known for the model_type.

        Raises ConfigurationError for values that no RouterSpec allows.
        """
        return router_of_config(*self.config, self.problem_fields["top_k"])

    def problem(self, tokens: int, **fields: Any) -> Problem:
        """Return the problem of a pairing that exchanges tokens between the ranks.

        tokens: the maximum of one call. fields: further fields of Problem, which override the
        checkpoint's. The layer's output is the sum over the TP ranks.
        """
        parallel = Parallel(self.ep[1], self._placement_argument(), self.ep[0])
        return Problem(**{"tokens": tokens, "parallel": parallel, **self.problem_fields, **fields})

    def partial(self, tokens: int, **fields: Any) -> tuple[Problem, ExpertWeights]:
        """Return the problem and weights of a pairing without token exchange.

        It takes all tokens with global expert ids, and skips the experts of other ranks. The
        layer's output is the sum over all ranks, expert- and tensor-parallel.
        """
        local = len(self.placement.slots[self.ep[0]])
        defaults = {"tokens": tokens, "local_experts": local, "expert_map": True}
        problem = Problem(**{**defaults, **self.problem_fields, **fields})
        expert_map = self.placement.expert_map(self.ep[0], self.weights.w1.device)
        return problem, replace(self.weights, expert_map=expert_map)

    def __repr__(self) -> str:
        """Return a summary without the values of the weights."""
        quant, stored = str(self.problem_fields["quant"]), str(self.format)
        is_rounded = quant != "none" and not self.format.scheme.quantized
        format = f"{stored}, quantized to {quant}" if is_rounded else stored
        experts = f"{len(self.weights.w1)} of {self.placement.experts} experts in {format}"
        share = f"ep={self.ep}, tp={self.tp}, bytes_read={self.bytes_read}"
        return f"LoadedExperts({experts}, {share})"

    def _placement_argument(self) -> Literal["linear"] | Placement:
        return "linear" if self.placement.is_linear else self.placement


@modes.outside_inference_mode()
def load_experts(  # noqa: PLR0913 (independent options)
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
    quantize: QuantScheme | str | None = None,
) -> LoadedExperts:
    """Load the experts of one layer that one rank holds, in the checkpoint's format or `quantize`.

    checkpoint: a folder with a config.json and safetensors (with or without an index), one
        safetensors file or index, or the name of a model on the Hugging Face Hub, which must be in
        the local cache: nothing is downloaded. `checkpoints.checkpoint_files` has the rules.
    layer: number of the layer, from 0.
    ep, tp: (rank, ranks) of expert and tensor parallelism. TP splits I, into equal shares if
        possible; where these divide a block or group of quantized weights, its scale is repeated
        (see `formats.fit`). Where equal shares do not exist, or would divide a group of mxfp4 or
        nvfp4, ranks get whole groups, and smaller shares are padded with weights of 0. The first TP
        rank has b2, the others have zeros.
    placement: the experts of each EP rank.
    dtype: of the layer, and of what is not quantized. None uses the config.json's, else that of
        unquantized files (DtypeError if they have several), else bfloat16.
    prefix: of the tensor names up to "layers.N", for a checkpoint with several models.
    config: a config.json to use instead of the one next to the tensors.
    quantize_inputs: for nvfp4 files whose recipe also rounds activations, load nvfp4_w4a4 with the
        input scales instead of nvfp4_w4a16. Raises ConfigurationError for other files.
    quantize: a scheme to which unquantized files are quantized, such as
        "fp8_w8a8_block:block=128x128". The result is that of `quantize_weights` of this rank's
        share, with the values in the files, which are not rounded to `dtype` first. Under TP,
        shares are whole groups or blocks of the scheme, if there is one for each rank; the scale of
        a tensor, of a channel of w2, or of a tile that a share cuts is that of the share.
        Float8 files with one scale per matrix can be loaded as "fp8_w8a8_channel", which rounds no
        weight again: by default gate and up get a common scale. Raises ConfigurationError for other
        quantized files, and for a scheme with static activation scales, which cannot be computed
        from weights.

    The format is the one that the quantization_config has for the layer's experts, which may differ
    between layers: a layer that it excludes is loaded unquantized. A layer for multi-token
    prediction (MTP) that the files have unquantized is too, although no entry excludes it.

    Names, shapes and dtypes are checked before a tensor is read. Raises ConfigurationError for an
    invalid config.json, format or share, and for a layer whose experts have several formats;
    WeightsError, ShapeError or DtypeError with the file and tensor, what they have and what is
    needed. There are no partial results. A load of more than five seconds logs its progress (INFO
    of the logger "modular_kernel.loading").
    """
    request = _LoadRequest(layer, ep, tp, dtype, prefix, scheme_to_quantize(quantize))
    expect("checkpoint", checkpoint, str | Path)
    expect("config", config, str | Path | None)
    expect("quantize_inputs", quantize_inputs, bool)
    torch_device = available_device(device)
    with open_tensors(Path(checkpoint)) as files:
        info = read_checkpoint_info(files, config, prefix, quantize_inputs=quantize_inputs)
        source = info.source(request.layer)
        return _load(source, info, request, placement, torch_device)


@dataclass(frozen=True)
class _LoadRequest:
    """The arguments of `load_experts`, checked."""

    layer: int
    ep: tuple[int, int]
    tp: tuple[int, int]
    dtype: torch.dtype | str | None
    prefix: str | None
    quantize: QuantScheme | None

    def __post_init__(self) -> None:
        expect("layer", self.layer, int)
        expect("prefix", self.prefix, str | None)
        for name in ("ep", "tp"):
            expect(f"{name}: (rank, ranks)", getattr(self, name), tuple[int, int])
            rank, world = getattr(self, name)
            expect(f"{name}: ranks", world, Count)
            if not 0 <= rank < world:
                raise ConfigurationError(f"{name}: rank", got=rank, need=f"in [0, {world})")


def _reader(
    source: LayerSource, problem: Problem, request: _LoadRequest, columns: Range
) -> "_ShareReader":
    """Return the reader of a rank's share; `problem` has the scheme of what is loaded."""
    is_first = request.tp[0] == 0
    stored = source.format.scheme
    if request.quantize is not None and not stored.quantized:
        return _QuantizingReader(source, source.format, problem, columns, is_first)
    # Files with static activation scales have them, too, where the problem does not use them.
    scheme = replace(problem.scheme, static=stored.static)
    fine = source.format.with_scheme(scheme)
    return _ShareReader(source, fine, problem, columns, is_first)


def scheme_to_quantize(quantize: QuantScheme | str | None) -> QuantScheme | None:
    """Return the scheme of the argument `quantize`; None means the format of the files.

    Raises ConfigurationError for an unknown scheme, or one that weights alone do not determine.
    """
    if quantize is None:
        return None
    scheme = QuantScheme.parse(quantize)
    if not scheme.quantized:
        raise ConfigurationError("quantize", got=str(scheme), need="a quantized scheme, or None")
    if scheme.static:
        need = "no static activation scales: they are calibrated with inputs of the model"
        raise ConfigurationError("quantize", got=str(scheme), need=need)
    return scheme


def _load(
    source: LayerSource,
    info: CheckpointInfo,
    request: _LoadRequest,
    placement: Literal["linear"] | Placement,
    device: torch.device,
) -> LoadedExperts:
    dtypes_by_role = source.check()
    dtype = None if request.dtype is None else dtype_name(parse_dtype(request.dtype))
    fields = info.problem_fields(source, request.tp[1], dtype=dtype)
    fields["dtype"] = parse_dtype(fields.get("dtype", "bfloat16"))
    check_quantizable(source.what, source.format, request.quantize)
    if request.quantize is not None:
        fields["quant"] = str(request.quantize)
    scheme = QuantScheme.parse(fields["quant"])
    split = split_intermediate(source.layer.intermediate, request.tp[1], scheme)
    fields["intermediate"] = split.width
    rank_placement = Parallel(request.ep[1], placement, request.ep[0]).place(fields["experts"])
    problem = Problem(tokens=1, local_experts=len(rank_placement.slots[request.ep[0]]), **fields)
    columns = split.columns(request.tp[0])
    share = _reader(source, problem, request, columns)
    share.check_cut()
    weights = share.read(
        rank_placement.slots[request.ep[0]], _allocate(problem, dtypes_by_role, device)
    )
    bytes_read = source.files.bytes_read
    return LoadedExperts(
        weights,
        fields,
        rank_placement,
        request.ep,
        request.tp,
        columns,
        source.format,
        bytes_read,
        info.config,
        source.layer.intermediate,
    )


def check_quantizable(what: str, format: Format, scheme: QuantScheme | None) -> None:
    """Raise ConfigurationError if weights in `format` cannot be loaded in `scheme`, if any."""
    if scheme is not None and format.scheme.quantized and not _keeps_codes(format, scheme):
        need = "unquantized files: stored codes are not rounded again"
        raise ConfigurationError(f"{what}: quantize={scheme}", got=str(format), need=need)


def _keeps_codes(format: Format, scheme: QuantScheme) -> bool:
    """Return whether `scheme` represents the weights of `format` by the same codes.

    This holds for float8 with one scale per matrix, where each row can have that scale.
    """
    return format.scheme.name == "fp8_w8a8_tensor" and scheme.name == "fp8_w8a8_channel"


@dataclass(frozen=True)
class _ShareReader:
    """One rank's part of a layer's matrices.

    fine: the format with the layer's tiles. problem: of this rank; its I includes the padding.
    columns: this rank's range of I: columns of w2, and rows of gate and of up. has_b2: this rank
    adds the bias of w2.
    """

    source: LayerSource
    fine: Format
    problem: Problem
    columns: Range
    has_b2: bool

    def check_cut(self) -> None:
        """Raise ConfigurationError if the share splits a packed word."""
        w1_locations, (down,) = self.source.layer.projections(0)
        hidden = self.problem.hidden
        parts = [(location, self._rows(0, self._width), (0, hidden)) for location in w1_locations]
        self.source.check_cut([*parts, (down, (0, hidden), self.columns)])

    def read(self, experts: Sequence[int], tensors: dict[str, torch.Tensor]) -> ExpertWeights:
        """Read this rank's share of `experts` into the preallocated tensors of `tensors`."""
        for slot, expert in enumerate(logged(experts, self.source.what, "experts")):
            w1_locations, (down,) = self.source.layer.projections(expert)
            orders = self._read_matrices(tensors, slot, w1_locations, down)
            if self.problem.bias:
                self._read_biases(tensors, slot, w1_locations, down)
            if orders:
                tensors["w1_order"][slot] = orders["w1"]
                sort_rows(tensors, slot, orders["w2"], interleaved=self._interleaved)
        self._fill_padding(tensors)
        if self.problem.scheme.static:
            tensors = tensors | self._input_scales(experts, tensors["w1"].device)
        return ExpertWeights(**tensors)

    def _read_matrices(
        self,
        tensors: dict[str, torch.Tensor],
        slot: int,
        w1_locations: Sequence[ProjectionLocation],
        down: ProjectionLocation,
    ) -> dict[str, torch.Tensor]:
        """Read w1 and w2 of one expert, and return their column orders, if they have any.

        With act-order, the rows of w1 are sorted like the columns of w2, which is then read first.
        """
        if not self.fine.scheme.act_order:
            self._read_w1(tensors, slot, w1_locations, None)
            self._read_w2(tensors, slot, down)
            return {}
        orders = self._read_w2(tensors, slot, down)
        row_order = projection_rows(orders["w2"], self._rows_per_column)
        return orders | self._read_w1(tensors, slot, w1_locations, row_order)

    def _read_w1(
        self,
        tensors: dict[str, torch.Tensor],
        slot: int,
        locations: Sequence[ProjectionLocation],
        row_order: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Read the projections of w1. row_order: the source of each row of one, or None."""
        orders, hidden = dict[str, torch.Tensor](), (0, self.problem.hidden)
        pieces = self._pieces(self._width, len(locations) * self.problem.hidden)
        if row_order is not None:
            pieces = iter([(0, self._width)])  # sorted rows may come from anywhere
        for rows in pieces:
            parts = [(location, self._rows(*rows), hidden) for location in locations]
            orders |= self._read_rows(tensors, "w1", slot, parts, rows, row_order)
        return orders

    def _read_w2(
        self, tensors: dict[str, torch.Tensor], slot: int, location: ProjectionLocation
    ) -> dict[str, torch.Tensor]:
        orders = dict[str, torch.Tensor]()
        for rows in self._pieces(self.problem.hidden, self.columns[1] - self.columns[0]):
            parts = [(location, rows, self.columns)]
            orders |= self._read_rows(tensors, "w2", slot, parts, rows)
        return orders

    def _fill_padding(self, tensors: dict[str, torch.Tensor]) -> None:
        problem, split = (
            self.problem,
            (self.columns[1] - self.columns[0], self.problem.intermediate),
        )
        gated, interleaved = problem.act.gated, self._interleaved
        fill_padding(tensors, problem.scheme, split, gated=gated, interleaved=interleaved)

    @property
    def _interleaved(self) -> bool:
        return self.source.layer.layout.interleaved

    @property
    def _rows_per_column(self) -> int:
        """Rows of one projection of w1 for each column of I."""
        return 2 if self._interleaved else 1

    @property
    def _width(self) -> int:
        """Rows of one projection of w1 that this rank reads."""
        return (self.columns[1] - self.columns[0]) * self._rows_per_column

    def _first_row(self, projection: int) -> int:
        """Return the row of w1 at which one of its projections begins."""
        return projection * self.problem.intermediate * self._rows_per_column

    def _rows(self, start: int, stop: int) -> Range:
        """Return the rows of the undivided projection for rows [start, stop) of this rank."""
        begin = self.columns[0] * self._rows_per_column
        return begin + start, begin + stop

    def _pieces(self, rows: int, values: int) -> Iterator[Range]:
        """Yield ranges of rows of `values` values each, aligned to tiles and packed words."""
        scheme = self.fine.scheme
        tile = lcm(8, scheme.group[0] if scheme.granularity == "block" else 1)
        # Numbers in float32, and what they are made of, take more memory than packed weights.
        limit = _VALUES_PER_STEP // (8 if self.source.format.has_blocks else 1)
        step = max(limit // values // tile, 1) * tile
        yield from ((start, min(start + step, rows)) for start in range(0, rows, step))

    def _read_rows(
        self,
        tensors: dict[str, torch.Tensor],
        name: str,
        slot: int,
        parts: Sequence[tuple[ProjectionLocation, Range, Range]],
        rows: Range,
        row_order: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read rows of some projections, fuse them, and copy them to their rows of w1 or w2.

        row_order: the source of each row of a projection, or None to keep the order. Returns {name:
        order} if the columns were sorted by act-order, else {}.
        """
        places = [self._first_row(number) + rows[0] for number in range(len(parts))]
        try:
            projections = [
                self.source.read_part(self.fine, *part, order=not rows[0]) for part in parts
            ]
            out = [self._place(tensors[name][slot], begin, rows, row_order) for begin in places]
            merged = self._fuse_projections(projections, out)
            order = same_order(merged)
        except InputError as error:
            what = f"{self.source.what}: {parts[0][0].base}: {error.what}"
            raise type(error)(what, got=error.got, need=error.need) from None
        for number, matrix in enumerate(merged):
            _copy_rows(tensors, name, slot, matrix, self.fine, places[number], row_order)
            if matrix.global_scale is not None:  # a fused gate_up has one for both
                columns = slice(None) if len(merged) == 1 else number
                tensors[f"{name}_global_scale"][slot, columns] = matrix.global_scale
        return {} if order is None else {name: order}

    def _place(
        self, w: torch.Tensor, begin: int, rows: Range, row_order: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the rows of an expert's w1 or w2 that a piece fills, or None if it is copied."""
        is_padded = self.columns[1] - self.columns[0] != self.problem.intermediate
        if row_order is not None or is_padded or w.device.type != "cpu":
            return None
        return w[begin : begin + rows[1] - rows[0]]

    def _fuse_projections(
        self,
        projections: Sequence[Mapping[str, torch.Tensor]],
        out: Sequence[torch.Tensor | None],
    ) -> list[Matrix]:
        """Fuse projections if they share a scale, else return each one separately.

        A separate projection is a view if nothing has to be unpacked. out: for each projection,
        where `fuse` may write it.
        """
        dtype = self.problem.dtype
        if self.fine.scheme.granularity != "tensor":
            return [
                fuse(self.fine, [projection], dtype, place)
                for projection, place in zip(projections, out, strict=True)
            ]
        matrix = fuse(self.fine, projections, dtype)  # their scales become one
        return [replace(matrix, w=rows) for rows in matrix.w.chunk(len(projections))]

    def _read_biases(
        self,
        tensors: dict[str, torch.Tensor],
        slot: int,
        w1_locations: Sequence[ProjectionLocation],
        down: ProjectionLocation,
    ) -> None:
        for number, location in enumerate(w1_locations):
            bias = self.source.bias_of(location, self._rows(0, self._width))
            begin = self._first_row(number)
            tensors["b1"][slot, begin : begin + len(bias)] = bias
        if self.has_b2:  # the sum over TP ranks must contain b2 once
            tensors["b2"][slot] = self.source.bias_of(down, (0, self.problem.hidden))

    def _input_scales(
        self, experts: Sequence[int], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Read the input scales of all experts: a token is quantized before it is assigned to one.

        If inputs are quantized after the dispatch, read those of this rank's experts, and use the
        largest of each expert's projections.
        """
        if self.fine.scheme.scales_by_expert:
            locations_by_expert = [self.source.layer.projections(expert) for expert in experts]
            read_scales = self.source.input_scales
            return {
                name: torch.stack(
                    [read_scales(locations[side]).amax() for locations in locations_by_expert]
                ).to(device)
                for side, name in enumerate(("a1_scale", "a2_scale"))
            }
        locations = [
            self.source.layer.projections(expert) for expert in range(self.problem.experts)
        ]
        w1_locations = [location for first, _ in locations for location in first]
        w2_locations = [location for _, second in locations for location in second]
        by_scale = {"a1_scale": w1_locations, "a2_scale": w2_locations}
        scales = {name: self.source.input_scales(keys) for name, keys in by_scale.items()}
        return {name: static_scale(scale).to(device) for name, scale in scales.items()}


class _QuantizingReader(_ShareReader):
    """A reader that quantizes the matrices of unquantized files, one at a time."""

    def _read_matrices(
        self,
        tensors: dict[str, torch.Tensor],
        slot: int,
        w1_locations: Sequence[ProjectionLocation],
        down: ProjectionLocation,
    ) -> dict[str, torch.Tensor]:
        hidden = (0, self.problem.hidden)
        w1_parts = [(location, self._rows(0, self._width), hidden) for location in w1_locations]
        matrices = {"w1": w1_parts, "w2": [(down, hidden, self.columns)]}
        out = {field: tensor[slot] for field, tensor in tensors.items()}
        missing = self.problem.intermediate - (self.columns[1] - self.columns[0])
        pad = {"w1": (0, 0, 0, missing * self._rows_per_column), "w2": (0, missing)}
        for name, parts in matrices.items():
            read = [self.source.read_part(self.fine, *part, order=False) for part in parts]
            weights = [part["weight"] for part in read]
            if missing:  # zeros stay zeros in every scheme
                weights = [torch.nn.functional.pad(weight, pad[name]) for weight in weights]
            quantize_expert(name, weights, self.problem, out)
        return {}

    def _fill_padding(self, tensors: dict[str, torch.Tensor]) -> None:
        """Do nothing: the padding was quantized with the weights."""


def _allocate(
    problem: Problem, dtypes_by_role: Mapping[str, frozenset[torch.dtype]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Allocate the tensors of the problem's weights, except static activation scales.

    dtypes_by_role: dtypes in the files. If all scales, or all biases, have one dtype that the layer
    allows, it is used; else float32, which represents all of them.
    """

    def dtype_of(role: str, allowed: Sequence[torch.dtype]) -> torch.dtype:
        file_dtypes = dtypes_by_role.get(role, frozenset())
        return next((dtype for dtype in allowed if file_dtypes == {dtype}), allowed[0])

    tensors = {}
    for name, spec in weight_specs(problem).items():
        if not name.startswith("a"):
            scale = name.endswith("_scale")
            dtype = dtype_of("scale", spec.dtypes) if scale else spec.dtypes[0]
            tensors[name] = torch.empty(spec.shape, dtype=dtype, device=device)
    if problem.bias:
        for name, size in (("b1", problem.w1_rows), ("b2", problem.hidden)):
            shape = (problem.e, size)
            dtype = dtype_of("bias", (torch.float32, problem.dtype))
            tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
    return tensors


def _copy_rows(
    tensors: dict[str, torch.Tensor],
    name: str,
    slot: int,
    matrix: Matrix,
    format: Format,
    start_row: int,
    row_order: torch.Tensor | None,
) -> None:
    """Copy a piece of one projection to the rows of w1 or w2 that start at `start_row`.

    row_order: the source of each row; zero points, of which a byte may have two rows, keep their
    order.
    """
    scheme = format.scheme
    scale_step = scheme.group[0] if scheme.granularity == "block" else 1
    steps = {"": 1, "_scale": scale_step, "_zero_point": 2 if scheme.packed else 1}
    for suffix, step in steps.items():
        source = getattr(matrix, suffix.removeprefix("_") or "w")
        if source is None:
            continue
        target = tensors[name + suffix]
        if source.dim():
            first_row = start_row // step
            target = target[slot, first_row : first_row + len(source)]
            if source.dim() > 1:
                target = target[..., : source.shape[-1]]  # the remaining columns are padding
            if row_order is not None and suffix != "_zero_point":
                source = source.index_select(0, row_order)
            if source.data_ptr() != target.data_ptr():  # else it was written to its place
                target.copy_(source)
        else:  # one scale for the whole matrix
            target[slot] = source
