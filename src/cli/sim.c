/* sim.c - `strata sim`: a recorded run once more, with other policies and sizes of the expert cache. */
#include "cli/cli.h"

#include "expert/profile.h"
#include "expert/simulate.h"

#include <getopt.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "Usage: strata sim [OPTIONS] TRACE\n"
    "Replays what 'strata run --trace TRACE' recorded, and counts the hits that a device's expert cache would have had. Without\n"
    "options it repeats the recorded run; one that began with a profile needs the same --profile.\n\n"
    "      --policy NAME       which experts the device keeps; with settings: lfu:half-life=16,hysteresis=1.5,admit=1.\n"
    "                          Several --policy are tried one after the other\n"
    "      --slots N           the cache holds N experts\n"
    "      --part PERCENT      or this part of all experts\n"
    "      --vram SIZE         or what fits into this memory, such as 4M or 1.5G\n"
    "                          Each takes a list too: --part 6,12,25,50\n"
    "      --swaps N           most experts exchanged at once (0: none)\n"
    "      --swap-period N     windows between two exchanges\n"
    "      --swap-lag N        windows until exchanged experts are used (with --swap-period alone: the period)\n"
    "      --profile FILE      begin with the experts that this profile prefers\n"
    "      --json              one object a line instead\n\n"
    "A request is one distinct expert of a layer of a window. Experts of the same size share slots, and every size gets the same\n"
    "part of the memory: where sizes differ, --slots N stands for the memory of N experts of average size, and the result says how\n"
    "many slots that makes. Belady's bound counts the hits of a cache that knows the future: it begins with the best experts and,\n"
    "at a miss, loads the missing one at once if that pays.\n\n"
    "Policies:\n";

enum { MAX_POLICIES = 16, MAX_SIZES = 64 };
enum size_unit { AS_RECORDED, SLOTS, PERCENT, BYTES };
static const char *const size_options[] = { [SLOTS] = "--slots", [PERCENT] = "--part", [BYTES] = "--vram" };

/* The command line. */
struct sim {
    const char *trace, *profile;
    struct expert_policy policies[MAX_POLICIES];
    double sizes[MAX_SIZES];
    int n_policies, n_sizes;
    enum size_unit unit;              /* of the sizes */
    long long swaps, period, lag;     /* -1: as recorded */
    bool json;
};

static void print_help(void)
{
    fputs(help, stdout);
    for (const struct expert_policy *p = expert_policies; p->name; p++)
        printf("  %-10s %s%s\n", p->name, p->summary, p == expert_policies ? " (the default of 'strata run')" : "");
}

static bool take_policy(struct sim *s, const char *text)
{
    struct strata_error error;
    if (s->n_policies == MAX_POLICIES)
        return cli_usage("sim", "more than %d policies", MAX_POLICIES), false;
    if (expert_policy_parse(&s->policies[s->n_policies++], text, &error))
        return cli_usage("sim", "--policy %s: %s", text, error.text), false;
    return true;
}

/* A list of numbers in one unit. */
static bool take_sizes(struct sim *s, enum size_unit unit, char *list)
{
    const char *option = size_options[unit];
    if (s->unit != AS_RECORDED && s->unit != unit)
        return cli_usage("sim", "%s and %s exclude each other", size_options[s->unit], option), false;
    s->unit = unit;
    for (char *text; (text = strsep(&list, ","));) {
        long long slots = 0;
        double *size = &s->sizes[s->n_sizes];
        if (s->n_sizes++ == MAX_SIZES)
            return cli_usage("sim", "more than %d sizes", MAX_SIZES), false;
        if (unit == SLOTS ? !cli_integer("sim", option, text, 0, INT32_MAX, &slots)
                          : unit == PERCENT ? !cli_number("sim", option, text, 0, 100, size) : !cli_size("sim", option, text, size))
            return false;
        *size = unit == SLOTS ? (double)slots : *size;
    }
    return true;
}

/* ---- What is simulated --------------------------------------------------------------------------------------------------- */

static int n_experts(const struct trace_header *h) { return h->n_layers * h->n_experts; }

/* Of the slots that hold all experts: residency_offset aligns each. */
static uint64_t all_bytes(const struct trace_header *h)
{
    uint64_t sum = 0;
    for (int i = 0; i < h->n_layers; i++)
        sum += (uint64_t)h->n_experts * ((h->blob_bytes[i] + 255) & ~(uint64_t)255);
    return sum;
}

/* Device memory of size i. Rounded up, so that no slot is lost to the rounding. */
static uint64_t bytes_of(const struct sim *s, int i, const struct trace_header *h)
{
    double size = s->sizes[i];
    switch (s->unit) {
    case SLOTS: return (uint64_t)(((unsigned __int128)size * all_bytes(h) + (unsigned)n_experts(h) - 1) / (unsigned)n_experts(h));
    case PERCENT: return (uint64_t)ceil((double)all_bytes(h) * size / 100);
    case BYTES: return (uint64_t)size;
    default: return h->options.bytes;
    }
}

