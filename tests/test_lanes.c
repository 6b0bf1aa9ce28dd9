/* Experts in three lanes: whoever computes them, the answer is the CPU's own; the simulator counts what the engine counts; a lane that hangs
 * becomes a sentence. On the sim device, with the real model. */
/* threads: host, device, copy engine and workers, with random delays in each. */
#include "answers.h"

#include "expert/residency.h"
#include "expert/simulate.h"

#include <time.h>
#include <unistd.h>

static const uint64_t blob_count = 8 * 48;
static uint64_t blob_bytes; /* of pebble's experts, as residency.h aligns them */
static answers reference;
static bool slow; /* with sanitizers */

static uint64_t slots(uint64_t n) { return n * blob_bytes; }

/* ---- Running -------------------------------------------------------------------------------------------------------------------------- */

static struct strata_engine *open_engine(const struct strata_options *options)
{
    struct strata_engine *engine;
    struct strata_error error;
    if (strata_engine_open(&engine, model_file, options, &error))
        fail_msg("%s", error.text);
    return engine;
}

static void compare(struct strata_engine *engine, int (*width)(int), const char *what)
{
    static answers got;
    memset(got, 0, sizeof got);
    read_text(engine, width, STRATA_KV_F16, &got);
    assert_same((const answers *)&got, (const answers *)&reference, what);
}

static struct strata_stats stats_of(const struct strata_engine *engine)
{
    struct strata_stats stats;
    strata_engine_stats(engine, -1, &stats);
    return stats;
}

/* A path for a file of this test, removed by the next call. */
static const char *scratch(void)
{
    static char path[64];
    if (*path)
        unlink(path);
    snprintf(path, sizeof path, "/tmp/strata-lanes-%d", (int)getpid());
    return path;
}

/* ---- One answer ----------------------------------------------------------------------------------------------------------------------- */

enum { AUTO = -1 };
static const char *const policies[] = { "lfu:admit=1,hysteresis=0.1", "lru", "none", "lfru:half-life=4", "stale" };
static const int shares[] = { AUTO, 0, 1, 100, 256 };
static int (*const widths[])(int) = { one, eight, ragged, three };

/* Run i of the matrix. Every cache size meets every share; the others turn with different periods, so that every pair of them meets too. */
static void run_of_matrix(int i, uint32_t delay_us)
{
    const uint64_t sizes[] = { 0, 1, blob_count / 10, blob_count / 2, blob_count };
    struct strata_sim sim = { .vram_bytes = slots(sizes[i % 5]), .link_bytes_per_s = i % 4 ? 20e9 : 0.5e9, .latency_s = i % 2 * 20e-6, .delay_us = delay_us };
    int share = shares[i / 5 % 5], period = 1 + i % 6;
    struct strata_options options = { .threads = 1 + i % 3, .sim = &sim, .policy = policies[i % 7 % 5], .max_swaps = i % 11 ? 1 << (i % 8) : -1,
                                      .swap_period = period, .swap_lag = 1 + i % period, .fixed_share = share != AUTO, .link_share = share };
    char what[160];
    snprintf(what, sizeof what, "run %d: %d of %d slots, share %d, %s, swaps %d every %d used after %d, %d threads, width %d", i, (int)sizes[i % 5],
             (int)blob_count, share, options.policy, options.max_swaps, period, options.swap_lag, options.threads, widths[i % 4](0));
    struct strata_engine *engine = open_engine(&options);
    compare(engine, widths[i % 4], what);
    struct strata_stats stats = stats_of(engine);
    uint64_t computed = 0;
    for (int lane = 0; lane < STRATA_LANES; lane++)
        computed += stats.lanes[lane].experts;
    assert_true(computed == stats.requests); /* every request in exactly one lane */
    assert_true(stats.lanes[STRATA_LANE_HIT].experts == stats.hits);
    assert_true(stats.slots == (int)sizes[i % 5]);
    if (share == 256)
        assert_true(stats.lanes[STRATA_LANE_CPU].experts == 0);
    if (share == 0)
        assert_true(stats.lanes[STRATA_LANE_LINK].experts == 0);
    strata_engine_close(engine);
}

