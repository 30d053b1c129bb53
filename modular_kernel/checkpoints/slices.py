"""Which boxes of which tensors a rank reads of a layer, checked against every header first.

Pure but for reading: a `Source` knows where the matrices of a layer lie, what they must be, and
gives a share of one as `merging.stack` takes it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from modular_kernel.checkpoints.expert_names import ExpertLayout, LayerPlaces, ProjectionPlace
from modular_kernel.checkpoints.formats import Format
from modular_kernel.checkpoints.fp8_mxfp4 import usable_inputs
from modular_kernel.checkpoints.fusing import piece
from modular_kernel.checkpoints.matrix_layout import FLOATS, UNREAD, Dim, Range, Stored
from modular_kernel.checkpoints.safetensors_files import Tensors
from modular_kernel.errors import ConfigurationError, DtypeError, ShapeError, WeightsError
from modular_kernel.spec.problem import DTYPES, dtype_name
from modular_kernel.text import counted

# Of matrices that are not quantized.
ONE_DTYPE = "one dtype, or one that config.json states or is asked for (dtype=, --dtype)"
_MOST_MISSING = 10_000  # after which no other is looked for
# Beside experts in some families' files, and no weight of them.
_OTHERS = ("e_score_correction_bias",)
_BIAS = Stored("bias", "bias", (Dim("N"),), FLOATS)
# What stands in front of the layers, of several kinds the language model's own first.
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
_LAYERS = r"(?P<prefix>(?:.*\.)?)(?:layers|blocks|h)\.(?P<layer>\d+)\."


@dataclass(frozen=True)
class LayerSource:
    """The experts of one layer in a checkpoint's files."""

    files: Tensors
    format: Format
    layer: LayerPlaces
    bias: bool

    @property
    def what(self) -> str:
        """Name the layer, for messages."""
        return f"{self.files.path}: {self.layer.prefix.rstrip('.')}"

    def stored(self) -> tuple[Stored, ...]:
        """Return what there is of each matrix."""
        return (*self.format.stored, *((_BIAS,) if self.bias else ()))

    def places(self) -> Iterator[ProjectionPlace]:
        """Yield where each projection of each expert lies; of a stack that of the first."""
        for expert in range(1 if self.layer.layout.stacked else self.layer.experts):
            first, second = self.layer.projections(expert)
            yield from (*first, *second)

    def key(self, place: ProjectionPlace, stored: Stored) -> str | None:
        """Return the name of a tensor in the files, None if it is not there."""
        return next((key for key in place.keys(stored) if key in self.files.names), None)

    def check(self) -> dict[str, frozenset[torch.dtype]]:
        """Check names, shapes and dtypes of all experts; return the dtypes of each kind of tensor.

        Raises WeightsError for tensors that are missing or too many, ShapeError and DtypeError
        with file and name otherwise. Only headers are read.
        """
        missing, seen, dtypes = list[str](), set[str](), dict[str, set[torch.dtype]]()
        for place in self.places():
            if len(missing) > _MOST_MISSING:
                break
            for stored in self.stored():
                key = self.key(place, stored)
                if key is None:
                    missing += [] if stored.optional else [next(iter(place.keys(stored)))]
                elif key not in seen:
                    seen.add(key)
                    shape, dtype = self.files.facts(key)
                    sizes = () if place.is_one(stored, shape) else place.shape(stored)
                    stored.check(self.files.where(key), shape, dtype, sizes)
                    dtypes.setdefault(stored.role, set()).add(dtype)
        if missing:
            got = f"no {missing[0]}{_more(missing)}"
            need = f"{counted(self.layer.experts, 'expert')} of {self.format}"
            raise WeightsError(self.what, got=got, need=need)
        self._check_extra(seen)
        return {role: frozenset(found) for role, found in dtypes.items()}

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of its matrices; None where no layer has it, or none tells it.

        DtypeError where they have several: in any of them, values of others would be rounded.
        """
        found = self.stored_dtypes()
        if not found or not found.keys() <= set(DTYPES.values()):
            return None
        if len(found) > 1:
            kinds = (f"{dtype_name(kind)} in {key}" for kind, key in found.items())
            raise DtypeError(f"{self.what}: dtype", got=" and ".join(kinds), need=ONE_DTYPE)
        return next(iter(found))

    def stored_dtypes(self) -> dict[torch.dtype, str]:
        """Return the dtypes of matrices that are not quantized, each with a tensor that has it."""
        if self.format.method != "none":
            return {}
        stored = next(each for each in self.format.stored if each.role == "w")
        found: dict[torch.dtype, str] = {}
        for key in (self.key(place, stored) for place in self.places()):
            if key is not None:
                found.setdefault(self.files.facts(key)[1], key)
        return found

    def nbytes(self) -> int:
        """Return the bytes of all tensors of the layer's experts."""
        keys = {self.key(place, stored) for place in self.places() for stored in self.stored()}
        facts = [self.files.facts(key) for key in keys if key is not None]
        return sum(prod(shape) * dtype.itemsize for shape, dtype in facts)

    def _check_extra(self, seen: set[str]) -> None:
        bases = {f"{self.layer.prefix}{name}" for name in self.layer.layout.names}
        own = re.compile(re.escape(self.layer.prefix) + r"\d+\.")
        bare = self.layer.layout.bare
        extra = sorted(
            name
            for name in self.files.names - seen
            if name.startswith(self.layer.prefix)
            and not name.endswith(_OTHERS)
            and (own.match(name) or any(_is_of(name, base, bare) for base in bases))
        )
        if extra:
            need = f"{counted(self.layer.experts, 'expert')} of {self.format}, and nothing else"
            got = f"{self.files.where(extra[0])}{_more(extra)}"
            raise WeightsError(self.what, got=got, need=need)

    def check_cut(self, parts: Sequence[tuple[ProjectionPlace, Range, Range]]) -> None:
        """Raise the ConfigurationError of shares that go through a word of packed values."""
        for place, rows, columns in parts:
            for stored in self.format.stored:
                stored.check_cut(self.what, rows, columns, (place.rows, place.depth))

    def part(
        self, fine: Format, place: ProjectionPlace, rows: Range, columns: Range, *, order: bool
    ) -> dict[str, torch.Tensor]:
        """Read rows [a, b) and columns [c, d) of a projection, as `merging.stack` takes them.

        order: read the order of columns too, and check it: once for all rows, but for act-order.
        """
        rows = (place.first + rows[0], place.first + rows[1])
        found, order = {}, order or self.format.scheme.act_order
        for stored in self.format.stored:
            skipped = stored.role in (*UNREAD, "a_scale") or (stored.role == "order" and not order)
            key = None if skipped else self.key(place, stored)
            if key is not None:
                found[stored.name] = self._read(key, place, stored, rows, columns)
        return piece(self.format, fine, found, rows, columns)

    def bias_of(self, place: ProjectionPlace, rows: Range) -> torch.Tensor:
        """Read rows [a, b) of a projection's bias."""
        key = self.key(place, _BIAS)
        assert key is not None
        rows = (place.first + rows[0], place.first + rows[1])
        return self._read(key, place, _BIAS, rows, (0, place.depth))

    def input_scales(self, places: Sequence[ProjectionPlace]) -> torch.Tensor:
        """Read the static activation scales of projections, float32: what values are divided by.

        compressed-tensors states what they are multiplied by. Of a stack that has one of each
        expert, the places' own.
        """
        (stored,) = (each for each in self.format.stored if each.role == "a_scale")
        found = dict[tuple[str, int | None], torch.Tensor]()
        for place in places:
            key = self.key(place, stored)
            assert key is not None
            if (key, place.expert) not in found:
                scale = self._read(key, place, stored, (0, place.rows), (0, place.depth))
                where = self.files.where(key)
                found[key, place.expert] = usable_inputs(scale.reshape(1), where)
        scales = torch.cat(list(found.values()))
        inverse = self.format.method == "compressed-tensors" and self.format.scheme.matrix_scales
        return 1 / scales if inverse else scales

    def _read(
        self, key: str, place: ProjectionPlace, stored: Stored, rows: Range, columns: Range
    ) -> torch.Tensor:
        one = stored.is_number and place.is_one(stored, self.files.facts(key)[0])
        tensor = self.files.read(key, () if one else place.box(stored, rows, columns))
        if place.transposed and len(stored.dims) > 1:
            tensor = tensor.transpose(-1, -2)
        return tensor.reshape([part.stop - part.start for part in stored.box(rows, columns)])