/* What the command line says of the recorded run's pace. False after a usage line. */
static bool set_pace(const struct sim *s, struct residency_options *o)
{
    o->max_swaps = s->swaps >= 0 ? (int)s->swaps : o->max_swaps;
    o->period = s->period >= 0 ? (int)s->period : o->period;
    o->lag = s->lag >= 0 ? (int)s->lag : s->period >= 0 ? (int)s->period : o->lag;
    if (o->lag > o->period)
        cli_usage("sim", "swaps every %d windows cannot be used after %d: wanted --swap-lag <= --swap-period", o->period, o->lag);
    return o->lag <= o->period;
}

/* ---- Results ------------------------------------------------------------------------------------------------------------- */

static double rate(uint64_t hits, uint64_t requests) { return requests ? (double)hits / (double)requests : 0; }

/* As --policy takes it. */
static const char *policy_text(char out[128], const struct expert_policy *p)
{
    snprintf(out, 128, p->value ? "%s:half-life=%g,admit=%g,hysteresis=%g" : "%s", p->name, (double)p->half_life, (double)p->admit, (double)p->hysteresis);
    return out;
}

static void print_one(const struct trace_header *h, const struct residency_options *o, const struct simulation *r)
{
    const struct residency_counters *c = &r->counters;
    char policy[128], size[32];
    printf("policy          %s, %d swaps every %d windows, used after %d\n", policy_text(policy, &o->policy), o->max_swaps, o->period, o->lag);
    printf("slots           %d of %d experts (%.1f %%)\n", r->slots, n_experts(h), 100 * rate((uint64_t)r->slots, (uint64_t)n_experts(h)));
    printf("windows         %" PRIu64 "\n", c->windows);
    printf("requests        %" PRIu64 "\n", c->requests);
    printf("hits            %" PRIu64 "\n", c->hits);
    printf("hit rate        %.2f %%\n", 100 * rate(c->hits, c->requests));
    printf("swaps           %" PRIu64 "\n", c->swaps);
    printf("bytes copied    %" PRIu64 " (%s)\n", c->swap_bytes, cli_bytes(size, (double)c->swap_bytes));
    printf("Belady's bound  %" PRIu64 " hits (%.2f %%)\n", r->belady_hits, 100 * rate(r->belady_hits, c->requests));
}

static void print_row(const struct trace_header *h, const struct residency_options *o, const struct simulation *r, bool first)
{
    const struct residency_counters *c = &r->counters;
    char policy[128], size[32];
    if (first) {
        printf("%" PRIu64 " windows, %" PRIu64 " requests, %d experts; %d swaps every %d windows, used after %d\n", c->windows, c->requests, n_experts(h),
               o->max_swaps, o->period, o->lag);
        printf("%-48s %8s %7s %12s %9s %10s %10s %9s\n", "policy", "slots", "part", "hits", "hit rate", "swaps", "copied", "Belady");
    }
    printf("%-48s %8d %5.1f %% %12" PRIu64 " %7.2f %% %10" PRIu64 " %10s %7.2f %%\n", policy_text(policy, &o->policy), r->slots,
           100 * rate((uint64_t)r->slots, (uint64_t)n_experts(h)), c->hits, 100 * rate(c->hits, c->requests), c->swaps,
           cli_bytes(size, (double)c->swap_bytes), 100 * rate(r->belady_hits, c->requests));
    fflush(stdout);
}

