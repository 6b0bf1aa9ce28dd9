/* Belady's bound. Between two requests of an expert lies a *gap*, and one before its first: the next request is a hit if the expert stays in
 * its slot over the gap. Any set of gaps will do of which no more than `slots` are open at once; keeping the largest such set means: when
 * there is one gap too many, the one that ends last is given up (its expert, or the newcomer, which then passes by the cache). The gaps
 * before first requests make the best contents to start with. A gap is known by the request that ends it. */
#include "expert/simulate.h"

#include <stdlib.h>
#include <string.h>

enum { NEVER = 0x7fffffff };

/* Of one class, in the order of the trace: windows, layers, first use. */
struct request {
    uint32_t kept : 1;  /* the gap that it ends */
    uint32_t next : 31; /* the same expert's next request, or NEVER */
};

/* Layers whose slots have the same size share them. */
struct class {
    uint64_t slot_bytes;
    struct request *requests; /* [n], room for `capacity` */
    uint32_t n, capacity;
    uint32_t slots, kept; /* gaps kept at the start */
};

struct future {
    int n_classes, n_experts;
    struct class *classes; /* room for [n_layers] */
    int *class_of;         /* [n_layers] */
    uint32_t *last;        /* [n_layers][n_experts]: 1 + the expert's last request; 0: none yet */
};

static void future_destroy(struct future *f)
{
    for (int i = 0; i < f->n_classes; i++)
        free(f->classes[i].requests);
    free(f->classes);
    free(f->class_of);
    free(f->last);
}

static int future_create(struct future *f, const struct trace_header *h, const struct residency *r, struct strata_error *error)
{
    size_t n = (size_t)h->n_layers;
    *f = (struct future){ .n_experts = h->n_experts, .classes = calloc(n, sizeof *f->classes), .class_of = calloc(n, sizeof *f->class_of),
                          .last = calloc(n * (size_t)h->n_experts, sizeof *f->last) };
    if (!f->classes || !f->class_of || !f->last)
        return error_set(error, STRATA_E_MEMORY, "out of memory for simulating %d layers of %d experts", h->n_layers, h->n_experts);
    for (int i = 0; i < h->n_layers; i++) {
        uint64_t slot_bytes = (h->blob_bytes[i] + 255) & ~(uint64_t)255; /* residency_offset is aligned so */
        int c = 0;
        while (c < f->n_classes && f->classes[c].slot_bytes != slot_bytes)
            c++;
        f->n_classes += c == f->n_classes;
        f->class_of[i] = c;
        f->classes[c].slot_bytes = slot_bytes;
        const int32_t *table = residency_table(r, i); /* nothing was swapped yet: every slot is in use */
        for (int e = 0; e < h->n_experts; e++)
            f->classes[c].slots += table[e] >= 0;
    }
    return 0;
}

static int append(struct class *c, struct strata_error *error)
{
    if (c->n == NEVER)
        return error_set(error, STRATA_E_UNSUPPORTED, "the trace is too long to simulate: more than %d requests", NEVER);
    if (c->n == c->capacity) {
        uint32_t capacity = c->capacity < 1024 ? 1024 : c->capacity < NEVER / 2 ? 2 * c->capacity : NEVER;
        struct request *grown = realloc(c->requests, capacity * sizeof *grown);
        if (!grown)
            return error_set(error, STRATA_E_MEMORY, "out of memory for simulating %u requests", c->n);
        c->requests = grown;
        c->capacity = capacity;
    }
    c->requests[c->n++] = (struct request){ .next = NEVER };
    return 0;
}

/* The distinct experts of one layer of a window. */
static int note(struct future *f, int layer, const int32_t *ids, int n, struct strata_error *error)
{
    struct class *c = &f->classes[f->class_of[layer]];
    uint32_t *last = f->last + (size_t)layer * (size_t)f->n_experts, start = c->n;
    for (int i = 0; i < n; i++) {
        uint32_t before = last[ids[i]];
        if (before > start) /* already in this window */
            continue;
        int code = append(c, error);
        if (code)
            return code;
        uint32_t now = c->n - 1;
        if (before) {
            c->requests[before - 1].next = now;
        } else if (c->kept < c->slots) { /* the gaps before first requests all begin at the start: those that end first are kept */
            c->requests[now].kept = 1;
            c->kept++;
        }
        last[ids[i]] = now + 1;
    }
    return 0;
}

