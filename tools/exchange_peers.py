"""Bare library calls beside our parts: `mk exchange --world-size N --peer tools/exchange_peers.py`.

NCCL's all_to_all_single of the same bytes (no permuting, no summing: rows there and back), DeepEP
V1 high throughput and low latency, DeepEP V2, pplx-kernels. Those whose module is found are
offered; V1 and V2 are one module of two versions, so each refuses where the other is installed.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist

from modular_kernel.bench.all2all.cases import Transport, dequantized
from modular_kernel.ops.quantize import Quantized, quantize_rows

BLOCK = 128  # columns of one scale
_WHEN = {False: "before", True: "in a launch of its own"}
FEW = 512  # tokens for which buffers of one row an expert still fit


def quantized(x_TH):
    """x in float8_e4m3fn, and float32 scales (T, H / 128)."""
    groups = x_TH.float().unflatten(1, (-1, BLOCK))
    scale = (groups.abs().amax(2) / 448).clamp(min=2.0**-33)
    return (groups / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale


class TransportPeer(Transport):
    """few: serves small capacities only. worlds: numbers of ranks. quantizing: rows are quantized
    in each dispatch, in a launch of their own, where the library does not."""

    few = quantizing = False
    worlds = None

    def refusal(self, cell):
        if cell.quant not in ("none", "fp8_w8a8_block") or cell.hidden % BLOCK:
            return f"bfloat16 or blocks of {BLOCK} columns"
        if self.quantizing and cell.quant == "none":
            return "bfloat16 rows travel as they are"
        if cell.experts % cell.world_size:
            return "as many experts on each rank"
        if self.worlds and cell.world_size not in self.worlds:
            return f"{self.worlds} ranks"
        if self.few and cell.capacity > FEW:
            return f"buffers for {FEW} tokens at most"
        return ""

    def open(self, cell, place):
        self.cell, self.place = cell, place
        self.fp8 = cell.quant != "none"
        self.local = cell.experts // cell.world_size
        self.setup()

    def setup(self):
        """Buffers and handles of the library."""

    def load(self, given):
        self.cell = given.cell  # several cells share what `open` made
        self.x, self.tokens = given.x_TH, len(given.x_TH)
        self.rows = quantized(self.x) if self.fp8 else self.x
        if self.quantizing:
            self.made = Quantized(*map(torch.empty_like, self.rows))
        self.ids = given.routing.topk_ids_TK.to(torch.int64)
        self.weights = given.routing.topk_weights_TK

    def rows_given(self):
        """Return what the library is given."""
        if self.quantizing:
            quantize_rows(self.x, self.cell.scheme, out=self.made)
            return self.made.q_RK, self.made.scale
        return self.rows

    def keep(self, made):
        """Put the experts' output at one address: a captured combine reads there."""
        old = getattr(self, "y", None)
        if old is not None and old.shape == made.shape:
            old.copy_(made)
        else:
            self.y = made

    def weighted(self, rows, ids_RK, weights_RK):
        """Rows times the weights of their pairs here."""
        x_RH = dequantized(*rows, BLOCK) if isinstance(rows, tuple) else rows
        share = torch.where(ids_RK >= 0, weights_RK, 0).sum(1, keepdim=True)
        self.keep((x_RH.float() * share).bfloat16())


class Nccl(TransportPeer):
    """Rows there, and as many back: one for each token and rank, or for each token and expert."""

    capturable = True

    def __init__(self, *, pairs):
        self.pairs = pairs
        self.name = f"all_to_all_single, one row {'an expert' if pairs else 'a rank'}"
        self.note = "no permute, no sums"

    def load(self, given):
        super().load(given)
        cell, rank, device = self.cell, self.place.rank, self.place.device
        tokens_WW = [[self._tokens(s, d) for d in range(cell.world_size)] for s in
                     range(cell.world_size)]  # fmt: skip
        self.sent = [len(tokens) for tokens in tokens_WW[rank]]
        self.came = [len(tokens[rank]) for tokens in tokens_WW]
        self.token_N = torch.cat(tokens_WW[rank]).to(device)
        own = self._bytes(self.rows) if self.fp8 else self._bytes((self.x,))
        self.given = own[self.token_N].contiguous()
        shape = sum(self.came), own.shape[1]
        self.arrived = torch.empty(shape, dtype=torch.uint8, device=device)
        self.y = torch.empty(sum(self.came), cell.hidden, dtype=torch.bfloat16, device=device)
        self.back = torch.empty(len(self.token_N), cell.hidden, dtype=self.y.dtype, device=device)

    def _tokens(self, source, target):
        """Tokens of rank `source` that go to rank `target`, in the order of their rows."""
        ids = self.cell.routing(source).topk_ids_TK.long()
        here = ids // self.local == target
        if not self.pairs:
            return here.any(1).nonzero().flatten()
        token = torch.arange(len(ids))[:, None].expand_as(ids)[here]
        return token[ids[here].argsort(stable=True)]

    def _bytes(self, tensors):
        return torch.cat([t.contiguous().view(torch.uint8) for t in tensors], 1)

    def dispatch(self):
        dist.all_to_all_single(
            self.arrived, self.given, self.came, self.sent, group=self.place.group
        )

    def identity(self):
        hidden = self.cell.hidden
        if not self.fp8:
            self.y.copy_(self.arrived.view(torch.bfloat16))
            return
        rows = self.arrived[:, :hidden].contiguous().view(torch.float8_e4m3fn)
        scale = self.arrived[:, hidden:].contiguous().view(torch.float32)
        self.y.copy_(dequantized(rows, scale, BLOCK))

    def combine(self):
        dist.all_to_all_single(self.back, self.y, self.sent, self.came, group=self.place.group)
        return self.back

    def expected(self, given):
        return given.x_TH[self.token_N]


