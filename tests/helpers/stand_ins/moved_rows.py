"""What the stand-ins of communication libraries share: everybody tells everybody everything.

They have the libraries' signatures, shapes and dtypes, and what is undefined there is NaN here.
"""

import io

import torch
import torch.distributed as dist


class Event:
    """`happens`: whether there is one to wait for, which is so in asynchronous calls alone."""

    def __init__(self, happens):
        self.happens = happens

    def current_stream_wait(self):
        assert self.happens


def worst(rows, number, fill=torch.nan):
    """As many rows as can come; those that did not hold `fill`, NaN meaning anything."""
    assert len(rows) <= number
    if not rows.dtype.is_floating_point and fill is torch.nan:
        fill = 5
    out = torch.full((number, rows.shape[1]), fill).to(rows.dtype)
    out[: len(rows)] = rows
    return out


def told_by_all(*given):
    """What each rank gave."""
    file, found = io.BytesIO(), [None] * dist.get_world_size()
    torch.save(_apart(given), file)  # plain pickle does not know float8
    dist.all_gather_object(found, file.getvalue())
    return [torch.load(io.BytesIO(each), weights_only=False) for each in found]


def _apart(given):
    """Tensors cut out of one workspace cannot be saved together."""
    if isinstance(given, torch.Tensor):
        return given.clone()
    return tuple(map(_apart, given)) if isinstance(given, tuple) else given


def local_ids(ids_TK, experts):
    """Ids of experts on this rank, counted from its first; -1 elsewhere. int64."""
    each = experts // dist.get_world_size()
    ids = ids_TK.long() - each * dist.get_rank()
    return torch.where((ids >= 0) & (ids < each), ids, -1)


def rows_by_rank(x, ids, weights, experts, elsewhere=99.0):
    """(rows, local ids, weights, (source, token) of each row): one row for each token and rank.
    elsewhere: the weights of pairs whose expert is on another rank; nobody may read 99."""
    found, places = [], []
    for source, (rows, theirs, router) in enumerate(told_by_all(x, ids, weights)):
        here = local_ids(theirs, experts)
        tokens = (here >= 0).any(1).nonzero().flatten()
        router = router[tokens].masked_fill(here[tokens] < 0, elsewhere)
        parts = rows if isinstance(rows, tuple) else (rows,)
        found.append(([part[tokens] for part in parts], here[tokens], router))
        places += [(source, int(token)) for token in tokens]
    parts = [torch.cat(columns) for columns in zip(*(rows for rows, _, _ in found), strict=True)]
    rows = tuple(parts) if isinstance(x, tuple) else parts[0]
    return rows, torch.cat([f[1] for f in found]), torch.cat([f[2] for f in found]), places


def sums_by_rank(y, places, tokens):
    """(tokens, H) bfloat16: the rows that other ranks made of this rank's tokens, added."""
    total = torch.zeros(tokens, y.shape[1])
    for theirs, at in told_by_all(y, places):
        for row, (source, token) in enumerate(at):
            if source == dist.get_rank():
                total[token] += theirs[row].float()
    return total.bfloat16()


def rows_by_expert(x, ids, experts, out, counts):
    """Fill out[0] (e, C, H), and out[1] with scales where there are some; returns the place
    {(source, token, expert): (slot, row)} of each row."""
    counts.zero_()
    places = {}
    for source, (rows, theirs) in enumerate(told_by_all(x, ids)):
        for token, local in enumerate(local_ids(theirs, experts).tolist()):
            for expert in local:
                if expert < 0:
                    continue
                row = int(counts[expert])
                counts[expert] += 1
                for into, part in zip(out, rows, strict=True):
                    into[expert, row] = part[token]
                places[source, token, expert] = row
    return places


def sums_by_expert(y_eCH, places, ids, weights, experts):
    """(T, H) bfloat16, weighted."""
    each = experts // dist.get_world_size()
    told = told_by_all(y_eCH, places)
    total = torch.zeros(len(ids), y_eCH.shape[2])
    for token, chosen in enumerate(ids.long().tolist()):
        for k, expert in enumerate(chosen):
            if expert < 0:
                continue
            theirs, at = told[expert // each]
            row = at[dist.get_rank(), token, expert % each]
            total[token] += weights[token, k] * theirs[expert % each, row].float()
    return total.bfloat16()
