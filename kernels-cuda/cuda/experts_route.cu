// Sorts the routing of the experts of a layer.
//
// A token has `top_k` slots, each with the number of an expert and a weight. Rows are slots in the order of experts;
// those of an expert are in the order of slots. Slots whose number is not that of an expert have no row.

#include "ptx.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
// An index that no row has.
constexpr u32 NO_ROW = 0xffffffffu;

// The number of a slot's expert; `count` if it has none.
INLINE u32 expert_of(const u32 *experts, u32 slot, u32 count) { return min(experts[slot], count); }

// A warp finds the rows of an expert: it counts the slots of the experts before, and then places the expert's own. One
// more warp finds the slots without an expert. Nothing depends on the order in which warps run.
//
// experts: [slots], weights: [slots]
// starts: [count + 1], the first row of each expert, and the number of rows
// token_of: [slots], factors: [slots], the token and the weight of each row
// row_of: [slots], the rows of each token, in ascending order, then NO_ROW for slots without an expert
extern "C" __global__ void __launch_bounds__(THREADS)
    route_experts(const u32 *experts, const float *weights, u32 *starts, u32 *token_of, float *factors, u32 *row_of,
                  u32 slots, u32 top_k, u32 count) {
    const u32 lane = threadIdx.x % 32, expert = blockIdx.x * WARPS + threadIdx.x / 32;
    if (expert > count) return;
    u32 row = 0;
#pragma unroll 4
    for (u32 base = 0; base < slots; base += 32) {
        const u32 slot = base + lane;
        row += __popc(__ballot_sync(ALL_LANES, slot < slots && expert_of(experts, slot, count) < expert));
    }
    if (lane == 0) starts[expert] = row;
    for (u32 base = 0; base < slots; base += 32) {
        const u32 slot = base + lane;
        const bool is_own = slot < slots && expert_of(experts, slot, count) == expert;
        const u32 own = __ballot_sync(ALL_LANES, is_own);
        if (is_own) {
            const u32 token = slot / top_k, first = token * top_k;
            u32 place = first;
            for (u32 other = first; other < first + top_k; other++) {
                const u32 number = expert_of(experts, other, count);
                if (number < expert || (number == expert && other < slot)) place++;
            }
            const u32 at = row + __popc(own & ((1u << lane) - 1));
            row_of[place] = expert < count ? at : NO_ROW;
            if (expert < count) {
                token_of[at] = token;
                factors[at] = weights[slot];
            }
        }
        row += __popc(own);
    }
}
