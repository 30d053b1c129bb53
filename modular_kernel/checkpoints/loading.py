"""Loads one layer's experts from a checkpoint.

    loaded = load_experts("checkpoint/", 3, ep=(rank, world))
    kernel = make_kernel(pf, experts, loaded.problem(tokens=512), group=...)
    y_TH = kernel(x_TH, loaded.weights, routing)

A rank reads only the bytes of its own share. The weights are allocated once, and filled a few rows
of a matrix at a time, so that loading needs little extra memory. Unquantized files can be quantized
while they are loaded (`quantize`).
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
from modular_kernel.checkpoints.fusing import (
    Matrix,
    expand_column_order,
    find_common_column_order,
    fuse,
    sort_w1_rows,
)
from modular_kernel.checkpoints.inspection import CheckpointInfo, read_checkpoint_info
from modular_kernel.checkpoints.matrix_layout import Range
from modular_kernel.checkpoints.open_files import open_tensors
from modular_kernel.checkpoints.padding import fill_padding
from modular_kernel.checkpoints.slices import LayerSource
from modular_kernel.errors import ConfigurationError, InputError
from modular_kernel.models.router_config import router_of_config
from modular_kernel.quant.expert_pieces import quantize_expert
from modular_kernel.quant.quantized_weights import get_default_scale_dtype, weight_specs
from modular_kernel.replay import modes
from modular_kernel.spec.intermediate_split import split_intermediate
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import Parallel, Problem, dtype_name, parse_dtype
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.argument_checks import Count, expect, resolve_device
from modular_kernel.utils.progress import log_progress

_VALUES_PER_STEP = 1 << 22  # weights that are read, fused and copied in one step


@dataclass(frozen=True, repr=False)
class LoadedExperts:
    """The experts of one layer that one rank holds.

    weights: weights of this rank's experts, in the order of `placement`.
    problem_fields: the fields of Problem that the checkpoint determines. `intermediate` is the
        width of this rank's share, including padding.
    placement, ep, tp: the share that was loaded.
    columns: the columns [start, stop) of I that this rank holds, which come first in its weights.
        The remaining columns are padding with weights of 0.
    format: the storage format of the files.
    bytes_read: bytes of tensor data that were read.
    config: path of the config.json, and the object in it that describes the layer.
    intermediate: I of a whole expert, before it is split over TP ranks.

    The result of `problem` and `partial` includes the checkpoint's routed_scaling_factor, by which
    the kernel multiplies its output. If the router weights already contain the factor, as in
    transformers' DeepSeek models, use `problem(tokens, routed_scaling_factor=1.0)`. The router
    weights that `router` describes do not contain it.
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
        """The router that the config.json describes, or None if the model_type has no known router.

        Raises ConfigurationError for values that RouterSpec does not support.
        """
        return router_of_config(*self.config, self.problem_fields["top_k"])

    def problem(self, tokens: int, **fields: Any) -> Problem:
        """Return the problem of a layer that exchanges tokens between the ranks.

        The output of the layer is the sum over the TP ranks.

        tokens: the maximum number of tokens in one call.
        fields: further fields of Problem, which override those of the checkpoint.
        """
        parallel = Parallel(self.ep[1], self._get_placement_argument(), self.ep[0])
        return Problem(**{"tokens": tokens, "parallel": parallel, **self.problem_fields, **fields})

    def partial(self, tokens: int, **fields: Any) -> tuple[Problem, ExpertWeights]:
        """Return the problem and weights of a layer that does not exchange tokens.

        Every rank calls the layer with all tokens and global expert ids. Experts of other ranks are
        skipped. The output of the layer is the sum over all EP and TP ranks.

        tokens, fields: as for `problem`.
        """
        local_experts = len(self.placement.slots[self.ep[0]])
        defaults = {"tokens": tokens, "local_experts": local_experts, "expert_map": True}
        problem = Problem(**{**defaults, **self.problem_fields, **fields})
        expert_map = self.placement.expert_map(self.ep[0], self.weights.w1.device)
        return problem, replace(self.weights, expert_map=expert_map)

    def __repr__(self) -> str:
        """Return a summary without the values of the weights."""
        quant, format = str(self.problem_fields["quant"]), str(self.format)
        if quant != "none" and not self.format.scheme.quantized:
            format = f"{format}, quantized to {quant}"
        experts = f"{len(self.weights.w1)} of {self.placement.experts} experts in {format}"
        share = f"ep={self.ep}, tp={self.tp}, bytes_read={self.bytes_read}"
        return f"LoadedExperts({experts}, {share})"

    def _get_placement_argument(self) -> Literal["linear"] | Placement:
        return "linear" if self.placement.is_linear else self.placement


