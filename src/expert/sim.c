/* sim.c - the sim device: a thread that runs windows, a thread that copies, and memory of its own (device.h).
 *
 * What it takes from the host it takes as a GPU would: blobs by copies that land in order, tables when they are set, answers through the mailbox. Its
 * dense operations are the CPU backend's, on one thread. */
#include "expert/device.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { STAGED = 4 }; /* blobs under way over the link at once */

struct copy { uint8_t *to; const uint8_t *from; size_t bytes; uint64_t *done; uint64_t ticket; };

/* First in, first out. The link lane's copies go before swaps: they hold up a layer. */
struct copy_queue { struct copy *items; size_t head, n, capacity; uint64_t issued, done; };

struct sim {
    struct expert_device device;
    struct sim_options options;
    struct ops ops;  /* the CPU backend's table with the device's own experts */
    struct ops *cpu; /* one thread */
    struct expert_mailbox mailbox;
    struct arena arena; /* what the mailbox points to, and the device's memory */
    int n_layers, n_experts, n_used;
    const struct expert_store *store;

    uint8_t *slots, *staging;
    size_t staged_bytes;
    uint64_t *offsets; /* [n_slots] */
    int32_t *tables;   /* [n_layers][n_experts] */

    /* The window. */
    struct split split;
    struct expert_job jobs[SPLIT_MAX];
    const struct expert_set *set;
    const struct activations *x;
    uint64_t started, stress, copy_stress;
    void (*body)(void *context);
    void *context;

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t wake_device, wake_copier;
    bool launched, stopping;
    struct copy_queue link, swaps;
    pthread_t device_thread, copy_thread;
    bool has_device_thread, has_copy_thread;

    uint64_t running; /* atomic: 1 from launch to the end of the window */
};

static struct sim *sim_of(struct expert_device *device) { return (struct sim *)device; }

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void wait_until(uint64_t ns)
{
    for (uint64_t now; (now = now_ns()) < ns;) {
        if (ns - now > 100000) /* the system's timer is late by about 60 us */
            nanosleep(&(struct timespec){ .tv_nsec = (long)(ns - now - 60000 < 900000000 ? ns - now - 60000 : 900000000) }, NULL);
        else
            sched_yield();
    }
}

void stress_pause(uint64_t *state, uint32_t delay_us)
{
    if (!delay_us)
        return;
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    uint64_t random = *state >> 33;
    if (random % 4 == 0) /* a quarter of them, half of those long enough for every other thread to run on */
        wait_until(now_ns() + random / 4 % (random % 8 ? delay_us * 1000ull : 2000));
}

static bool aborted(struct sim *s) { return mailbox_load(&s->mailbox.abort) != 0; }

static void stall_here(struct sim *s, int lane)
{
    if (lane == s->options.stall && s->mailbox.window >= s->options.stall_window && (!s->set || s->set->layer == s->options.stall_layer))
        while (!aborted(s))
            nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
}

/* ---- The copy engine --------------------------------------------------------------------------------------------------------------- */

static bool push(struct copy_queue *q, struct copy copy)
{
    if (q->n == q->capacity) {
        size_t capacity = q->capacity ? 2 * q->capacity : 64;
        struct copy *items = malloc(capacity * sizeof *items);
        if (!items)
            return false;
        for (size_t i = 0; i < q->n; i++)
            items[i] = q->items[(q->head + i) % q->capacity];
        free(q->items);
        q->items = items;
        q->head = 0;
        q->capacity = capacity;
    }
    q->items[(q->head + q->n++) % q->capacity] = copy;
    return true;
}

static struct copy pop(struct copy_queue *q)
{
    struct copy copy = q->items[q->head];
    q->head = (q->head + 1) % q->capacity;
    q->n--;
    return copy;
}

/* Returns the ticket; *done reaches it when the copy has landed. Without memory for the queue the copy is made here and now. */
static uint64_t issue(struct sim *s, struct copy_queue *q, uint8_t *to, const uint8_t *from, size_t bytes)
{
    pthread_mutex_lock(&s->lock);
    uint64_t ticket = ++q->issued;
    bool queued = push(q, (struct copy){ to, from, bytes, &q->done, ticket });
    pthread_cond_signal(&s->wake_copier);
    pthread_mutex_unlock(&s->lock);
    if (!queued) {
        memcpy(to, from, bytes);
        mailbox_store(&q->done, ticket);
    }
    return ticket;
}

