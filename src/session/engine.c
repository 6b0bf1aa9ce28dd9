/* engine.c - the public interface: engine, sessions, windows. Owns the token lists and decides what is committed; the states
 * themselves belong to model/. */
#include <strata.h>

#include "expert/lanes.h"
#include "model/model.h"

#include <stdlib.h>
#include <string.h>

struct strata_engine {
    struct gguf *gguf;
    struct ops *ops; /* the CPU's */
    struct model *model;
    struct expert_lanes *lanes;
    struct model_window *window;
    strata_probe_fn *probe;
    void *probe_context;
    /* The last window. A session's commit reads what it left behind, so the next one waits for all of them. */
    uint64_t serial;
    int n_rows, n_pending; /* n_pending: sessions not yet committed */
    struct strata_row rows[STRATA_MAX_ROWS];
    int32_t positions[STRATA_MAX_ROWS];
};

struct strata_session {
    struct strata_engine *engine;
    struct model_state *state;
    int32_t *tokens; /* [context] */
    int length, context;
    int pending_first, pending; /* its rows in the last window, not yet committed */
    uint64_t logits_serial; /* the window whose logits are the session's; 0: none */
    int logits_row;
};

_Static_assert((int)STRATA_MAX_ROWS == (int)KERNEL_MAX_ROWS, "a window is what the kernels take");

static const struct model_arch *arch_of(const struct strata_engine *engine) { return engine->model->arch; }

static int lane_number(const char *name)
{
    return !name ? -1 : !strcmp(name, "hit") ? LANE_HIT : !strcmp(name, "link") ? LANE_LINK : !strcmp(name, "cpu") ? LANE_CPU : -2;
}

/* What the lanes are asked to do; 0 stands for a default. */
static int lanes_options_from(struct lanes_options *out, const struct strata_options *o, struct strata_error *error)
{
    *out = (struct lanes_options){ .residency = residency_defaults(), .share = o->fixed_share ? o->link_share : -1, .profile = o->profile, .trace = o->trace,
                                   .watchdog_s = o->watchdog_s > 0 ? o->watchdog_s : 20 };
    struct residency_options *r = &out->residency;
    r->max_swaps = o->max_swaps ? o->max_swaps : r->max_swaps;
    r->max_swaps = r->max_swaps < 0 ? 0 : r->max_swaps;
    r->period = o->swap_period ? o->swap_period : r->period;
    r->lag = o->swap_lag ? o->swap_lag : o->swap_period ? o->swap_period : r->lag;
    if (o->fixed_share && (o->link_share < 0 || o->link_share > 256))
        return error_set(error, STRATA_E_ARGUMENT, "a link share of %d/256: wanted 0 to 256", o->link_share);
    if (r->period < 1 || r->lag < 1 || r->lag > r->period)
        return error_set(error, STRATA_E_ARGUMENT, "swaps every %d windows, used after %d: wanted 1 <= used <= every", r->period, r->lag);
    if (o->sim && lane_number(o->sim->stall) < -1)
        return error_set(error, STRATA_E_ARGUMENT, "there is no lane '%s': wanted hit, link or cpu", o->sim->stall);
    if (o->sim) {
        r->bytes = o->sim->vram_bytes;
        out->delay_us = o->sim->delay_us;
        out->stall_cpu = lane_number(o->sim->stall) == LANE_CPU;
        out->stall_layer = o->sim->stall_layer;
        out->stall_window = o->sim->stall_window;
    }
    return o->policy ? expert_policy_parse(&r->policy, o->policy, error) : 0;
}

