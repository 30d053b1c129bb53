"""Verdicts of many pairings, which a notebook shows as a grid."""

from html import escape

from modular_kernel.compatibility.support import Verdict


class Verdicts(tuple[Verdict, ...]):
    """Verdicts of many pairings; a notebook shows them as a grid."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return a grid of pairings: ok, or the rules that refuse."""
        names = dict.fromkeys(verdict.experts for verdict in self)
        cells = {(v.prepare_finalize, v.experts): v for v in self}
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
        rows = ""
        for pf in dict.fromkeys(verdict.prepare_finalize for verdict in self):
            found = (cells.get((pf, name)) for name in names)
            texts = "".join(f"<td>{_in_a_grid(verdict)}</td>" for verdict in found)
            rows += f"<tr><th>{escape(pf)}</th>{texts}</tr>"
        return f"<table><tr>{head}</tr>{rows}</table>"


def _in_a_grid(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    rules = dict.fromkeys(rejection.rule for rejection in verdict.rejections)
    return "ok" if verdict.ok else escape(", ".join(rules))