static void *copy_main(void *argument)
{
    struct sim *s = argument;
    uint64_t free_at = 0; /* when the engine has moved what it was given */
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (!s->link.n && !s->swaps.n && !s->stopping)
            pthread_cond_wait(&s->wake_copier, &s->lock);
        if (s->stopping) {
            pthread_mutex_unlock(&s->lock);
            return NULL;
        }
        bool for_link = s->link.n > 0;
        struct copy copy = pop(for_link ? &s->link : &s->swaps);
        pthread_mutex_unlock(&s->lock);
        uint64_t now = now_ns();
        double seconds = s->options.link_bytes_per_s > 0 ? (double)copy.bytes / s->options.link_bytes_per_s : 0;
        free_at = (free_at > now ? free_at : now) + (uint64_t)(seconds * 1e9);
        stress_pause(&s->copy_stress, s->options.delay_us);
        memcpy(copy.to, copy.from, copy.bytes);
        wait_until(free_at + (uint64_t)(s->options.latency_s * 1e9));
        mailbox_store(copy.done, copy.ticket);
    }
}

/* ---- The lanes of a layer ---------------------------------------------------------------------------------------------------------- */

static struct expert_job job_of(const struct sim *s, int i, const uint8_t *blob)
{
    struct expert_job job = { .expert = s->split.expert[i], .n_rows = s->split.n_rows[i], .blob = blob };
    memcpy(job.row, s->split.row[i], sizeof job.row);
    memcpy(job.rank, s->split.rank[i], sizeof job.rank);
    return job;
}

static void compute(struct sim *s, int lane, const struct expert_job *job, float *parts)
{
    mailbox_store(&s->mailbox.at, MAILBOX_AT(lane, job->expert));
    stress_pause(&s->stress, s->options.delay_us);
    stall_here(s, lane);
    ops_cpu_experts(s->cpu, s->n_used, s->set, s->x, job, 1, parts, 0);
}

static void ring(struct sim *s, int n, const struct route *route)
{
    const struct expert_set *set = s->set;
    struct mailbox_layer *there = &s->mailbox.layers[set->layer];
    memcpy(there->ids, route->ids, sizeof there->ids);
    split_plan(&s->split, there->ids[0], SPLIT_USED, n, s->n_used, s->tables + (size_t)set->layer * (size_t)s->n_experts, &there->costs);
    there->split_sum = split_sum(&s->split);
    if (s->split.n_cpu) { /* the last answer was awaited: nobody reads the old rows any more */
        size_t rows = (size_t)n, width = (size_t)set->hidden;
        memcpy(s->mailbox.x.values, s->x->values, rows * (size_t)ops_padded(set->hidden) * sizeof(float));
        memcpy(s->mailbox.x.codes, s->x->codes, rows * width);
        memcpy(s->mailbox.x.scales, s->x->scales, rows * (width / 32) * sizeof(float));
        memcpy(s->mailbox.x.sums, s->x->sums, rows * (width / 16) * sizeof(int32_t));
    }
    stress_pause(&s->stress, s->options.delay_us);
    mailbox_store(&s->mailbox.rung, s->mailbox.window * (uint64_t)s->n_layers + (uint64_t)set->layer + 1);
}

/* The next expert of the link lane at or after i, or -1. */
static int next_link(const struct sim *s, int i)
{
    while (i < s->split.n && s->split.lane[i] != LANE_LINK)
        i++;
    return i < s->split.n ? i : -1;
}

static void start_copy(struct sim *s, int i, int place, uint64_t *tickets)
{
    const struct expert_set *set = s->set;
    tickets[place] = issue(s, &s->link, s->staging + (size_t)place * s->staged_bytes, set->blobs + (size_t)s->split.expert[i] * set->blob_bytes, set->blob_bytes);
}