/* The lanes of the model's experts, and the device that computes with them. */
static int open_lanes(struct strata_engine *engine, const struct strata_options *o, const struct lanes_options *lanes, struct strata_error *error)
{
    struct model *m = engine->model;
    struct expert_device *device = NULL;
    int code = 0;
    if (o->sim) {
        struct sim_options sim = { .vram_bytes = o->sim->vram_bytes, .link_bytes_per_s = o->sim->link_bytes_per_s, .latency_s = o->sim->latency_s,
                                   .delay_us = o->sim->delay_us, .stall = lane_number(o->sim->stall), .stall_layer = o->sim->stall_layer,
                                   .stall_window = o->sim->stall_window };
        code = sim_create(&device, &m->experts, m->n_used, &sim, error);
    }
    if (!code)
        code = lanes_create(&engine->lanes, &m->experts, m->n_used, engine->ops, device, lanes, o->progress, o->progress_context, error);
    if (!code)
        m->ops = lanes_ops(engine->lanes);
    return code;
}

int strata_engine_open(struct strata_engine **out, const char *path, const struct strata_options *options, struct strata_error *error)
{
    struct strata_options o = options ? *options : (struct strata_options){ 0 };
    struct load_options load = { .pack = o.pack, .verify = o.verify, .ignore_memory = o.ignore_memory, .progress = o.progress,
                                 .progress_context = o.progress_context };
    struct lanes_options lanes;
    struct strata_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the engine");
    int code = lanes_options_from(&lanes, &o, error);
    if (!code)
        code = gguf_open(&engine->gguf, path, error);
    if (!code) /* shapes and types before anything is allocated: a wrong file fails at once */
        code = model_check(engine->gguf, error);
    if (!code)
        code = ops_cpu_create(&engine->ops, isa_detect(), o.threads, error);
    if (!code)
        code = model_load(&engine->model, engine->gguf, engine->ops, &load, error);
    if (!code)
        code = open_lanes(engine, &o, &lanes, error);
    if (!code)
        code = arch_of(engine)->window_create(&engine->window, engine->model, error);
    if (code) {
        strata_engine_close(engine);
        return code;
    }
    *out = engine;
    return 0;
}

void strata_engine_close(struct strata_engine *engine)
{
    if (!engine)
        return;
    if (!lanes_destroy(engine->lanes))
        return; /* a thread that hangs may still use all of it: it is left to the end of the process */
    if (engine->model) {
        arch_of(engine)->window_destroy(engine->window);
        arch_of(engine)->destroy(engine->model);
    }
    ops_cpu_destroy(engine->ops);
    gguf_close(engine->gguf);
    free(engine);
}

void strata_engine_info(const struct strata_engine *engine, struct strata_info *info)
{
    const struct model *m = engine->model;
    *info = (struct strata_info){ ops_cpu_name(engine->ops), pool_threads(ops_cpu_pool(engine->ops)), m->n_vocab, m->n_layers, m->max_context, m->weight_bytes,
                                  m->experts.arena.used, m->ops == engine->ops ? "cpu" : "sim" };
}

void strata_engine_stats(const struct strata_engine *engine, int layer, struct strata_stats *stats)
{
    struct lanes_stats s;
    lanes_stats(engine->lanes, layer < engine->model->n_layers ? layer : -1, &s);
    *stats = (struct strata_stats){ s.counters.windows, s.counters.requests, s.counters.hits, s.counters.swaps, s.counters.swap_bytes, s.slots, s.slot_bytes,
                                    .layer_mean_us = s.layer.mean_us, .layer_p95_us = s.layer.p95_us };
    for (int i = 0; i < STRATA_LANES; i++)
        stats->lanes[i] = (struct strata_lane_stats){ s.experts[i], s.bytes[i], s.lane[i].mean_us, s.lane[i].p95_us };
}

int strata_engine_save_profile(const struct strata_engine *engine, const char *path, struct strata_error *error)
{
    return lanes_save_profile(engine->lanes, path, error);
}

int strata_engine_end_trace(struct strata_engine *engine, struct strata_error *error) { return lanes_close_trace(engine->lanes, error); }

void strata_engine_probe(struct strata_engine *engine, strata_probe_fn *probe, void *context)
{
    engine->probe = probe;
    engine->probe_context = context;
}

/* ---- Sessions ---------------------------------------------------------------------------------------------------------------------- */