@modes.disable_inference_mode()
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
    """Load the experts of one layer that one rank holds.

    Weights keep the format of the checkpoint, unless `quantize` is used. The quantization_config
    determines the format of each layer. Layers that it excludes are loaded unquantized. Layers for
    multi-token prediction (MTP) that are unquantized in the files are also loaded unquantized, even
    if the quantization_config does not exclude them.

    checkpoint: a folder with a config.json and safetensors or GGUF files, a safetensors file or
        index, a GGUF file, or the name of a model on the Hugging Face Hub. Nothing is downloaded,
        so the model must be in the local cache. See `checkpoints.checkpoint_files`.
    layer: number of the layer, from 0.
    ep, tp: (rank, ranks) of expert and tensor parallelism. TP splits I, into equal shares if
        possible. A block or group that equal shares would split is divided, and its scale repeated
        (`formats.fit_scheme`). If there are no equal shares, or if they would split a group of
        mxfp4 or nvfp4, ranks get whole groups, and smaller shares are padded with weights of 0. The
        first TP rank has b2, and the others have zeros.
    placement: the experts of each EP rank.
    dtype: dtype of the layer, and of unquantized weights. None uses the dtype in the config.json.
        If the config.json has no dtype, the dtype of unquantized files is used (DtypeError if they
        have several), or bfloat16 if all weights are quantized.
    prefix: the part of the tensor names before "layers.N", for a checkpoint with several models.
    config: a config.json to use instead of the one next to the tensors.
    quantize_inputs: whether to load nvfp4_w4a4, with the activation scales, instead of nvfp4_w4a16.
        The files must be of a model whose activations were also quantized to nvfp4. Raises
        ConfigurationError for other files.
    quantize: scheme to quantize unquantized files to, such as "fp8_w8a8_block:block=128x128". The
        result is the same as with `quantize_weights` for this rank's share of the values in the
        files, which are not rounded to `dtype` first. With TP, shares consist of whole groups or
        blocks of the scheme if there are enough of them for all ranks. Scales of a tensor, of a row
        of w2, or of a tile that is split are computed from this rank's share. Float8 files with one
        scale per matrix can be loaded as "fp8_w8a8_channel". Gate and up then keep their scales,
        whereas a common scale requires rounding one of them again. Raises ConfigurationError for
        other quantized files, and for a scheme with static activation scales, which cannot be
        computed from weights.

    Checks names, shapes and dtypes before reading any tensor. Raises ConfigurationError for an
    invalid config.json, format or share, and for a layer whose experts have several formats. Raises
    WeightsError, ShapeError or DtypeError, with the file and the tensor, for invalid tensors. If
    loading takes more than five seconds, progress is logged with level INFO to the logger
    "modular_kernel.loading".
    """
    request = _LoadRequest(layer, ep, tp, dtype, prefix, parse_quantize(quantize))
    expect("checkpoint", checkpoint, str | Path)
    expect("config", config, str | Path | None)
    expect("quantize_inputs", quantize_inputs, bool)
    torch_device = resolve_device(device)
    with open_tensors(Path(checkpoint)) as files:
        info = read_checkpoint_info(files, config, prefix, quantize_inputs=quantize_inputs)
        source = info.layer_source(request.layer)
        return _load_layer(source, info, request, placement, torch_device)


