"""Public transports for `mk exchange --world-size N --peer tools/exchange_peers.py`.

The peers are NCCL's all_to_all_single, DeepEP V1 (high throughput and low latency), DeepEP V2, and
pplx-kernels. all_to_all_single sends the same bytes to the experts and back, but does not permute
or sum rows. Libraries that are not installed are omitted. DeepEP V1 and V2 are versions of the same
module, so the transports of one version refuse to run if the other is installed.
"""

from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist

from modular_kernel.bench.all2all.cases import Transport, dequantize
from modular_kernel.ops.quantize import QuantizedRows, quantize_rows

BLOCK = 128  # columns per scale
_QUANTIZATION_NOTES = {False: "before the dispatch", True: "in a separate launch"}
MAX_FEW_TOKENS = 512  # limit on the number of tokens if buffers have a row per token and expert


def quantize_fp8_blocks(x_TH):
    """Quantize x to float8_e4m3fn with float32 scales (T, H / 128)."""
    groups = x_TH.float().unflatten(1, (-1, BLOCK))
    scale = (groups.abs().amax(2) / 448).clamp(min=2.0**-33)
    return (groups / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale


class TransportPeer(Transport):
    """Base class of peers.

    few_tokens_only: whether only capacities of at most MAX_FEW_TOKENS are supported.
    world_sizes: supported world sizes, or None for all.
    quantizes: whether each dispatch quantizes rows in a separate launch, for libraries that do not
        quantize.
    """

    few_tokens_only = quantizes = False
    world_sizes = None

    def refusal(self, case):
        if case.quant not in ("none", "fp8_w8a8_block") or case.hidden % BLOCK:
            return f"bfloat16, or float8 in blocks of {BLOCK} columns, only"
        if self.quantizes and case.quant == "none":
            return "bfloat16 rows are not quantized"
        if case.experts % case.world_size:
            return "equally many experts on each rank only"
        if self.world_sizes and case.world_size not in self.world_sizes:
            return f"{self.world_sizes} ranks only"
        if self.few_tokens_only and case.capacity > MAX_FEW_TOKENS:
            return f"at most {MAX_FEW_TOKENS} tokens"
        return ""

    def open(self, case, context):
        self.case, self.context = case, context
        self.fp8 = case.quant != "none"
        self.local = case.experts // case.world_size
        self.setup()

    def setup(self):
        """Create buffers and handles of the library."""

    def load(self, inputs):
        self.case = inputs.case  # cases of one batch share the state of `open`
        self.x, self.tokens = inputs.x_TH, len(inputs.x_TH)
        self.rows = quantize_fp8_blocks(self.x) if self.fp8 else self.x
        if self.quantizes:
            self.quantized_rows = QuantizedRows(*map(torch.empty_like, self.rows))
        self.ids = inputs.routing.topk_ids_TK.to(torch.int64)
        self.weights = inputs.routing.topk_weights_TK

    def get_rows_to_send(self):
        """Return the rows to pass to the library, quantized first if `quantizes` is set."""
        if self.quantizes:
            quantize_rows(self.x, self.case.scheme, out=self.quantized_rows)
            return self.quantized_rows.q_RK, self.quantized_rows.scale
        return self.rows

    def store_output(self, output):
        """Store the experts' output at a fixed address, which a captured combine reads."""
        previous = getattr(self, "y", None)
        if previous is not None and previous.shape == output.shape:
            previous.copy_(output)
        else:
            self.y = output

    def store_weighted(self, rows, ids_RK, weights_RK):
        """Store the rows, each multiplied by the sum of its local router weights."""
        x_RH = dequantize(*rows, BLOCK) if isinstance(rows, tuple) else rows
        weight_sum = torch.where(ids_RK >= 0, weights_RK, 0).sum(1, keepdim=True)
        self.store_output((x_RH.float() * weight_sum).bfloat16())


class Nccl(TransportPeer):
    """NCCL's all_to_all_single in both directions.

    per_pair: whether to send a row per token and expert, instead of one per token and rank.
    """

    capturable = True

    def __init__(self, *, per_pair):
        self.per_pair = per_pair
        self.name = f"all_to_all_single, one row per {'expert' if per_pair else 'rank'}"
        self.note = "no permute, no sums"

    def load(self, inputs):
        super().load(inputs)
        case, rank, device = self.case, self.context.rank, self.context.device
        tokens_WW = [[self._find_tokens(s, d) for d in range(case.world_size)] for s in
                     range(case.world_size)]  # fmt: skip
        self.send_counts = [len(tokens) for tokens in tokens_WW[rank]]
        self.receive_counts = [len(tokens[rank]) for tokens in tokens_WW]
        self.token_N = torch.cat(tokens_WW[rank]).to(device)
        row_bytes = (
            self._concatenate_bytes(self.rows) if self.fp8 else self._concatenate_bytes((self.x,))
        )
        self.send_rows = row_bytes[self.token_N].contiguous()
        shape = sum(self.receive_counts), row_bytes.shape[1]
        self.received = torch.empty(shape, dtype=torch.uint8, device=device)
        self.y = torch.empty(
            sum(self.receive_counts), case.hidden, dtype=torch.bfloat16, device=device
        )
        self.returned = torch.empty(
            len(self.token_N), case.hidden, dtype=self.y.dtype, device=device
        )

    def _find_tokens(self, source, target):
        """Return the tokens that rank `source` sends to rank `target`, in the order of the rows."""
        ids = self.case.routing(source).topk_ids_TK.long()
        to_target = ids // self.local == target
        if not self.per_pair:
            return to_target.any(1).nonzero().flatten()
        token = torch.arange(len(ids))[:, None].expand_as(ids)[to_target]
        return token[ids[to_target].argsort(stable=True)]

    def _concatenate_bytes(self, tensors):
        return torch.cat([t.contiguous().view(torch.uint8) for t in tensors], 1)

    def dispatch(self):
        dist.all_to_all_single(
            self.received,
            self.send_rows,
            self.receive_counts,
            self.send_counts,
            group=self.context.group,
        )

    def identity(self):
        hidden = self.case.hidden
        if not self.fp8:
            self.y.copy_(self.received.view(torch.bfloat16))
            return
        rows = self.received[:, :hidden].contiguous().view(torch.float8_e4m3fn)
        scale = self.received[:, hidden:].contiguous().view(torch.float32)
        self.y.copy_(dequantize(rows, scale, BLOCK))

    def combine(self):
        dist.all_to_all_single(
            self.returned, self.y, self.send_counts, self.receive_counts, group=self.context.group
        )
        return self.returned

    def compute_expected(self, inputs):
        return inputs.x_TH[self.token_N]


class DeepEP(TransportPeer):
    """A transport that uses a buffer of DeepEP."""

    def close(self):
        buffer, self.buffer = getattr(self, "buffer", None), None
        if buffer is not None:
            buffer.destroy()


class DeepEPPerRank(DeepEP):
    """A transport that sends a row per token and rank, without host synchronization.

    Buffers have room for the maximum number of rows.
    """

    capturable = True
    included_note = ""  # describes work besides the exchange that the time includes

    def __init__(self, sms, *, quantizes=False):
        self.sms, self.quantizes = sms, quantizes
        self.name = f"{self.name}, {sms} SMs" + ", quantizing" * quantizes
        self.note = f"{self.included_note}rows quantized {_QUANTIZATION_NOTES[quantizes]}"

    def identity(self):
        rows, ids, weights, *_ = self.received  # rows after the received ones are undefined
        self.store_weighted(rows, ids, weights)


class DeepEPV1(DeepEP):
    """Base class of DeepEP V1, which is recognized by the absence of ElasticBuffer."""

    world_sizes = (2, 4, 8)

    def refusal(self, case):
        if hasattr(import_module("deep_ep"), "ElasticBuffer"):
            return "this deep_ep is V2"
        if self.count_local_experts(case) > BLOCK:  # number of threads of DeepEP's counting kernel
            return f"at most {BLOCK} experts per rank"
        return super().refusal(case)

    def count_local_experts(self, case):
        return case.experts // case.world_size


class DeepEPHighThroughput(DeepEPPerRank, DeepEPV1):
    """DeepEP V1's high-throughput kernels."""

    name = "DeepEP V1 high throughput"
    included_note = "includes its layout kernel; "

    def setup(self):
        Buffer = import_module("deep_ep").Buffer
        Buffer.set_num_sms(self.sms)
        world_size, row_bytes = self.case.world_size, 2 * self.case.hidden
        configs = Buffer.get_dispatch_config(world_size), Buffer.get_combine_config(world_size)
        buffer_bytes = max(
            config.get_nvl_buffer_size_hint(row_bytes, world_size) for config in configs
        )
        buffer_bytes = -(-buffer_bytes // BLOCK) * BLOCK
        self.buffer = Buffer(self.context.group, buffer_bytes, 0, explicitly_destroy=True)

    def dispatch(self):
        layout = self.buffer.get_dispatch_layout(self.ids, self.case.experts)
        per_rank, _, per_expert, in_rank, _ = layout
        self.received = self.buffer.dispatch(
            self.get_rows_to_send(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_worst_tokens=self.case.world_size * self.case.capacity,
        )

    def combine(self):
        return self.buffer.combine(self.y, self.received[4])[0]


class DeepEPLowLatency(DeepEPV1):
    """DeepEP V1's low-latency kernels: a row per token and expert, with weights applied in combine.

    The library quantizes rows itself.
    """

    name = "DeepEP V1 low latency"
    capturable = needs_fresh_ranks = few_tokens_only = True

    def setup(self):
        Buffer = import_module("deep_ep").Buffer
        case = self.case
        self.max_tokens = -(-case.capacity // 4) * 4
        sizes = self.max_tokens, case.hidden, case.world_size, case.experts
        nbytes = Buffer.get_low_latency_rdma_size_hint(*sizes)
        self.buffer = Buffer(
            self.context.group,
            0,
            nbytes,
            low_latency_mode=True,
            num_qps_per_rank=self.local,
            explicitly_destroy=True,
        )

    def dispatch(self):
        self.received = self.buffer.low_latency_dispatch(
            self.x, self.ids, self.max_tokens, self.case.experts, use_fp8=self.fp8
        )

    def identity(self):
        rows = self.received[0]
        self.store_output(dequantize(*rows, BLOCK) if self.fp8 else rows.clone())

    def combine(self):
        handle = self.received[2]
        return self.buffer.low_latency_combine(self.y, self.ids, self.weights, handle)[0]


class DeepEPV2(DeepEPPerRank):
    """DeepEP V2's ElasticBuffer."""

    name = "DeepEP V2"

    def refusal(self, case):
        if not hasattr(import_module("deep_ep"), "ElasticBuffer"):
            return "this deep_ep is V1"
        return super().refusal(case)

    def setup(self):
        deep_ep, case = import_module("deep_ep"), self.case
        self.ids_dtype = deep_ep.topk_idx_t
        self.buffer = deep_ep.ElasticBuffer(
            self.context.group,
            num_max_tokens_per_rank=case.capacity,
            hidden=case.hidden,
            num_topk=case.top_k,
            use_fp8_dispatch=self.fp8,
            explicitly_destroy=True,
        )

    def load(self, inputs):
        super().load(inputs)
        self.ids = self.ids.to(self.ids_dtype)

    def dispatch(self):
        self.received = self.buffer.dispatch(
            self.get_rows_to_send(),
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_experts=self.case.experts,
            num_max_tokens_per_rank=self.case.capacity,
            num_sms=self.sms,
            do_cpu_sync=False,
        )

    def combine(self):
        return self.buffer.combine(self.y, self.received[3], num_sms=self.sms)[0]


class Pplx(TransportPeer):
    """pplx-kernels within a host: a row per token and expert, with weights applied in combine."""

    name = "pplx-kernels"
    capturable = needs_fresh_ranks = few_tokens_only = True
    note = "rows quantized before the dispatch"

    def setup(self):
        case, context = self.case, self.context
        # The library exchanges handles on the CPU.
        backend = "cpu:gloo,cuda:nccl" if context.device.type == "cuda" else "gloo"
        self.group = dist.new_group(list(range(case.world_size)), backend=backend)
        # Scales are transferred in units of 16 bytes, so their columns are padded.
        self.columns = -(-(case.hidden // BLOCK) // 4) * 4 if self.fp8 else 0
        self.all2all = import_module("pplx_kernels.all_to_all").AllToAll.intranode(
            max_num_tokens=case.capacity,
            num_experts=case.experts,
            experts_per_token=case.top_k,
            rank=context.rank,
            world_size=case.world_size,
            dp_size=1,
            hidden_dim=case.hidden,
            hidden_dim_bytes=case.hidden * (1 if self.fp8 else 2),
            hidden_dim_scale_bytes=4 * self.columns,
            group_name=self.group.group_name,
        )
        rows = self.local, case.capacity * case.world_size
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        self.counts = torch.empty(self.local, dtype=torch.int32, device=context.device)
        self.received_rows = torch.empty(*rows, case.hidden, dtype=dtype, device=context.device)
        self.scale = None
        if self.fp8:
            self.scale = torch.empty(
                *rows, self.columns, dtype=torch.float32, device=context.device
            )

    def load(self, inputs):
        super().load(inputs)
        self.ids = self.ids.to(torch.uint32)
        if self.fp8:
            rows, scale = self.rows
            self.rows = rows, torch.nn.functional.pad(scale, (0, self.columns - scale.shape[1]))
        self.out = torch.empty_like(self.x)

    def dispatch(self):
        rows, scale = self.rows if self.fp8 else (self.x, None)
        self.all2all.dispatch(
            out_expert_num_tokens=self.counts,
            out_expert_x=self.received_rows,
            out_expert_x_scale=self.scale,
            dp_x=rows,
            dp_x_scale=scale,
            indices=self.ids,
            bound_m=None,
        )

    def identity(self):
        self.store_output(
            dequantize(self.received_rows, self.scale, BLOCK)
            if self.fp8
            else self.received_rows.clone()
        )

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
    """Return the transports whose modules are installed."""
    peers = [Nccl(per_pair=False), Nccl(per_pair=True)]
    if find_spec("deep_ep") is not None:
        peers += [
            DeepEPHighThroughput(20),
            DeepEPHighThroughput(20, quantizes=True),
            DeepEPHighThroughput(96),
        ]
        peers += [DeepEPLowLatency(), DeepEPV2(22), DeepEPV2(22, quantizes=True), DeepEPV2(64)]
    if find_spec("pplx_kernels") is not None:
        peers += [Pplx()]
    return peers
