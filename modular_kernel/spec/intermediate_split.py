"""Division of the intermediate size I among tensor-parallel ranks.

    split = split_intermediate(2880, 8, QuantScheme.parse("mxfp4_w4a16"))
    split.width, split.columns(0), split.columns(7)     # 384, (0, 384), (2528, 2880)

The weights of all ranks have the same number of columns (the width), so that all ranks run the same
kernel. A rank's columns end at a boundary of a quantization group, so that stored codes and scales
do not change. If a rank holds fewer columns than the width, its weights are padded with zeros.
"""

from dataclasses import dataclass
from math import lcm

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.quantization import QuantScheme

# Alignments of a padded width, in columns. The largest alignment that leaves columns for every rank
# is used. 16 values of at least one byte each satisfy the alignment of TMA and of vector loads.
_ALIGNMENTS = (16, 8, 4, 2, 1)
_VALUES_PER_WORD = {"uint4": 8, "uint8": 4}  # in a packed int32
_VALUES_PER_BYTE = {"table4": 2}


@dataclass(frozen=True)
class IntermediateSplit:
    """The columns of I that each tensor-parallel rank holds.

    intermediate: I.
    ranks: number of tensor-parallel ranks.
    unit: number of adjacent columns that must stay on one rank.
    width: number of columns in the weights of each rank, including padding.
    """

    intermediate: int
    ranks: int
    unit: int
    width: int

    def columns(self, rank: int) -> tuple[int, int]:
        """Return (first, end): the rank holds the columns [first, end) of I."""
        units, extra = divmod(_ceil_div(self.intermediate, self.unit), self.ranks)
        first, end = (r * units + min(r, extra) for r in (rank, rank + 1))
        return first * self.unit, min(end * self.unit, self.intermediate)

    @property
    def is_padded(self) -> bool:
        """Whether the weights of some rank contain padding."""
        return self.width * self.ranks != self.intermediate


def columns_per_unit(scheme: QuantScheme, intermediate: int) -> int:
    """Return how many adjacent columns of I share a scale or a packed word and must not be split.

    A group that covers all columns may be split. Each rank then has one group with the same scale.
    """
    values_per_word = _VALUES_PER_WORD.get(scheme.weight, _VALUES_PER_BYTE.get(scheme.weight, 1))
    if scheme.weight == "int8" and not scheme.quantizes_activations:
        values_per_word = 4
    is_integer = scheme.weight in _VALUES_PER_WORD
    if scheme.granularity == "group" and is_integer and scheme.group[0] >= intermediate:
        return values_per_word
    return lcm(values_per_word, *scheme.group)


def split_intermediate(intermediate: int, ranks: int, scheme: QuantScheme) -> IntermediateSplit:
    """Divide I among tensor-parallel ranks.

    - If an equal division splits neither a group nor a packed word, all ranks get equally many
      columns.
    - Otherwise, each rank gets whole groups. Some ranks get one group more than others, and the
      width is the largest number of columns of a rank.
    - If there are fewer groups than ranks, but the columns divide evenly, the equal division is
      used although it splits groups. `formats.fit_scheme` refuses it for stored weights.

    Raises ConfigurationError if there are fewer groups than ranks and the columns do not divide
    evenly.
    """
    unit, (share, remainder) = columns_per_unit(scheme, intermediate), divmod(intermediate, ranks)
    if not remainder and (ranks == 1 or share % unit == 0):
        return IntermediateSplit(intermediate, ranks, share, share)
    for alignment in _ALIGNMENTS:
        padded_unit = lcm(unit, alignment)
        units = _ceil_div(intermediate, padded_unit)
        if units >= ranks:
            width = _ceil_div(units, ranks) * padded_unit
            return IntermediateSplit(intermediate, ranks, padded_unit, width)
    if not remainder:
        return IntermediateSplit(intermediate, ranks, share, share)
    raise make_too_few_groups_error(intermediate, ranks, unit)


def make_too_few_groups_error(intermediate: int, ranks: int, unit: int) -> ConfigurationError:
    """Return the error for more ranks than groups of columns."""
    groups = _ceil_div(intermediate, unit)
    unit_name = "column" if unit == 1 else f"group of {unit} columns"
    need = f"at most {groups}: each rank holds a whole {unit_name} of intermediate={intermediate}"
    return ConfigurationError("tp: ranks", got=ranks, need=need)


def _ceil_div(value: int, step: int) -> int:
    return -(-value // step)
