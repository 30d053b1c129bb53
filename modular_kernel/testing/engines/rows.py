"""Groups the outcomes of cases by class, scheme, activation, dtype and bias."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite

from modular_kernel.integrations.engine import EngineCase, Kind, Outcome, Promise
from modular_kernel.spec.problem import dtype_name
from modular_kernel.testing.engines.processes import Result, get_row_key


@dataclass(frozen=True)
class Row:
    """The outcomes of the cases of one class, scheme, activation, dtype and bias.

    reproduced: the last line of output of the worst case's reproducer, or why it did not show the
        error; empty if it was not run.
    """

    results: tuple[Result, ...]
    reproduced: str = ""

    @property
    def case(self) -> EngineCase:
        """The first case. All cases have the same class, scheme, activation, dtype and bias."""
        return self.results[0][0]

    @property
    def dtype(self) -> str:
        return dtype_name(self.case.problem.dtype)

    @cached_property
    def numbers(self) -> tuple[Result, ...]:
        """The results of the cases that check the output's values."""
        return tuple(result for result in self.results if result[0].promise is None)

    @property
    def kind(self) -> Kind:
        """The worst outcome of any call in the row.

        Refused calls, and calls that cannot run here, count only if there are no others.
        """
        kinds = {outcome.kind for _, outcome in self.numbers}
        return next(kind for kind in Kind if kind in kinds)

    def select(self, kind: Kind) -> list[Result]:
        """Return the results of `numbers` that have this outcome."""
        return [result for result in self.numbers if result[1].kind is kind]

    @property
    def details(self) -> list[str]:
        """The distinct details of the calls with the row's outcome."""
        return list(dict.fromkeys(outcome.detail for _, outcome in self.select(self.kind)))

    @property
    def worst_ratio(self) -> float | None:
        """Largest ratio of error to bound; None without outputs."""
        outcomes = [outcome for _, outcome in self.numbers]
        ratios = [o.error / o.bound for o in outcomes if o.error is not None and o.bound]
        return max(ratios, default=None)

    @cached_property
    def promises(self) -> Mapping[Promise, Outcome]:
        """The outcomes of the promises that were checked."""
        return {
            case.promise: outcome
            for case, outcome in self.results
            if case.promise is not None
            and outcome.kind in (Kind.RIGHT, Kind.WRONG, Kind.CRASHED, Kind.TIMEOUT)
        }

    @property
    def reproducer(self) -> str:
        """Program that shows the error of the worst case; empty if none is wrong."""
        wrong_outcomes = [outcome for _, outcome in self.numbers if outcome.reproducer]
        return max(wrong_outcomes, key=_get_ratio).reproducer if wrong_outcomes else ""

    def make_record(self) -> dict[str, object]:
        """Return the row for JSON."""
        case = self.case
        return {
            "experts": case.experts,
            "scheme": case.problem.quant,
            "activation": case.activation,
            "dtype": self.dtype,
            "bias": case.problem.bias,
            "outcome": self.kind,
            "details": self.details,
            "calls": [
                {
                    "shape": case.shape,
                    "outcome": outcome.kind,
                    "detail": outcome.detail,
                    "error": outcome.error,
                    "bound": outcome.bound,
                    "seconds": outcome.seconds,
                }
                for case, outcome in self.numbers
            ],
            "promises": {
                promise: {"kept": outcome.kind is Kind.RIGHT, "detail": outcome.detail}
                for promise, outcome in self.promises.items()
            },
            "reproducer": self.reproducer,
            "reproduced": self.reproduced,
        }


def _get_ratio(outcome: Outcome) -> float:
    """Return the ratio of error to bound, or infinity if an output is not finite."""
    has_ratio = outcome.error is not None and isfinite(outcome.error) and outcome.bound
    return outcome.error / outcome.bound if has_ratio else inf  # type: ignore[operator]


def make_rows(results: Iterable[Result]) -> list[Row]:
    """Return the rows, sorted by outcome, and with the same outcome in the order of the results."""
    rows: dict[object, list[Result]] = {}
    for result in results:
        rows.setdefault(get_row_key(result[0]), []).append(result)
    kind_order = list(Kind)
    grouped_rows = [Row(tuple(r)) for r in rows.values() if any(c.promise is None for c, _ in r)]
    return sorted(grouped_rows, key=lambda row: kind_order.index(row.kind))
