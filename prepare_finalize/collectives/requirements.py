"""Common requirements of the contiguous parts over torch.distributed collectives."""

from modular_kernel.compatibility.support import PrepareFinalizeRequirements
from modular_kernel.quant.quantized_weights import ACTIVATION_SCHEMES
from modular_kernel.spec.problem import ActivationFormat, Reduce

CONTIGUOUS = PrepareFinalizeRequirements(
    activation_format=ActivationFormat.STANDARD,
    reduces=frozenset({Reduce.NOOP, Reduce.CONTIGUOUS, Reduce.DELEGATE}),
    localizes_ids=True,
    dispatch_schemes=ACTIVATION_SCHEMES,
    world_sizes=(2, None),
    linear_placement=False,
    graph_capturable=True,
    graph_on_request=True,
    lora=True,
)
