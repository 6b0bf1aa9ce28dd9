#include "cli/engine_options.h"

#include "cli/cli.h"

#include <jansson.h>
#include <string.h>

void engine_options_init(struct engine_options *e) { *e = (struct engine_options){ .sim = { .vram_bytes = 64000000, .latency_s = 10e-6 } }; }

/* "link", "link:3", "link:3:10" */
static bool stall(struct strata_sim *sim, const char *command, char *text)
{
    long long layer = 0, window = 0;
    char *first = strchr(text, ':'), *second = first ? strchr(first + 1, ':') : NULL;
    if (first)
        *first++ = 0;
    if (second)
        *second++ = 0;
    if ((first && !cli_integer(command, "--sim-stall LANE:LAYER", first, 0, 1023, &layer)) ||
        (second && !cli_integer(command, "--sim-stall LANE:LAYER:WINDOW", second, 0, 1 << 30, &window)))
        return false;
    if (strcmp(text, "hit") && strcmp(text, "link") && strcmp(text, "cpu")) {
        cli_usage(command, "--sim-stall %s: wanted hit, link or cpu", text);
        return false;
    }
    sim->stall = text;
    sim->stall_layer = (int)layer;
    sim->stall_window = (uint64_t)window;
    return true;
}

int engine_option(struct engine_options *e, const char *command, int c, const char *value)
{
    struct strata_options *o = &e->options;
    long long whole = 0;
    double number = 0;
    bool ok = true;
    switch (c) {
    case 512: ok = cli_integer(command, "--threads", value, 1, 1024, &whole); o->threads = (int)whole; break;
    case 513:
        if (strcmp(value, "cpu") && strcmp(value, "sim"))
            return cli_usage(command, "--device %s: wanted cpu or sim", value), -1;
        e->with_sim = !strcmp(value, "sim");
        break;
    case 514: ok = cli_size(command, "--sim-vram", value, &number); e->sim.vram_bytes = (uint64_t)number; e->sim_set = true; break;
    case 515: ok = cli_size(command, "--sim-link", value, &e->sim.link_bytes_per_s); e->sim_set = true; break;
    case 516: ok = cli_number(command, "--sim-latency", value, 0, 1e6, &number); e->sim.latency_s = number * 1e-6; e->sim_set = true; break;
    case 517: ok = cli_integer(command, "--sim-delay", value, 0, 1000000, &whole); e->sim.delay_us = (unsigned)whole; e->sim_set = true; break;
    case 518: ok = stall(&e->sim, command, (char *)value); e->sim_set = true; break;
    case 519: o->policy = value; break;
    case 520: ok = cli_integer(command, "--swaps", value, 0, 100000, &whole); o->max_swaps = whole ? (int)whole : -1; break;
    case 521: ok = cli_integer(command, "--swap-period", value, 1, 1000000, &whole); o->swap_period = (int)whole; break;
    case 522: ok = cli_integer(command, "--swap-lag", value, 1, 1000000, &whole); o->swap_lag = (int)whole; break;
    case 523:
        o->fixed_share = strcmp(value, "auto") != 0;
        ok = !o->fixed_share || cli_integer(command, "--link-share", value, 0, 256, &whole);
        o->link_share = (int)whole;
        break;
    case 524: o->profile = value; break;
    case 525: e->profile_save = value; break;
    case 526: o->trace = value; break;
    case 527: o->pack = value; break;
    case 528: o->verify = true; break;
    case 529: o->ignore_memory = true; break;
    case 530: ok = cli_number(command, "--watchdog", value, 0.01, 1e6, &o->watchdog_s); break;
    case 531:
        if (value && strcmp(value, "json"))
            return cli_usage(command, "--stats=%s: wanted --stats or --stats=json", value), -1;
        e->stats = true;
        e->stats_json = value != NULL;
        break;
    default: return 0;
    }
    return ok ? 1 : -1;
}

bool engine_options_finish(struct engine_options *e, const char *command)
{
    if (e->sim_set && !e->with_sim) {
        cli_usage(command, "options --sim-... want --device sim");
        return false;
    }
    e->options.sim = e->with_sim ? &e->sim : NULL;
    return true;
}