/* Copies run up to STAGED experts ahead of the computing. Returns when the last byte came. */
static uint64_t link_lane(struct sim *s, float *parts, uint64_t *computing)
{
    uint64_t tickets[STAGED], came = now_ns();
    int ahead = next_link(s, 0), issued = 0, used = 0;
    for (int i = ahead; i >= 0; i = next_link(s, i + 1), used++) {
        for (; ahead >= 0 && issued - used < STAGED; ahead = next_link(s, ahead + 1), issued++)
            start_copy(s, ahead, issued % STAGED, tickets);
        mailbox_store(&s->mailbox.at, MAILBOX_AT(LANE_LINK, s->split.expert[i]));
        stall_here(s, LANE_LINK);
        while (mailbox_load(&s->link.done) < tickets[used % STAGED] && !aborted(s))
            sched_yield();
        if (aborted(s))
            break;
        uint64_t start = came = now_ns();
        struct expert_job job = job_of(s, i, s->staging + (size_t)(used % STAGED) * s->staged_bytes);
        compute(s, LANE_LINK, &job, parts);
        *computing += now_ns() - start;
    }
    return came;
}

static void experts(struct ops *ops, int n, int n_used, const struct expert_set *set, const struct activations *x, const struct route *route, float *parts)
{
    struct sim *s = ops->expert_backend;
    if (aborted(s))
        return;
    s->set = set;
    s->x = x;
    s->started = now_ns();
    ring(s, n, route);
    struct mailbox_layer *there = &s->mailbox.layers[set->layer];
    uint64_t computing = 0, start = now_ns();
    for (int i = 0; i < s->split.n && !aborted(s); i++)
        if (s->split.lane[i] == LANE_HIT) {
            struct expert_job job = job_of(s, i, s->slots + s->offsets[s->split.slot[i]]);
            compute(s, LANE_HIT, &job, parts);
        }
    computing = now_ns() - start;
    there->link_ns = (uint32_t)(s->split.n_link ? link_lane(s, parts, &computing) - s->started : 0);
    there->hit_ns = (uint32_t)computing;
}

/* The cpu lane's parts come from the mailbox. */
static void experts_wait(struct ops *ops, int n, int n_used, const struct expert_set *set, float *parts)
{
    struct sim *s = ops->expert_backend;
    size_t padded = (size_t)ops_padded(set->hidden);
    mailbox_store(&s->mailbox.at, MAILBOX_AT(N_LANES, 0));
    if (s->split.n_cpu) {
        uint64_t wanted = s->mailbox.window * (uint64_t)s->n_layers + (uint64_t)set->layer + 1;
        while (mailbox_load(&s->mailbox.answered) < wanted && !aborted(s))
            sched_yield();
        for (int i = 0; i < s->split.n && !aborted(s); i++)
            for (int j = 0; s->split.lane[i] == LANE_CPU && j < s->split.n_rows[i]; j++) {
                size_t at = ((size_t)s->split.row[i][j] * (size_t)n_used + s->split.rank[i][j]) * padded;
                memcpy(parts + at, s->mailbox.parts + at, (size_t)set->hidden * sizeof *parts);
            }
    }
    s->mailbox.layers[set->layer].layer_ns = (uint32_t)(now_ns() - s->started);
}

/* ---- The interface ----------------------------------------------------------------------------------------------------------------- */

static void *device_main(void *argument)
{
    struct sim *s = argument;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (!s->launched && !s->stopping)
            pthread_cond_wait(&s->wake_device, &s->lock);
        bool stop = s->stopping;
        s->launched = false;
        pthread_mutex_unlock(&s->lock);
        if (stop)
            return NULL;
        s->body(s->context);
        mailbox_store(&s->running, 0);
    }
}

static void set_slots(struct expert_device *device, int n_slots, const uint64_t *offsets)
{
    struct sim *s = sim_of(device);
    s->offsets = arena_alloc(&s->arena, (size_t)n_slots * sizeof *offsets);
    memcpy(s->offsets, offsets, (size_t)n_slots * sizeof *offsets);
}

static void set_table(struct expert_device *device, int layer, const int32_t *slot_of)
{
    struct sim *s = sim_of(device);
    memcpy(s->tables + (size_t)layer * (size_t)s->n_experts, slot_of, (size_t)s->n_experts * sizeof *slot_of);
}

static void copy_blob(struct expert_device *device, uint64_t offset, const uint8_t *blob, size_t bytes)
{
    struct sim *s = sim_of(device);
    issue(s, &s->swaps, s->slots + offset, blob, bytes);
}

static bool landed(struct expert_device *device)
{
    struct sim *s = sim_of(device);
    return mailbox_load(&s->swaps.done) == s->swaps.issued; /* only the host's thread issues swaps */
}