@dataclass(frozen=True)
class _LoadRequest:
    """Checked arguments of `load_experts`."""

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


def parse_quantize(quantize: QuantScheme | str | None) -> QuantScheme | None:
    """Return the scheme of the argument `quantize` of `load_experts`.

    Raises ConfigurationError for a scheme that is unknown or unquantized, or that has static
    activation scales.
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


def _load_layer(
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
    reader = _make_reader(source, problem, request, columns)
    reader.check_share()
    if isinstance(reader, _QuantizingReader):  # the files have no scales
        scale_dtypes = frozenset({get_default_scale_dtype(problem)})
        dtypes_by_role = {**dtypes_by_role, "scale": scale_dtypes}
    tensors = _allocate_tensors(problem, dtypes_by_role, device)
    weights = reader.read(rank_placement.slots[request.ep[0]], tensors)
    return LoadedExperts(
        weights=weights,
        problem_fields=fields,
        placement=rank_placement,
        ep=request.ep,
        tp=request.tp,
        columns=columns,
        format=source.format,
        bytes_read=source.files.bytes_read,
        config=info.config,
        intermediate=source.layer.intermediate,
    )


def check_quantizable(what: str, format: Format, scheme: QuantScheme | None) -> None:
    """Raise ConfigurationError if weights in `format` cannot be loaded as `scheme`.

    what: name of the layer, for messages.
    scheme: result of `parse_quantize`.
    """
    if scheme is not None and format.scheme.quantized and not _keeps_codes(format, scheme):
        need = "unquantized files: stored codes are not rounded again"
        raise ConfigurationError(f"{what}: quantize={scheme}", got=str(format), need=need)


def _keeps_codes(format: Format, scheme: QuantScheme) -> bool:
    """Return whether `scheme` can represent the weights of `format` with the same codes.

    This holds for float8 weights with one scale per matrix, because every row can use that scale.
    """
    return format.scheme.name == "fp8_w8a8_tensor" and scheme.name == "fp8_w8a8_channel"


def _make_reader(
    source: LayerSource, problem: Problem, request: _LoadRequest, columns: Range
) -> "_ShareReader":
    has_b2 = request.tp[0] == 0
    file_scheme = source.format.scheme
    if request.quantize is not None and not file_scheme.quantized:
        return _QuantizingReader(source, source.format, problem, columns, has_b2)
    # The tensors in the files include static activation scales, even if `problem` has none.
    scheme = replace(problem.scheme, static=file_scheme.static)
    target_format = source.format.with_scheme(scheme)
    return _ShareReader(source, target_format, problem, columns, has_b2)


@dataclass(frozen=True)
class _ShareReader:
    """Reads one rank's share of a layer's experts.

    target_format: the format of the files with the tile sizes of the layer.
    problem: problem of this rank, whose I includes padding.
    columns: range of I that this rank holds, as columns of w2, and rows of gate and of up.
    has_b2: whether this rank adds the bias of w2.

    Methods take `tensors`, the fields of ExpertWeights by name, and `slot`, an expert's index in
    them.
    """

    source: LayerSource
    target_format: Format
    problem: Problem
    columns: Range
    has_b2: bool

    def check_share(self) -> None:
        """Raise ConfigurationError if the share splits a packed word."""
        w1_locations, (down,) = self.source.layer.projections(0)
        hidden = self.problem.hidden
        parts = [
            (location, self._to_file_rows(0, self._width), (0, hidden)) for location in w1_locations
        ]
        self.source.check_share([*parts, (down, (0, hidden), self.columns)])

    def read(self, experts: Sequence[int], tensors: dict[str, torch.Tensor]) -> ExpertWeights:
        """Read this rank's share of `experts` into the allocated `tensors`."""
        for slot, expert in enumerate(log_progress(experts, self.source.what, "experts")):
            w1_locations, (down,) = self.source.layer.projections(expert)
            orders = self._read_matrices(tensors, slot, w1_locations, down)
            if self.problem.bias:
                self._read_biases(tensors, slot, w1_locations, down)
            if orders:
                tensors["w1_order"][slot] = orders["w1"]
                sort_w1_rows(tensors, slot, orders["w2"], interleaved=self._interleaved)
        self._fill_padding(tensors)
        if self.problem.scheme.static:
            tensors = tensors | self._read_input_scales(experts, tensors["w1"].device)
        return ExpertWeights(**tensors)

    def _read_matrices(
        self,
        tensors: dict[str, torch.Tensor],
        slot: int,
        w1_locations: Sequence[ProjectionLocation],
        down: ProjectionLocation,
    ) -> dict[str, torch.Tensor]:
        """Read w1 and w2 of one expert. Returns {"w1": column order, "w2": ...} for act-order.

        Act-order sorts the columns of w2 by group. The rows of w1 must be sorted in the same way,
        so w2 is read first.
        """
        if not self.target_format.scheme.act_order:
            self._read_w1(tensors, slot, w1_locations, None)
            self._read_w2(tensors, slot, down)
            return {}
        orders = self._read_w2(tensors, slot, down)
        row_order = expand_column_order(orders["w2"], self._rows_per_column)
        return orders | self._read_w1(tensors, slot, w1_locations, row_order)

    def _read_w1(
        self,
        tensors: dict[str, torch.Tensor],
        slot: int,
        locations: Sequence[ProjectionLocation],
        row_order: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Read the projections of w1. `row_order` is the source of each row of a projection."""
        orders, hidden = dict[str, torch.Tensor](), (0, self.problem.hidden)
        row_ranges = self._split_rows(self._width, len(locations) * self.problem.hidden)
        if row_order is not None:
            row_ranges = iter([(0, self._width)])  # a row's source may be any row
        for rows in row_ranges:
            parts = [(location, self._to_file_rows(*rows), hidden) for location in locations]
            orders |= self._read_rows(tensors, "w1", slot, parts, rows, row_order)
        return orders

    def _read_w2(
        self, tensors: dict[str, torch.Tensor], slot: int, location: ProjectionLocation
    ) -> dict[str, torch.Tensor]:
        orders = dict[str, torch.Tensor]()
        for rows in self._split_rows(self.problem.hidden, self.columns[1] - self.columns[0]):
            parts = [(location, rows, self.columns)]
            orders |= self._read_rows(tensors, "w2", slot, parts, rows)
        return orders

    def _fill_padding(self, tensors: dict[str, torch.Tensor]) -> None:
        problem = self.problem
        split = (self.columns[1] - self.columns[0], problem.intermediate)
        gated, interleaved = problem.act.gated, self._interleaved
        fill_padding(tensors, problem.scheme, split, gated=gated, interleaved=interleaved)

    @property
    def _interleaved(self) -> bool:
        return self.source.layer.layout.interleaved

    @property
    def _rows_per_column(self) -> int:
        """Number of rows of a w1 projection per column of I: 2 if gate and up rows alternate."""
        return 2 if self._interleaved else 1

    @property
    def _width(self) -> int:
        """Number of rows of a w1 projection that this rank reads."""
        return (self.columns[1] - self.columns[0]) * self._rows_per_column

    def _find_first_row(self, projection: int) -> int:
        """Return the row of this rank's w1 at which a projection starts."""
        return projection * self.problem.intermediate * self._rows_per_column

    def _to_file_rows(self, start: int, stop: int) -> Range:
        """Convert rows [start, stop) of this rank's projection to rows of the whole projection."""
        offset = self.columns[0] * self._rows_per_column
        return offset + start, offset + stop

    def _split_rows(self, rows: int, row_values: int) -> Iterator[Range]:
        """Yield ranges of rows to read in one step, aligned to tiles and packed words.

        row_values: number of weights per row.
        """
        scheme = self.target_format.scheme
        tile = lcm(8, scheme.group[0] if scheme.granularity == "block" else 1)
        limit = _VALUES_PER_STEP // (8 if self.source.format.expands_on_load else 1)
        step = max(limit // row_values // tile, 1) * tile
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
        """Read a range of rows of some projections into w1 or w2.

        name: "w1" or "w2".
        parts: (projection, rows in the file, columns in the file) for each projection.
        rows: the rows of this rank's projection.
        row_order: the source of each row of a projection, or None to keep the order.

        Returns {name: column order} for act-order, and otherwise {}.
        """
        start_rows = [
            self._find_first_row(projection) + rows[0] for projection in range(len(parts))
        ]
        try:
            projections = [
                self.source.read_part(self.target_format, *part, order=not rows[0])
                for part in parts
            ]
            out = [
                self._select_output_rows(tensors[name][slot], start, rows, row_order)
                for start in start_rows
            ]
            matrices = self._fuse_projections(projections, out)
            order = find_common_column_order(matrices)
        except InputError as error:
            what = f"{self.source.what}: {parts[0][0].base}: {error.what}"
            raise type(error)(what, got=error.got, need=error.need) from None
        for projection, matrix in enumerate(matrices):
            _copy_rows(
                tensors, name, slot, matrix, self.target_format, start_rows[projection], row_order
            )
            if matrix.global_scale is not None:  # one per projection, or one for a stored gate_up
                columns = slice(None) if len(matrices) == 1 else projection
                tensors[f"{name}_global_scale"][slot, columns] = matrix.global_scale
        return {} if order is None else {name: order}

    def _select_output_rows(
        self, w: torch.Tensor, start: int, rows: Range, row_order: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the rows of w that `fuse` can write to, or None if its result must be copied."""
        is_padded = self.columns[1] - self.columns[0] != self.problem.intermediate
        if row_order is not None or is_padded or w.device.type != "cpu":
            return None
        return w[start : start + rows[1] - rows[0]]

    def _fuse_projections(
        self,
        projections: Sequence[Mapping[str, torch.Tensor]],
        out: Sequence[torch.Tensor | None],
    ) -> list[Matrix]:
        """Convert projections to the layout of kernels.

        Projections are fused only if they get a common scale, because fusing concatenates them.

        out: for each projection, the tensor that `fuse` may write w to.
        """
        dtype = self.problem.dtype
        if self.target_format.scheme.granularity != "tensor":
            return [
                fuse(self.target_format, [projection], dtype, out_rows)
                for projection, out_rows in zip(projections, out, strict=True)
            ]
        matrix = fuse(self.target_format, projections, dtype)
        return [replace(matrix, w=rows) for rows in matrix.w.chunk(len(projections))]

    def _read_biases(
        self,
        tensors: dict[str, torch.Tensor],
        slot: int,
        w1_locations: Sequence[ProjectionLocation],
        down: ProjectionLocation,
    ) -> None:
        for projection, location in enumerate(w1_locations):
            bias = self.source.read_bias(location, self._to_file_rows(0, self._width))
            start = self._find_first_row(projection)
            tensors["b1"][slot, start : start + len(bias)] = bias
        if self.has_b2:  # the output is summed over TP ranks, so only one rank adds b2
            tensors["b2"][slot] = self.source.read_bias(down, (0, self.problem.hidden))

    def _read_input_scales(
        self, experts: Sequence[int], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Read a1_scale and a2_scale, the static activation scales.

        Activations are usually quantized before they are dispatched to experts. All experts of the
        layer then share the maximum of their scales. Schemes with `scales_by_expert` quantize after
        the dispatch. Each of this rank's experts then has the maximum over its projections.
        """
        if self.target_format.scheme.scales_by_expert:
            locations_by_expert = [self.source.layer.projections(expert) for expert in experts]
            read_scales = self.source.read_input_scales
            return {
                name: torch.stack(
                    [read_scales(locations[index]).amax() for locations in locations_by_expert]
                ).to(device)
                for index, name in enumerate(("a1_scale", "a2_scale"))
            }
        locations = [
            self.source.layer.projections(expert) for expert in range(self.problem.experts)
        ]
        w1_locations = [location for w1, _ in locations for location in w1]
        w2_locations = [location for _, w2 in locations for location in w2]
        scales = {
            "a1_scale": self.source.read_input_scales(w1_locations),
            "a2_scale": self.source.read_input_scales(w2_locations),
        }
        return {name: static_scale(scale).to(device) for name, scale in scales.items()}


class _QuantizingReader(_ShareReader):
    """Quantizes the weights of unquantized files, one matrix at a time."""

    def _read_matrices(
        self,
        tensors: dict[str, torch.Tensor],
        slot: int,
        w1_locations: Sequence[ProjectionLocation],
        down: ProjectionLocation,
    ) -> dict[str, torch.Tensor]:
        hidden = (0, self.problem.hidden)
        w1_parts = [
            (location, self._to_file_rows(0, self._width), hidden) for location in w1_locations
        ]
        parts_by_name = {"w1": w1_parts, "w2": [(down, hidden, self.columns)]}
        out = {field: tensor[slot] for field, tensor in tensors.items()}
        padding = self.problem.intermediate - (self.columns[1] - self.columns[0])
        padding_by_name = {"w1": (0, 0, 0, padding * self._rows_per_column), "w2": (0, padding)}
        for name, parts in parts_by_name.items():
            weights = [
                self.source.read_part(self.target_format, *part, order=False)["weight"]
                for part in parts
            ]
            if padding:  # every scheme represents 0 exactly
                weights = [
                    torch.nn.functional.pad(weight, padding_by_name[name]) for weight in weights
                ]
            quantize_expert(name, weights, self.problem, out)
        return {}

    def _fill_padding(self, tensors: dict[str, torch.Tensor]) -> None:
        """Do nothing, because `_read_matrices` has already padded the weights."""


def _allocate_tensors(
    problem: Problem, dtypes_by_role: Mapping[str, frozenset[torch.dtype]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Allocate the weights of a problem, except for static activation scales.

    dtypes_by_role: the dtypes in the files. Scales and biases keep their dtype if it is the same
        for all of them and the layer supports it. Otherwise, they become float32, which is exact.
    """

    def select_dtype(role: str, allowed: Sequence[torch.dtype]) -> torch.dtype:
        file_dtypes = dtypes_by_role.get(role, frozenset())
        return next((dtype for dtype in allowed if file_dtypes == {dtype}), allowed[0])

    tensors = {}
    for name, spec in weight_specs(problem).items():
        if not name.startswith("a"):
            is_scale = name.endswith("_scale")
            dtype = select_dtype("scale", spec.dtypes) if is_scale else spec.dtypes[0]
            tensors[name] = torch.empty(spec.shape, dtype=dtype, device=device)
    if problem.bias:
        for name, size in (("b1", problem.w1_rows), ("b2", problem.hidden)):
            shape = (problem.e, size)
            dtype = select_dtype("bias", (torch.float32, problem.dtype))
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
    """Copy w, scales and zero points of some rows to w1 or w2, starting at `start_row`.

    row_order: the source of each row. `sort_w1_rows` sorts the zero points instead, because they
        may be packed in pairs of rows.
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
                if target.is_contiguous() and (target.dtype, target.device) == (
                    source.dtype,
                    source.device,
                ):
                    torch.index_select(source, 0, row_order, out=target)
                    continue
                source = source.index_select(0, row_order)
            if source.data_ptr() != target.data_ptr():  # equal if `fuse` wrote to `out`
                target.copy_(source)
        else:  # one scale for the whole matrix
            target[slot] = source