static void any_cache_share_policy_and_width_gives_one_answer(void **state)
{
    for (int i = 0; i < (slow ? 10 : 50); i++)
        run_of_matrix(i, 0);
}

static void random_pauses_in_every_lane_change_nothing(void **state)
{
    for (int i = 0; i < (slow ? 5 : 25); i++)
        run_of_matrix(i * 7, 30 + 100 * (unsigned)(i % 3));
}

static void drafts_and_batches_meet_in_the_lanes(void **state)
{
    struct strata_sim sim = { .vram_bytes = slots(100), .link_bytes_per_s = 20e9, .delay_us = 20 };
    struct strata_engine *engine = open_engine(&(struct strata_options){ .sim = &sim, .threads = 2, .policy = "lru", .swap_period = 1 });
    struct strata_session *a = open_session(engine, STRATA_KV_F16), *b = open_session(engine, STRATA_KV_F16), *plain = open_session(engine, STRATA_KV_F16);
    for (int at = 0; at + 2 < n_tokens / 2; at += 2) {
        struct strata_row rows[] = { { a, tokens[at], true, true }, { a, tokens[at + 1], false, true }, { a, 5 + at % 90, false, true },
                                     { b, tokens[at], true, true }, { b, tokens[at + 1], true, true } };
        run_window(engine, rows, 5);
        assert_true(XXH64(strata_window_logits(engine, 1), (size_t)n_vocab * sizeof(float), 0) == reference[at + 1][n_layers]);
        assert_true(XXH64(strata_window_logits(engine, 4), (size_t)n_vocab * sizeof(float), 0) == reference[at + 1][n_layers]);
        assert_int_equal(strata_session_commit(a, 2, NULL), 0);
        assert_int_equal(strata_session_commit(b, 2, NULL), 0);
    }
    assert_int_equal(strata_session_sync(plain, tokens, strata_session_length(a), 8, NULL, NULL, NULL), 0);
    assert_true(strata_session_hash(a) == strata_session_hash(plain));
    assert_true(strata_session_hash(b) == strata_session_hash(plain));
    strata_session_close(a);
    strata_session_close(b);
    strata_session_close(plain);
    strata_engine_close(engine);
}

/* ---- Simulator = engine --------------------------------------------------------------------------------------------------------------- */

static struct residency_counters counters_of(const struct strata_stats *s)
{
    return (struct residency_counters){ s->windows, s->requests, s->hits, s->swaps, s->swap_bytes };
}

static void assert_counters(struct residency_counters a, struct residency_counters b, const char *what)
{
    if (a.windows != b.windows || a.requests != b.requests || a.hits != b.hits || a.swaps != b.swaps || a.swap_bytes != b.swap_bytes)
        fail_msg("%s: %llu/%llu windows, %llu/%llu requests, %llu/%llu hits, %llu/%llu swaps, %llu/%llu bytes", what, (unsigned long long)a.windows,
                 (unsigned long long)b.windows, (unsigned long long)a.requests, (unsigned long long)b.requests, (unsigned long long)a.hits,
                 (unsigned long long)b.hits, (unsigned long long)a.swaps, (unsigned long long)b.swaps, (unsigned long long)a.swap_bytes,
                 (unsigned long long)b.swap_bytes);
}

static void record(const struct strata_options *options, int (*width)(int), struct strata_stats *stats)
{
    static answers ignored;
    struct strata_error error;
    struct strata_engine *engine = open_engine(options);
    read_text(engine, width, STRATA_KV_F16, &ignored);
    *stats = stats_of(engine);
    if (strata_engine_end_trace(engine, &error))
        fail_msg("%s", error.text);
    strata_engine_close(engine);
}

static struct residency_counters replay(const char *path, const struct residency_options *options)
{
    struct trace_reader *trace;
    struct simulation simulation;
    struct strata_error error;
    if (trace_reader_open(&trace, path, &error) || simulate(&simulation, trace, options ? options : &trace_reader_header(trace)->options, NULL, &error))
        fail_msg("%s", error.text);
    trace_reader_close(trace);
    return simulation.counters;
}

