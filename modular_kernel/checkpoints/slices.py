"""Slices of a layer's stored tensors: locate them in the files, check all headers, read a share.

`LayerSource` holds the location and shape of the matrices of a layer, and returns a share of one as
`fusing.fuse` takes it. Reading is the only side effect.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from modular_kernel.checkpoints.bitsandbytes import dequantize_part
from modular_kernel.checkpoints.expert_names import LayerLayout, ProjectionLocation
from modular_kernel.checkpoints.formats import Format
from modular_kernel.checkpoints.fp8_mxfp4 import usable_inputs
from modular_kernel.checkpoints.fusing import convert_share
from modular_kernel.checkpoints.ggml_blocks import dequantize_blocks, group_weights
from modular_kernel.checkpoints.gguf_files import GgufFiles
from modular_kernel.checkpoints.matrix_layout import (
    FLOATS,
    UNREAD,
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

# Requirement on the dtypes of unquantized matrices.
ONE_DTYPE = "one dtype, or an explicit one in config.json or by dtype= or --dtype"
_MAX_MISSING = 10_000  # stop looking for missing tensors after this many
# Suffixes of tensors next to the experts that are not expert weights.
_NOT_EXPERT_WEIGHTS = ("e_score_correction_bias",)
_BIAS = StoredTensor("bias", "bias", (Dim("N"),), FLOATS)
# Prefixes of the layers' names. If several match, the language model's comes first.
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
_LAYERS = r"(?P<prefix>(?:.*\.)?)(?:layers|blocks|blk|h)\.(?P<layer>\d+)\."


@dataclass(frozen=True)
class LayerSource:
    """The experts of one layer in a checkpoint's files."""

    files: TensorFiles
    format: Format
    layer: LayerLayout
    bias: bool
    _keys: dict[tuple[str, str], str | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def what(self) -> str:
        """The name of the layer, for messages."""
        return f"{self.files.path}: {self.layer.prefix.rstrip('.')}"

    @property
    def number(self) -> int:
        """The number of the layer in the names of its tensors."""
        match = re.match(_LAYERS, self.layer.prefix)
        assert match is not None
        return int(match["layer"])

    def stored(self) -> tuple[StoredTensor, ...]:
        """Return the tensors that each matrix has."""
        return (*self.format.stored, *((_BIAS,) if self.bias else ()))

    def locations(self) -> Iterator[ProjectionLocation]:
        """Yield the location of each projection of each expert; of the first only, in a stack."""
        for expert in range(1 if self.layer.layout.stacked else self.layer.experts):
            first, second = self.layer.projections(expert)
            yield from (*first, *second)

    def key(self, location: ProjectionLocation, spec: StoredTensor) -> str | None:
        """Return the name of a tensor in the files, or None if there is none."""
        place = location.base, spec.name
        if place not in self._keys:
            names = self.files.names
            self._keys[place] = next((key for key in location.keys(spec) if key in names), None)
        return self._keys[place]

    def check(self) -> dict[str, frozenset[torch.dtype]]:
        """Check names, shapes and dtypes of all experts; return the dtypes by role.

        Raises WeightsError for missing or superfluous tensors, ShapeError and DtypeError with file
        and name. Only headers are read.
        """
        missing, checked_keys, dtypes = list[str](), set[str](), dict[str, set[torch.dtype]]()
        for location in self.locations():
            if len(missing) > _MAX_MISSING:
                break
            for spec in self.stored():
                key = self.key(location, spec)
                if key is None:
                    missing += [] if spec.optional else [next(iter(location.keys(spec)))]
                elif key not in checked_keys:
                    checked_keys.add(key)
                    shape, dtype = self.files.shape_and_dtype(key)
                    sizes = () if location.is_shared_scalar(spec, shape) else location.shape(spec)
                    spec.check(self.files.qualified_name(key), shape, dtype, sizes)
                    dtypes.setdefault(spec.role, set()).add(dtype)
                    if self.format.torchao is not None and spec.role == "w":
                        self.check_metadata(key, shape, self.format.torchao)
        if missing:
            got = f"no {missing[0]}{_more(missing)}"
            need = f"{format_count(self.layer.experts, 'expert')} of {self.format}"
            raise WeightsError(self.what, got=got, need=need)
        self._check_extra(checked_keys)
        if self.format.method == "gguf" and self.format.scheme.weight in IMPLICIT_ZERO_POINT:
            types = {self._block_type(key) for key in checked_keys}
            dtypes["scale"] = {parse_dtype(scale_dtype(types))}  # within the blocks
        return {role: frozenset(kinds) for role, kinds in dtypes.items()}

    def check_metadata(
        self, key: str, shape: tuple[int, ...], torchao_format: TorchaoFormat
    ) -> None:
        """Raise WeightsError if the metadata of a file contradicts the quantization_config."""
        what, metadata = self.files.files[key].name, self.files.metadata(key)
        check_metadata(what, metadata, key, shape, torchao_format)

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of unquantized matrices; None if no layer can have it.

        None is also returned for quantized matrices. Raises DtypeError if there are several dtypes,
        because any choice would round some values.
        """
        dtypes = self.stored_dtypes()
        if not dtypes or not dtypes.keys() <= set(DTYPES.values()):
            return None
        if len(dtypes) > 1:
            kinds = (f"{dtype_name(kind)} in {key}" for kind, key in dtypes.items())
            raise DtypeError(f"{self.what}: dtype", got=" and ".join(kinds), need=ONE_DTYPE)
        return next(iter(dtypes))

    def stored_dtypes(self) -> dict[torch.dtype, str]:
        """Return the dtypes of unquantized matrices, each with the name of a tensor that has it."""
        if self.format.method != "none":
            return {}
        spec = next(spec for spec in self.format.stored if spec.role == "w")
        dtypes: dict[torch.dtype, str] = {}
        for key in (self.key(location, spec) for location in self.locations()):
            if key is not None:
                dtypes.setdefault(self.files.shape_and_dtype(key)[1], key)
        return dtypes

    def has_floats(self) -> bool:
        """Return whether the first expert has weights that are not quantized."""
        if self.format.method != "none":
            return False
        spec = next(spec for spec in self.format.stored if spec.role == "w")
        key = self.key(next(self.locations()), spec)
        return key is not None and self.files.shape_and_dtype(key)[1] in FLOATS

    def has_scales(self) -> bool:
        """Return whether the first expert has the scales of quantized weights."""
        location = next(self.locations())
        scales = [spec for spec in self.format.stored if spec.role == "scale"]
        return any(self.key(location, spec) is not None for spec in scales)

    def nbytes(self) -> int:
        """Return the total size in bytes of the tensors of the layer's experts."""
        keys = {self.key(location, spec) for location in self.locations() for spec in self.stored()}
        return sum(self.files.nbytes(key) for key in keys if key is not None)

    def _check_extra(self, checked_keys: set[str]) -> None:
        names = self.layer.layout.names
        bases = {f"{self.layer.prefix}{name}" for name in names}
        bases |= {f"{self.layer.prefix}_{name}" for name in names}  # of torchao
        expert_name = re.compile(re.escape(self.layer.prefix) + r"\d+\.")
        is_parameter = self.layer.layout.is_parameter
        extra = sorted(
            name
            for name in self.files.names - checked_keys
            if name.startswith(self.layer.prefix)
            and not name.endswith(_NOT_EXPERT_WEIGHTS)
            and (
                expert_name.match(name)
                or any(_belongs_to(name, base, is_parameter) for base in bases)
            )
        )
        if extra:
            need = (
                f"{format_count(self.layer.experts, 'expert')} of {self.format}, and nothing else"
            )
            got = f"{self.files.qualified_name(extra[0])}{_more(extra)}"
            raise WeightsError(self.what, got=got, need=need)

    def check_cut(self, parts: Sequence[tuple[ProjectionLocation, Range, Range]]) -> None:
        """Raise ConfigurationError if a share splits a packed word."""
        for location, rows, columns in parts:
            for spec in self.format.stored:
                spec.check_cut(self.what, rows, columns, (location.rows, location.depth))

    def read_part(
        self,
        fine: Format,
        location: ProjectionLocation,
        rows: Range,
        columns: Range,
        *,
        order: bool,
    ) -> dict[str, torch.Tensor]:
        """Read rows [a, b) and columns [c, d) of a projection, as `fusing.fuse` takes them.

        order: also read and check the column order. Once per matrix is enough, except for
        act-order.
        """
        rows = (location.first + rows[0], location.first + rows[1])
        if self.format.method == "gguf":
            return self._gguf_part(location, rows, columns)
        if self.format.dequantized and self.format.torchao is None:
            return {"weight": self._dequantized(location, rows, columns)}
        tensors, order = {}, order or self.format.scheme.act_order
        for spec in self.format.stored:
            skip = spec.role in (*UNREAD, "a_scale") or (spec.role == "order" and not order)
            key = None if skip else self.key(location, spec)
            if key is not None:
                tensors[spec.name] = self._read(key, location, spec, rows, columns)
        if self.format.dequantized and self.format.torchao is not None:
            return {"weight": dequantize_int4(tensors, self.format.torchao.group, columns)}
        return convert_share(self.format, fine, tensors, rows, columns)

    def _block_type(self, key: str) -> str:
        return self.files.type_of(key).name if isinstance(self.files, GgufFiles) else ""

    def _gguf_part(
        self, location: ProjectionLocation, rows: Range, columns: Range
    ) -> dict[str, torch.Tensor]:
        """Read the blocks that cover a part, and return it as numbers or as (weight, scale)."""
        key = self.key(location, self.format.stored[0])
        if not isinstance(self.files, GgufFiles) or key is None or location.expert is None:
            need = "a GGUF file"
            raise ConfigurationError(f"{self.what}: files of {self.format}", got=key, need=need)
        kind, name = self.files.type_of(key), self.files.qualified_name(key)
        blocks = self.files.read_blocks(key, location.expert, rows, columns)
        skipped = columns[0] % kind.values
        within = slice(skipped, skipped + columns[1] - columns[0])
        if not self.format.scheme.quantized:
            values = dequantize_blocks(kind.name, blocks)[:, within]
            if not bool(values.isfinite().all()):
                got = float(values[~values.isfinite()][0])
                raise WeightsError(name, got=got, need="finite numbers")
            return {"weight": values}
        w, scale = group_weights(kind.name, self.format.scheme, blocks)
        per_byte, group = 2 if self.format.scheme.packed else 1, self.format.scheme.group[0]
        return {
            "weight": w[:, within.start // per_byte : within.stop // per_byte],
            "scale": scale[:, within.start // group : -(-within.stop // group)],
        }

    def _dequantized(
        self, location: ProjectionLocation, rows: Range, columns: Range
    ) -> torch.Tensor:
        keys = {spec.name: self.key(location, spec) for spec in self.format.stored}
        present = {name: key for name, key in keys.items() if key is not None}
        tensors = _FlatTensorsOfFiles(self.files, present)
        what = self.files.qualified_name(f"{location.base}.weight")
        shape = (location.rows, location.depth)
        return dequantize_part(self.format.dequantized, shape, rows, columns, tensors, what)

    def bias_of(self, location: ProjectionLocation, rows: Range) -> torch.Tensor:
        """Read rows [a, b) of a projection's bias."""
        key = self.key(location, _BIAS)
        assert key is not None
        rows = (location.first + rows[0], location.first + rows[1])
        return self._read(key, location, _BIAS, rows, (0, location.depth))

    def input_scales(self, locations: Sequence[ProjectionLocation]) -> torch.Tensor:
        """Read the static activation scales of projections, float32, by which inputs are divided.

        compressed-tensors stores the inverse for nvfp4. If a stack has a scale per expert, only the
        scales of `locations` are read.
        """
        (spec,) = (spec for spec in self.format.stored if spec.role == "a_scale")
        by_key = dict[tuple[str, int | None], torch.Tensor]()
        for location in locations:
            key = self.key(location, spec)
            assert key is not None
            if (key, location.expert) not in by_key:
                scale = self._read(key, location, spec, (0, location.rows), (0, location.depth))
                subject = self.files.qualified_name(key)
                by_key[key, location.expert] = usable_inputs(scale.reshape(1), subject)
        scales = torch.cat(list(by_key.values()))
        inverse = self.format.method == "compressed-tensors" and self.format.scheme.matrix_scales
        return 1 / scales if inverse else scales

    def _read(
        self,
        key: str,
        location: ProjectionLocation,
        spec: StoredTensor,
        rows: Range,
        columns: Range,
    ) -> torch.Tensor:
        if isinstance(spec, BlockedScale):
            expert = (
                () if location.expert is None else (slice(location.expert, location.expert + 1),)
            )
            stored = self.files.read(key, (*expert, *spec.stored_slices(rows, location.depth)))
            return spec.unblocked(stored.reshape(stored.shape[-2:]), rows, columns)
        shape = self.files.shape_and_dtype(key)[0]
        single = spec.is_scalar and location.is_shared_scalar(spec, shape)
        slices = () if single else location.slices(spec, rows, columns)
        kept = spec.kept_dims(shape, location.shape(spec))
        if len(shape) == len(slices) or kept is None:
            tensor = self.files.read(key, slices)
        else:  # with dimensions of 1
            by_dim = dict(zip(kept, slices, strict=True))
            tensor = self.files.read(
                key, tuple(by_dim.get(dim, slice(0, 1)) for dim in range(len(shape)))
            )
            tensor = tensor.reshape([tensor.shape[dim] for dim in kept])
        if location.transposed and len(spec.dims) > 1:
            tensor = tensor.transpose(-1, -2)
        return tensor.reshape(
            [entries.stop - entries.start for entries in spec.slices(rows, columns)]
        )


@dataclass(frozen=True)
class _FlatTensorsOfFiles:
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


def _belongs_to(name: str, base: str, is_parameter: bool) -> bool:
    suffix = name.removeprefix(base)
    return suffix != name and (not suffix or suffix[0] in ("._:" if is_parameter else "."))


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


# ------------------------------------------------------------------------ locating layers


def find_blocks(names: frozenset[str], layout: ExpertLayout) -> dict[tuple[str, int], str]:
    """Return the name up to the experts' own names, by (prefix of the layers, layer number)."""
    names_pattern = "|".join(re.escape(name) for name in layout.names)
    names_pattern = (
        rf"_?(?:{names_pattern})(?:[._:]|$)" if layout.stacked else rf"\d+\.(?:{names_pattern})\."
    )
    pattern = re.compile(rf"{_LAYERS}{re.escape(layout.path)}(?={names_pattern})")
    blocks = {}
    for match in filter(None, map(pattern.match, names)):
        blocks[match["prefix"], int(match["layer"])] = match[0]
    return blocks


def find_layers(
    files: TensorFiles, layouts: Sequence[ExpertLayout], prefix: str | None
) -> tuple[str, dict[int, list[tuple[ExpertLayout, str]]]]:
    """Return the prefix of the layers, and for each layer with experts its possible layouts.

    prefix: None selects the language model. Raises ConfigurationError if no layer has experts, or
    if there are several models and none has a known prefix.
    """
    by_prefix: dict[str, dict[int, list[tuple[ExpertLayout, str]]]] = {}
    for layout in layouts:
        for (found_prefix, layer), block in find_blocks(files.names, layout).items():
            by_prefix.setdefault(found_prefix, {}).setdefault(layer, []).append((layout, block))
    if prefix is not None:
        by_prefix = {name: layers for name, layers in by_prefix.items() if name == prefix}
    prefixes = [name for name in _PREFIXES if name in by_prefix] or sorted(by_prefix)
    if len(prefixes) == 1:
        return prefixes[0], by_prefix[prefixes[0]]
    searched = " or ".join(
        f"{prefix or '...'}layers.L.{layout.block or layout.gate}" for layout in layouts
    )
    if not prefixes:
        need = f"experts in {searched}"
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
    """Select the layout of a layer among the candidates whose names match.

    sizes: experts, hidden, intermediate. Returns the first whose shapes match, or else the first,
    for which `LayerSource.check` then reports the mismatch.
    """
    sources = [
        LayerSource(files, format, LayerLayout(layout, block, *sizes), bias)
        for layout, block in candidates
    ]
    quantized = format.method != "none"
    unsupported = [
        s for s in sources if quantized and (s.layer.layout.flat or _is_unknown_transposed(s))
    ]
    sources = [source for source in sources if source not in unsupported]
    if not sources:
        got = f"{format} in a layout of whole matrices ({unsupported[0].layer.layout.block})"
        raise ConfigurationError(unsupported[0].what, got=got, need="no quantization")
    return next((source for source in sources if _matches_layout(source)), sources[0])


def _is_unknown_transposed(source: LayerSource) -> bool:
    """Return whether a layout stores (K, N) in a format that no quantizer stores that way.

    ModelOpt does so with float8 and nvfp4 of Llama-4 and gpt-oss, FBGEMM with float8 of Llama-4.
    torchao has the scales of blocks along N then, not along K.
    """
    scheme = source.format.scheme
    stored_transposed = scheme.granularity == "tensor"
    if source.format.torchao is None:
        stored_transposed |= scheme.granularity == "block" or scheme.matrix_scales
    stored_transposed |= source.format.method == "fbgemm_fp8"
    return bool(source.layer.layout.transposed) and not stored_transposed


def _matches_layout(source: LayerSource) -> bool:
    first, second = source.layer.projections(0)
    spec = next(spec for spec in source.format.stored if spec.role == "w")
    for location in (*first, *second):
        key = source.key(location, spec)
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
