"""number_and_quantize equals number_pairs followed by quantize_rows, bit for bit."""

import pytest
import torch
from ops_fixtures import DEVICE, make_path_fixture, random_normal

from modular_kernel.errors import ConfigurationError, ShapeError
from modular_kernel.ops import expert_slots, quantize, slots_and_quantize
from modular_kernel.ops.expert_slots import Numbering, Pairs, number_pairs
from modular_kernel.ops.quantize import QuantizedRows, quantize_rows, scale_shape
from modular_kernel.ops.slots_and_quantize import number_and_quantize
from modular_kernel.quant.quantized_weights import STORAGE
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import Routing

SCHEMES = (
    "fp8_w8a8_tensor:static=true",
    "fp8_w8a8_channel",
    "fp8_w8a8_block:block=8x24",
    "int8_w8a8_block:block=8x32",
)
BLOCKS, COPIES = Placement.linear(8, 2), Placement.linear(7, 2).with_copies({0: (1,)})
COLUMNS = 100

path = make_path_fixture(slots_and_quantize, expert_slots, quantize)


class CallArguments:
    """The arguments of a call. Outputs contain values that must be overwritten."""

    def __init__(
        self, routing: Routing, numbering: Numbering, scheme: QuantScheme, tokens: int, join: bool
    ) -> None:
        shape = routing.topk_ids_TK.shape
        self.pairs = Pairs(
            routing,
            numbering,
            torch.full(shape, 12345, device=DEVICE),
            torch.full(shape, torch.nan, device=DEVICE),
            torch.full((1,), 5, dtype=torch.int32, device=DEVICE),
            join,
            0.5,
        )
        q = torch.full((tokens, COLUMNS), 0x55, dtype=torch.uint8, device=DEVICE)
        scales = scale_shape(scheme, tokens, COLUMNS)
        scale = torch.full(scales, 0.0123 if scheme.static else -3.0, device=DEVICE)
        self.rows = QuantizedRows(q.view(STORAGE[scheme.activation]), scale)

    def get_outputs(self) -> list[torch.Tensor]:
        pairs, rows = self.pairs, self.rows
        outputs = pairs.numbers_TK, pairs.weights_TK, pairs.invalid_ids
        return [*outputs, rows.q_RK.view(torch.uint8), rows.scale]


def make_random_routing(tokens: int, top_k: int) -> Routing:
    """Return ids from -2 to 8. The router weights of skipped pairs are NaN."""
    ids = torch.randint(-2, 9, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    weights = torch.rand(tokens, top_k).masked_fill(ids < 0, torch.nan)
    return Routing(weights.to(DEVICE), ids.to(DEVICE))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scheme_name", SCHEMES)
@pytest.mark.parametrize(("placement", "num_sinks"), [(BLOCKS, 0), (BLOCKS, 2), (COPIES, 0)])
@pytest.mark.parametrize("tokens", [0, 1, 75])
def test_number_and_quantize_equals_both_operations(
    tokens: int, placement: Placement, num_sinks: int, scheme_name: str
) -> None:
    scheme, routing = QuantScheme.parse(scheme_name), make_random_routing(tokens, 3)
    x_TH = random_normal(tokens, COLUMNS + 8, dtype=torch.bfloat16)[:, :COLUMNS]
    numbering = Numbering.of(placement, DEVICE, 1, num_sinks=num_sinks)
    actual, expected = (
        CallArguments(routing, numbering, scheme, tokens, join=True) for _ in range(2)
    )
    number_and_quantize(x_TH, scheme, actual.pairs, out=actual.rows)
    number_pairs(expected.pairs)
    quantize_rows(x_TH, scheme, out=expected.rows)
    assert all(map(torch.equal, actual.get_outputs(), expected.get_outputs()))


def run_number_and_quantize(scheme_name: str, routed_tokens: int, join: bool = True) -> None:
    scheme, numbering = QuantScheme.parse(scheme_name), Numbering.of(BLOCKS, DEVICE, num_sinks=2)
    arguments = CallArguments(make_random_routing(routed_tokens, 3), numbering, scheme, 4, join)
    x_TH = random_normal(4, COLUMNS, dtype=torch.bfloat16)
    number_and_quantize(x_TH, scheme, arguments.pairs, out=arguments.rows)


def test_unsupported_combinations_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="need a static scale, or a scale per token or group"
    ):
        run_number_and_quantize("fp8_w8a8_tensor", 4)
    with pytest.raises(ShapeError, match="tokens: got 4, need 5, as in the routing"):
        run_number_and_quantize(SCHEMES[1], 5)
    with pytest.raises(ConfigurationError, match="need join"):
        run_number_and_quantize(SCHEMES[1], 4, join=False)
