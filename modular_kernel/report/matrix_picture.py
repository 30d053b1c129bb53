"""The compatibility matrix as a picture: a square for each pair, by scheme and number of ranks."""

from modular_kernel.report.judge_all import JudgedPair, Matrix
from modular_kernel.report.pages.document import MatrixPicture


def matrix_picture(matrix: Matrix) -> MatrixPicture:
    """Build the picture of a matrix. A reason that several cells share is stored only once."""
    texts: dict[str, int] = {}
    refusals: dict[tuple[int, ...], int] = {(): 0}
    cells: dict[str, list[int]] = {}
    for size in matrix.world_sizes:
        for quant in matrix.quants:
            cells[f"{quant} {size}"] = [
                refusals.setdefault(
                    _texts_of(matrix.by_key[*pair, quant, size], texts), len(refusals)
                )
                for pair in matrix.pairs
            ]
    return MatrixPicture(
        rows=tuple(dict.fromkeys(pf for pf, _ in matrix.pairs)),
        columns=tuple(dict.fromkeys(experts for _, experts in matrix.pairs)),
        schemes=matrix.quants,
        world_sizes=matrix.world_sizes,
        texts=tuple(texts),
        refusals=tuple(refusals),
        cells={key: tuple(indices) for key, indices in cells.items()},
    )


def _texts_of(cell: JudgedPair, texts: dict[str, int]) -> tuple[int, ...]:
    """Return the indices in `texts` of a cell's reasons, after adding new ones."""
    reasons = []
    for r in cell.rejections:
        hint = f" ({r.hint})" if r.hint else ""
        reasons.append(f"{r.rule}: {' / '.join(r.parties)}: got {r.got}, need {r.need}{hint}")
    return tuple(texts.setdefault(reason, len(texts)) for reason in dict.fromkeys(reasons))