static int print_json(const struct trace_header *h, const struct residency_options *o, const struct simulation *r, bool cut, struct strata_error *error)
{
    const struct residency_counters *c = &r->counters;
    char policy[128];
    json_t *root = json_pack("{ss si si si si si sI sI sI sf sI sI sI sf sb}", "policy", policy_text(policy, &o->policy), "swaps_at_once", o->max_swaps,
                             "swap_period", o->period, "swap_lag", o->lag, "experts", n_experts(h), "slots", r->slots, "windows", (json_int_t)c->windows,
                             "requests", (json_int_t)c->requests, "hits", (json_int_t)c->hits, "hit_rate", rate(c->hits, c->requests), "swaps",
                             (json_int_t)c->swaps, "swap_bytes", (json_int_t)c->swap_bytes, "belady_hits", (json_int_t)r->belady_hits, "belady_rate",
                             rate(r->belady_hits, c->requests), "cut", cut);
    if (!root)
        return error_set(error, STRATA_E_MEMORY, "out of memory for the results");
    json_dumpf(root, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
    fputs("\n", stdout);
    json_decref(root);
    return 0;
}

/* ---- The command --------------------------------------------------------------------------------------------------------- */

static int simulate_all(const struct sim *s, struct trace_reader *trace, const struct residency_options *pace, const float *profile, struct strata_error *error)
{
    const struct trace_header *h = trace_reader_header(trace);
    int n_policies = s->n_policies ? s->n_policies : 1, n_sizes = s->n_sizes ? s->n_sizes : 1, code = 0;
    for (int i = 0; !code && i < n_policies * n_sizes; i++) {
        struct residency_options options = *pace;
        struct simulation result;
        if (s->n_policies)
            options.policy = s->policies[i / n_sizes];
        options.bytes = bytes_of(s, i % n_sizes, h);
        code = simulate(&result, trace, &options, profile, error);
        if (code)
            break;
        if (s->json)
            code = print_json(h, &options, &result, trace_reader_cut(trace), error);
        else if (n_policies * n_sizes > 1)
            print_row(h, &options, &result, i == 0);
        else
            print_one(h, &options, &result);
    }
    return code;
}

/* What the reader of the results should know. */
static void warn(const struct sim *s, const struct trace_reader *trace)
{
    if (trace_reader_cut(trace)) {
        fputs("strata: ", stderr);
        cli_print_text(stderr, s->trace, strlen(s->trace));
        fputs(" ends in the middle of a window, which is left out\n", stderr);
    }
    if (s->unit == AS_RECORDED && !trace_reader_header(trace)->options.bytes)
        fputs("strata: the recorded run had no device, so its cache has no slots; --part 25 would try some\n", stderr);
}

static int run(const struct sim *s)
{
    struct strata_error error = { 0 };
    struct trace_reader *trace;
    float *profile = NULL;
    if (trace_reader_open(&trace, s->trace, &error))
        return cli_fail(&error);
    const struct trace_header *h = trace_reader_header(trace);
    struct residency_options pace = h->options;
    int exit_code = set_pace(s, &pace) ? CLI_OK : CLI_USAGE, code = 0;
    for (int i = 0; !exit_code && s->unit == SLOTS && i < s->n_sizes; i++)
        if (s->sizes[i] > n_experts(h))
            exit_code = cli_usage("sim", "--slots %.0f: the model has %d experts", s->sizes[i], n_experts(h));
    if (!exit_code && s->profile) {
        profile = malloc((size_t)n_experts(h) * sizeof *profile);
        code = profile ? profile_read(s->profile, h->n_layers, h->n_experts, profile, &error)
                       : error_set(&error, STRATA_E_MEMORY, "out of memory for the profile");
    }
    if (!exit_code && !code)
        code = simulate_all(s, trace, &pace, profile, &error);
    if (code)
        exit_code = cli_fail(&error);
    else if (!exit_code)
        warn(s, trace);
    free(profile);
    trace_reader_close(trace);
    return exit_code;
}

int cli_sim(int argc, char **argv)
{
    enum { POLICY = 256, SLOT_COUNT, PART, VRAM, SWAPS, PERIOD, LAG, PROFILE, JSON };
    static const struct option options[] = {
        { "policy", required_argument, NULL, POLICY },
        { "slots", required_argument, NULL, SLOT_COUNT },
        { "part", required_argument, NULL, PART },
        { "vram", required_argument, NULL, VRAM },
        { "swaps", required_argument, NULL, SWAPS },
        { "swap-period", required_argument, NULL, PERIOD },
        { "swap-lag", required_argument, NULL, LAG },
        { "profile", required_argument, NULL, PROFILE },
        { "json", no_argument, NULL, JSON },
        { "help", no_argument, NULL, 'h' },
        { NULL, 0, NULL, 0 },
    };
    struct sim s = { .swaps = -1, .period = -1, .lag = -1 };
    bool ok = true;
    optind = 1;
    for (int c; ok && (c = getopt_long(argc, argv, "h", options, NULL)) != -1;)
        switch (c) {
        case 'h': print_help(); return CLI_OK;
        case POLICY: ok = take_policy(&s, optarg); break;
        case SLOT_COUNT: ok = take_sizes(&s, SLOTS, optarg); break;
        case PART: ok = take_sizes(&s, PERCENT, optarg); break;
        case VRAM: ok = take_sizes(&s, BYTES, optarg); break;
        case SWAPS: ok = cli_integer("sim", "--swaps", optarg, 0, 100000, &s.swaps); break;
        case PERIOD: ok = cli_integer("sim", "--swap-period", optarg, 1, 1000000, &s.period); break;
        case LAG: ok = cli_integer("sim", "--swap-lag", optarg, 1, 1000000, &s.lag); break;
        case PROFILE: s.profile = optarg; break;
        case JSON: s.json = true; break;
        default: return cli_usage("sim", "wrong option");
        }
    if (!ok)
        return CLI_USAGE;
    if (optind + 1 != argc)
        return cli_usage("sim", optind < argc ? "one trace at a time" : "no trace");
    s.trace = argv[optind];
    return run(&s);
}
