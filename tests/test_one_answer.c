/* One answer: the same bits after every layer and in every logit, whatever computes them. The first run (plain C, one thread, one row at
 * a time) is the reference; every other way of computing the same real text is compared with it, position by position and layer by layer. */
#include "answers.h"

static const char *const model_files[] = { "models/pebble/pebble.gguf", "models/pebble/pebble-iq3.gguf" };
static const char *reference_isa = "ref";
static answers reference;

static struct strata_engine *open_engine(const char *isa, int threads)
{
    struct strata_engine *engine;
    struct strata_error error;
    setenv("STRATA_ISA", isa, 1);
    if (strata_engine_open(&engine, model_file, &(struct strata_options){ .threads = threads }, &error))
        fail_msg("%s", error.text);
    struct strata_info info;
    strata_engine_info(engine, &info);
    if (strcmp(info.isa, isa)) {
        print_message("SKIPPED: this processor has no %s\n", isa);
        strata_engine_close(engine);
        skip();
    }
    return engine;
}

static void compare_width(const char *isa, int threads, int (*width)(int), const char *what)
{
    static answers got;
    struct strata_engine *engine = open_engine(isa, threads);
    memset(got, 0, sizeof got);
    read_text(engine, width, STRATA_KV_F16, &got);
    strata_engine_close(engine);
    assert_same((const answers *)&got, (const answers *)&reference, what);
}

/* ---- The tests ----------------------------------------------------------------------------------------------------------------------- */

static void plain_c_in_windows_of_eight(void **state)
{
    if (strcmp(reference_isa, "ref")) {
        print_message("SKIPPED: plain C takes too long with sanitizers; checkops compares its kernels\n");
        skip();
    }
    compare_width("ref", 2, eight, "ref, 2 threads, windows of 8");
}
static void avx2_one_row(void **state) { compare_width("avx2", 1, one, "avx2"); }
static void avx2_in_ragged_pieces_on_2_threads(void **state) { compare_width("avx2", 2, ragged, "avx2, 2 threads, ragged windows"); }
static void avx512_one_row(void **state) { compare_width("avx512", 1, one, "avx512"); }
static void avx512_two_rows_on_2_threads(void **state) { compare_width("avx512", 2, two, "avx512, 2 threads, windows of 2"); }
static void avx512_three_rows_on_4_threads(void **state) { compare_width("avx512", 4, three, "avx512, 4 threads, windows of 3"); }
static void avx512_eight_rows_on_2_threads(void **state) { compare_width("avx512", 2, eight, "avx512, 2 threads, windows of 8"); }
static void avx512_in_ragged_pieces(void **state) { compare_width("avx512", 1, ragged, "avx512, ragged windows"); }

static const char *best_isa(void)
{
    struct strata_engine *engine;
    struct strata_info info;
    unsetenv("STRATA_ISA");
    assert_int_equal(strata_engine_open(&engine, model_file, NULL, NULL), 0);
    strata_engine_info(engine, &info);
    strata_engine_close(engine);
    return info.isa;
}

/* Four sequences, each at its own speed: the rows of one are always among rows of others. Sequence s starts s windows late. */
static void four_sequences_interleaved_equal_one_alone(void **state)
{
    static answers got[SEQUENCES];
    struct strata_engine *engine = open_engine(best_isa(), 2);
    struct recorder recorder = { .out = got };
    int at[SEQUENCES] = { 0 };
    memset(got, 0, sizeof got);
    for (int s = 0; s < SEQUENCES; s++)
        recorder.sessions[s] = open_session(engine, STRATA_KV_F16);
    strata_engine_probe(engine, record_layer, &recorder);
    for (int window = 0, busy = 1; busy; window++) {
        struct strata_row rows[STRATA_MAX_ROWS];
        int n = 0, taken[SEQUENCES] = { 0 };
        busy = 0;
        for (int s = 0; s < SEQUENCES; s++) {
            int wish = window < s ? 0 : 1 + (window + s) % 2;
            for (; taken[s] < wish && at[s] + taken[s] < n_tokens; taken[s]++)
                rows[n++] = (struct strata_row){ (struct strata_session *)recorder.sessions[s], tokens[at[s] + taken[s]], true, true };
            busy |= at[s] + taken[s] < n_tokens;
        }
        run_window(engine, rows, n);
        for (int s = 0, row = 0; s < SEQUENCES; s++) {
            for (int t = 0; t < taken[s]; t++)
                record_logits(engine, row++, at[s] + t, &got[s]);
            at[s] += taken[s];
            if (taken[s])
                assert_int_equal(strata_session_commit((struct strata_session *)recorder.sessions[s], taken[s], NULL), 0);
        }
    }
    for (int s = 0; s < SEQUENCES; s++) {
        assert_same((const answers *)&got[s], (const answers *)&reference, "four sequences interleaved");
        strata_session_close((struct strata_session *)recorder.sessions[s]);
    }
    strata_engine_close(engine);
}