static void launch(struct expert_device *device, void (*body)(void *), void *context)
{
    struct sim *s = sim_of(device);
    s->body = body;
    s->context = context;
    mailbox_store(&s->running, 1);
    pthread_mutex_lock(&s->lock);
    s->launched = true;
    pthread_cond_signal(&s->wake_device);
    pthread_mutex_unlock(&s->lock);
}

static int finished(struct expert_device *device, struct strata_error *error) { return !mailbox_load(&sim_of(device)->running); }

static void destroy(struct expert_device *device)
{
    struct sim *s = sim_of(device);
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    pthread_cond_signal(&s->wake_device);
    pthread_cond_signal(&s->wake_copier);
    pthread_mutex_unlock(&s->lock);
    if (s->has_device_thread)
        pthread_join(s->device_thread, NULL);
    if (s->has_copy_thread)
        pthread_join(s->copy_thread, NULL);
    ops_cpu_destroy(s->cpu);
    free(s->link.items);
    free(s->swaps.items);
    arena_destroy(&s->arena);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->wake_device);
    pthread_cond_destroy(&s->wake_copier);
    free(s);
}

int sim_create(struct expert_device **out, const struct expert_store *store, int n_used, const struct sim_options *options, struct strata_error *error)
{
    struct sim *s = calloc(1, sizeof *s);
    if (!s)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the sim device");
    const struct expert_set *first = store->sets[0];
    size_t hidden = (size_t)ops_padded(first->hidden), rows = SPLIT_ROWS, all = 0;
    s->device = (struct expert_device){ .ops = &s->ops, .mailbox = &s->mailbox, .set_slots = set_slots, .set_table = set_table, .copy = copy_blob, .landed = landed,
                                        .launch = launch, .finished = finished, .destroy = destroy };
    s->options = *options;
    s->n_layers = store->n_layers;
    s->n_experts = first->n_experts;
    s->n_used = n_used;
    s->store = store;
    s->stress = 2;
    s->copy_stress = 3;
    for (int i = 0; i < store->n_layers; i++) {
        const struct expert_set *set = store->sets[i];
        s->staged_bytes = set->blob_bytes > s->staged_bytes ? set->blob_bytes : s->staged_bytes;
        all += (size_t)set->n_experts * (set->blob_bytes + 256);
    }
    size_t slots = options->vram_bytes < all ? (size_t)options->vram_bytes : all;
    s->staged_bytes = (s->staged_bytes + 63) & ~(size_t)63;
    size_t tables = (size_t)s->n_layers * (size_t)s->n_experts * sizeof *s->tables, parts = rows * (size_t)n_used * hidden * sizeof(float);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake_device, NULL);
    pthread_cond_init(&s->wake_copier, NULL);
    int code = arena_create(&s->arena, slots + STAGED * s->staged_bytes + 3 * tables + parts + rows * hidden * 6 + (size_t)s->n_layers * sizeof *s->mailbox.layers + 4096,
                            "the sim device", error);
    if (!code) {
        s->slots = arena_alloc(&s->arena, slots);
        s->staging = arena_alloc(&s->arena, STAGED * s->staged_bytes);
        s->tables = arena_alloc(&s->arena, tables);
        s->mailbox.parts = arena_alloc(&s->arena, parts);
        s->mailbox.layers = arena_alloc(&s->arena, (size_t)s->n_layers * sizeof *s->mailbox.layers);
        s->mailbox.x = (struct activations){ first->hidden, arena_alloc(&s->arena, rows * hidden * sizeof(float)), arena_alloc(&s->arena, rows * hidden),
                                             arena_alloc(&s->arena, rows * hidden / 8), arena_alloc(&s->arena, rows * hidden / 4) };
        code = ops_cpu_create(&s->cpu, isa_detect(), 1, error);
    }
    if (!code)
        code = ops_cpu_reserve_experts(s->cpu, first->width, n_used, error);
    if (!code) {
        s->ops = *s->cpu;
        s->ops.expert_backend = s;
        s->ops.experts = experts;
        s->ops.experts_wait = experts_wait;
        s->has_device_thread = pthread_create(&s->device_thread, NULL, device_main, s) == 0;
        s->has_copy_thread = pthread_create(&s->copy_thread, NULL, copy_main, s) == 0;
        if (!s->has_device_thread || !s->has_copy_thread)
            code = error_set(error, STRATA_E_MEMORY, "cannot start the threads of the sim device");
    }
    if (code) {
        destroy(&s->device);
        return code;
    }
    *out = &s->device;
    return 0;
}