/* The trace of a run with a device repeats that run; a trace of the CPU alone foretells what a device will do. */
static void the_simulator_counts_what_the_engine_counts(void **state)
{
    static const char *const texts[] = { "tests/data/prose.txt", "tests/data/chat.txt" };
    static const char *const named[] = { "lfu:half-life=6,admit=1,hysteresis=0.5", "lru", "stale" };
    static const uint64_t sizes[] = { 1, 40, 190 };
    char alone[80];
    snprintf(alone, sizeof alone, "/tmp/strata-lanes-alone-%d", (int)getpid());
    for (int text = 0; text < 2; text++) {
        struct strata_stats stats;
        assert_true(load_text(texts[text], text == 1, slow ? 100 : MAX_TOKENS));
        record(&(struct strata_options){ .trace = alone }, ragged, &stats);
        assert_counters(counters_of(&stats), replay(alone, NULL), "the CPU alone");
        for (int i = 0; i < 9; i++) {
            const char *path = scratch();
            struct strata_sim sim = { .vram_bytes = slots(sizes[i / 3]), .link_bytes_per_s = 20e9, .delay_us = i % 2 * 20 };
            struct strata_options options = { .sim = &sim, .policy = named[i % 3], .trace = path, .swap_period = 1 + i % 4 };
            record(&options, ragged, &stats);
            assert_true(stats.swaps > 0 && stats.hits > 0 && stats.hits < stats.requests);
            assert_counters(counters_of(&stats), replay(path, NULL), "a run and its own trace");
            struct residency_options simulated = residency_defaults();
            assert_int_equal(expert_policy_parse(&simulated.policy, options.policy, NULL), 0);
            simulated.bytes = sim.vram_bytes;
            simulated.period = simulated.lag = options.swap_period;
            assert_counters(counters_of(&stats), replay(alone, &simulated), "a run and the trace of the CPU");
        }
    }
    unlink(alone);
    unlink(scratch());
    assert_true(load_text(texts[0], false, slow ? 100 : MAX_TOKENS));
}

static void a_saved_profile_makes_the_next_run_start_with_what_the_last_one_used(void **state)
{
    const char *path = scratch();
    struct strata_error error;
    struct strata_sim sim = { .vram_bytes = slots(blob_count / 4), .link_bytes_per_s = 20e9 };
    struct strata_options options = { .sim = &sim, .policy = "none" };
    struct strata_engine *engine = open_engine(&options);
    compare(engine, three, "without a profile");
    struct strata_stats before = stats_of(engine);
    if (strata_engine_save_profile(engine, path, &error))
        fail_msg("%s", error.text);
    strata_engine_close(engine);
    options.profile = path;
    engine = open_engine(&options);
    compare(engine, three, "with a profile");
    struct strata_stats after = stats_of(engine);
    assert_true(after.requests == before.requests);
    assert_true((double)after.hits > 1.3 * (double)before.hits);
    strata_engine_close(engine);
    unlink(path);
    assert_int_equal(strata_engine_open(&engine, model_file, &options, &error), STRATA_E_IO);
    assert_non_null(strstr(error.text, path));
}

/* ---- Hanging -------------------------------------------------------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A hung pool may still use its engine, so closing leaves that to the end of the process: not a leak. */
static struct strata_engine *volatile left_behind;

/* In layer 3 of window 40 or a later one; the engine says so, refuses more, and closes. */
static void hang(const char *lane, int share)
{
    struct strata_sim sim = { .vram_bytes = slots(100), .link_bytes_per_s = 20e9, .stall = lane, .stall_layer = 3, .stall_window = 40 };
    struct strata_options options = { .sim = &sim, .threads = 2, .watchdog_s = 0.5, .fixed_share = true, .link_share = share };
    struct strata_engine *engine = open_engine(&options);
    struct strata_session *session = open_session(engine, STRATA_KV_F16);
    struct strata_error error = { 0 };
    char begins[64];
    snprintf(begins, sizeof begins, "layer 3: the %s lane has hung at expert ", lane);
    double start = seconds();
    int code = strata_session_sync(session, tokens, n_tokens, 1, NULL, NULL, &error);
    assert_int_equal(code, STRATA_E_STALLED);
    if (strncmp(error.text, begins, strlen(begins)))
        fail_msg("wanted '%s...', found '%s'", begins, error.text);
    assert_true(seconds() - start < (slow ? 60 : 15));
    assert_int_equal(strata_session_length(session), 0); /* nothing half-done is left */
    assert_int_equal(strata_session_sync(session, tokens, 1, 1, NULL, NULL, &error), STRATA_E_STALLED);
    strata_session_close(session);
    if (!strcmp(lane, "cpu"))
        left_behind = engine;
    strata_engine_close(engine);
}

