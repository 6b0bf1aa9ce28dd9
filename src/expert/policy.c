/* policy.c - the policies of residency.h: what an expert is worth to a cache. */
#include "expert/residency.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static float frequent(float heat, uint32_t age) { return heat; }

static float recent(float heat, uint32_t age) { return age < 1000000 ? -(float)age : -1e6f; }

static float frequent_and_recent(float heat, uint32_t age) { return heat / (1 + (float)age); }

/* Whatever the current stretch of text has not asked for is stale and goes first, the longest unused of it before all others; among
 * what is fresh the heat decides. */
static float fresh(float heat, uint32_t age)
{
    enum { STRETCH = 16 }; /* windows: a paragraph */
    return age < STRETCH ? heat : recent(heat, age);
}

/* docs/LEARNED.md #16 */
const struct expert_policy expert_policies[] = {
    { "lfu", "most requests lately: heat halves every half-life windows", frequent, 32, 1, 2 },
    { "lru", "most recent request", recent, 0, -1e6f, 1 },
    { "lfru", "most requests lately, divided by the windows since the last one", frequent_and_recent, 8, 0, 1 },
    { "stale", "requested in the last 16 windows, most requests lately first", fresh, 64, 0, 1.25f },
    { "none", "what it began with", NULL, 8, 0, 0 },
    { 0 },
};

static int setting(struct expert_policy *policy, const char *text, size_t length, struct strata_error *error)
{
    static const char *const keys[] = { "half-life=", "admit=", "hysteresis=" };
    float *const values[] = { &policy->half_life, &policy->admit, &policy->hysteresis };
    for (int i = 0; i < 3; i++) {
        size_t key = strlen(keys[i]);
        if (length <= key || strncmp(text, keys[i], key))
            continue;
        char *end;
        float value = strtof(text + key, &end);
        if (end != text + length || !(fabsf(value) <= 1e9f) || (values[i] != &policy->admit && value < 0))
            break;
        *values[i] = value;
        return 0;
    }
    return error_set(error, STRATA_E_ARGUMENT, "policy setting '%.*s': wanted half-life=N (windows), admit=N or hysteresis=N", (int)length, text);
}

int expert_policy_parse(struct expert_policy *out, const char *text, struct strata_error *error)
{
    size_t length = strcspn(text, ":");
    const struct expert_policy *p = expert_policies;
    while (p->name && (strlen(p->name) != length || strncmp(p->name, text, length)))
        p++;
    if (!p->name)
        return error_set(error, STRATA_E_ARGUMENT, "there is no policy '%.*s': wanted lfu, lru, lfru, stale or none", (int)length, text);
    *out = *p;
    int code = 0;
    for (text += length; !code && *text; text += length) {
        text++; /* the colon or a comma */
        length = strcspn(text, ",");
        code = setting(out, text, length, error);
    }
    return code;
}