def _is_of(name: str, base: str, bare: bool) -> bool:
    rest = name.removeprefix(base)
    return rest != name and (not rest or rest[0] in ("._" if bare else "."))


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


# ------------------------------------------------------------------------ finding a layer


def blocks_of(names: frozenset[str], layout: ExpertLayout) -> dict[tuple[str, int], str]:
    """Return what is in front of the experts' own names, by (what is in front of layers, layer)."""
    own = "|".join(re.escape(name) for name in layout.names)
    own = rf"(?:{own})(?:[._]|$)" if layout.stacked else rf"\d+\.(?:{own})\."
    pattern = re.compile(rf"{_LAYERS}{re.escape(layout.block)}\.(?={own})")
    found = {}
    for match in filter(None, map(pattern.match, names)):
        found[match["prefix"], int(match["layer"])] = match[0]
    return found


def find_layers(
    files: Tensors, layouts: Sequence[ExpertLayout], prefix: str | None
) -> tuple[str, dict[int, list[tuple[ExpertLayout, str]]]]:
    """Return what is in front of the layers, and for each with experts how they may lie.

    prefix: given by the caller, or None for that of the language model. ConfigurationError if
    there are none, or several models of which none is known to be it.
    """
    found: dict[str, dict[int, list[tuple[ExpertLayout, str]]]] = {}
    for layout in layouts:
        for (front, layer), block in blocks_of(files.names, layout).items():
            found.setdefault(front, {}).setdefault(layer, []).append((layout, block))
    if prefix is not None:
        found = {front: layers for front, layers in found.items() if front == prefix}
    known = [front for front in _PREFIXES if front in found] or sorted(found)
    if len(known) == 1:
        return known[0], found[known[0]]
    looked = " or ".join(f"{prefix or '...'}layers.L.{layout.block}" for layout in layouts)
    if not known:
        need = f"experts in {looked}"
        raise ConfigurationError(f"checkpoint {files.path}", got="no experts", need=need)
    got, need = " and ".join(repr(front) for front in known[:4]), "prefix=... to say which"
    raise ConfigurationError(f"checkpoint {files.path}: experts below", got=got, need=need)