class DeepEP(TransportPeer):
    """A transport over one buffer of the library's."""

    def close(self):
        buffer, self.buffer = getattr(self, "buffer", None), None
        if buffer is not None:
            buffer.destroy()


class DeepEPOfTokens(DeepEP):
    """One row for each token and rank, without a wait of the host: room for all that can come."""

    capturable = True
    measured = ""  # what else is

    def __init__(self, sms, *, quantizing=False):
        self.sms, self.quantizing = sms, quantizing
        self.name = f"{self.name}, {sms} SMs" + ", quantizing" * quantizing
        self.note = f"{self.measured}rows quantized {_WHEN[quantizing]}"

    def identity(self):
        rows, ids, weights, *_ = self.arrived  # behind those that came, whatever was there
        self.weighted(rows, ids, weights)


class DeepEPV1(DeepEP):
    """needs the module of V1, which has no ElasticBuffer."""

    worlds = (2, 4, 8)

    def refusal(self, cell):
        if hasattr(import_module("deep_ep"), "ElasticBuffer"):
            return "this deep_ep is V2"
        if self.local_of(cell) > BLOCK:  # threads of its counting kernel
            return f"{BLOCK} experts a rank at most"
        return super().refusal(cell)

    def local_of(self, cell):
        return cell.experts // cell.world_size


