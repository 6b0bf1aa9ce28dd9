#include "expert/lanes.h"

#include "base/pool.h"
#include "expert/profile.h"
#include "expert/trace.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { N_TIMES = N_LANES + 1, ALL_LANES = N_LANES };

struct samples { float us[LANES_SAMPLES]; unsigned n; };

/* What a layer's lanes did, over the run. */
struct layer_record {
    uint64_t experts[N_LANES];
    struct samples times[N_TIMES];
};

struct expert_lanes {
    const struct expert_store *store;
    int n_layers, n_experts, n_used;
    struct ops *host;
    struct expert_device *device;
    struct lanes_options options;
    struct residency *residency; /* without a device: of no slots, it only counts */
    struct controller controller;
    int *class; /* [n_layers]: layers of equal blobs */
    struct trace_writer *trace;
    struct layer_record *records; /* [n_layers] */
    bool *changed;                /* [n_layers]: its table is not on the device yet */

    /* The window. */
    uint64_t window;
    int n_rows, next_layer; /* the layer whose ring is awaited */
    bool probing;
    int *n_link, *n_hit, *n_cpu; /* [n_layers], of this window */
    int32_t (*ids)[SPLIT_ROWS][SPLIT_USED]; /* [n_layers], of this window */
    struct split split;
    struct expert_job jobs[SPLIT_MAX];
    int (*body)(void *context);
    void *body_context;
    int body_code;

