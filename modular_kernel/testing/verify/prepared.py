"""Check that prepared weights give correct results in eager and planned calls.

`kernel.prepare_weights` converts weights once, for example into a tiled layout that an experts
component ("part") reads faster.
"""

from collections.abc import Iterator

from modular_kernel.quant.prepared import SOURCE_FIELDS
from modular_kernel.testing.verify.trial import Trial


def check_prepared_weights(trial: Trial) -> Iterator[str]:
    """Compare one eager and two planned calls on prepared weights with the float64 reference.

    Experts parts that do not prepare weights must return the same weights object. Other experts
    parts may replace only the tensors listed in `SOURCE_FIELDS`.
    """
    sample, kernel = trial.first, trial.kernel
    weights = sample.inputs.weights
    prepared = kernel.prepare_weights(weights)
    if not kernel.experts.prepared_specs():
        if prepared is not weights:
            yield "prepare_weights returned other weights although the experts prepare nothing"
        return
    changed = [
        name
        for name, tensor in vars(weights).items()
        if tensor is not getattr(prepared, name) and name not in SOURCE_FIELDS
    ]
    if changed:
        yield f"prepare_weights replaced {', '.join(changed)}"
    plan, routing = kernel.plan(), sample.inputs.routing
    for run in (kernel, plan, plan):
        output = run(sample.x_TH(), prepared, routing).clone()
        yield from sample.compare(output).problems
