/* engine_options.h - the options of every command that computes with a model: threads, where experts live, statistics. */
#ifndef CLI_ENGINE_OPTIONS_H
#define CLI_ENGINE_OPTIONS_H

#include <getopt.h>
#include <strata.h>

#include "base/error.h"

struct engine_options {
    struct strata_options options;
    struct strata_sim sim;
    const char *profile_save;
    bool with_sim, sim_set, stats, stats_json;
};

/* Values from 512 up are these options'. */
#define ENGINE_OPTIONS                                                                                                                               \
    { "threads", required_argument, NULL, 512 }, { "device", required_argument, NULL, 513 }, { "sim-vram", required_argument, NULL, 514 },           \
        { "sim-link", required_argument, NULL, 515 }, { "sim-latency", required_argument, NULL, 516 }, { "sim-delay", required_argument, NULL, 517 }, \
        { "sim-stall", required_argument, NULL, 518 }, { "policy", required_argument, NULL, 519 }, { "swaps", required_argument, NULL, 520 },        \
        { "swap-period", required_argument, NULL, 521 }, { "swap-lag", required_argument, NULL, 522 }, { "link-share", required_argument, NULL, 523 }, \
        { "profile", required_argument, NULL, 524 }, { "profile-save", required_argument, NULL, 525 }, { "trace", required_argument, NULL, 526 },    \
        { "pack", required_argument, NULL, 527 }, { "verify", no_argument, NULL, 528 }, { "ignore-memory", no_argument, NULL, 529 },                 \
        { "watchdog", required_argument, NULL, 530 }, { "stats", optional_argument, NULL, 531 }

#define ENGINE_OPTIONS_HELP                                                                                                                          \
    "Computing (none of these changes the text):\n"                                                                                                  \
    "      --threads N         default: one per physical core\n"                                                                                     \
    "      --pack FILE         read the experts from what 'strata pack' made of this model: a faster start\n"                                        \
    "      --verify            compare the pack's hashes with what was read\n"                                                                       \
    "      --ignore-memory     load even if the model does not seem to fit into RAM\n"                                                               \
    "      --stats[=json]      what was computed where, and how long it took\n\n"                                                                    \
    "Experts on a device (a simulated one so far: it is for tests and studies, and no faster):\n"                                                    \
    "      --device cpu|sim    default: cpu\n"                                                                                                       \
    "      --policy NAME       which experts the device keeps: lfu (default), lru, lfru, stale, none;\n"                                             \
    "                          with settings: lfu:half-life=16,hysteresis=1.5,admit=1\n"                                                             \
    "      --swaps N           most experts exchanged at once (default 96; 0: none)\n"                                                               \
    "      --swap-period N     windows between two exchanges (default 4)\n"                                                                          \
    "      --swap-lag N        windows until exchanged experts are used (default: the period)\n"                                                     \
    "      --link-share N      N/256 of the missing experts go over the link (default: measured and chosen)\n"                                       \
    "      --profile FILE      begin with the experts that this profile prefers\n"                                                                   \
    "      --profile-save FILE write at the end which experts were used\n"                                                                           \
    "      --trace FILE        record every window's experts, for 'strata sim'\n"                                                                    \
    "      --watchdog S        seconds after which a part that hangs is an error (default 20)\n"                                                     \
    "      --sim-vram SIZE     memory of the simulated device for experts, such as 4M or 1.5G (default 64M)\n"                                       \
    "      --sim-link RATE     its link, bytes per second, such as 20G (default: as fast as memory)\n"                                               \
    "      --sim-latency US    of each copy (default 10)\n"                                                                                          \
    "      --sim-delay US      random pauses of up to US in every part, to find races\n"                                                             \
    "      --sim-stall LANE[:LAYER[:WINDOW]]\n"                                                                                                      \
    "                          hit, link or cpu hangs there, to see what happens\n"

void engine_options_init(struct engine_options *e);
/* Takes option c if it is one of these. Returns 1 taken, 0 another's, -1 wrong (a usage line was printed). */
int engine_option(struct engine_options *e, const char *command, int c, const char *value);
/* Checks what excludes each other, and completes e->options. False after printing a usage line. */
bool engine_options_finish(struct engine_options *e, const char *command);
/* At the end of a run: statistics to stderr, the profile and the trace to their files. */
int engine_options_report(const struct engine_options *e, struct strata_engine *engine, struct strata_error *error);

#endif