/* Its rows in the last window have been decided about. */
static void settle(struct strata_session *s)
{
    s->engine->n_pending -= s->pending > 0;
    s->pending = 0;
}

int strata_session_open(struct strata_session **out, struct strata_engine *engine, int context, enum strata_kv kv, struct strata_error *error)
{
    struct strata_session *s = calloc(1, sizeof *s);
    if (!s)
        return error_set(error, STRATA_E_MEMORY, "out of memory for a session");
    *s = (struct strata_session){ .engine = engine, .context = context };
    int code = arch_of(engine)->state_create(&s->state, engine->model, context, kv == STRATA_KV_INT8 ? KV_INT8 : KV_F16, error);
    if (!code && !(s->tokens = malloc((size_t)context * sizeof *s->tokens)))
        code = error_set(error, STRATA_E_MEMORY, "out of memory for a session of %d tokens", context);
    if (code) {
        strata_session_close(s);
        return code;
    }
    *out = s;
    return 0;
}

void strata_session_close(struct strata_session *s)
{
    if (!s)
        return;
    settle(s);
    arch_of(s->engine)->state_destroy(s->state);
    free(s->tokens);
    free(s);
}

int strata_session_length(const struct strata_session *s) { return s->length; }
const int32_t *strata_session_tokens(const struct strata_session *s) { return s->tokens; }
const float *strata_session_logits(const struct strata_session *s)
{
    return s->logits_serial && s->logits_serial == s->engine->serial ? strata_window_logits(s->engine, s->logits_row) : NULL;
}
uint64_t strata_session_hash(const struct strata_session *s) { return arch_of(s->engine)->state_hash(s->state, s->length); }

static void clear(struct strata_session *s)
{
    arch_of(s->engine)->state_reset(s->state);
    settle(s);
    s->length = 0;
    s->logits_serial = 0;
}

int strata_session_sync(struct strata_session *s, const int32_t *tokens, int n, int width, bool (*progress)(void *, double), void *progress_context,
                        struct strata_error *error)
{
    if (n < 1 || n > s->context)
        return error_set(error, STRATA_E_ARGUMENT, "%d tokens for a session of 1 to %d", n, s->context);
    if (width < 1 || width > STRATA_MAX_ROWS)
        return error_set(error, STRATA_E_ARGUMENT, "a window of %d rows: wanted 1 to %d", width, STRATA_MAX_ROWS);
    /* The logits of the last token are wanted even if nothing is new, and they may be gone: then the sequence is read again. */
    bool continues = s->length <= n && memcmp(s->tokens, tokens, (size_t)s->length * sizeof *tokens) == 0 && (s->length < n || strata_session_logits(s));
    if (!continues)
        clear(s);
    int code = 0, start = s->length;
    while (!code && s->length < n) {
        struct strata_row rows[STRATA_MAX_ROWS];
        int count = n - s->length < width ? n - s->length : width;
        for (int t = 0; t < count; t++)
            rows[t] = (struct strata_row){ s, tokens[s->length + t], true, s->length + t == n - 1 };
        code = strata_window_run(s->engine, rows, count, error);
        if (!code)
            code = strata_session_commit(s, count, error);
        if (!code && progress && !progress(progress_context, (double)(s->length - start) / (double)(n - start)))
            code = error_set(error, STRATA_E_STOPPED, "reading the prompt was stopped");
    }
    if (code)
        clear(s);
    return code;
}

/* ---- Windows ----------------------------------------------------------------------------------------------------------------------- */

static void pass_probe(void *context, int layer, int n, const float *residual, int width)
{
    struct strata_engine *engine = context;
    for (int t = 0; t < n; t++)
        engine->probe(engine->probe_context, engine->rows[t].session, engine->positions[t], layer, residual + (size_t)t * (size_t)width, width);
}

struct forward { struct strata_engine *engine; const struct model_row *rows; int n; struct strata_error *error; };

