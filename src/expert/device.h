/* device.h - what a device must do to compute experts beside the CPU, and the memory through which both talk.
 *
 * A device has memory of its own (slots, cut by residency.h), engines that copy blobs into it, and runs a whole window by itself. In each layer
 * it writes the routing and the activations into the mailbox and rings; it goes on with its hits and its link lane at once; the host
 * computes the cpu lane and answers; the device waits for the answer only if that lane had work. Both sides evaluate split.h on their own copy of
 * the tables. The invariant: between windows nothing in the mailbox is read or written by the device, and the tables change only then.
 *
 * Words of the mailbox that both sides touch during a window are accessed with mailbox_load and mailbox_store on the host; on a GPU with
 * system-scope loads and stores. Counters grow over all windows, so an old value can never be mistaken for a new one.
 */
#ifndef EXPERT_DEVICE_H
#define EXPERT_DEVICE_H

#include "expert/split.h"
#include "expert/store.h"
#include "ops/ops.h"

/* Where a device is, for the watchdog: lane and expert of the job it works on. */
#define MAILBOX_AT(lane, expert) ((uint64_t)(lane) << 32 | (uint32_t)(expert))

/* One layer's part of the mailbox. */
struct mailbox_layer {
    int32_t ids[SPLIT_ROWS][SPLIT_USED]; /* device: the routing */
    uint32_t split_sum;                  /* device: of its plan */
    uint32_t hit_ns, link_ns, layer_ns;  /* device: computing hits and what the link brought; ring to the last byte over the link; ring to all parts */
    struct split_costs costs;            /* host, before the window */
};

struct expert_mailbox {
    uint64_t rung;     /* device: window * n_layers + layer + 1, when that layer's routing lies here */
    uint64_t pad0[7];
    uint64_t answered; /* host: the same number, when the cpu lane's parts lie here */
    uint64_t pad1[7];
    uint64_t abort;    /* host: not 0: stop waiting for anything, finish the window quickly */
    uint64_t pad2[7];
    uint64_t at;       /* device: MAILBOX_AT of the current job */
    uint64_t pad3[7];
    uint64_t window;   /* host, before the window: its number */
    int32_t n_rows, n_used, n_layers;
    struct activations x; /* device: the layer's input rows */
    float *parts;         /* host: [n_rows][n_used][ops_padded(hidden)], the cpu lane's entries */
    struct mailbox_layer *layers; /* [n_layers] */
};

static inline uint64_t mailbox_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void mailbox_store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

struct expert_device {
    struct ops *ops; /* the operations of a window; `experts` and `experts_wait` are the device's */
    struct expert_mailbox *mailbox;

    /* Between windows. `offset` is where a slot begins in the slots' memory. */
    void (*set_slots)(struct expert_device *device, int n_slots, const uint64_t *offsets);
    void (*set_table)(struct expert_device *device, int layer, const int32_t *slot_of); /* [n_experts], copied */

    /* Starts copying a blob to a slot; copies land in order, also during a window. */
    void (*copy)(struct expert_device *device, uint64_t offset, const uint8_t *blob, size_t bytes);
    bool (*landed)(struct expert_device *device); /* all of them */

    /* Starts body(context) on the device, which calls its ops. */
    void (*launch)(struct expert_device *device, void (*body)(void *context), void *context);
    /* 0: still running, 1: finished, negative: the device failed. */
    int (*finished)(struct expert_device *device, struct strata_error *error);
    void (*destroy)(struct expert_device *device); /* after a window that did not end: leaves its memory behind */
};

/* ---- The sim device: a thread that plays a GPU ------------------------------------------------------------------------------------- */

/* It has its own copy of the experts it holds and a copy engine (another thread) of a set speed; everything else it does as a GPU would. Tests
 * of residency, split, swaps and ordering run on it. */
struct sim_options {
    uint64_t vram_bytes;
    double link_bytes_per_s; /* 0: as fast as memory */
    double latency_s;        /* of each copy */
    uint32_t delay_us;       /* stress: random pauses up to this in every lane */
    int stall;               /* a lane that hangs in `stall_layer` of window `stall_window` until the host aborts; -1: none */
    int stall_layer;
    uint64_t stall_window;
};

/* `store` describes the sets whose experts it will compute: sizes of staging buffers. */
int sim_create(struct expert_device **out, const struct expert_store *store, int n_used, const struct sim_options *options, struct strata_error *error);

/* A pseudo-random pause for stress tests: spins or sleeps 0 .. delay_us. `state` is the lane's own. */
void stress_pause(uint64_t *state, uint32_t delay_us);

#endif
