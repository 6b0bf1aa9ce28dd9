#include "model/model.h"

#include "model/loader.h"

#include <string.h>

static const struct model_arch *const architectures[] = { &model_qwen4exp };

static int find_arch(const struct model_arch **out, const struct gguf *gguf, struct strata_error *error)
{
    struct gguf_string name;
    int code = gguf_get_string(gguf, "general.architecture", &name, error);
    if (code < 0)
        return code;
    if (code == 0)
        return error_set(error, STRATA_E_FORMAT, "%s has no general.architecture: not a model", gguf->files[0].path);
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
        if (strcmp(architectures[i]->name, name.data) == 0) {
            *out = architectures[i];
            return 0;
        }
    return error_set(error, STRATA_E_UNSUPPORTED,
                     "architecture '%.40s' is not supported; Strata runs qwen4exp (Qwen3.8-Flash-Next)", name.data);
}

int model_load(struct model **out, const struct gguf *gguf, struct ops *ops, const struct load_options *options,
               struct strata_error *error)
{
    static const struct load_options defaults;
    const struct model_arch *arch;
    int code = find_arch(&arch, gguf, error);
    return code ? code : arch->load(out, gguf, ops, options ? options : &defaults, error);
}

int model_check(const struct gguf *gguf, struct strata_error *error) { return model_load(NULL, gguf, NULL, NULL, error); }

int model_pack(const struct gguf *gguf, const char *path, int threads, bool (*progress)(void *context, double part),
               void *progress_context, struct strata_error *error)
{
    struct model *shapes = NULL;
    struct pool *pool = NULL;
    int code = model_load(&shapes, gguf, NULL, NULL, error);
    if (!code)
        code = pool_create(&pool, threads ? threads : pool_default_threads(), error);
    if (!code)
        code = loader_pack(gguf, &shapes->experts, path, pool, progress, progress_context, error);
    pool_destroy(pool);
    if (shapes)
        shapes->arch->destroy(shapes);
    return code;
}
