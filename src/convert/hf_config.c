#include "convert/hf.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- Hash constants (spec/model.md section 3.2) -------------------------------------------------------------------------------- */

void hf_hash_multipliers(uint64_t seed, int ngram_layer_index, int vocab, uint64_t out[3])
{
    const uint64_t gamma = 0x9e3779b97f4a7c15u;
    uint64_t half = (uint64_t)INT64_MAX / (uint64_t)vocab / 2; /* id * multiplier stays below 2^63 */
    for (uint64_t k = 1; k <= 3; k++) {
        uint64_t x = seed + 10007 * (uint64_t)ngram_layer_index + k * gamma; /* SplitMix64 */
        x += gamma;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        out[k - 1] = 2 * (x % (half ? half : 1)) + 1;
    }
}

static bool is_prime(uint64_t n)
{
    if (n < 4 || n % 2 == 0)
        return n == 2 || n == 3;
    for (uint64_t d = 3; d * d <= n; d += 2)
        if (n % d == 0)
            return false;
    return true;
}

void hf_hash_sizes(uint64_t base, int n_heads, uint64_t *sizes, uint64_t *offsets)
{
    uint64_t prime = base - 1, sum = 0;
    for (int h = 0; h < n_heads; h++) {
        do
            prime++;
        while (!is_prime(prime));
        sizes[h] = prime;
        offsets[h] = sum;
        sum += prime;
    }
}

static int read_i64s(const struct hf *hf, const char *name, int n, uint64_t *out, bool *found, struct strata_error *error)
{
    char full[160];
    snprintf(full, sizeof full, "%slayers.%d.ple.ple_embedding.%s", hf->prefix, hf->ngram_layer, name);
    struct safetensor *t = safetensors_find(hf->st, full);
    *found = t != NULL;
    if (!t)
        return 0;
    t->used = true;
    return safetensors_read_i64(hf->st, t, n, (int64_t *)out, error);
}

/* The checkpoint's own constants where it has them. */
static int read_hash(struct hf *hf, struct strata_error *error)
{
    int seed, base, code;
    bool has_multipliers, has_sizes, has_offsets;
    if ((code = hf_int(hf, hf->text, "seed", 0, INT_MAX, 1234, &seed, error)) ||
        (code = hf_int(hf, hf->text, "ngram_vocab_size_base", 2, 1 << 26, 20000000, &base, error)))
        return code;
    hf_hash_multipliers((uint64_t)seed, 0, hf->vocab, hf->multipliers);
    hf_hash_sizes((uint64_t)base, hf->ngram_heads, hf->head_sizes, hf->head_offsets);
    if ((code = read_i64s(hf, "layer_multipliers", 3, hf->multipliers, &has_multipliers, error)) ||
        (code = read_i64s(hf, "ngram_heads_vocab_sizes", hf->ngram_heads, hf->head_sizes, &has_sizes, error)) ||
        (code = read_i64s(hf, "ngram_heads_offsets", hf->ngram_heads, hf->head_offsets, &has_offsets, error)))
        return code;
    for (int h = 0; h < hf->ngram_heads; h++)
        if (hf->head_sizes[h] < 1 || hf->head_sizes[h] > INT32_MAX || hf->head_offsets[h] > INT32_MAX - hf->head_sizes[h])
            return error_set(error, STRATA_E_FORMAT, "%s: n-gram head %d has offset %llu and size %llu, wanted an end below 2^31", hf->directory, h,
                             (unsigned long long)hf->head_offsets[h], (unsigned long long)hf->head_sizes[h]);
    return 0;
}

/* ---- config.json ------------------------------------------------------------------------------------------------------------ */

int hf_int(const struct hf *hf, const json_t *object, const char *key, int min, int max, int fallback, int *out, struct strata_error *error)
{
    const json_t *value = json_object_get(object, key);
    if (json_is_array(value)) /* some configurations list stop tokens: the first is the one meant */
        value = json_array_get(value, 0);
    if (!value || json_is_null(value)) {
        if (fallback < min)
            return error_set(error, STRATA_E_FORMAT, "%s/config.json: %s is missing", hf->directory, key);
        *out = fallback;
        return 0;
    }
    if (!json_is_integer(value) || json_integer_value(value) < min || json_integer_value(value) > max)
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: %s is not a whole number from %d to %d", hf->directory, key, min, max);
    *out = (int)json_integer_value(value);
    return 0;
}

static int get_number(const struct hf *hf, const json_t *object, const char *key, double fallback, double *out, struct strata_error *error)
{
    const json_t *value = json_object_get(object, key);
    *out = json_is_number(value) ? json_number_value(value) : fallback;
    if ((value && !json_is_number(value)) || !isfinite(*out) || *out <= 0)
        return error_set(error, STRATA_E_FORMAT, "%s/config.json: %s is not a positive number", hf->directory, key);
    return 0;
}

