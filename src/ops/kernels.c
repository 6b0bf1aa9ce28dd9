#include "ops/kernels.h"

#include "ops/ref/ref.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const char *const isa_names[ISA_COUNT] = { "ref", "avx2", "avx512" };

#if defined(__x86_64__)
static bool isa_available(enum isa isa)
{
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
                  __builtin_cpu_supports("avx512bitalg");
    return isa == ISA_REF || (isa == ISA_AVX2 && avx2) || (isa == ISA_AVX512 && avx512);
}
#else
static bool isa_available(enum isa isa) { return isa == ISA_REF; }
#endif

static struct kernels tables[ISA_COUNT];

static void fill_tables(void)
{
    for (int isa = 0; isa < ISA_COUNT; isa++) {
        struct kernels *k = &tables[isa];
        if (!isa_available((enum isa)isa))
            continue;
        kernels_ref(k);
#if defined(__x86_64__)
        if (isa >= ISA_AVX2)
            kernels_avx2(k);
        if (isa >= ISA_AVX512)
            kernels_avx512(k);
#endif
        k->name = isa_names[isa];
    }
}

const struct kernels *kernels_get(enum isa isa)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_tables);
    return tables[isa].name ? &tables[isa] : NULL;
}

enum isa isa_detect(void)
{
    int cap = ISA_COUNT - 1;
    const char *wanted = getenv("STRATA_ISA");
    for (int isa = 0; wanted && isa < ISA_COUNT; isa++)
        if (strcmp(wanted, isa_names[isa]) == 0)
            cap = isa;
    while (cap > ISA_REF && !kernels_get((enum isa)cap))
        cap--;
    return (enum isa)cap;
}