/* Before every token a window with a wrong draft of 1 to 7 tokens is run and rejected but for its first row; sometimes part of the draft is
 * right and kept. The states must end as if it had never been. */
static void drafts_that_are_rejected_leave_no_trace(void **state)
{
    static answers got;
    struct strata_engine *engine = open_engine(best_isa(), 2);
    struct strata_session *session = open_session(engine, STRATA_KV_F16), *plain = open_session(engine, STRATA_KV_F16);
    memset(got, 0, sizeof got);
    struct recorder recorder = { { session }, &got };
    for (int at = 0, round = 0; at < n_tokens; round++) {
        struct strata_row rows[STRATA_MAX_ROWS];
        int right = round % 3, wrong = 1 + round % 5, certain = round % 2, n = 0;
        if (right + 1 > n_tokens - at)
            right = n_tokens - at - 1;
        for (int t = 0; t <= right; t++)
            rows[n++] = (struct strata_row){ session, tokens[at + t], t < certain, true };
        for (int t = 0; t < wrong; t++)
            rows[n++] = (struct strata_row){ session, (tokens[(at + t) % n_tokens] * 31 + 7) % 4000, false, true };
        strata_engine_probe(engine, record_layer, &recorder); /* a position's last row is the accepted one: it overwrites what drafts recorded */
        run_window(engine, rows, n);
        for (int t = 0; t <= right; t++)
            record_logits(engine, t, at + t, &got);
        strata_engine_probe(engine, NULL, NULL);
        assert_int_equal(strata_session_commit(session, right + 1, NULL), 0);
        at += right + 1;
        if (round % 16 == 0 || at == n_tokens) { /* the state itself, against plain reading */
            assert_int_equal(strata_session_sync(plain, tokens, at, 8, NULL, NULL, NULL), 0);
            assert_true(strata_session_hash(session) == strata_session_hash(plain));
        }
    }
    assert_same((const answers *)&got, (const answers *)&reference, "drafts before every token");
    strata_session_close(session);
    strata_session_close(plain);
    strata_engine_close(engine);
}

static void a_rejected_window_can_be_repeated(void **state)
{
    struct strata_engine *engine = open_engine(best_isa(), 1);
    struct strata_session *session = open_session(engine, STRATA_KV_F16);
    struct strata_row rows[5];
    assert_int_equal(strata_session_sync(session, tokens, 50, 8, NULL, NULL, NULL), 0);
    for (int t = 0; t < 5; t++)
        rows[t] = (struct strata_row){ session, tokens[50 + t], false, true };
    run_window(engine, rows, 5);
    uint64_t first = XXH64(strata_window_logits(engine, 4), (size_t)n_vocab * sizeof(float), 0), before = strata_session_hash(session);
    assert_int_equal(strata_session_commit(session, 0, NULL), 0);
    run_window(engine, rows, 5);
    assert_true(first == XXH64(strata_window_logits(engine, 4), (size_t)n_vocab * sizeof(float), 0));
    assert_int_equal(strata_session_commit(session, 0, NULL), 0);
    assert_true(before == strata_session_hash(session));
    strata_session_close(session);
    strata_engine_close(engine);
}

