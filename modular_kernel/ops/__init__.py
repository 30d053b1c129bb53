"""Operations of a mixture-of-experts layer other than GEMMs: route, sort, quantize, sum.

Most modules have a function that launches a Triton kernel from `modular_kernel.ops.kernels`, and a
torch reference with the suffix _ref. The function calls the reference for tensors that Triton
cannot process, for example on a CPU.

A pair is a token together with one of its K experts. Pair p of a routing (T, K) belongs to token p
// K. A pair is skipped if its expert id is -1, or if its expert is on another rank.

Suffixes of tensor names give the shape: T tokens, K experts per token, R rows, H the hidden size, I
the intermediate size, N the output columns of a GEMM, E all experts, e the experts on this rank, G
groups of columns with a common quantization scale.
"""
