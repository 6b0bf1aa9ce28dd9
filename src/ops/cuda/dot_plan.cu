/* dot_plan.cu - split_plan (expert/split.h) by one block: the same plan, bit for bit, and the device's tasks in it.
 *
 * A thread is a (row, rank) pair. Its expert is an entry of the plan where no earlier pair has it; entries are numbered by counting the
 * threads before.
 */
#include "ops/cuda/cuda_text.h"
#include "ops/cuda/dot_args.h"

enum { PLAN_WARPS = SPLIT_MAX / 32, COST_WORDS = sizeof(struct split_costs) / 4 };

/* How many threads before this one have the flag, and how many there are. `counts` is shared scratch; contains two barriers. */
DEVICE_FN int count_before(bool flag, int32_t *counts, int *total)
{
    uint32_t ballot = __ballot_sync(ALL_LANES, flag);
    int before = 0, all = 0;
    if (lane_id() == 0)
        counts[warp_id()] = __popc(ballot);
    __syncthreads();
    for (int w = 0; w < PLAN_WARPS; w++) {
        before += w < warp_id() ? counts[w] : 0;
        all += counts[w];
    }
    __syncthreads();
    *total = all;
    return before + __popc(ballot & ((1u << lane_id()) - 1));
}

DEVICE_FN uint64_t warp_least(uint64_t v)
{
    for (int h = 16; h; h >>= 1) {
        uint64_t other = __shfl_xor_sync(ALL_LANES, v, h);
        v = other < v ? other : v;
    }
    return v;
}

/* split_link_count: thread m-1 tries m. The serial loop takes the first m that ends earliest and before the limit, so the least (end, m) is it. */
DEVICE_FN int link_count(const struct split_costs *c, int hits, int misses, uint64_t *least)
{
    if (c->share >= 0)
        return split_link_count(c, hits, misses);
    int m = (int)threadIdx.x + 1;
    uint32_t alone = split_end(c, hits, misses, 0), end = split_end(c, hits, misses, m);
    uint64_t best = warp_least(m <= misses && end < alone - alone / 16 ? (uint64_t)end << 32 | (uint32_t)m : UINT64_MAX);
    if (lane_id() == 0)
        least[warp_id()] = best;
    __syncthreads();
    for (int w = 0; w < PLAN_WARPS; w++)
        best = least[w] < best ? least[w] : best;
    return best == UINT64_MAX ? 0 : (int)(uint32_t)best;
}

KERNEL_BOUNDS(dot_plan, SPLIT_MAX, 1)
{
    __shared__ int32_t ids[SPLIT_MAX], counts[PLAN_WARPS];
    __shared__ uint32_t costs[COST_WORDS], words[SPLIT_MAX], slots[SPLIT_MAX];
    __shared__ int32_t entry_of[SPLIT_MAX];
    __shared__ uint64_t least[PLAN_WARPS];
    __shared__ uint32_t places;
    int p = (int)threadIdx.x, n_pairs = a.n_rows * a.n_used, row = p / a.n_used, rank = p % a.n_used;
    bool exists = p < n_pairs;
    int expert = exists ? a.ids[row * a.stride + rank] : -1, slot = exists ? a.slot_of[expert] : 0;
    if (p < COST_WORDS)
        costs[p] = ((const volatile uint32_t *)(const volatile void *)a.costs)[p];
    ids[p] = expert;
    if (p == 0)
        places = 0;
    __syncthreads();
    if (exists)
        atomicAdd(&places, split_place(expert, row, rank));

    int first = p, earlier = 0, sharers = 0; /* the first pair with this expert, how many before this one, how many in all */
    for (int j = 0; j < n_pairs; j++) {
        bool same = ids[j] == expert;
        first = same && j < first ? j : first;
        earlier += same && j < p;
        sharers += same;
    }
    int n, n_hit;
    bool is_entry = exists && first == p, hit = is_entry && slot >= 0;
    int entry = count_before(is_entry, counts, &n);
    int hits_before = count_before(hit, counts, &n_hit), misses_before = entry - hits_before;
    entry_of[p] = entry;
    int misses = n - n_hit, n_link = link_count((const struct split_costs *)(const void *)costs, n_hit, misses, least), n_cpu = misses - n_link;
    int lane = hit ? LANE_HIT : misses_before < n_cpu ? LANE_CPU : LANE_LINK;
    __syncthreads();

    struct split *s = &a.plan->split;
    if (p == 0) {
        s->n = n;
        s->n_hit = n_hit;
        s->n_link = n_link;
        s->n_cpu = n_cpu;
        a.plan->n_tasks[LANE_HIT] = n_hit;
        a.plan->n_tasks[LANE_LINK] = n_link;
    }
    int order = hit ? hits_before : misses_before - n_cpu; /* of the task in its lane */
    if (is_entry) {
        s->expert[entry] = (uint16_t)expert;
        s->slot[entry] = slot;
        s->lane[entry] = (uint8_t)lane;
        s->n_rows[entry] = (uint8_t)sharers;
        words[entry] = (uint32_t)(uint16_t)expert << 8 | (uint32_t)lane << 4 | (uint8_t)sharers;
        slots[entry] = (uint32_t)slot;
        if (lane != LANE_CPU) {
            struct expert_task *task = &a.plan->tasks[lane][order];
            task->blob = hit ? a.slots + a.offsets[slot] : a.link + a.link_stride * (uint64_t)(a.link_staged ? order : expert);
            task->expert = expert;
            task->n_rows = sharers;
        }
        ids[p] = lane == LANE_CPU ? -1 : lane * SPLIT_MAX + order; /* from here on: the task of this entry */
    }
    __syncthreads();
    if (exists && earlier < SPLIT_ROWS) {
        s->row[entry_of[first]][earlier] = (uint8_t)row;
        s->rank[entry_of[first]][earlier] = (uint8_t)rank;
        if (ids[first] >= 0) {
            struct expert_task *task = &a.plan->tasks[ids[first] / SPLIT_MAX][ids[first] % SPLIT_MAX];
            task->row[earlier] = (uint8_t)row;
            task->rank[earlier] = (uint8_t)rank;
        }
    }
    if (p == 0 && a.sum) { /* split_sum */
        uint32_t sum = 2166136261u;
        for (int i = 0; i < n; i++)
            sum = (sum ^ words[i]) * 16777619u ^ slots[i];
        *a.sum = sum ^ places;
    }
}
