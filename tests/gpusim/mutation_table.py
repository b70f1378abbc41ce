"""The faults that `mutations` puts into the package's kernels: what becomes of a line, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in one file of csrc, for some of the .cu files in kernels/instances."""

    file: str
    old: str
    new: str
    instances: tuple[str, ...]
    tests: tuple[str, ...]  # arguments of pytest
    times: int = 1  # how often `old` occurs


MMA = (("matmul_fp16",), ("tests/test_matmul.py", "-k", "fp16"))
TF32 = (("matmul_tf32",), ("tests/test_matmul.py", "-k", "tf32"))
FP32 = (("matmul_fp32",), ("tests/test_matmul.py", "-k", "fp32"))
QKV = (("qkv_split",), ("tests/test_qkv_split.py",))
_SOFTMAX_TESTS = (
    "tests/test_masked_softmax.py",
    "-m",
    "not slow",
    "-k",
    "not more_rows_than_a_grid_axis and not float64",
)
SOFTMAX = (("masked_softmax_float",), _SOFTMAX_TESTS)
BACKWARD = (("masked_softmax_backward_float",), _SOFTMAX_TESTS)
_FUSED_TESTS = ("tests/test_fused.py", "-k", "float16 or group or strides or same_bits")
FUSED_FORWARD = (("attention_fwd_fp16",), ("tests/test_attention_fwd_sm80.py", *_FUSED_TESTS))
FUSED_BACKWARD = (("attention_bwd_fp16",), ("tests/test_attention_bwd_sm80.py", *_FUSED_TESTS))

