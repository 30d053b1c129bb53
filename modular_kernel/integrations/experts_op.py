"""torch.ops.modular_kernel.experts: one call of a layer that torch.compile and export pass over.

    experts(x_TH, ids_TK, weights_TK, params, fields, layer, pairing) -> y_TH

What is not a tensor is a text, so that an exported program runs in another process: it has to
import this module, transformers is not needed. fields: what each tensor of params is, as
`expert_fields` reads it. layer and pairing: as `pairing` writes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from modular_kernel.integrations.expert_fields import place, weights_from
from modular_kernel.integrations.pairing import pairing_of
from modular_kernel.tensors import ExpertWeights, Routing


@dataclass(frozen=True)
class _Bound:
    """Weights made of `params`, valid while each is where it was."""

    fields: str
    others: tuple[int, ...]
    places: tuple[object, ...]
    weights: ExpertWeights


# By the first tensor. What is kept are aliases, so that an entry goes with its key.
_bound: Any = WeakIdKeyDictionary()


@torch.library.custom_op("modular_kernel::experts", mutates_args=())
def experts(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    params: Sequence[torch.Tensor],
    fields: str,
    layer: str,
    pairing: str,
) -> torch.Tensor:
    """Return a new (T, H) tensor like x. ids and weights as those of a Routing."""
    return pairing_of(pairing).run(
        layer, x_TH, _weights(params, fields), Routing(weights_TK, ids_TK)
    )


@experts.register_fake
def _(x_TH, ids_TK, weights_TK, params, fields, layer, pairing):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Shape and dtype of the output."""
    return x_TH.new_empty(x_TH.shape)


def _weights(params: Sequence[torch.Tensor], fields: str) -> ExpertWeights:
    found = _bound.get(params[0]) if params else None
    others, places = tuple(map(id, params)), tuple(map(place, params))
    if found is None or (found.fields, found.others, found.places) != (fields, others, places):
        weights = weights_from([param.detach() for param in params], fields)
        found = _Bound(fields, others, places, weights)
        _bound[params[0]] = found
    return found.weights