/* Things that the architecture fixes: a configuration that says otherwise is another model. */
static int check_fixed(const struct hf *hf, struct strata_error *error)
{
    static const struct { const char *key, *wanted; } strings[] = { { "output_gate_type", "sigmoid" }, { "hidden_act", "silu" } };
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        const char *found = json_string_value(json_object_get(hf->text, strings[i].key));
        if (found && strcmp(found, strings[i].wanted) != 0)
            return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: %s is '%.40s', wanted '%s'", hf->directory, strings[i].key, found,
                             strings[i].wanted);
    }
    if (json_is_false(json_object_get(hf->text, "norm_topk_prob")))
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: norm_topk_prob is false, wanted true", hf->directory);
    return 0;
}

static int read_layer_kinds(struct hf *hf, struct strata_error *error)
{
    int code = hf_int(hf, hf->text, "full_attention_interval", 1, HF_MAX_LAYERS, 4, &hf->interval, error);
    const json_t *kinds = json_object_get(hf->text, "layer_types");
    if (code || !kinds)
        return code;
    if (json_array_size(kinds) != (size_t)hf->layers)
        return error_set(error, STRATA_E_FORMAT, "%s/config.json: layer_types has %zu entries, wanted %d", hf->directory, json_array_size(kinds), hf->layers);
    bool found = false;
    for (int i = 0; i < hf->layers; i++) {
        const char *kind = json_string_value(json_array_get(kinds, (size_t)i));
        bool attends = !kind || strcmp(kind, "linear_attention") != 0;
        if (attends && !found)
            hf->interval = i + 1;
        found |= attends;
        if (found && attends != ((i + 1) % hf->interval == 0)) /* GGUF has only the interval */
            return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: layer_types[%d] is %s, wanted an attention layer every %d layers", hf->directory, i,
                             kind ? kind : "no string", hf->interval);
    }
    return found ? 0 : error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: layer_types has no attention layer", hf->directory);
}

static int read_rope(struct hf *hf, struct strata_error *error)
{
    const json_t *rope = json_object_get(hf->text, "rope_parameters");
    if (!rope)
        rope = hf->text;
    double partial;
    int code;
    if ((code = get_number(hf, rope, "rope_theta", 1e7, &hf->rope_theta, error)) || (code = get_number(hf, rope, "partial_rotary_factor", 0.25, &partial, error)))
        return code;
    hf->rope_dims = (int)(hf->head_dim * fmin(partial, 1.0));
    const json_t *sections = json_object_get(rope, "mrope_section");
    hf->n_sections = (int)json_array_size(sections);
    if (hf->n_sections > 4)
        return error_set(error, STRATA_E_FORMAT, "%s/config.json: mrope_section has %d entries, wanted at most 4", hf->directory, hf->n_sections);
    for (int i = 0; i < hf->n_sections; i++) {
        const json_t *value = json_array_get(sections, (size_t)i);
        if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > 4096)
            return error_set(error, STRATA_E_FORMAT, "%s/config.json: mrope_section[%d] is not a small number", hf->directory, i);
        hf->sections[i] = (int)json_integer_value(value);
    }
    return 0;
}

static int read_ngram(struct hf *hf, struct strata_error *error)
{
    const json_t *ids = json_object_get(hf->text, "ple_layer_ids");
    int per_order = 0, width = 0, code;
    if (!json_is_array(ids) || json_array_size(ids) != 1 || !json_is_integer(json_array_get(ids, 0)))
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: ple_layer_ids has %zu entries, wanted 1", hf->directory, json_array_size(ids));
    json_int_t layer = json_integer_value(json_array_get(ids, 0)) - 1; /* one-based here, zero-based in names and in GGUF */
    if (layer < 0 || layer >= hf->layers || (layer + 1) % hf->interval == 0)
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: ple_layer_ids names layer %lld, wanted a DeltaNet layer of 1 to %d", hf->directory,
                         (long long)layer + 1, hf->layers);
    hf->ngram_layer = (int)layer;
    if ((code = hf_int(hf, hf->text, "ngram_size", 3, 3, 0, &hf->ngram_size, error)) ||
        (code = hf_int(hf, hf->text, "heads_per_ngram", 1, HF_MAX_NGRAM_HEADS / 2, 0, &per_order, error)) ||
        (code = hf_int(hf, hf->text, "ple_embed_dim", 1, 1 << 20, hf->hidden, &width, error)) ||
        (code = hf_int(hf, hf->text, "ple_conv_kernel_size", 1, 64, 4, &hf->ngram_taps, error)) ||
        (code = hf_int(hf, hf->text, "eos_token_id", 0, hf->vocab - 1, -1, &hf->hash_eos, error)) ||
        (code = hf_int(hf, hf->config, "image_token_id", 0, hf->vocab - 1, hf->vocab, &hf->image_token, error)))
        return code;
    if (hf->image_token == hf->vocab)
        hf->image_token = -1;
    hf->ngram_heads = per_order * (hf->ngram_size - 1);
    hf->ngram_width = width / hf->ngram_heads;
    if (hf->ngram_width < 1 || hf->ngram_width * hf->ngram_heads != hf->hidden)
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: %d n-gram heads share ple_embed_dim %d, wanted a division of the hidden size %d",
                         hf->directory, hf->ngram_heads, width, hf->hidden);
    return read_hash(hf, error);
}