static int run_forward(void *context)
{
    struct forward *f = context;
    struct strata_engine *engine = f->engine;
    return arch_of(engine)->forward(engine->window, f->rows, f->n, engine->probe ? pass_probe : NULL, engine, f->error);
}

int strata_window_run(struct strata_engine *engine, const struct strata_row *rows, int n, struct strata_error *error)
{
    if (n < 1 || n > STRATA_MAX_ROWS)
        return error_set(error, STRATA_E_ARGUMENT, "a window of %d rows: wanted 1 to %d", n, STRATA_MAX_ROWS);
    for (int t = 0; t < n; t++) {
        if (rows[t].session->engine != engine)
            return error_set(error, STRATA_E_ARGUMENT, "row %d of the window belongs to another engine", t);
        if (rows[t].session->pending)
            return error_set(error, STRATA_E_ARGUMENT, "row %d: its session's last window was not committed", t);
        for (int before = 0; before + 1 < t; before++)
            if (rows[before].session == rows[t].session && rows[t - 1].session != rows[t].session)
                return error_set(error, STRATA_E_ARGUMENT, "row %d: the rows of a session must be neighbours", t);
        if (t && rows[t - 1].session == rows[t].session && rows[t].certain && !rows[t - 1].certain)
            return error_set(error, STRATA_E_ARGUMENT, "row %d of the window does not follow row %d", t, t - 1);
    }
    if (engine->n_pending)
        return error_set(error, STRATA_E_ARGUMENT, "a session of the last window was not committed");
    struct model_row model_rows[STRATA_MAX_ROWS] = { 0 };
    for (int t = 0, i = 0; t < n; t++) {
        struct strata_session *s = rows[t].session;
        i = t && rows[t - 1].session == s ? i + 1 : 0;
        if (s->length + i >= s->context)
            return error_set(error, STRATA_E_ARGUMENT, "the session is full: %d of %d tokens", s->length, s->context);
        if (rows[t].token < 0 || rows[t].token >= engine->model->n_vocab)
            return error_set(error, STRATA_E_ARGUMENT, "token %d at position %d is outside the vocabulary of %d", rows[t].token, s->length + i,
                             engine->model->n_vocab);
        s->tokens[s->length + i] = rows[t].token;
        engine->positions[t] = s->length + i;
        model_rows[t] = (struct model_row){ s->state, s->tokens, s->length + i, rows[t].certain, rows[t].wants_logits };
    }
    memcpy(engine->rows, rows, (size_t)n * sizeof *rows);
    engine->serial++;
    struct forward forward = { engine, model_rows, n, error };
    int code = lanes_window(engine->lanes, n, run_forward, &forward, error);
    engine->n_rows = code ? 0 : n; /* a window that failed has no logits */
    for (int t = 0; t < n; t++) {
        struct strata_session *s = rows[t].session;
        if (code) {
            clear(s); /* part of the states may have moved on */
            continue;
        }
        if (t == 0 || rows[t - 1].session != s) {
            s->pending_first = t;
            engine->n_pending++;
        }
        s->pending = t - s->pending_first + 1;
    }
    return code;
}

const float *strata_window_logits(const struct strata_engine *engine, int row)
{
    return row >= 0 && row < engine->n_rows ? arch_of(engine)->logits(engine->window, row) : NULL;
}

int strata_session_commit(struct strata_session *s, int n, struct strata_error *error)
{
    int certain = 0;
    while (certain < s->pending && s->engine->rows[s->pending_first + certain].certain)
        certain++;
    if (!s->pending)
        return error_set(error, STRATA_E_ARGUMENT, "the session has no window to commit");
    if (n < certain || n > s->pending)
        return error_set(error, STRATA_E_ARGUMENT, "commit of %d rows: wanted %d to %d", n, certain, s->pending);
    arch_of(s->engine)->commit(s->engine->window, s->state, n);
    s->length += n;
    s->logits_serial = n ? s->engine->serial : 0;
    s->logits_row = s->pending_first + n - 1;
    settle(s);
    return 0;
}