/* A commit reads what the last window left behind: no other window may come between. */
static void a_window_waits_for_the_commits_of_other_sessions(void **state)
{
    struct strata_engine *engine = open_engine(best_isa(), 1);
    struct strata_session *first = open_session(engine, STRATA_KV_F16), *second = open_session(engine, STRATA_KV_F16);
    struct strata_row draft[2] = { { first, tokens[0], false, true }, { first, tokens[1], false, true } }, other = { second, tokens[5], true, true };
    struct strata_error error;
    run_window(engine, draft, 2);
    assert_int_equal(strata_window_run(engine, &other, 1, &error), STRATA_E_ARGUMENT);
    assert_string_equal(error.text, "a session of the last window was not committed");
    assert_int_equal(strata_session_commit(first, 2, NULL), 0);
    run_window(engine, &other, 1);
    strata_session_close(second); /* closing counts as a decision */
    uint64_t drafted = strata_session_hash(first);
    assert_int_equal(strata_session_sync(first, tokens + 2, 1, 1, NULL, NULL, NULL), 0);
    assert_int_equal(strata_session_sync(first, tokens, 2, 1, NULL, NULL, NULL), 0);
    assert_true(drafted == strata_session_hash(first));
    strata_session_close(first);
    strata_engine_close(engine);
}

static void int8_kv_is_one_answer_too(void **state)
{
    static answers narrow, wide;
    struct strata_engine *engine = open_engine(reference_isa, 1);
    memset(narrow, 0, sizeof narrow);
    memset(wide, 0, sizeof wide);
    int all = n_tokens;
    n_tokens = 120;
    read_text(engine, one, STRATA_KV_INT8, &narrow);
    strata_engine_close(engine);
    engine = open_engine(best_isa(), 2);
    read_text(engine, eight, STRATA_KV_INT8, &wide);
    strata_engine_close(engine);
    assert_same((const answers *)&wide, (const answers *)&narrow, "int8 KV");
    assert_true(narrow[100][n_layers] != reference[100][n_layers]); /* it is another arithmetic, and says so */
    n_tokens = all;
}

/* ---- The text and the reference -------------------------------------------------------------------------------------------------------- */

static int set_up(void **state)
{
    bool slow = getenv("STRATA_TEST_SANITIZER") != NULL; /* AVX2 is the reference there, over less text, but still beyond the attention budget of 256 */
    if (!load_text("tests/data/prose.txt", false, slow ? 264 : MAX_TOKENS))
        return -1;
    reference_isa = slow ? "avx2" : "ref";
    struct strata_engine *engine = open_engine(reference_isa, 1);
    note_shape(engine);
    memset(reference, 0, sizeof reference);
    read_text(engine, one, STRATA_KV_F16, &reference);
    strata_engine_close(engine);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_c_in_windows_of_eight), cmocka_unit_test(avx2_one_row), cmocka_unit_test(avx2_in_ragged_pieces_on_2_threads),
        cmocka_unit_test(avx512_one_row), cmocka_unit_test(avx512_two_rows_on_2_threads), cmocka_unit_test(avx512_three_rows_on_4_threads),
        cmocka_unit_test(avx512_eight_rows_on_2_threads), cmocka_unit_test(avx512_in_ragged_pieces),
        cmocka_unit_test(four_sequences_interleaved_equal_one_alone), cmocka_unit_test(drafts_that_are_rejected_leave_no_trace),
        cmocka_unit_test(a_rejected_window_can_be_repeated), cmocka_unit_test(a_window_waits_for_the_commits_of_other_sessions),
        cmocka_unit_test(int8_kv_is_one_answer_too),
    };
    int failed = 0;
    for (size_t i = 0; i < sizeof model_files / sizeof *model_files; i++) {
        model_file = model_files[i];
        failed += cmocka_run_group_tests_name(model_file, tests, set_up, NULL);
    }
    return failed;
}
