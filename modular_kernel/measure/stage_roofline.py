"""The roofline of each stage of a call: its minimum flops and bytes, and the minimum time.

`mk profile` compares the measured time of a stage with its roofline. `modular_kernel.replay.stages`
lists the stages. The letters in the table are for one rank and one call:

    T, R, P    tokens of this rank; rows that it receives; (token, expert) pairs that it computes
    e          experts of this rank with at least one pair
    s          bytes of a value in the problem's dtype
    a, b       bytes of a value of x and of h, the inputs of GEMM 1 and GEMM 2: s, or for quantized
               inputs 1 plus the share of a value in the bytes of its scale
    w1, w2     bytes of the weights of one expert
    R', r      rank of the LoRA adapters; see `measure.adapter_roofline` for r

    stage               flops              read            weights   written        over links
    quantize_input      -                  T H s           -         T H a          -
    dispatch            -                  T H a           -         R H a          link rows H a
    sort                -                  expert ids      -         4 P            -
    permute             -                  R H a           -         P H a          -
    shrink              2 P (r H + R' I)   R H s + P I s   A13, A2   P (r + R') s   -
    gemm1_activation    2 P N H            rows H a        e w1      P I s          -
    quantize            -                  P I s           -         P I b          -
    gemm2               2 P I H            P I b           e w2      P H s          -
    unpermute           -                  P H s           -         P H s          -
    weight_and_reduce   -                  P H s           -         R H s          -
    combine             -                  R H s           -         T H s          link rows H s

    time = max(flops / rate, (read + weights + written) / bandwidth, over links / link bandwidth)

- "rows" of GEMM 1 are the P permuted rows if an earlier stage permutes, otherwise the R received
  rows.
- "link rows" is the number of rows sent to other ranks, or of rows received from other ranks if
  this number is larger.
- With a single rank, R = T.
- A fused stage reads what its first stage reads and writes what its last stage writes, because
  intermediates can stay on chip.
- Between two stages, rows are counted as written to and read from memory. If the L2 cache holds
  them, a stage can be faster than its roofline.
- With LoRA adapters, the stage shrink computes u = A x and u = A h. The GEMMs also compute B u,
  which adds 2 P N R' flops and P r s bytes to GEMM 1, and 2 P H R' flops and P R' s bytes to
  GEMM 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from modular_kernel.measure.adapter_roofline import adapter_work
from modular_kernel.measure.roofline import Peaks, Roofline, get_peak_rate, matrix_bytes
from modular_kernel.replay import stages
from modular_kernel.spec.problem import Problem
from modular_kernel.spec.quantization import QuantScheme

_SCALE_BYTES = 4.0  # bytes of a float32 scale
_INDEX_BYTES = 4.0


@dataclass(frozen=True)
class RankLoad:
    """The load of one rank in one call.

    tokens: T, the number of tokens of this rank.
    rows: R, the number of tokens of all ranks with an expert on this rank.
    pairs: P, the number of (token, expert) pairs that this rank computes.
    touched: number of experts of this rank with at least one pair.
    out, back: rows sent to other ranks in the dispatch, and rows received from them.
    """

    tokens: int
    rows: int
    pairs: int
    touched: int
    out: int = 0
    back: int = 0

    @property
    def link_rows(self) -> int:
        """The larger one of `out` and `back`."""
        return max(self.out, self.back)


@dataclass(frozen=True)
class StageWork:
    """The minimum work of a stage, as in the table of this module.

    flops: flops of GEMMs.
    read, weights, written: bytes read from and written to device memory.
    link: bytes sent to or received from other ranks.
    """

    flops: float = 0.0
    read: float = 0.0
    weights: float = 0.0
    written: float = 0.0
    link: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes read from and written to device memory."""
        return self.read + self.weights + self.written


def compute_stage_works(
    names: Sequence[str], problem: Problem, scheme: QuantScheme, load: RankLoad
) -> dict[str, StageWork]:
    """Return the work of each stage, by name. Stages that are not in the table are omitted.

    names: all stages of the call, including fused ones.
    """
    table = _compute_table(names, problem, scheme, load)
    in_table = [name for name in names if all(part in table for part in stages.split_stages(name))]
    return {name: _fuse([table[part] for part in stages.split_stages(name)]) for name in in_table}


def compute_stage_roofline(
    work: StageWork, problem: Problem, scheme: QuantScheme, peaks: Peaks, link: float | None = None
) -> Roofline:
    """Return the minimum time of a stage.

    link: bytes per second to other ranks. None omits the limit of the links.
    """
    times = {
        "memory": work.bytes / peaks.bandwidth,
        "compute": work.flops / get_peak_rate(problem, scheme, peaks),
        "link": work.link / link if link else 0.0,
    }
    bound = max(times, key=times.__getitem__)
    return Roofline(times[bound] * 1e6, bound)


