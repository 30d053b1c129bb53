"""Accesses the experts of one layer in open files: finds tensors, checks headers, reads shares.

`find_layers` finds the layers with experts by tensor names, and `find_source` selects the layout of
one layer. The resulting `LayerSource` checks the headers of its tensors, and reads a range of rows
and columns of one projection for `fusing.fuse`.

In this module, a key is the name of a tensor in the files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from modular_kernel.checkpoints.bitsandbytes import dequantize_part
from modular_kernel.checkpoints.expert_names import LayerLayout, ProjectionLocation
from modular_kernel.checkpoints.formats import Format
from modular_kernel.checkpoints.fp8_mxfp4 import convert_input_scale
from modular_kernel.checkpoints.fusing import convert_share
from modular_kernel.checkpoints.ggml_blocks import dequantize_blocks, repack_blocks
from modular_kernel.checkpoints.gguf_files import GgufFiles
from modular_kernel.checkpoints.matrix_layout import (
    FLOATS,
    UNREAD_ROLES,
    BlockedScale,
    Dim,
    Range,
    StoredTensor,
)
from modular_kernel.checkpoints.safetensors_files import TensorFiles
from modular_kernel.checkpoints.torchao import check_metadata, dequantize_int4
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.models.expert_layouts import ExpertLayout
from modular_kernel.models.gguf_config import scale_dtype
from modular_kernel.models.torchao_config import TorchaoFormat
from modular_kernel.quant.quantized_weights import IMPLICIT_ZERO_POINT
from modular_kernel.spec.problem import DTYPES, dtype_name, parse_dtype
from modular_kernel.text import format_count

# The requirement on the dtypes of unquantized matrices, for messages.
ONE_DTYPE = "one dtype, or an explicit one in config.json or by dtype= or --dtype"
_MAX_MISSING = 10_000  # the check stops after this number of missing tensors
# Suffixes of tensors that share the prefix of the experts' names but are not expert weights.
_NOT_EXPERT_WEIGHTS = ("e_score_correction_bias",)
_BIAS = StoredTensor("bias", "bias", (Dim("N"),), FLOATS)
# Known prefixes of "layers.N" in tensor names. If a checkpoint has several of them, the first in
# this order belongs to the language model.
_PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "model.llm.",
    "",
    "backbone.",
    "language_model.",
    "transformer.",
    "thinker.model.",
)
_LAYER_PATTERN = r"(?P<prefix>(?:.*\.)?)(?:layers|blocks|blk|h)\.(?P<layer>\d+)\."


@dataclass(frozen=True)
class LayerSource:
    """The experts of one layer in a checkpoint's files.

    bias: whether projections have biases.
    """

    files: TensorFiles
    format: Format
    layer: LayerLayout
    bias: bool
    _keys: dict[tuple[str, str], str | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def what(self) -> str:
        """The checkpoint and the layer, for messages."""
        return f"{self.files.path}: {self.layer.prefix.rstrip('.')}"

    @property
    def layer_number(self) -> int:
        """The number of the layer in the names of its tensors, from 0."""
        match = re.match(_LAYER_PATTERN, self.layer.prefix)
        assert match is not None
        return int(match["layer"])

    def stored_tensors(self) -> tuple[StoredTensor, ...]:
        """Return the tensors that the files have for each matrix, including the bias."""
        return (*self.format.stored_tensors, *((_BIAS,) if self.bias else ()))

    def locations(self) -> Iterator[ProjectionLocation]:
        """Yield the location of each projection of each expert.

        Stacked experts share their tensors, so only the first expert is included for them.
        """
        for expert in range(1 if self.layer.layout.stacked else self.layer.experts):
            w1_locations, w2_locations = self.layer.projections(expert)
            yield from (*w1_locations, *w2_locations)

    def find_key(self, location: ProjectionLocation, spec: StoredTensor) -> str | None:
        """Return the name of a projection's tensor in the files, or None if there is none."""
        cache_key = location.base, spec.name
        if cache_key not in self._keys:
            names, candidates = self.files.names, location.candidate_keys(spec)
            self._keys[cache_key] = next((key for key in candidates if key in names), None)
        return self._keys[cache_key]

    def check(self) -> dict[str, frozenset[torch.dtype]]:
        """Check names, shapes and dtypes of all experts' tensors, reading only headers.

        Returns the dtypes by role. Raises WeightsError for missing or unexpected tensors, and
        ShapeError or DtypeError, with the names of the file and the tensor, for invalid tensors.
        """
        missing, checked_keys, dtypes = list[str](), set[str](), dict[str, set[torch.dtype]]()
        for location in self.locations():
            if len(missing) > _MAX_MISSING:
                break
            for spec in self.stored_tensors():
                key = self.find_key(location, spec)
                if key is None:
                    missing += [] if spec.optional else [next(iter(location.candidate_keys(spec)))]
                elif key not in checked_keys:
                    checked_keys.add(key)
                    shape, dtype = self.files.shape_and_dtype(key)
                    sizes = () if location.is_shared_scalar(spec, shape) else location.shape(spec)
                    spec.check(self.files.qualified_name(key), shape, dtype, sizes)
                    dtypes.setdefault(spec.role, set()).add(dtype)
                    if self.format.torchao is not None and spec.role == "w":
                        self.check_metadata(key, shape, self.format.torchao)
        if missing:
            got = f"no {missing[0]}{_format_num_others(missing)}"
            need = self._describe_experts()
            raise WeightsError(self.what, got=got, need=need)
        self._check_no_unexpected(checked_keys)
        if self.format.method == "gguf" and self.format.scheme.weight in IMPLICIT_ZERO_POINT:
            types = {self._get_block_type(key) for key in checked_keys}
            dtypes["scale"] = {parse_dtype(scale_dtype(types))}  # scales are stored in the blocks
        return {role: frozenset(kinds) for role, kinds in dtypes.items()}

    def check_metadata(
        self, key: str, shape: tuple[int, ...], torchao_format: TorchaoFormat
    ) -> None:
        """Raise WeightsError if torchao's metadata of a weight contradict the quantization_config.

        key, shape: name and shape of the codes.
        """
        what, metadata = self.files.files[key].name, self.files.metadata(key)
        check_metadata(what, metadata, key, shape, torchao_format)

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of unquantized matrices.

        Returns None for quantized matrices, and for a dtype that no layer supports. Raises
        DtypeError for several dtypes, because conversion to one of them would round some values.
        """
        dtypes = self.stored_dtypes()
        if not dtypes or not dtypes.keys() <= set(DTYPES.values()):
            return None
        if len(dtypes) > 1:
            kinds = (f"{dtype_name(kind)} in {key}" for kind, key in dtypes.items())
            raise DtypeError(f"{self.what}: dtype", got=" and ".join(kinds), need=ONE_DTYPE)
        return next(iter(dtypes))

    def stored_dtypes(self) -> dict[torch.dtype, str]:
        """Return {dtype: name of a tensor that has it} for unquantized matrices."""
        if self.format.method != "none":
            return {}
        spec = next(spec for spec in self.format.stored_tensors if spec.role == "w")
        dtypes: dict[torch.dtype, str] = {}
        for key in (self.find_key(location, spec) for location in self.locations()):
            if key is not None:
                dtypes.setdefault(self.files.shape_and_dtype(key)[1], key)
        return dtypes

    def has_floats(self) -> bool:
        """Return whether the first expert has unquantized weights."""
        if self.format.method != "none":
            return False
        spec = next(spec for spec in self.format.stored_tensors if spec.role == "w")
        key = self.find_key(next(self.locations()), spec)
        return key is not None and self.files.shape_and_dtype(key)[1] in FLOATS

    def has_scales(self) -> bool:
        """Return whether the first expert has the scales of quantized weights."""
        location = next(self.locations())
        scales = [spec for spec in self.format.stored_tensors if spec.role == "scale"]
        return any(self.find_key(location, spec) is not None for spec in scales)

    def nbytes(self) -> int:
        """Return the total size in bytes of the tensors of the layer's experts."""
        keys = {
            self.find_key(location, spec)
            for location in self.locations()
            for spec in self.stored_tensors()
        }
        return sum(self.files.nbytes(key) for key in keys if key is not None)

    def _describe_experts(self) -> str:
        """Describe the experts that the files must contain, for messages."""
        if str(self.format) == "none":
            return format_count(self.layer.experts, "unquantized expert")
        return f"{format_count(self.layer.experts, 'expert')} in {self.format}"

    def _check_no_unexpected(self, checked_keys: set[str]) -> None:
        """Raise WeightsError if the experts have tensors other than `checked_keys`."""
        names = self.layer.layout.names
        bases = {f"{self.layer.prefix}{name}" for name in names}
        bases |= {f"{self.layer.prefix}_{name}" for name in names}  # torchao
        expert_name = re.compile(re.escape(self.layer.prefix) + r"\d+\.")
        is_parameter = self.layer.layout.is_parameter
        unexpected = sorted(
            name
            for name in self.files.names - checked_keys
            if name.startswith(self.layer.prefix)
            and not name.endswith(_NOT_EXPERT_WEIGHTS)
            and (
                expert_name.match(name)
                or any(_is_name_of_tensor(name, base, is_parameter) for base in bases)
            )
        )
        if unexpected:
            need = f"{self._describe_experts()}, and nothing else"
            got = f"{self.files.qualified_name(unexpected[0])}{_format_num_others(unexpected)}"
            raise WeightsError(self.what, got=got, need=need)

    def check_share(self, parts: Sequence[tuple[ProjectionLocation, Range, Range]]) -> None:
        """Raise ConfigurationError if a range of rows and columns splits a packed word.

        parts: (projection, rows, columns) to read.
        """
        for location, rows, columns in parts:
            for spec in self.format.stored_tensors:
                spec.check_share(self.what, rows, columns, (location.rows, location.depth))

    def read_part(
        self,
        target_format: Format,
        location: ProjectionLocation,
        rows: Range,
        columns: Range,
        *,
        order: bool,
    ) -> dict[str, torch.Tensor]:
        """Read rows [a, b) and columns [c, d) of a projection, as tensors for `fusing.fuse`.

        target_format: the format with the tile sizes of the layer.
        order: whether to also read GPTQ's g_idx, which is then checked. One check per matrix is
            enough. With act-order, g_idx is always read.
        """
        rows = (location.first_row + rows[0], location.first_row + rows[1])
        if self.format.method == "gguf":
            return self._read_gguf(location, rows, columns)
        if self.format.dequantized and self.format.torchao is None:
            return {"weight": self._read_bitsandbytes_4bit(location, rows, columns)}
        tensors, order = {}, order or self.format.scheme.act_order
        for spec in self.format.stored_tensors:
            is_skipped = spec.role in (*UNREAD_ROLES, "a_scale") or (
                spec.role == "order" and not order
            )
            key = None if is_skipped else self.find_key(location, spec)
            if key is not None:
                tensors[spec.name] = self._read_tensor(key, location, spec, rows, columns)
        if self.format.dequantized and self.format.torchao is not None:
            return {"weight": dequantize_int4(tensors, self.format.torchao.group, columns)}
        return convert_share(self.format, target_format, tensors, rows, columns)

    def _get_block_type(self, key: str) -> str:
        return self.files.block_type(key).name if isinstance(self.files, GgufFiles) else ""

    def _read_gguf(
        self, location: ProjectionLocation, rows: Range, columns: Range
    ) -> dict[str, torch.Tensor]:
        """Read the GGUF blocks that cover a range of rows and columns of a projection.

        Returns {"weight": codes, "scale": scales}, or {"weight": float32 values} if no scheme can
        represent the block type.
        """
        key = self.find_key(location, self.format.stored_tensors[0])
        if not isinstance(self.files, GgufFiles) or key is None or location.expert is None:
            need = "a GGUF file"
            raise ConfigurationError(f"{self.what}: files of {self.format}", got=key, need=need)
        block, name = self.files.block_type(key), self.files.qualified_name(key)
        blocks = self.files.read_blocks(key, location.expert, rows, columns)
        # The first block may start before the first column.
        start = columns[0] % block.values
        stop = start + columns[1] - columns[0]
        if not self.format.scheme.quantized:
            values = dequantize_blocks(block.name, blocks)[:, start:stop]
            if not bool(values.isfinite().all()):
                got = float(values[~values.isfinite()][0])
                raise WeightsError(name, got=got, need="finite numbers")
            return {"weight": values}
        w, scale = repack_blocks(block.name, self.format.scheme, blocks)
        per_byte, group = 2 if self.format.scheme.packed else 1, self.format.scheme.group[0]
        return {
            "weight": w[:, start // per_byte : stop // per_byte],
            "scale": scale[:, start // group : -(-stop // group)],
        }

    def _read_bitsandbytes_4bit(
        self, location: ProjectionLocation, rows: Range, columns: Range
    ) -> torch.Tensor:
        keys = {spec.name: self.find_key(location, spec) for spec in self.format.stored_tensors}
        present = {name: key for name, key in keys.items() if key is not None}
        tensors = _FlatFileTensors(self.files, present)
        what = self.files.qualified_name(f"{location.base}.weight")
        shape = (location.rows, location.depth)
        return dequantize_part(self.format.dequantized, shape, rows, columns, tensors, what)

    def read_bias(self, location: ProjectionLocation, rows: Range) -> torch.Tensor:
        """Read rows [a, b) of a projection's bias."""
        key = self.find_key(location, _BIAS)
        assert key is not None
        rows = (location.first_row + rows[0], location.first_row + rows[1])
        return self._read_tensor(key, location, _BIAS, rows, (0, location.depth))

    def read_input_scales(self, locations: Sequence[ProjectionLocation]) -> torch.Tensor:
        """Read the static activation scales of projections, (number of tensors,) float32.

        Activations are divided by these scales. compressed-tensors stores the reciprocals for
        nvfp4.
        """
        (spec,) = (spec for spec in self.format.stored_tensors if spec.role == "a_scale")
        scale_by_key = dict[tuple[str, int | None], torch.Tensor]()
        for location in locations:
            key = self.find_key(location, spec)
            assert key is not None
            if (key, location.expert) not in scale_by_key:
                scale = self._read_tensor(
                    key, location, spec, (0, location.rows), (0, location.depth)
                )
                qualified_name = self.files.qualified_name(key)
                scale_by_key[key, location.expert] = convert_input_scale(
                    scale.reshape(1), qualified_name
                )
        scales = torch.cat(list(scale_by_key.values()))
        is_nvfp4 = self.format.scheme.matrix_scales
        is_reciprocal = self.format.method == "compressed-tensors" and is_nvfp4
        return 1 / scales if is_reciprocal else scales

    def _read_tensor(
        self,
        key: str,
        location: ProjectionLocation,
        spec: StoredTensor,
        rows: Range,
        columns: Range,
    ) -> torch.Tensor:
        if isinstance(spec, BlockedScale):
            expert_slices = (
                () if location.expert is None else (slice(location.expert, location.expert + 1),)
            )
            stored = self.files.read(
                key, (*expert_slices, *spec.stored_slices(rows, location.depth))
            )
            return spec.unblock(stored.reshape(stored.shape[-2:]), rows, columns)
        shape = self.files.shape_and_dtype(key)[0]
        is_shared = spec.is_scalar and location.is_shared_scalar(spec, shape)
        slices = () if is_shared else location.slices(spec, rows, columns)
        matched_dims = spec.match_dims(shape, location.shape(spec))
        if len(shape) == len(slices) or matched_dims is None:
            tensor = self.files.read(key, slices)
        else:  # the file has excess dimensions of size 1
            slice_by_dim = dict(zip(matched_dims, slices, strict=True))
            all_slices = tuple(slice_by_dim.get(dim, slice(0, 1)) for dim in range(len(shape)))
            tensor = self.files.read(key, all_slices)
            tensor = tensor.reshape([tensor.shape[dim] for dim in matched_dims])
        if location.transposed and len(spec.dims) > 1:
            tensor = tensor.transpose(-1, -2)
        return tensor.reshape(
            [entries.stop - entries.start for entries in spec.slices(rows, columns)]
        )


@dataclass(frozen=True)
class _FlatFileTensors:
    """Reads the tensors of one matrix from the files, as `bitsandbytes.FlatTensors`.

    keys: name in the files by name in `Format.stored_tensors`.
    """

    files: TensorFiles
    keys: Mapping[str, str]

    def header(self, name: str) -> tuple[int, torch.dtype] | None:
        if name not in self.keys:
            return None
        shape, dtype = self.files.shape_and_dtype(self.keys[name])
        return prod(shape), dtype

    def read(self, name: str, entries: Range | None = None) -> torch.Tensor:
        key = self.keys[name]
        shape = self.files.shape_and_dtype(key)[0]
        slices = [slice(0, size) for size in shape]
        if entries is not None:
            slices[shape.index(max(shape))] = slice(*entries)  # (n,), (n, 1) or (1, n)
        return self.files.read(key, tuple(slices)).flatten()


def _is_name_of_tensor(name: str, base: str, is_parameter: bool) -> bool:
    """Return whether `name` is `base`, optionally with a suffix such as ".weight_scale"."""
    suffix = name.removeprefix(base)
    return suffix != name and (not suffix or suffix[0] in ("._:" if is_parameter else "."))


def _format_num_others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


# --- Search for layers with experts ---


def find_layers(
    files: TensorFiles, layouts: Sequence[ExpertLayout], prefix: str | None
) -> tuple[str, dict[int, list[tuple[ExpertLayout, str]]]]:
    """Find the layers with experts by the names of tensors.

    layouts: the layouts of the model_type.
    prefix: the part of tensor names before "layers.N". None selects the language model.

    Returns the prefix, and {layer number: [(layout, prefix of the experts' names), ...]} with the
    layouts whose names match. Raises ConfigurationError if no layer has experts, or if there are
    several models and none has a known prefix.
    """
    by_prefix: dict[str, dict[int, list[tuple[ExpertLayout, str]]]] = {}
    for layout in layouts:
        for (name, layer), expert_prefix in _find_expert_prefixes(files.names, layout).items():
            by_prefix.setdefault(name, {}).setdefault(layer, []).append((layout, expert_prefix))
    if prefix is not None:
        by_prefix = {name: layers for name, layers in by_prefix.items() if name == prefix}
    prefixes = [name for name in _PREFIXES if name in by_prefix] or sorted(by_prefix)
    if len(prefixes) == 1:
        return prefixes[0], by_prefix[prefixes[0]]
    searched_names = " or ".join(
        f"{prefix or '...'}layers.L.{layout.experts_module or layout.gate}" for layout in layouts
    )
    if not prefixes:
        need = f"experts in {searched_names}"
        raise ConfigurationError(f"checkpoint {files.path}", got="no experts", need=need)
    got, need = " and ".join(map(repr, prefixes[:4])), "prefix=... to select one"
    raise ConfigurationError(f"checkpoint {files.path}: experts with prefixes", got=got, need=need)


def find_source(
    files: TensorFiles,
    format: Format,
    candidates: Sequence[tuple[ExpertLayout, str]],
    sizes: tuple[int, int, int],
    bias: bool,
) -> LayerSource:
    """Return the source of a layer with the first layout whose shapes match.

    If no layout matches, the first one is used, and `LayerSource.check` reports the mismatch.

    candidates: the layouts whose names match, from `find_layers`.
    sizes: (experts, hidden, intermediate).
    bias: whether projections have biases.

    Raises ConfigurationError for a quantized format in a layout that is supported only for
    unquantized weights.
    """
    sources = [
        LayerSource(files, format, LayerLayout(layout, expert_prefix, *sizes), bias)
        for layout, expert_prefix in candidates
    ]
    quantized = format.method != "none"
    unsupported = [
        source
        for source in sources
        if quantized and (source.layer.layout.flat or _has_unsupported_transpose(source))
    ]
    sources = [source for source in sources if source not in unsupported]
    if not sources:
        got = (
            f"{format} in a layout of whole matrices ({unsupported[0].layer.layout.experts_module})"
        )
        raise ConfigurationError(unsupported[0].what, got=got, need="no quantization")
    return next((source for source in sources if _matches_layout(source)), sources[0])


def _find_expert_prefixes(
    names: frozenset[str], layout: ExpertLayout
) -> dict[tuple[str, int], str]:
    """Return {(prefix of "layers.N", N): prefix of the experts' names} for a layout.

    The prefix of the experts' names ends before the number of the expert or, for stacked experts,
    before the projection.
    """
    projection = "|".join(re.escape(name) for name in layout.names)
    stacked_pattern = rf"_?(?:{projection})(?:[._:]|$)"
    lookahead = stacked_pattern if layout.stacked else rf"\d+\.(?:{projection})\."
    pattern = re.compile(rf"{_LAYER_PATTERN}{re.escape(layout.prefix)}(?={lookahead})")
    prefixes = {}
    for match in filter(None, map(pattern.match, names)):
        prefixes[match["prefix"], int(match["layer"])] = match[0]
    return prefixes


def _has_unsupported_transpose(source: LayerSource) -> bool:
    """Return whether matrices are stored as (K, N) in a format for which this is not supported.

    ModelOpt stores float8 and nvfp4 of Llama-4 and gpt-oss as (K, N), and FBGEMM stores float8 of
    Llama-4 in this way. torchao stores such matrices with scales of blocks along N instead of K,
    which is not supported.
    """
    scheme = source.format.scheme
    is_supported = scheme.granularity == "tensor"
    if source.format.torchao is None:
        is_supported |= scheme.granularity == "block" or scheme.matrix_scales
    is_supported |= source.format.method == "fbgemm_fp8"
    return bool(source.layer.layout.transposed) and not is_supported


def _matches_layout(source: LayerSource) -> bool:
    """Return whether the first expert's weights exist and have the shapes of the layout."""
    w1_locations, w2_locations = source.layer.projections(0)
    spec = next(spec for spec in source.format.stored_tensors if spec.role == "w")
    for location in (*w1_locations, *w2_locations):
        key = source.find_key(location, spec)
        try:
            if key is None:
                return False
            shape, dtype = source.files.shape_and_dtype(key)
            spec.check(key, shape, dtype, location.shape(spec))
        except ShapeError:
            return False
        except DtypeError:
            continue  # names and shapes match; `LayerSource.check` reports the dtype
    return True