MUTATIONS = {
    # synchronisation
    "matmul_mma: barrier before the free stage is refilled": Mutation(
        "kernels/matmul_mma.cuh", "__syncthreads();                    // ... all of them", "// ... all of them", *MMA
    ),
    "matmul_mma: wait for one group too few": Mutation(
        "kernels/matmul_mma.cuh", "cp_async_wait<kStages - 2>()", "cp_async_wait<kStages - 1>()", *MMA
    ),
    "matmul_mma: commit only where there was a load": Mutation(
        "kernels/matmul_mma.cuh",
        "      --loads_left;\n    }\n    ptx::cp_async_commit();",
        "      --loads_left;\n      ptx::cp_async_commit();\n    }",
        *MMA,
    ),
    "matmul_mma: refills the stage being read": Mutation(
        "kernels/matmul_mma.cuh", "load_next(shared.stage[free_stage])", "load_next(shared.stage[stage])", *MMA
    ),
    "matmul_simt: barrier before the free stage is refilled": Mutation(
        "kernels/matmul_simt.cuh", "__syncthreads();                    // ... all of them", "// ... all of them", *FP32
    ),
    "reduction: barrier before the partial results are read": Mutation(
        "device/warp.h", "    __syncthreads();\n    value = scratch[0];", "    value = scratch[0];", *SOFTMAX
    ),
    "reduction: barrier before the partial results are overwritten": Mutation(
        "device/warp.h", "__syncthreads();  // scratch may be written again", "", *SOFTMAX
    ),
    # bounds and fills
    "matmul_mma: one line too many": Mutation(
        "kernels/matmul_mma.cuh", "pass_line < lines_left ? bytes : 0", "pass_line <= lines_left ? bytes : 0", *MMA
    ),
    "matmul_mma: no zeros behind the last column": Mutation(
        "kernels/matmul_mma.cuh", "max(0, min(cols_left, Tile::kChunkElements))", "Tile::kChunkElements", *MMA
    ),
    "matmul_mma: unaligned rows without zeros": Mutation(
        "kernels/matmul_mma.cuh", "pass_line < lines_left && i < cols_left ?", "pass_line < lines_left ?", *MMA
    ),
    "matmul_mma: stores one row too many": Mutation(
        "kernels/matmul_mma.cuh", "if (row < rows_left)", "if (row <= rows_left)", *MMA
    ),
    "matmul: vectors stored whatever their alignment": Mutation(
        "device/types.h", "if (aligned && inside >= kCount)", "if (inside >= kCount)", *MMA
    ),
    "matmul_simt: one line too many": Mutation(
        "kernels/matmul_simt.cuh",
        "col_inside && pass_line < lines_left",
        "col_inside && pass_line <= lines_left",
        *FP32,
    ),
    "masked_softmax: one column too many": Mutation(
        "kernels/row_tile.cuh",
        "if (column < end) row[column] = convert<T>",
        "if (column <= end) row[column] = convert<T>",
        *SOFTMAX,
    ),
    "qkv_merge: the last chunk is a whole one": Mutation(
        "kernels/qkv_split.cuh",
        "first_row + rows_per_chunk < rows ? first_row + rows_per_chunk : rows",
        "first_row + rows_per_chunk",
        *QKV,
    ),
    # layouts
    "matmul_mma: swizzle dropped where tiles are written": Mutation(
        "kernels/matmul_mma.cuh",
        "offset(Tile::offset(line, threadIdx.x % Tile::kChunks))",
        "offset(line * Tile::kLineBytes + threadIdx.x % Tile::kChunks * kChunkBytes)",
        *MMA,
    ),
    "matmul_mma: no swizzle at all": Mutation(
        "device/swizzle.h",
        "return chunk ^ ((row >> 1) & 3);",
        "return chunk;",
        MMA[0],
        ("tests/test_counters.py", "-k", "fp16"),
    ),
    "qkv_split: element by element": Mutation(
        "kernels/qkv_split.cuh",
        "if (aligned(kPack)) {",
        "if (false) {",
        QKV[0],
        ("tests/test_counters.py", "-k", "qkv"),
    ),
    "matmul_simt: swizzle dropped where tiles are read": Mutation(
        "kernels/matmul_simt.cuh", "Tile::column(k, mn) + v /", "mn + v /", *FP32
    ),
    "fragments: quarters of A numbered along k": Mutation(
        "device/fragment.h",
        "return kOperand == Operand::kA ? reg & 1 : reg >> 1;",
        "return reg >> 1;",
        *MMA,
    ),
    "matmul_mma: outputs exchanged with the wrong lane": Mutation(
        "kernels/matmul_mma.cuh", "odd ? left : right, 1)", "odd ? left : right, 2)", *MMA
    ),
    "qkv_split: the last query head counts as key": Mutation(
        "kernels/qkv_split.cuh", "part = packed_head < num_heads_q ?", "part = packed_head < num_heads_q - 1 ?", *QKV
    ),
    # heads and batches
    "matmul: divisor of the other operand's heads": Mutation(
        "kernels/matmul_mma.cuh",
        "b_head = tile.head * p.group_sum / p.b_divisor",
        "b_head = tile.head * p.group_sum / p.a_divisor",
        *MMA,
    ),
    "matmul: sum over the group misses one head": Mutation(
        "kernels/matmul_mma.cuh",
        "steps = int64_t{p.group_sum} * tiles_k",
        "steps = int64_t{p.group_sum - (p.group_sum > 1)} * tiles_k",
        *MMA,
    ),
    "matmul: the next head of the group begins one tile late": Mutation(
        "kernels/matmul_tiles.cuh",
        "kBytes - tiles_k * walk.tile_bytes",
        "kBytes - (tiles_k - 1) * walk.tile_bytes",
        *MMA,
    ),
    "mask: key length of the first batch": Mutation(
        "attention/mask.h", "params.key_lengths[b]", "params.key_lengths[0]", *SOFTMAX
    ),
    "qkv_merge: no step to the next batch": Mutation(
        "kernels/qkv_split.cuh", "        source += batch_step;\n", "", *QKV
    ),
    "qkv_split: bias of the first columns": Mutation(
        "kernels/qkv_split.cuh",
        "static_cast<const T*>(params.bias) + column",
        "static_cast<const T*>(params.bias)",
        *QKV,
    ),
    # arithmetic
    "matmul: scale applied twice": Mutation(
        "kernels/matmul_mma.cuh", "static_cast<float>(p.alpha)", "static_cast<float>(p.alpha * p.alpha)", *MMA
    ),
    "matmul: TF32 cut off, not rounded": Mutation(
        "kernels/matmul_mma.cuh", "word = ptx::cvt_rna_tf32(word)", "word = word & 0xffffe000u", *TF32
    ),
    "mask: comparison flipped": Mutation(
        "attention/mask.h",
        "return visible ? score : -kInfinity<T>;",
        "return visible ? -kInfinity<T> : score;",
        *SOFTMAX,
    ),
    "mask: window ends one key early": Mutation(
        "attention/mask.h", "clamp(params.window_right, 0, kFar) + 1", "clamp(params.window_right, 0, kFar)", *SOFTMAX
    ),
    "mask: window begins one key late": Mutation(
        "attention/mask.h", "begin = clamp(rule.position -", "begin = clamp(rule.position + 1 -", *SOFTMAX
    ),
    "masked_softmax: sum and lse without the sink": Mutation(
        "kernels/masked_softmax.cuh", "result(shift, sum + exp(sink - shift))", "result(shift, sum)", *SOFTMAX, times=2
    ),
    "masked_softmax: ALiBi pulls towards the distant": Mutation(
        "kernels/masked_softmax.cuh", "-= rule.slope * rule.distance", "+= rule.slope * rule.distance", *SOFTMAX
    ),
    "masked_softmax: sum not rescaled to the new maximum": Mutation(
        "attention/online_softmax.h", "sum *= std::exp(max - softmax_shift(new_max));", "", *SOFTMAX
    ),
    "dropout: the word of the other query": Mutation(
        "kernels/row_tile.cuh", "upper_query ? random.word[2]", "!upper_query ? random.word[2]", *SOFTMAX
    ),
    "dropout: what is kept is not scaled": Mutation(
        "kernels/row_tile.cuh",
        "keep ? tile[vec][element] * scale : Acc(0)",
        "keep ? tile[vec][element] : Acc(0)",
        *SOFTMAX,
    ),
    "dropout: six rounds": Mutation("attention/dropout.h", "kRounds = 7", "kRounds = 6", *SOFTMAX),
    "masked_softmax_backward: no gradient of lse": Mutation(
        "kernels/masked_softmax_backward.cuh", "delta - grad_lse, params", "delta, params", *BACKWARD, times=2
    ),
    "masked_softmax_backward: no derivative of softcap": Mutation(
        "kernels/masked_softmax_backward.cuh", "grad * rule.capped_slope(scores[vec][element])", "grad", *BACKWARD
    ),
    "masked_softmax_backward: NaN under weights of 0": Mutation(
        "kernels/masked_softmax_backward.cuh", "if (weight != Acc(0)) sum +=", "sum +=", *BACKWARD
    ),
    "qkv_merge: bias gradient misses rows": Mutation(
        "kernels/qkv_split.cuh", "chunk * columns + column;", "column;", *QKV
    ),
    # fused attention, forward
    "attention_fwd: barrier before the values are overwritten": Mutation(
        "kernels/attention_fwd_sm80.cuh",
        "    __syncthreads();          // ... all of them, and nobody reads values any more\n",
        "",
        *FUSED_FORWARD,
    ),
    "attention_fwd: keys read before they are here": Mutation(
        "kernels/attention_fwd_sm80.cuh", "    ptx::cp_async_wait<0>();  // the keys are here ...\n", "", *FUSED_FORWARD
    ),
    "attention_fwd: values read before they are here": Mutation(
        "kernels/attention_fwd_sm80.cuh",
        "wait_for_values(bool follows) {\n  ptx::cp_async_wait<0>();\n",
        "wait_for_values(bool follows) {\n",
        *FUSED_FORWARD,
    ),
    "attention_fwd: reads one key too many": Mutation(
        "kernels/attention_fwd_sm80.cuh", "first + row < range.end &&", "first + row <= range.end &&", *FUSED_FORWARD
    ),
    "attention_fwd: a row sees one key too many": Mutation(
        "kernels/attention_fwd_scores.cuh", "k >= begin && k < end", "k >= begin && k <= end", *FUSED_FORWARD
    ),
    "attention_fwd: scale applied twice": Mutation(
        "kernels/attention_fwd_softmax.cuh",
        "const float unit = scale * kLog2E;",
        "const float unit = scale * scale * kLog2E;",
        *FUSED_FORWARD,
    ),
    "attention_fwd: sum not rescaled to the new maximum": Mutation(
        "kernels/attention_fwd_softmax.cuh", "sum[i][half] *= factor;", "", *FUSED_FORWARD
    ),
    "attention_fwd: weights packed in the order of rows": Mutation(
        "kernels/attention_fwd_sm80.cuh",
        "acc[2 * step + quarter_k<Operand::kA>(reg)][2 * quarter_row<Operand::kA>(reg)]",
        "acc[2 * step + quarter_row<Operand::kA>(reg)][2 * quarter_k<Operand::kA>(reg)]",
        *FUSED_FORWARD,
    ),
    "attention_fwd: a masked tile counts as whole": Mutation(
        "kernels/attention_query_tile.cuh",
        "keys.masked = (shown >> (keys.index - window) & 1) == 0;",
        "keys.masked = (shown >> (keys.index - window) & 1) != 0;",
        *FUSED_FORWARD,
    ),
    "attention_fwd: dropout of the other key": Mutation(
        "kernels/attention_fwd_scores.cuh",
        "acc[i][j + w % 2][w / 2 * 2 + e]",
        "acc[i][j + 1 - w % 2][w / 2 * 2 + e]",
        *FUSED_FORWARD,
    ),
    "attention_fwd: packed heads in the order of queries": Mutation(
        "kernels/attention_query_tile.cuh",
        "return row - query_of(row) * pack;",
        "return query_of(row) % pack;",
        *FUSED_FORWARD,
    ),
    # fused attention, backward
    "attention_bwd: barrier before P and dS of others are read": Mutation(
        "kernels/attention_bwd_sm80.cuh",
        "    __syncthreads();\n    if (next.block >= 0) fetch_row(next);",
        "    if (next.block >= 0) fetch_row(next);",
        *FUSED_BACKWARD,
    ),
    "attention_bwd: queries read before they are here": Mutation(
        "kernels/attention_bwd_sm80.cuh",
        "    ptx::cp_async_wait<0>();  // this step's tiles are here ...\n",
        "",
        *FUSED_BACKWARD,
    ),
    "attention_bwd: blocks add out of turn": Mutation(
        "kernels/ordered_sum.cuh", "if (lane == 0) ptx::wait_acquire(turn, mine.rank);", "", *FUSED_BACKWARD
    ),
    "attention_bwd: the last block does not add what came before": Mutation(
        "kernels/ordered_sum.cuh", "if (mine.rank > 0) {", "if (mine.rank > 0 && !mine.last) {", *FUSED_BACKWARD
    ),
    "attention_bwd: P of its own queries twice": Mutation(
        "kernels/attention_bwd_sm80.cuh",
        "shared.p_smem, warp_n * kWarpN, (warp_m ^ Config::kFirstOther) * kWarpM * 2, lane)",
        "shared.p_smem, warp_n * kWarpN, warp_m * kWarpM * 2, lane)",
        *FUSED_BACKWARD,
    ),
    "attention_bwd: one query too many sees a key": Mutation(
        "kernels/attention_bwd_scores.cuh",
        "ahead + key - query < width",
        "ahead + key - query <= width",
        *FUSED_BACKWARD,
    ),
    "attention_bwd: the first head of the group for all": Mutation(
        "kernels/attention_key_tile.cuh",
        "return head_kv * group + member;",
        "return head_kv * group + 0 * member;",
        *FUSED_BACKWARD,
    ),
    "attention_bwd: no derivative of softcap": Mutation(
        "kernels/attention_bwd_scores.cuh", "          grad *= tangent;\n", "", *FUSED_BACKWARD
    ),
    "attention_bwd: delta where dropout took the weight": Mutation(
        "kernels/attention_bwd_scores.cuh",
        "weight * (grad + mine.neg_delta);",
        "weight * (kept == 0.0f ? 0.0f : grad + mine.neg_delta);",
        *FUSED_BACKWARD,
    ),
    "attention_bwd: gradient of lse forgotten": Mutation(
        "kernels/attention_bwd_delta.cuh",
        "rowsum - (p.grad_lse ? p.grad_lse[at] : 0.0f)",
        "rowsum",
        ("attention_bwd_delta",),
        _FUSED_TESTS,
    ),
    "mask_blocks: keys beyond the last are visible": Mutation(
        "kernels/mask_blocks.cuh",
        "key < keys_left && is_visible(row[key * key_stride])",
        "key >= keys_left || is_visible(row[key * key_stride])",
        ("mask_blocks",),
        ("tests/test_mask_blocks.py",),
    ),
}