static void a_hit_lane_that_hangs_is_named(void **state) { hang("hit", 128); }
static void a_link_lane_that_hangs_is_named(void **state) { hang("link", 256); }
static void a_cpu_lane_that_hangs_is_named(void **state) { hang("cpu", 0); }

static void a_slow_lane_is_not_a_hanging_one(void **state)
{
    struct strata_sim sim = { .vram_bytes = slots(4), .link_bytes_per_s = 5e5 }; /* 55 ms for an expert */
    struct strata_options options = { .sim = &sim, .watchdog_s = 0.3, .fixed_share = true, .link_share = 256, .max_swaps = -1 };
    struct strata_engine *engine = open_engine(&options);
    struct strata_session *session = open_session(engine, STRATA_KV_F16);
    struct strata_error error;
    if (strata_session_sync(session, tokens, 1, 1, NULL, NULL, &error)) /* 6 experts a layer: longer than the watchdog's patience */
        fail_msg("%s", error.text);
    strata_session_close(session);
    strata_engine_close(engine);
}

/* ---- Refusals ------------------------------------------------------------------------------------------------------------------------- */

static void refused(const struct strata_options *options, const char *sentence)
{
    struct strata_engine *engine = NULL;
    struct strata_error error = { 0 };
    assert_int_equal(strata_engine_open(&engine, model_file, options, &error), STRATA_E_ARGUMENT);
    assert_string_equal(error.text, sentence);
    assert_null(engine);
}

static void impossible_options_are_refused_with_a_sentence(void **state)
{
    struct strata_sim sim = { .stall = "left" };
    refused(&(struct strata_options){ .fixed_share = true, .link_share = 257 }, "a link share of 257/256: wanted 0 to 256");
    refused(&(struct strata_options){ .swap_period = 2, .swap_lag = 3 }, "swaps every 2 windows, used after 3: wanted 1 <= used <= every");
    refused(&(struct strata_options){ .sim = &sim }, "there is no lane 'left': wanted hit, link or cpu");
    refused(&(struct strata_options){ .policy = "fifo" }, "there is no policy 'fifo': wanted lfu, lru, lfru, stale or none");
}

/* ---- The text and the reference -------------------------------------------------------------------------------------------------------- */

static int set_up(void **state)
{
    model_file = "models/pebble/pebble.gguf";
    slow = getenv("STRATA_TEST_SANITIZER") != NULL;
    if (!load_text("tests/data/prose.txt", false, slow ? 100 : MAX_TOKENS))
        return -1;
    struct strata_engine *engine = open_engine(&(struct strata_options){ .threads = 1 });
    note_shape(engine);
    struct strata_info info;
    strata_engine_info(engine, &info);
    blob_bytes = (info.expert_bytes / blob_count + 255) & ~255ull;
    read_text(engine, one, STRATA_KV_F16, &reference);
    strata_engine_close(engine);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_cache_share_policy_and_width_gives_one_answer),
        cmocka_unit_test(random_pauses_in_every_lane_change_nothing),
        cmocka_unit_test(drafts_and_batches_meet_in_the_lanes),
        cmocka_unit_test(the_simulator_counts_what_the_engine_counts),
        cmocka_unit_test(a_saved_profile_makes_the_next_run_start_with_what_the_last_one_used),
        cmocka_unit_test(a_hit_lane_that_hangs_is_named),
        cmocka_unit_test(a_link_lane_that_hangs_is_named),
        cmocka_unit_test(a_cpu_lane_that_hangs_is_named),
        cmocka_unit_test(a_slow_lane_is_not_a_hanging_one),
        cmocka_unit_test(impossible_options_are_refused_with_a_sentence),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