class DeepEPHighThroughput(DeepEPOfTokens, DeepEPV1):
    """The first library's buffer."""

    name = "DeepEP V1 high throughput"
    measured = "its layout kernel included; "

    def setup(self):
        Buffer = import_module("deep_ep").Buffer
        Buffer.set_num_sms(self.sms)
        world, nbytes = self.cell.world_size, 2 * self.cell.hidden
        configs = Buffer.get_dispatch_config(world), Buffer.get_combine_config(world)
        most = max(config.get_nvl_buffer_size_hint(nbytes, world) for config in configs)
        most = -(-most // BLOCK) * BLOCK
        self.buffer = Buffer(self.place.group, most, 0, explicitly_destroy=True)

    def dispatch(self):
        layout = self.buffer.get_dispatch_layout(self.ids, self.cell.experts)
        per_rank, _, per_expert, in_rank, _ = layout
        self.arrived = self.buffer.dispatch(
            self.rows_given(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_worst_tokens=self.cell.world_size * self.cell.capacity,
        )

    def combine(self):
        return self.buffer.combine(self.y, self.arrived[4])[0]


class DeepEPLowLatency(DeepEPV1):
    """One row for each token and expert; quantizes by itself; weights in the combine."""

    name = "DeepEP V1 low latency"
    capturable = alone = few = True

    def setup(self):
        Buffer = import_module("deep_ep").Buffer
        cell = self.cell
        self.most = -(-cell.capacity // 4) * 4
        sizes = self.most, cell.hidden, cell.world_size, cell.experts
        nbytes = Buffer.get_low_latency_rdma_size_hint(*sizes)
        self.buffer = Buffer(
            self.place.group,
            0,
            nbytes,
            low_latency_mode=True,
            num_qps_per_rank=self.local,
            explicitly_destroy=True,
        )

    def dispatch(self):
        self.arrived = self.buffer.low_latency_dispatch(
            self.x, self.ids, self.most, self.cell.experts, use_fp8=self.fp8
        )

    def identity(self):
        rows = self.arrived[0]
        self.keep(dequantized(*rows, BLOCK) if self.fp8 else rows.clone())

    def combine(self):
        handle = self.arrived[2]
        return self.buffer.low_latency_combine(self.y, self.ids, self.weights, handle)[0]


class DeepEPV2(DeepEPOfTokens):
    """ElasticBuffer."""

    name = "DeepEP V2"

    def refusal(self, cell):
        if not hasattr(import_module("deep_ep"), "ElasticBuffer"):
            return "this deep_ep is V1"
        return super().refusal(cell)

    def setup(self):
        deep_ep, cell = import_module("deep_ep"), self.cell
        self.ids_dtype = deep_ep.topk_idx_t
        self.buffer = deep_ep.ElasticBuffer(
            self.place.group,
            num_max_tokens_per_rank=cell.capacity,
            hidden=cell.hidden,
            num_topk=cell.top_k,
            use_fp8_dispatch=self.fp8,
            explicitly_destroy=True,
        )

    def load(self, given):
        super().load(given)
        self.ids = self.ids.to(self.ids_dtype)

    def dispatch(self):
        self.arrived = self.buffer.dispatch(
            self.rows_given(),
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_experts=self.cell.experts,
            num_max_tokens_per_rank=self.cell.capacity,
            num_sms=self.sms,
            do_cpu_sync=False,
        )

    def combine(self):
        return self.buffer.combine(self.y, self.arrived[3], num_sms=self.sms)[0]


class Pplx(TransportPeer):
    """pplx-kernels within a host: one row for each token and expert; weights in the combine."""

    name = "pplx-kernels"
    capturable = alone = few = True
    note = "rows quantized before"

    def setup(self):
        cell, place = self.cell, self.place
        # Its handles are exchanged over the CPU.
        backend = "cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo"
        self.group = dist.new_group(list(range(cell.world_size)), backend=backend)
        # Scales travel in pieces of 16 bytes, with whatever fills up the last one.
        self.columns = -(-(cell.hidden // BLOCK) // 4) * 4 if self.fp8 else 0
        self.all2all = import_module("pplx_kernels.all_to_all").AllToAll.intranode(
            max_num_tokens=cell.capacity,
            num_experts=cell.experts,
            experts_per_token=cell.top_k,
            rank=place.rank,
            world_size=cell.world_size,
            dp_size=1,
            hidden_dim=cell.hidden,
            hidden_dim_bytes=cell.hidden * (1 if self.fp8 else 2),
            hidden_dim_scale_bytes=4 * self.columns,
            group_name=self.group.group_name,
        )
        rows = self.local, cell.capacity * cell.world_size
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        self.counts = torch.empty(self.local, dtype=torch.int32, device=place.device)
        self.there = torch.empty(*rows, cell.hidden, dtype=dtype, device=place.device)
        self.scale = None
        if self.fp8:
            self.scale = torch.empty(*rows, self.columns, dtype=torch.float32, device=place.device)

    def load(self, given):
        super().load(given)
        self.ids = self.ids.to(torch.uint32)
        if self.fp8:
            rows, scale = self.rows
            self.rows = rows, torch.nn.functional.pad(scale, (0, self.columns - scale.shape[1]))
        self.out = torch.empty_like(self.x)

    def dispatch(self):
        rows, scale = self.rows if self.fp8 else (self.x, None)
        self.all2all.dispatch(
            out_expert_num_tokens=self.counts,
            out_expert_x=self.there,
            out_expert_x_scale=self.scale,
            dp_x=rows,
            dp_x_scale=scale,
            indices=self.ids,
            bound_m=None,
        )

    def identity(self):
        self.keep(dequantized(self.there, self.scale, BLOCK) if self.fp8 else self.there.clone())

    def combine(self):
        self.all2all.combine(
            out_tokens=self.out,
            indices=self.ids,
            weights=self.weights,
            expert_y=self.y,
            bound_m=None,
        )
        return self.out

    def close(self):
        all2all, self.all2all = getattr(self, "all2all", None), None
        if all2all is not None:
            all2all.destroy()


def transports():
    """Those whose modules are found here."""
    found = [Nccl(pairs=False), Nccl(pairs=True)]
    if find_spec("deep_ep") is not None:
        found += [
            DeepEPHighThroughput(20),
            DeepEPHighThroughput(20, quantizing=True),
            DeepEPHighThroughput(96),
        ]
        found += [DeepEPLowLatency(), DeepEPV2(22), DeepEPV2(22, quantizing=True), DeepEPV2(64)]
    if find_spec("pplx_kernels") is not None:
        found += [Pplx()]
    return found