def _fuse(works: Sequence[StageWork]) -> StageWork:
    """Return the work of one kernel that fuses stages with these works."""
    return StageWork(
        sum(work.flops for work in works),
        works[0].read,
        sum(work.weights for work in works),
        works[-1].written,
        sum(work.link for work in works),
    )


def _compute_table(
    names: Sequence[str], problem: Problem, scheme: QuantScheme, load: RankLoad
) -> dict[str, StageWork]:
    """Return the table of this module, by name of the unfused stage."""
    hidden, intermediate, value_bytes = problem.hidden, problem.intermediate, problem.dtype.itemsize
    fused_stages = [stages.split_stages(name) for name in names]
    # If the kernel of a GEMM also quantizes or permutes, it reads an operand in the original form.
    x_quantized = _is_separate_stage(stages.QUANTIZE_INPUT, stages.GEMM1, fused_stages)
    h_quantized = _is_separate_stage(stages.QUANTIZE, stages.GEMM2, fused_stages)
    x_row = hidden * (_compute_quantized_bytes(scheme, hidden) if x_quantized else value_bytes)
    h_row = intermediate * (
        _compute_quantized_bytes(scheme, intermediate) if h_quantized else value_bytes
    )
    y_row, unquantized_h_row = hidden * value_bytes, intermediate * value_bytes
    gemm1_rows = (
        load.pairs if _is_separate_stage(stages.PERMUTE, stages.GEMM1, fused_stages) else load.rows
    )
    w1, w2 = (load.touched * nbytes for nbytes in matrix_bytes(problem, scheme))
    a13, b13, a2, b2 = adapter_work(problem, load.pairs, load.touched).values()
    u13, u2 = _count_u_values_per_pair(problem)
    ids = load.tokens * problem.top_k * (problem.ids_dtype.itemsize if problem.ids_dtype else 4.0)
    pairs, tokens = load.pairs, load.tokens
    return {
        stages.QUANTIZE_INPUT: StageWork(0.0, tokens * y_row, 0.0, tokens * x_row),
        stages.DISPATCH: StageWork(
            0.0, tokens * x_row, 0.0, load.rows * x_row, load.link_rows * x_row
        ),
        stages.SORT: StageWork(0.0, ids, 0.0, pairs * _INDEX_BYTES),
        stages.PERMUTE: StageWork(0.0, load.rows * x_row, 0.0, pairs * x_row),
        stages.SHRINK: StageWork(
            a13.flops + a2.flops,
            load.rows * y_row + pairs * unquantized_h_row if u2 else 0.0,
            a13.bytes + a2.bytes,
            pairs * (u13 + u2) * value_bytes,
        ),
        stages.GEMM1: StageWork(
            2.0 * pairs * problem.w1_rows * hidden + b13.flops,
            gemm1_rows * x_row + pairs * u13 * value_bytes,
            w1 + b13.bytes,
            pairs * unquantized_h_row,
        ),
        stages.QUANTIZE: StageWork(0.0, pairs * unquantized_h_row, 0.0, pairs * h_row),
        stages.GEMM2: StageWork(
            2.0 * pairs * intermediate * hidden + b2.flops,
            pairs * h_row + pairs * u2 * value_bytes,
            w2 + b2.bytes,
            pairs * y_row,
        ),
        stages.UNPERMUTE: StageWork(0.0, pairs * y_row, 0.0, pairs * y_row),
        stages.REDUCE: StageWork(0.0, pairs * y_row, 0.0, load.rows * y_row),
        stages.COMBINE: StageWork(
            0.0, load.rows * y_row, 0.0, tokens * y_row, load.link_rows * y_row
        ),
    }


def _count_u_values_per_pair(problem: Problem) -> tuple[int, int]:
    """Return the number of values of u = A x per pair in each GEMM; 0 without adapters."""
    spec = problem.adapters
    if spec is None:
        return 0, 0
    sizes = 1, problem.w1_rows, problem.hidden, problem.intermediate
    return spec.shapes(*sizes)["lora_a13"][2], spec.rank


def _is_separate_stage(stage: str, gemm: str, fused_stages: Sequence[Sequence[str]]) -> bool:
    """Return whether `stage` runs, and is not fused with the stage `gemm`."""
    return any(stage in names and gemm not in names for names in fused_stages)


def _compute_quantized_bytes(scheme: QuantScheme, depth: int) -> float:
    """Return the bytes of a quantized value, including its share of the scales of its row.

    depth: number of values in the row.
    """
    granularity = scheme.activation_granularity
    if granularity == "token":
        return 1.0 + _SCALE_BYTES / depth
    if granularity == "group":
        return 1.0 + _SCALE_BYTES / scheme.group[-1]
    return 1.0