/* ---- Statistics -------------------------------------------------------------------------------------------------------------------- */

static const char *const lane_names[STRATA_LANES] = { "hit", "link", "cpu" };

static double part(uint64_t a, uint64_t b) { return b ? (double)a / (double)b : 0; }

static void print_stats(const struct strata_stats *s, const char *device)
{
    char a[32], b[32];
    const struct strata_lane_stats *lanes = s->lanes;
    fprintf(stderr, "experts on %s: %llu windows, %llu requests", device, (unsigned long long)s->windows, (unsigned long long)s->requests);
    if (strcmp(device, "cpu"))
        fprintf(stderr, ", hit rate %.1f %% with %d slots (%s); %llu swaps (%s); %.1f %% of the misses over the link", 100 * part(s->hits, s->requests), s->slots,
                cli_bytes(a, (double)s->slot_bytes), (unsigned long long)s->swaps, cli_bytes(b, (double)s->swap_bytes),
                100 * part(lanes[STRATA_LANE_LINK].experts, lanes[STRATA_LANE_LINK].experts + lanes[STRATA_LANE_CPU].experts));
    fprintf(stderr, "\n");
    for (int i = 0; i < STRATA_LANES; i++)
        if (lanes[i].experts)
            fprintf(stderr, "  %-4s lane: %llu experts, %s; a layer takes %.1f us (mean), %.1f us (p95)\n", lane_names[i], (unsigned long long)lanes[i].experts,
                    cli_bytes(a, (double)lanes[i].bytes), lanes[i].mean_us, lanes[i].p95_us);
    if (s->layer_mean_us > 0)
        fprintf(stderr, "  all lanes: a layer takes %.1f us (mean), %.1f us (p95)\n", s->layer_mean_us, s->layer_p95_us);
}

static json_t *lanes_json(const struct strata_stats *s)
{
    json_t *out = json_object();
    for (int i = 0; i < STRATA_LANES; i++)
        json_object_set_new(out, lane_names[i],
                            json_pack("{sI sI sf sf}", "experts", (json_int_t)s->lanes[i].experts, "bytes", (json_int_t)s->lanes[i].bytes, "mean_us",
                                      s->lanes[i].mean_us, "p95_us", s->lanes[i].p95_us));
    json_object_set_new(out, "all", json_pack("{sf sf}", "mean_us", s->layer_mean_us, "p95_us", s->layer_p95_us));
    return out;
}

static void print_json(const struct strata_engine *engine, const struct strata_info *info, const struct strata_stats *s)
{
    json_t *layers = json_array();
    for (int i = 0; i < info->n_layers; i++) {
        struct strata_stats layer;
        strata_engine_stats(engine, i, &layer);
        json_array_append_new(layers, lanes_json(&layer));
    }
    json_t *root = json_pack("{ss si sI sI sI sf si sI sI sI sf so so}", "device", info->device, "threads", info->threads, "windows", (json_int_t)s->windows,
                             "requests", (json_int_t)s->requests, "hits", (json_int_t)s->hits, "hit_rate", part(s->hits, s->requests), "slots", s->slots,
                             "slot_bytes", (json_int_t)s->slot_bytes, "swaps", (json_int_t)s->swaps, "swap_bytes", (json_int_t)s->swap_bytes, "link_share",
                             part(s->lanes[STRATA_LANE_LINK].experts, s->lanes[STRATA_LANE_LINK].experts + s->lanes[STRATA_LANE_CPU].experts), "lanes",
                             lanes_json(s), "layers", layers);
    if (root)
        json_dumpf(root, stderr, JSON_COMPACT | JSON_REAL_PRECISION(6));
    fputc('\n', stderr);
    json_decref(root);
}

int engine_options_report(const struct engine_options *e, struct strata_engine *engine, struct strata_error *error)
{
    struct strata_info info;
    struct strata_stats stats;
    strata_engine_info(engine, &info);
    strata_engine_stats(engine, -1, &stats);
    if (e->stats_json)
        print_json(engine, &info, &stats);
    else if (e->stats)
        print_stats(&stats, info.device);
    int code = strata_engine_end_trace(engine, error);
    return !code && e->profile_save ? strata_engine_save_profile(engine, e->profile_save, error) : code;
}
