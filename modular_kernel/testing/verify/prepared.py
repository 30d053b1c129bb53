"""Weights that were prepared: a call, and a plan's, are as right with them."""

from collections.abc import Iterator

from modular_kernel.quant.prepared import MADE_OF
from modular_kernel.testing.verify.trial import Trial


def prepared_weights(trial: Trial) -> Iterator[str]:
    """Compare a call and two of a plan that are given prepared weights with the oracle.

    Of experts that prepare nothing: the weights come back as they were.
    """
    sample, kernel = trial.first, trial.kernel
    given = sample.inputs.weights
    made = kernel.prepare_weights(given)
    if not kernel.experts.prepared_specs():
        if made is not given:
            yield "other weights, of experts that prepare nothing"
        return
    if changed := [
        n for n, t in vars(given).items() if t is not getattr(made, n) and n not in MADE_OF
    ]:
        yield f"other {', '.join(changed)}"
    plan, routing = kernel.plan(), sample.inputs.routing
    for run in (kernel, plan, plan):
        output = run(sample.x_TH(), made, routing).clone()
        yield from sample.compare(output).problems