/* ---- The largest set of gaps -------------------------------------------------------------------------------------------- */

/* The gaps that are open, by their ends: the largest on top. A gap that has ended stays until the room is needed: it is smaller than every
 * open one, so it never gets to the top while there are any. */
struct heap {
    uint32_t *ends, n, capacity;
};

static void sift_down(struct heap *h, uint32_t at)
{
    uint32_t end = h->ends[at];
    for (uint32_t child; (child = 2 * at + 1) < h->n; at = child) {
        child += child + 1 < h->n && h->ends[child + 1] > h->ends[child];
        if (h->ends[child] <= end)
            break;
        h->ends[at] = h->ends[child];
    }
    h->ends[at] = end;
}

static void drop_ended(struct heap *h, uint32_t now)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < h->n; i++)
        if (h->ends[i] > now)
            h->ends[n++] = h->ends[i];
    h->n = n;
    for (uint32_t i = n / 2; i-- > 0;)
        sift_down(h, i);
}

static void push(struct heap *h, uint32_t end, uint32_t now)
{
    if (h->n == h->capacity)
        drop_ended(h, now);
    uint32_t at = h->n++;
    for (; at && h->ends[(at - 1) / 2] < end; at = (at - 1) / 2)
        h->ends[at] = h->ends[(at - 1) / 2];
    h->ends[at] = end;
}

static int belady(const struct class *c, uint64_t *hits, struct strata_error *error)
{
    uint32_t slots = c->slots < c->n ? c->slots : c->n, open = 0;
    if (!slots)
        return 0;
    struct heap heap = { .capacity = 2 * slots }; /* half of a full one has ended, so cleaning it costs little per request */
    heap.ends = malloc(heap.capacity * sizeof *heap.ends);
    if (!heap.ends)
        return error_set(error, STRATA_E_MEMORY, "out of memory for simulating %u slots", slots);
    for (uint32_t i = 0; open < c->kept; i++)
        if (c->requests[i].kept) {
            push(&heap, i, 0);
            open++;
        }
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t next = c->requests[i].next;
        *hits += c->requests[i].kept;
        open -= c->requests[i].kept;
        if (next == NEVER)
            continue;
        if (open < slots) {
            push(&heap, next, i);
            open++;
        } else if (heap.ends[0] > next) {
            c->requests[heap.ends[0]].kept = 0;
            heap.ends[0] = next;
            sift_down(&heap, 0);
        } else {
            continue;
        }
        c->requests[next].kept = 1;
    }
    free(heap.ends);
    return 0;
}

/* ---- The replay --------------------------------------------------------------------------------------------------------- */

/* Window by window what the engine does. */
static int replay(struct residency *r, struct future *f, struct trace_reader *trace, struct strata_error *error)
{
    const struct trace_header *h = trace_reader_header(trace);
    const int32_t *ids;
    int code = trace_reader_rewind(trace, error), n_rows;
    if (code)
        return code;
    while ((n_rows = trace_reader_next(trace, &ids, error)) > 0) {
        const struct residency_swap *swaps;
        int a_layer = n_rows * h->n_used;
        if (residency_due(r))
            residency_admit(r);
        for (int i = 0; i < h->n_layers; i++, ids += a_layer) {
            residency_use(r, i, ids, h->n_used, n_rows, h->n_used);
            if ((code = note(f, i, ids, a_layer, error)))
                return code;
        }
        residency_end(r, &swaps);
    }
    return n_rows;
}

int simulate(struct simulation *out, struct trace_reader *trace, const struct residency_options *options, const float *profile, struct strata_error *error)
{
    const struct trace_header *h = trace_reader_header(trace);
    struct residency_shape shape = { h->n_layers, h->n_experts, h->blob_bytes };
    struct residency *r = NULL;
    struct future f = { 0 };
    *out = (struct simulation){ 0 };
    int code = residency_create(&r, &shape, options, profile, error);
    code = code ? code : future_create(&f, h, r, error);
    code = code ? code : replay(r, &f, trace, error);
    for (int i = 0; !code && i < f.n_classes; i++)
        code = belady(&f.classes[i], &out->belady_hits, error);
    if (!code) {
        out->counters = *residency_counters(r);
        out->slots = residency_slots(r);
    }
    future_destroy(&f);
    residency_destroy(r);
    return code;
}
