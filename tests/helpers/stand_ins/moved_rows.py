"""Exchanges of rows for the stand-ins of communication libraries.

Every rank gathers the rows of all ranks. Values that are undefined in the libraries are NaN.
"""

import io

import torch
import torch.distributed as dist


class Event:
    """An event of a call, which exists and can be waited for only if the call is asynchronous."""

    def __init__(self, exists):
        self.exists = exists

    def current_stream_wait(self):
        assert self.exists


def pad_rows(rows, number, fill=torch.nan):
    """Append rows of `fill` up to `number` rows. Integers, which have no NaN, are filled with 5."""
    assert len(rows) <= number
    if not rows.dtype.is_floating_point and fill is torch.nan:
        fill = 5
    out = torch.full((number, rows.shape[1]), fill).to(rows.dtype)
    out[: len(rows)] = rows
    return out


def all_gather(*values):
    """Return the tuple of values of each rank."""
    file, gathered = io.BytesIO(), [None] * dist.get_world_size()
    torch.save(_clone(values), file)  # pickle alone does not support float8
    dist.all_gather_object(gathered, file.getvalue())
    return [torch.load(io.BytesIO(data), weights_only=False) for data in gathered]


def _clone(values):
    """Copy tensors, because torch.save would write the whole workspace of which they are views."""
    if isinstance(values, torch.Tensor):
        return values.clone()
    return tuple(map(_clone, values)) if isinstance(values, tuple) else values


def localize_ids(ids_TK, experts):
    """Return int64 ids relative to the first expert of this rank, or -1 for experts elsewhere."""
    experts_per_rank = experts // dist.get_world_size()
    ids = ids_TK.long() - experts_per_rank * dist.get_rank()
    return torch.where((ids >= 0) & (ids < experts_per_rank), ids, -1)


def send_rows_to_ranks(x, ids, weights, experts, remote_weight=99.0):
    """Send each token once to every rank that has one of its experts.

    Returns the rows that this rank receives, their local ids, their weights, and the (source rank,
    token) of each row. remote_weight: weight of a pair whose expert is on another rank, which must
    not be read.
    """
    received, places = [], []
    for source, (rows, ids_of_source, router) in enumerate(all_gather(x, ids, weights)):
        local = localize_ids(ids_of_source, experts)
        tokens = (local >= 0).any(1).nonzero().flatten()
        router = router[tokens].masked_fill(local[tokens] < 0, remote_weight)
        parts = rows if isinstance(rows, tuple) else (rows,)
        received.append(([part[tokens] for part in parts], local[tokens], router))
        places += [(source, int(token)) for token in tokens]
    parts = [torch.cat(columns) for columns in zip(*(rows for rows, _, _ in received), strict=True)]
    rows = tuple(parts) if isinstance(x, tuple) else parts[0]
    return rows, torch.cat([r[1] for r in received]), torch.cat([r[2] for r in received]), places


def sum_rows_by_rank(y, places, tokens):
    """Return the sum over ranks of the rows of each token of this rank, (tokens, H) bfloat16."""
    total = torch.zeros(tokens, y.shape[1])
    for rows, places_of_rank in all_gather(y, places):
        for row, (source, token) in enumerate(places_of_rank):
            if source == dist.get_rank():
                total[token] += rows[row].float()
    return total.bfloat16()


def send_rows_to_experts(x, ids, experts, out, counts):
    """Write the received rows to out[0], (e, C, H), their scales to out[1] if any, and `counts`.

    Returns {(source rank, token, local expert): row}.
    """
    counts.zero_()
    places = {}
    for source, (rows, ids_of_source) in enumerate(all_gather(x, ids)):
        for token, local in enumerate(localize_ids(ids_of_source, experts).tolist()):
            for expert in local:
                if expert < 0:
                    continue
                row = int(counts[expert])
                counts[expert] += 1
                for out_rows, payload in zip(out, rows, strict=True):
                    out_rows[expert, row] = payload[token]
                places[source, token, expert] = row
    return places


def sum_rows_by_expert(y_eCH, places, ids, weights, experts):
    """Return the weighted sum of the rows of each token of this rank, (T, H) bfloat16."""
    experts_per_rank = experts // dist.get_world_size()
    outputs_by_rank = all_gather(y_eCH, places)
    total = torch.zeros(len(ids), y_eCH.shape[2])
    for token, chosen in enumerate(ids.long().tolist()):
        for k, expert in enumerate(chosen):
            if expert < 0:
                continue
            rows, places_of_rank = outputs_by_rank[expert // experts_per_rank]
            row = places_of_rank[dist.get_rank(), token, expert % experts_per_rank]
            total[token] += weights[token, k] * rows[expert % experts_per_rank, row].float()
    return total.bfloat16()