static int read_numbers(struct hf *hf, struct strata_error *error)
{
    const struct { const char *key; int *out, max; } numbers[] = {
        { "hidden_size", &hf->hidden, 65536 },
        { "vocab_size", &hf->vocab, 1 << 24 },
        { "num_hidden_layers", &hf->layers, HF_MAX_LAYERS - 1 },
        { "max_position_embeddings", &hf->context, 1 << 28 },
        { "num_attention_heads", &hf->heads, 1024 },
        { "num_key_value_heads", &hf->kv_heads, 1024 },
        { "head_dim", &hf->head_dim, 4096 },
        { "indexer_n_heads", &hf->index_heads, 64 },
        { "indexer_head_dim", &hf->index_dim, 4096 },
        { "indexer_budget", &hf->index_budget, 1 << 24 },
        { "indexer_compress_ratio", &hf->index_block, 1024 },
        { "linear_num_key_heads", &hf->k_heads, 1024 },
        { "linear_num_value_heads", &hf->v_heads, 1024 },
        { "linear_key_head_dim", &hf->k_dim, 4096 },
        { "linear_value_head_dim", &hf->v_dim, 4096 },
        { "linear_conv_kernel_dim", &hf->conv_taps, 64 },
        { "num_experts", &hf->experts, 65536 },
        { "num_experts_per_tok", &hf->experts_used, 65536 },
        { "moe_intermediate_size", &hf->expert_width, 1 << 20 },
        { "shared_expert_intermediate_size", &hf->shared_width, 1 << 20 },
        { "hc_count", &hf->streams, 16 },
        { "hc_lowrank", &hf->low_rank, 65536 },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        int code = hf_int(hf, hf->text, numbers[i].key, 1, numbers[i].max, 0, numbers[i].out, error);
        if (code)
            return code;
    }
    if (hf->v_heads % hf->k_heads)
        return error_set(error, STRATA_E_FORMAT, "%s/config.json: %d value heads do not divide among %d key heads", hf->directory, hf->v_heads, hf->k_heads);
    return get_number(hf, hf->text, "rms_norm_eps", 1e-6, &hf->eps, error);
}

static int read_config(struct hf *hf, struct strata_error *error)
{
    const char *type = json_string_value(json_object_get(hf->config, "model_type"));
    hf->text = json_object_get(hf->config, "text_config");
    if (!hf->text)
        hf->text = hf->config;
    if (!type || (strcmp(type, "qwen4_exp") != 0 && strcmp(type, "qwen4_exp_text") != 0 && strcmp(type, "qwen3_8_flash_next") != 0))
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: model_type is '%.60s', wanted qwen4_exp or qwen4_exp_text", hf->directory,
                         type ? type : "(none)");
    int code;
    if ((code = check_fixed(hf, error)) || (code = read_numbers(hf, error)) || (code = read_layer_kinds(hf, error)) || (code = read_rope(hf, error)))
        return code;
    return read_ngram(hf, error);
}

/* ---- The checkpoint ----------------------------------------------------------------------------------------------------------- */

struct safetensor *hf_find(const struct hf *hf, const char *prefix, const char *name)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    return safetensors_find(hf->st, full);
}

int hf_open(struct hf *hf, const char *directory, struct strata_error *error)
{
    *hf = (struct hf){ .directory = directory };
    int code;
    if ((code = json_read(&hf->config, directory, "config.json", true, error)) ||
        (code = json_read(&hf->generation, directory, "generation_config.json", false, error)) ||
        (code = safetensors_open(&hf->st, directory, error)))
        return code;
    hf->prefix = hf_find(hf, "model.language_model.", "embed_tokens.weight") ? "model.language_model." : "model.";
    hf->mtp = hf_find(hf, "mtp.", "fc_embedding.weight") != NULL;
    return read_config(hf, error);
}

void hf_close(struct hf *hf)
{
    json_decref(hf->config);
    json_decref(hf->generation);
    safetensors_close(hf->st);
}
