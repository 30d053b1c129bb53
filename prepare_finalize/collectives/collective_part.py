"""CollectivePart: base of the parts that exchange packed rows over torch.distributed."""

from typing import ClassVar

from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.tensors import ContiguousShape, DispatchShape
from prepare_finalize.common.fixed_exchange import FixedExchange
from prepare_finalize.common.group_part import RowsPart


class CollectivePart(RowsPart):
    """Base of parts whose exchanges either have counted rows or a fixed size.

    By default, ranks exchange row counts before every call, read them on the host, and send just
    the rows that are needed (`fixed` is None). With Problem(graph=True) or
    TorchGroup(checked=False), they send blocks of a fixed size instead (`fixed`). The host then
    reads nothing after the layer's first call, and calls can be captured in a CUDA graph.
    """

    gathers: ClassVar[bool] = False  # whether each rank sends the same rows to all ranks
    fixed: FixedExchange | None = None

    def __init__(self, problem: Problem, group: object | None = None) -> None:
        super().__init__(problem, group)
        if problem.graph or not self.manager.checked:
            self._check_max_received()
            rows = self.rows_per_rank
            self.fixed = FixedExchange(self.layer, rows=rows, gathers=self.gathers)

    def _check_max_received(self) -> None:
        """Raise ConfigurationError if problem.max_received is below one row from each rank."""
        max_received, world_size = self.problem.max_received, self.problem.parallel.world_size
        if max_received is not None and max_received < world_size:
            self.destroy()
            need = f">= {world_size}, one row from each rank, in an exchange of fixed size"
            raise ConfigurationError("max_received", got=max_received, need=need)

    @property
    def rows_per_rank(self) -> int:
        """Number of rows that a rank sends to each rank in an exchange of fixed size.

        It is problem.tokens, which no routing exceeds, or an equal share of problem.max_received.
        """
        problem = self.problem
        if problem.max_received is None:
            return problem.tokens
        return min(problem.tokens, problem.max_received // problem.parallel.world_size)

    @property
    def rows_received(self) -> int:
        """Maximum number of rows that this rank receives; all of them in a fixed exchange."""
        if self.fixed is None:
            return self.max_rows
        return self.fixed.rows * self.manager.world_size

    def dispatch_shape(self, tokens: int) -> DispatchShape:
        return ContiguousShape(self.rows_received, self.problem.top_k)

    def check(self) -> None:
        if self.fixed is not None:
            self.fixed.check()

    def refuse(self, error: Exception) -> None:
        if self.fixed is None or not self.fixed.refuse(error):
            super().refuse(error)
