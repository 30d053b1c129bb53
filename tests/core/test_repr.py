"""The repr, str and notebook display of problems, verdicts, kernels and plans, and the version."""

from dataclasses import replace
from importlib.metadata import version

import modular_kernel as mk
from modular_kernel.compatibility.support import Rejection
from modular_kernel.spec.problem import Combine, Problem  # noqa: F401  names in the repr

PROBLEM = mk.Problem(tokens=8, hidden=64, intermediate=128, experts=8, top_k=2, graph=True)
CPU = mk.Machine("cpu", None, frozenset())
PAIR = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")


def test_the_repr_of_a_problem_omits_defaults_and_evaluates_to_it() -> None:
    assert repr(PROBLEM) == (
        "Problem(tokens=8, hidden=64, intermediate=128, experts=8, top_k=2, graph=True)"
    )
    assert eval(repr(PROBLEM)) == PROBLEM
    fp8_problem = mk.Problem(8, 64, 128, 8, 2, quant="fp8_w8a8_block", activation="gelu")
    assert "quant='fp8_w8a8_block'" in repr(fp8_problem)
    assert "activation='gelu'" in repr(fp8_problem)
    assert eval(repr(fp8_problem)) == fp8_problem
    unweighted = mk.Problem(8, 64, 128, 8, 2, combine=Combine.TOPK_UNWEIGHTED)
    assert eval(repr(unweighted)) == unweighted


def test_values_in_rejections_may_be_numbers() -> None:
    rejection = Rejection("r", (), 3, "<4")  # type: ignore[arg-type]
    verdict = replace(mk.check(*PAIR, PROBLEM, CPU), rejections=(rejection,))
    assert "<td>3</td><td>&lt;4</td>" in verdict._repr_html_()


def test_verdicts_are_short_and_have_tables() -> None:
    valid, refused = (mk.check(PAIR[0], name, PROBLEM, CPU) for name in (PAIR[1], "TritonExperts"))
    without_rejections = mk.check(*PAIR, mk.Problem(8, 64, 128, 8, 2), CPU)
    assert repr(without_rejections).endswith("T8-H64-I128-E8-K2-bfloat16: valid>")
    assert "<table>" not in without_rejections._repr_html_()
    rules = ", ".join(dict.fromkeys(r.rule for r in refused.rejections))
    assert repr(refused).endswith(f"-graph: refused: {rules}>")
    assert len(repr(refused)) < 200
    for rejection in (*valid.rejections, *refused.rejections):
        html = refused._repr_html_() + valid._repr_html_()
        assert f"<td>{rejection.rule}</td>" in html
    assert "<script" not in mk.check(*PAIR, PROBLEM, CPU)._repr_html_()


def test_a_verdict_with_rejections_is_false() -> None:
    valid, refused = mk.check(*PAIR, PROBLEM, CPU), mk.check(PAIR[0], "TritonExperts", PROBLEM, CPU)
    assert (bool(valid), bool(refused)) == (valid.ok, refused.ok)
    assert refused.rejections


def test_a_matrix_is_shown_as_a_grid() -> None:
    matrix = mk.check_all(PROBLEM, CPU)
    assert isinstance(matrix, tuple)
    html = matrix._repr_html_()
    names = {verdict.experts for verdict in matrix}
    assert html.count("<tr>") == len(matrix) // len(names) + 1
    assert html.count("<td>") == len(matrix)
    assert [name for name in names if f"<th>{name}</th>" not in html] == []


def test_the_repr_of_kernels_and_plans_names_their_pairing() -> None:
    kernel = mk.make_kernel(*PAIR, mk.Problem(8, 64, 128, 8, 2), machine=CPU)
    assert repr(kernel) == f"<{' x '.join(PAIR)}, T8-H64-I128-E8-K2-bfloat16 on cpu>"
    plan = kernel.plan()
    assert repr(plan).startswith(f"<plan of {' x '.join(PAIR)}, T8-")
    assert str(plan.nbytes) in repr(plan)


def test_a_notebook_shows_kernels_as_it_shows_verdicts() -> None:
    problem = mk.Problem(8, 64, 128, 8, 2)
    kernel = mk.make_kernel(*PAIR, problem, machine=CPU)
    assert kernel._repr_html_() == f"<p>{' x '.join(PAIR)}, {problem} on cpu</p>"
    verdict = mk.check(*PAIR, problem, CPU)
    assert verdict._repr_html_() == f"<p>{' x '.join(PAIR)}: valid, {problem}</p>"


def test_version_is_that_of_the_distribution() -> None:
    assert mk.__version__ == version("modular-kernel")
