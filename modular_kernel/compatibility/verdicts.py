"""Collections of verdicts, shown as a grid in notebooks."""

from html import escape

from modular_kernel.compatibility.support import Verdict


class Verdicts(tuple[Verdict, ...]):
    """Verdicts of several pairings, shown as a grid in notebooks."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return an HTML grid of pairings; each cell is ok or the violated rules."""
        names = dict.fromkeys(verdict.experts for verdict in self)
        cells = {(v.prepare_finalize, v.experts): v for v in self}
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
        rows = ""
        for pf in dict.fromkeys(verdict.prepare_finalize for verdict in self):
            row = (cells.get((pf, name)) for name in names)
            texts = "".join(f"<td>{_cell_text(verdict)}</td>" for verdict in row)
            rows += f"<tr><th>{escape(pf)}</th>{texts}</tr>"
        return f"<table><tr>{head}</tr>{rows}</table>"


def _cell_text(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    rules = dict.fromkeys(rejection.rule for rejection in verdict.rejections)
    return "ok" if verdict.ok else escape(", ".join(rules))