def find_source(
    files: Tensors,
    format: Format,
    candidates: Sequence[tuple[ExpertLayout, str]],
    sizes: tuple[int, int, int],
    bias: bool,
) -> LayerSource:
    """Return the layout that a layer's names and shapes tell, of those that its names allow.

    sizes: experts, hidden, intermediate. The first that fits by the shape of its down projection;
    where none does, `LayerSource.check` of the first says why.
    """
    sources = [
        LayerSource(files, format, LayerPlaces(layout, block, *sizes), bias)
        for layout, block in candidates
    ]
    quantized = format.method != "none"
    odd = [s for s in sources if quantized and (s.layer.layout.flat or _turned(s))]
    sources = [source for source in sources if source not in odd]
    if not sources:
        got = f"{format} in a layout of whole matrices ({odd[0].layer.layout.block})"
        raise ConfigurationError(odd[0].what, got=got, need="no quantization")
    return next((source for source in sources if _fits(source)), sources[0])


def _turned(source: LayerSource) -> bool:
    """Whether a layout stores (K, N) of a format that no packer stores so.

    ModelOpt stores float8 and nvfp4 so, of Llama-4 and gpt-oss.
    """
    scheme = source.format.scheme
    known = scheme.granularity in ("block", "tensor") or scheme.matrix_scales
    return bool(source.layer.layout.transposed) and not known


def _fits(source: LayerSource) -> bool:
    first, second = source.layer.projections(0)
    stored = next(each for each in source.format.stored if each.role == "w")
    for place in (*first, *second):
        key = source.key(place, stored)
        try:
            if key is None:
                return False
            shape, dtype = source.files.facts(key)
            stored.check(key, shape, dtype, place.shape(stored))
        except ShapeError:
            return False
        except DtypeError:
            continue  # its names and shapes tell; `LayerSource.check` says what is wrong
    return True