    int code; /* a lane hangs or the device failed: nothing runs any more */
    bool lost; /* ... and did not come back */
    struct strata_error error;
    uint64_t stress;
    pthread_t caller; /* of lanes_window */
    int stalled, stall_over; /* atomic: a worker of a test's hung cpu lane hangs; it may go on */
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static const struct expert_set *set_of(const struct expert_lanes *l, int layer) { return l->store->sets[layer]; }
static const int32_t *table_of(const struct expert_lanes *l, int layer) { return residency_table(l->residency, layer); }

static void sample(struct expert_lanes *l, int layer, int what, uint64_t ns)
{
    struct samples *s = &l->records[layer].times[what];
    s->us[s->n++ % LANES_SAMPLES] = (float)ns * 1e-3f;
}

/* ---- The cpu lane ------------------------------------------------------------------------------------------------------------------ */

static int lane_hangs(struct expert_lanes *l, int layer, const char *lane, int expert)
{
    l->code = error_set(&l->error, STRATA_E_STALLED, "layer %d: the %s lane has hung at expert %d (nothing moved for %g s)", layer, lane, expert,
                        l->options.watchdog_s);
    return l->code;
}

/* Computes the plan's experts of the cpu lane. */
static int compute(struct expert_lanes *l, int layer, const struct activations *x, float *parts)
{
    const struct expert_set *set = set_of(l, layer);
    int n = 0;
    for (int i = 0; i < l->split.n; i++) {
        if (l->split.lane[i] != LANE_CPU)
            continue;
        struct expert_job *job = &l->jobs[n++];
        *job = (struct expert_job){ .expert = l->split.expert[i], .n_rows = l->split.n_rows[i], .blob = set->blobs + l->split.expert[i] * set->blob_bytes };
        memcpy(job->row, l->split.row[i], sizeof job->row);
        memcpy(job->rank, l->split.rank[i], sizeof job->rank);
    }
    if (!n)
        return 0;
    uint64_t start = now_ns();
    int stalled = ops_cpu_experts(l->host, l->n_used, set, x, l->jobs, n, parts, l->options.watchdog_s);
    if (stalled >= 0)
        return lane_hangs(l, layer, "cpu", l->jobs[stalled].expert);
    uint64_t ns = now_ns() - start;
    if (!l->probing)
        sample(l, layer, LANE_CPU, ns);
    if (l->device)
        controller_learn(&l->controller, l->class[layer], l->n_rows, l->split.n_link ? COST_CPU : COST_ALONE, n, (double)ns);
    return 0;
}

/* What every layer is noted for, whoever computes it. */
static void note(struct expert_lanes *l, int layer, const int32_t *ids, int stride)
{
    l->n_cpu[layer] = l->split.n_cpu;
    for (int t = 0; t < l->n_rows; t++)
        memcpy(l->ids[layer][t], ids + t * stride, (size_t)l->n_used * sizeof *ids);
}

/* Of a whole window. One that failed on the way counts nowhere: the tables, the statistics and the trace know the same windows. */
static void count(struct expert_lanes *l)
{
    for (int i = 0; i < l->n_layers; i++) {
        l->records[i].experts[LANE_CPU] += (uint64_t)l->n_cpu[i];
        residency_use(l->residency, i, l->ids[i][0], SPLIT_USED, l->n_rows, l->n_used);
        if (l->trace)
            trace_writer_layer(l->trace, l->ids[i][0], SPLIT_USED, l->n_rows);
    }
    if (l->trace)
        trace_writer_window(l->trace, true);
}

/* The ops entry of a model without a device. */
static void experts_on_host(struct ops *ops, int n, int n_used, const struct expert_set *set, const struct activations *x, const struct route *route,
                            float *parts)
{
    struct expert_lanes *l = ops->expert_backend;
    if (l->code)
        return;
    split_plan(&l->split, route->ids[0], OPS_MAX_USED, n, n_used, table_of(l, set->layer), &(struct split_costs){ .share = 0 });
    note(l, set->layer, route->ids[0], OPS_MAX_USED);
    compute(l, set->layer, x, parts);
}

static void nothing_to_wait_for(struct ops *ops, int n, int n_used, const struct expert_set *set, float *parts) {}

/* ---- Serving a device -------------------------------------------------------------------------------------------------------------- */

/* The device rang for next_layer: plan, compute, answer. */
static int serve(struct expert_lanes *l)
{
    struct expert_mailbox *box = l->device->mailbox;
    int layer = l->next_layer++;
    const struct mailbox_layer *there = &box->layers[layer];
    split_plan(&l->split, there->ids[0], SPLIT_USED, l->n_rows, l->n_used, table_of(l, layer), &there->costs);
    if (split_sum(&l->split) != there->split_sum)
        return l->code = error_set(&l->error, STRATA_E_STALLED, "layer %d: host and device disagree about who computes which expert (a bug in Strata)", layer);
    l->n_hit[layer] = l->split.n_hit;
    l->n_link[layer] = l->split.n_link;
    stress_pause(&l->stress, l->options.delay_us);
    int code = l->split.n_cpu ? compute(l, layer, &box->x, box->parts) : 0;
    if (code)
        return code;
    stress_pause(&l->stress, l->options.delay_us);
    mailbox_store(&box->answered, l->window * (uint64_t)l->n_layers + (uint64_t)layer + 1);
    note(l, layer, there->ids[0], SPLIT_USED); /* after the answer: the device need not wait for it */
    return 0;
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits until check() says so; false when nothing changed for the watchdog's time. `progress` is what must change meanwhile. */
static bool device_idle(struct expert_lanes *l, bool (*check)(struct expert_lanes *), uint64_t (*progress)(struct expert_lanes *))
{
    uint64_t last = progress(l), since = now_ns();
    for (unsigned i = 1; !check(l); i++) {
        pause_cpu();
        if (i % 64)
            continue;
        sched_yield(); /* where there are fewer cores than threads, the device needs this one */
        if (i % 1024)
            continue;
        uint64_t at = progress(l), time = now_ns();
        if (at != last) {
            last = at;
            since = time;
        } else if ((double)(time - since) * 1e-9 > l->options.watchdog_s) {
            return false;
        }
    }
    return true;
}

static bool rung_or_finished(struct expert_lanes *l)
{
    return mailbox_load(&l->device->mailbox->rung) > l->window * (uint64_t)l->n_layers + (uint64_t)l->next_layer || l->device->finished(l->device, NULL);
}
static uint64_t device_progress(struct expert_lanes *l) { return mailbox_load(&l->device->mailbox->rung) ^ mailbox_load(&l->device->mailbox->at) << 20; }
static bool copies_landed(struct expert_lanes *l) { return l->device->landed(l->device); }
static bool device_finished(struct expert_lanes *l) { return l->device->finished(l->device, NULL) != 0; }
static uint64_t no_progress(struct expert_lanes *l) { return 0; }

/* The device stands still: says where, and asks it to give up. */
static void device_hangs(struct expert_lanes *l)
{
    static const char *const names[N_LANES] = { "hit", "link", "cpu" };
    struct expert_mailbox *box = l->device->mailbox;
    uint64_t at = mailbox_load(&box->at);
    int lane = (int)(at >> 32), layer = l->next_layer > 0 ? l->next_layer - 1 : 0; /* the last one that rang */
    if (lane < N_LANES && (lane != LANE_CPU))
        lane_hangs(l, layer, names[lane], (int)(uint32_t)at);
    else
        l->code = error_set(&l->error, STRATA_E_STALLED, "layer %d: the device has hung between two layers (nothing moved for %g s)", layer, l->options.watchdog_s);
}

static void run_body(void *context)
{
    struct expert_lanes *l = context;
    l->body_code = l->body(l->body_context);
}

/* Runs the window on the device and serves it; costs and rows are in the mailbox. */
static int device_window(struct expert_lanes *l)
{
    struct expert_device *d = l->device;
    d->launch(d, run_body, l);
    for (;;) {
        if (!device_idle(l, rung_or_finished, device_progress)) {
            device_hangs(l);
            break;
        }
        uint64_t rung = mailbox_load(&d->mailbox->rung), base = l->window * (uint64_t)l->n_layers;
        if (rung <= base + (uint64_t)l->next_layer)
            break; /* finished, and every ring was served */
        while (!l->code && l->next_layer < l->n_layers && rung > base + (uint64_t)l->next_layer)
            serve(l);
        if (l->code)
            break;
    }
    if (l->code) {
        mailbox_store(&d->mailbox->abort, 1);
        l->options.watchdog_s = 5; /* for the device to give up */
        l->lost = !device_idle(l, device_finished, no_progress);
        return l->code;
    }
    int finished = d->finished(d, &l->error);
    if (finished < 0)
        l->code = finished;
    return l->code;
}

/* Learns what the device's lanes took. */
static void learn(struct expert_lanes *l)
{
    for (int i = 0; i < l->n_layers; i++) {
        const struct mailbox_layer *there = &l->device->mailbox->layers[i];
        int hits = l->n_hit[i], links = l->n_link[i];
        if (hits + links)
            controller_learn(&l->controller, l->class[i], l->n_rows, COST_HIT, hits + links, there->hit_ns);
        if (links)
            controller_learn(&l->controller, l->class[i], l->n_rows, COST_LINK, links, there->link_ns);
        if (l->probing)
            continue;
        if (hits)
            sample(l, i, LANE_HIT, there->hit_ns);
        if (links)
            sample(l, i, LANE_LINK, there->link_ns);
        sample(l, i, ALL_LANES, there->layer_ns);
        l->records[i].experts[LANE_HIT] += (uint64_t)hits;
        l->records[i].experts[LANE_LINK] += (uint64_t)links;
    }
}

/* One layer of every eighth window is split as it would not be, so that no line of the costs grows old: without the link, or with one expert
 * on it. On the slowest link that costs 0.5 % of the time at most. */
enum { EXPLORE_WINDOWS = 8 };

static void set_costs(struct expert_lanes *l)
{
    struct expert_mailbox *box = l->device->mailbox;
    for (int i = 0; i < l->n_layers; i++) {
        struct split_costs *costs = &box->layers[i].costs;
        *costs = controller_costs(&l->controller, l->class[i], l->n_rows);
        if (l->options.share >= 0)
            costs->share = l->options.share;
    }
    uint64_t turn = l->window / EXPLORE_WINDOWS;
    if (l->options.share < 0 && l->window % EXPLORE_WINDOWS == 0)
        box->layers[turn % (uint64_t)l->n_layers].costs.share = turn / (uint64_t)l->n_layers % 2 ? SPLIT_COUNT + 1 : 0;
}

static void upload_tables(struct expert_lanes *l)
{
    for (int i = 0; i < l->n_layers; i++)
        if (l->changed[i]) {
            l->device->set_table(l->device, i, table_of(l, i));
            l->changed[i] = false;
        }
}

/* Waits for copies under way. */
static int land(struct expert_lanes *l)
{
    if (device_idle(l, copies_landed, no_progress))
        return 0;
    l->lost = true;
    return l->code = error_set(&l->error, STRATA_E_STALLED, "a copy of experts to the device has hung (nothing moved for %g s)", l->options.watchdog_s);
}

static int begin(struct expert_lanes *l, int n_rows)
{
    l->n_rows = n_rows;
    l->caller = pthread_self();
    l->body_code = 0;
    l->next_layer = 0;
    l->window++;
    if (!l->device)
        return 0;
    struct expert_mailbox *box = l->device->mailbox;
    box->window = l->window;
    box->n_rows = n_rows;
    memset(l->n_hit, 0, (size_t)l->n_layers * sizeof *l->n_hit);
    memset(l->n_link, 0, (size_t)l->n_layers * sizeof *l->n_link);
    if (!l->probing && residency_due(l->residency)) {
        int code = land(l);
        if (code)
            return code;
        residency_admit(l->residency);
        memset(l->changed, true, (size_t)l->n_layers * sizeof *l->changed);
    }
    upload_tables(l);
    set_costs(l);
    return 0;
}

static void start_swaps(struct expert_lanes *l)
{
    const struct residency_swap *swaps;
    int n = residency_end(l->residency, &swaps); /* none without slots */
    for (int i = 0; i < n; i++) {
        const struct expert_set *set = set_of(l, swaps[i].layer);
        l->device->copy(l->device, swaps[i].offset, set->blobs + (size_t)swaps[i].expert * set->blob_bytes, set->blob_bytes);
    }
    if (n) /* a victim may be of another layer than the newcomer */
        memset(l->changed, true, (size_t)l->n_layers * sizeof *l->changed);
}

int lanes_window(struct expert_lanes *l, int n_rows, int (*body)(void *context), void *context, struct strata_error *error)
{
    l->body = body;
    l->body_context = context;
    int code = l->code ? l->code : begin(l, n_rows);
    if (!code && l->device)
        code = device_window(l);
    else if (!code)
        run_body(l);
    code = l->code;
    if (code)
        return error_set(error, code, "%s", l->error.text);
    if (l->body_code)
        return l->body_code;
    if (l->device)
        learn(l);
    count(l);
    start_swaps(l);
    return 0;
}

/* ---- Before the first window ------------------------------------------------------------------------------------------------------- */

/* Copies the seeded experts into their slots. */
static int fill_slots(struct expert_lanes *l, bool (*progress)(void *, double), void *progress_context, struct strata_error *error)
{
    int n = residency_slots(l->residency), done = 0;
    for (int i = 0; i < l->n_layers; i++) {
        const struct expert_set *set = set_of(l, i);
        for (int e = 0; e < l->n_experts; e++) {
            int32_t slot = table_of(l, i)[e];
            if (slot < 0)
                continue;
            l->device->copy(l->device, residency_offset(l->residency, slot), set->blobs + (size_t)e * set->blob_bytes, set->blob_bytes);
            if (++done % 64 && done < n)
                continue;
            if (land(l))
                return error_set(error, l->code, "%s", l->error.text);
            if (progress && !progress(progress_context, (double)done / n))
                return error_set(error, STRATA_E_STOPPED, "filling the expert cache was stopped");
        }
    }
    return 0;
}

struct probe {
    struct expert_lanes *l;
    int layer;
    struct activations x;
    struct route route;
    float *parts;
};

static int probe_body(void *context)
{
    struct probe *p = context;
    struct ops *ops = p->l->device->ops;
    ops->experts(ops, 1, p->l->n_used, set_of(p->l, p->layer), &p->x, &p->route, p->parts);
    ops->experts_wait(ops, 1, p->l->n_used, set_of(p->l, p->layer), p->parts);
    return 0;
}

/* One window of one layer per share and class, with experts that no cache holds: the costs to start from. */
static int measure(struct expert_lanes *l, struct strata_error *error)
{
    static const int shares[] = { 0, 0, 0, 128, 256, SPLIT_COUNT + 1, 128, 0 };
    size_t hidden = (size_t)ops_padded(set_of(l, 0)->hidden);
    float *memory = calloc(hidden * (4 + (size_t)l->n_used), sizeof *memory);
    if (!memory)
        return error_set(error, STRATA_E_MEMORY, "out of memory for measuring the lanes");
    struct probe p = { .l = l, .parts = memory + 4 * hidden };
    p.x = (struct activations){ set_of(l, 0)->hidden, memory, (int8_t *)(memory + hidden), memory + 2 * hidden, (int32_t *)(memory + 3 * hidden) };
    int code = 0, next = 0, share = l->options.share;
    l->probing = true;
    for (int class = 0; !code && class < l->controller.n_classes; class ++)
        for (size_t i = 0; !code && i < sizeof shares / sizeof *shares; i++) {
            p.layer = 0;
            while (l->class[p.layer] != class)
                p.layer++;
            for (int k = 0; k < l->n_used; k++)
                p.route.ids[0][k] = next++ % l->n_experts;
            l->options.share = shares[i];
            code = begin(l, 1);
            l->next_layer = p.layer;
            l->body = probe_body;
            l->body_context = &p;
            code = code ? code : device_window(l);
            if (!code)
                learn(l);
        }
    l->probing = false;
    l->options.share = share;
    free(memory);
    return code ? error_set(error, code, "%s", l->error.text) : 0;
}

static void find_classes(struct expert_lanes *l, int *n_classes)
{
    *n_classes = 0;
    for (int i = 0; i < l->n_layers; i++) {
        int same = 0;
        while (same < i && set_of(l, same)->blob_bytes != set_of(l, i)->blob_bytes)
            same++;
        l->class[i] = same < i ? l->class[same] : (*n_classes)++;
    }
}

/* A test's hung cpu lane: a worker's item of that layer does not end before the lanes are destroyed. The calling thread keeps the watch: it only
 * leaves a worker that is late the time to take an item. */
static void stalled_item(void *context)
{
    struct expert_lanes *l = context;
    stress_pause(&(uint64_t){ now_ns() }, l->options.delay_us);
    int layer = l->device ? l->next_layer - 1 : l->options.stall_layer;
    if (!l->options.stall_cpu || l->probing || l->window < l->options.stall_window || layer != l->options.stall_layer)
        return;
    bool caller = pthread_equal(pthread_self(), l->caller);
    if (!caller)
        __atomic_store_n(&l->stalled, 1, __ATOMIC_RELEASE);
    for (int ms = 0; caller ? ms < 1000 && !__atomic_load_n(&l->stalled, __ATOMIC_ACQUIRE) : !__atomic_load_n(&l->stall_over, __ATOMIC_ACQUIRE); ms++)
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
}

static int open_trace(struct expert_lanes *l, const uint64_t *blob_bytes, struct strata_error *error)
{
    struct trace_header header = { .n_layers = l->n_layers, .n_experts = l->n_experts, .n_used = l->n_used, .blob_bytes = (uint64_t *)blob_bytes,
                                   .options = l->options.residency };
    return trace_writer_create(&l->trace, l->options.trace, &header, error);
}

int lanes_create(struct expert_lanes **out, const struct expert_store *store, int n_used, struct ops *host, struct expert_device *device,
                 const struct lanes_options *options, bool (*progress)(void *, double), void *progress_context, struct strata_error *error)
{
    struct expert_lanes *l = calloc(1, sizeof *l);
    int n_layers = store->n_layers, n_experts = store->sets[0]->n_experts, n_classes = 0, code = 0;
    uint64_t *blob_bytes = calloc((size_t)n_layers, sizeof *blob_bytes);
    float *profile = NULL;
    if (!l || !blob_bytes) {
        free(l);
        free(blob_bytes);
        if (device)
            device->destroy(device);
        return error_set(error, STRATA_E_MEMORY, "out of memory for the expert lanes");
    }
    *l = (struct expert_lanes){ .store = store, .n_layers = n_layers, .n_experts = n_experts, .n_used = n_used, .host = host, .device = device,
                                .options = *options, .stress = 1 };
    *out = l;
    l->class = calloc((size_t)n_layers, sizeof *l->class);
    l->records = calloc((size_t)n_layers, sizeof *l->records);
    l->n_link = calloc((size_t)n_layers, sizeof *l->n_link);
    l->n_hit = calloc((size_t)n_layers, sizeof *l->n_hit);
    l->n_cpu = calloc((size_t)n_layers, sizeof *l->n_cpu);
    l->ids = calloc((size_t)n_layers, sizeof *l->ids);
    l->changed = calloc((size_t)n_layers, sizeof *l->changed);
    if (!l->class || !l->records || !l->n_link || !l->n_hit || !l->n_cpu || !l->ids || !l->changed)
        code = error_set(error, STRATA_E_MEMORY, "out of memory for the expert lanes");
    for (int i = 0; i < n_layers; i++)
        blob_bytes[i] = set_of(l, i)->blob_bytes;
    host->expert_backend = l;
    host->experts = experts_on_host;
    host->experts_wait = nothing_to_wait_for;
    if (!code && (l->options.stall_cpu || l->options.delay_us))
        pool_hook(ops_cpu_pool(host), stalled_item, l);
    if (!code)
        find_classes(l, &n_classes);
    if (!code && controller_create(&l->controller, n_classes))
        code = error_set(error, STRATA_E_MEMORY, "out of memory for the expert lanes");
    if (!code && options->profile) {
        profile = calloc((size_t)n_layers * (size_t)n_experts, sizeof *profile);
        code = profile ? profile_read(options->profile, n_layers, n_experts, profile, error) : error_set(error, STRATA_E_MEMORY, "out of memory for the profile");
    }
    if (!device)
        l->options.residency.bytes = 0;
    struct residency_shape shape = { n_layers, n_experts, blob_bytes };
    code = code ? code : residency_create(&l->residency, &shape, &l->options.residency, profile, error);
    if (!code && options->trace)
        code = open_trace(l, blob_bytes, error);
    if (!code && device) {
        int n = residency_slots(l->residency);
        uint64_t *offsets = calloc((size_t)n + 1, sizeof *offsets);
        for (int slot = 0; offsets && slot < n; slot++)
            offsets[slot] = residency_offset(l->residency, slot);
        if (offsets)
            device->set_slots(device, n, offsets);
        else
            code = error_set(error, STRATA_E_MEMORY, "out of memory for the expert lanes");
        free(offsets);
        device->mailbox->n_layers = n_layers;
        device->mailbox->n_used = n_used;
        memset(l->changed, true, (size_t)n_layers * sizeof *l->changed);
        code = code ? code : fill_slots(l, progress, progress_context, error);
        code = code ? code : measure(l, error);
    }
    free(blob_bytes);
    free(profile);
    return code;
}

bool lanes_destroy(struct expert_lanes *l)
{
    if (!l)
        return true;
    __atomic_store_n(&l->stall_over, 1, __ATOMIC_RELEASE);
    lanes_close_trace(l, NULL);
    if (l->lost || pool_is_stalled(ops_cpu_pool(l->host)))
        return false; /* a thread may still use any of it: it stays */
    if (l->device)
        l->device->destroy(l->device);
    pool_hook(ops_cpu_pool(l->host), NULL, NULL);
    residency_destroy(l->residency);
    controller_destroy(&l->controller);
    free(l->class);
    free(l->records);
    free(l->n_link);
    free(l->n_hit);
    free(l->n_cpu);
    free(l->ids);
    free(l->changed);
    free(l);
    return true;
}

struct ops *lanes_ops(struct expert_lanes *l) { return l->device ? l->device->ops : l->host; }

int lanes_close_trace(struct expert_lanes *l, struct strata_error *error)
{
    int code = l->trace ? trace_writer_close(l->trace, error) : 0;
    l->trace = NULL;
    return code;
}

int lanes_save_profile(const struct expert_lanes *l, const char *path, struct strata_error *error)
{
    float *profile = calloc((size_t)l->n_layers * (size_t)l->n_experts, sizeof *profile);
    if (!profile)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the profile");
    residency_profile(l->residency, profile);
    int code = profile_write(path, l->n_layers, l->n_experts, profile, error);
    free(profile);
    return code;
}

/* ---- Statistics -------------------------------------------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b) { return *(const float *)a < *(const float *)b ? -1 : *(const float *)a > *(const float *)b; }

static struct lane_times times(const struct expert_lanes *l, int first, int last, int what)
{
    size_t n = 0;
    double sum = 0;
    float *all = malloc((size_t)(last - first) * LANES_SAMPLES * sizeof *all);
    for (int i = first; all && i < last; i++) {
        const struct samples *s = &l->records[i].times[what];
        for (unsigned j = 0; j < (s->n < LANES_SAMPLES ? s->n : LANES_SAMPLES); j++) {
            sum += (double)s->us[j];
            all[n++] = s->us[j];
        }
    }
    struct lane_times out = { 0 };
    if (n) {
        qsort(all, n, sizeof *all, ascending);
        out = (struct lane_times){ sum / (double)n, (double)all[(n * 95 + 99) / 100 - 1] };
    }
    free(all);
    return out;
}

void lanes_stats(const struct expert_lanes *l, int layer, struct lanes_stats *out)
{
    int first = layer < 0 ? 0 : layer, last = layer < 0 ? l->n_layers : layer + 1;
    *out = (struct lanes_stats){ .counters = *residency_counters(l->residency), .slots = residency_slots(l->residency),
                                 .slot_bytes = residency_bytes(l->residency) };
    for (int lane = 0; lane < N_LANES; lane++) {
        for (int i = first; i < last; i++) {
            out->experts[lane] += l->records[i].experts[lane];
            out->bytes[lane] += l->records[i].experts[lane] * set_of(l, i)->blob_bytes;
        }
        out->lane[lane] = times(l, first, last, lane);
    }
    out->layer = times(l, first, last, ALL_LANES);
}
