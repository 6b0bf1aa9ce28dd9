#include "convert/hf.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static int read_i64s(const struct hf *hf, const char *name, int n, uint64_t *out, bool *found, struct strata_error *error)
{
    char full[160];
    snprintf(full, sizeof full, "%slayers.%d.ple.ple_embedding.%s", hf->prefix, hf->shape.ngram_layer, name);
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
    shape_hash_multipliers((uint64_t)seed, 0, hf->shape.vocab, hf->shape.multipliers);
    shape_hash_sizes((uint64_t)base, hf->shape.ngram_heads, hf->shape.head_sizes, hf->shape.head_offsets);
    if ((code = read_i64s(hf, "layer_multipliers", 3, hf->shape.multipliers, &has_multipliers, error)) ||
        (code = read_i64s(hf, "ngram_heads_vocab_sizes", hf->shape.ngram_heads, hf->shape.head_sizes, &has_sizes, error)) ||
        (code = read_i64s(hf, "ngram_heads_offsets", hf->shape.ngram_heads, hf->shape.head_offsets, &has_offsets, error)))
        return code;
    for (int h = 0; h < hf->shape.ngram_heads; h++)
        if (hf->shape.head_sizes[h] < 1 || hf->shape.head_sizes[h] > INT32_MAX ||
            hf->shape.head_offsets[h] > INT32_MAX - hf->shape.head_sizes[h])
            return error_set(error, STRATA_E_FORMAT, "%s: n-gram head %d has offset %llu and size %llu, wanted an end below 2^31",
                             hf->directory, h, (unsigned long long)hf->shape.head_offsets[h],
                             (unsigned long long)hf->shape.head_sizes[h]);
    return 0;
}

/* ---- config.json ------------------------------------------------------------------------------------------------------------ */

int hf_int(const struct hf *hf, const json_t *object, const char *key, int min, int max, int fallback, int *out,
           struct strata_error *error)
{
    const char *file = object && object == hf->generation ? "generation_config.json" : "config.json";
    const json_t *value = json_object_get(object, key);
    if (json_is_array(value)) /* some configurations list stop tokens: the first is the one meant */
        value = json_array_get(value, 0);
    if (!value || json_is_null(value)) {
        if (fallback < min)
            return error_set(error, STRATA_E_FORMAT, "%s/%s: %s is missing", hf->directory, file, key);
        *out = fallback;
        return 0;
    }
    if (!json_is_integer(value) || json_integer_value(value) < min || json_integer_value(value) > max)
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/%s: %s is not a whole number from %d to %d", hf->directory, file, key,
                         min, max);
    *out = (int)json_integer_value(value);
    return 0;
}

static int get_number(const struct hf *hf, const json_t *object, const char *key, double fallback, double *out,
                      struct strata_error *error)
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
    static const struct {
        const char *key, *wanted;
    } strings[] = { { "output_gate_type", "sigmoid" }, { "hidden_act", "silu" } };
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        const char *found = json_string_value(json_object_get(hf->text, strings[i].key));
        if (found && strcmp(found, strings[i].wanted) != 0)
            return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: %s is '%.40s', wanted '%s'", hf->directory,
                             strings[i].key, found, strings[i].wanted);
    }
    if (json_is_false(json_object_get(hf->text, "norm_topk_prob")))
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: norm_topk_prob is false, wanted true", hf->directory);
    return 0;
}

static int read_layer_kinds(struct hf *hf, struct strata_error *error)
{
    int code = hf_int(hf, hf->text, "full_attention_interval", 1, SHAPE_MAX_LAYERS, 4, &hf->shape.interval, error);
    const json_t *kinds = json_object_get(hf->text, "layer_types");
    if (code || !kinds)
        return code;
    if (json_array_size(kinds) != (size_t)hf->shape.layers)
        return error_set(error, STRATA_E_FORMAT, "%s/config.json: layer_types has %zu entries, wanted %d", hf->directory,
                         json_array_size(kinds), hf->shape.layers);
    bool found = false;
    for (int i = 0; i < hf->shape.layers; i++) {
        const char *kind = json_string_value(json_array_get(kinds, (size_t)i));
        bool attends = !kind || strcmp(kind, "linear_attention") != 0;
        if (attends && !found)
            hf->shape.interval = i + 1;
        found |= attends;
        if (found && attends != ((i + 1) % hf->shape.interval == 0)) /* GGUF has only the interval */
            return error_set(error, STRATA_E_UNSUPPORTED,
                             "%s/config.json: layer_types[%d] is %s, wanted an attention layer every %d layers", hf->directory, i,
                             kind ? kind : "no string", hf->shape.interval);
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
    if ((code = get_number(hf, rope, "rope_theta", 1e7, &hf->shape.rope_theta, error)) ||
        (code = get_number(hf, rope, "partial_rotary_factor", 0.25, &partial, error)))
        return code;
    hf->shape.rope_dims = (int)(hf->shape.head_dim * fmin(partial, 1.0));
    const json_t *sections = json_object_get(rope, "mrope_section");
    hf->shape.n_sections = (int)json_array_size(sections);
    if (hf->shape.n_sections > 4)
        return error_set(error, STRATA_E_FORMAT, "%s/config.json: mrope_section has %d entries, wanted at most 4", hf->directory,
                         hf->shape.n_sections);
    for (int i = 0; i < hf->shape.n_sections; i++) {
        const json_t *value = json_array_get(sections, (size_t)i);
        if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > 4096)
            return error_set(error, STRATA_E_FORMAT, "%s/config.json: mrope_section[%d] is not a small number", hf->directory, i);
        hf->shape.sections[i] = (int)json_integer_value(value);
    }
    return 0;
}

static int read_ngram(struct hf *hf, struct strata_error *error)
{
    const json_t *ids = json_object_get(hf->text, "ple_layer_ids");
    int per_order = 0, width = 0, code;
    if (!json_is_array(ids) || json_array_size(ids) != 1 || !json_is_integer(json_array_get(ids, 0)))
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: ple_layer_ids has %zu entries, wanted 1", hf->directory,
                         json_array_size(ids));
    json_int_t layer = json_integer_value(json_array_get(ids, 0)) - 1; /* one-based here, zero-based in names and in GGUF */
    if (layer < 0 || layer >= hf->shape.layers || (layer + 1) % hf->shape.interval == 0)
        return error_set(error, STRATA_E_UNSUPPORTED,
                         "%s/config.json: ple_layer_ids names layer %lld, wanted a DeltaNet layer of 1 to %d", hf->directory,
                         (long long)layer + 1, hf->shape.layers);
    hf->shape.ngram_layer = (int)layer;
    if ((code = hf_int(hf, hf->text, "ngram_size", 3, 3, 0, &hf->shape.ngram_size, error)) ||
        (code = hf_int(hf, hf->text, "heads_per_ngram", 1, SHAPE_MAX_NGRAM_HEADS / 2, 0, &per_order, error)) ||
        (code = hf_int(hf, hf->text, "ple_embed_dim", 1, 1 << 20, hf->shape.hidden, &width, error)) ||
        (code = hf_int(hf, hf->text, "ple_conv_kernel_size", 1, 64, 4, &hf->shape.ngram_taps, error)) ||
        (code = hf_int(hf, hf->text, "eos_token_id", 0, hf->shape.vocab - 1, -1, &hf->shape.hash_eos, error)) ||
        (code = hf_int(hf, hf->config, "image_token_id", 0, hf->shape.vocab - 1, hf->shape.vocab, &hf->shape.image_token, error)))
        return code;
    if (hf->shape.image_token == hf->shape.vocab)
        hf->shape.image_token = -1;
    hf->shape.ngram_heads = per_order * (hf->shape.ngram_size - 1);
    hf->shape.ngram_width = width / hf->shape.ngram_heads;
    if (hf->shape.ngram_width < 1 || hf->shape.ngram_width * hf->shape.ngram_heads != hf->shape.hidden)
        return error_set(error, STRATA_E_UNSUPPORTED,
                         "%s/config.json: %d n-gram heads share ple_embed_dim %d, wanted a division of the hidden size %d",
                         hf->directory, hf->shape.ngram_heads, width, hf->shape.hidden);
    return read_hash(hf, error);
}

static int read_numbers(struct hf *hf, struct strata_error *error)
{
    const struct {
        const char *key;
        int *out, max;
    } numbers[] = {
        { "hidden_size", &hf->shape.hidden, 65536 },
        { "vocab_size", &hf->shape.vocab, 1 << 24 },
        { "num_hidden_layers", &hf->shape.layers, SHAPE_MAX_LAYERS - 1 },
        { "max_position_embeddings", &hf->shape.context, 1 << 28 },
        { "num_attention_heads", &hf->shape.heads, 1024 },
        { "num_key_value_heads", &hf->shape.kv_heads, 1024 },
        { "head_dim", &hf->shape.head_dim, 4096 },
        { "indexer_n_heads", &hf->shape.index_heads, 64 },
        { "indexer_head_dim", &hf->shape.index_dim, 4096 },
        { "indexer_budget", &hf->shape.index_budget, 1 << 24 },
        { "indexer_compress_ratio", &hf->shape.index_block, 1024 },
        { "linear_num_key_heads", &hf->shape.k_heads, 1024 },
        { "linear_num_value_heads", &hf->shape.v_heads, 1024 },
        { "linear_key_head_dim", &hf->shape.k_dim, 4096 },
        { "linear_value_head_dim", &hf->shape.v_dim, 4096 },
        { "linear_conv_kernel_dim", &hf->shape.conv_taps, 64 },
        { "num_experts", &hf->shape.experts, 65536 },
        { "num_experts_per_tok", &hf->shape.experts_used, 65536 },
        { "moe_intermediate_size", &hf->shape.expert_width, 1 << 20 },
        { "shared_expert_intermediate_size", &hf->shape.shared_width, 1 << 20 },
        { "hc_count", &hf->shape.streams, 16 },
        { "hc_lowrank", &hf->shape.low_rank, 65536 },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        int code = hf_int(hf, hf->text, numbers[i].key, 1, numbers[i].max, 0, numbers[i].out, error);
        if (code)
            return code;
    }
    if (hf->shape.v_heads % hf->shape.k_heads)
        return error_set(error, STRATA_E_FORMAT, "%s/config.json: %d value heads do not divide among %d key heads", hf->directory,
                         hf->shape.v_heads, hf->shape.k_heads);
    return get_number(hf, hf->text, "rms_norm_eps", 1e-6, &hf->shape.eps, error);
}

static int read_config(struct hf *hf, struct strata_error *error)
{
    const char *type = json_string_value(json_object_get(hf->config, "model_type"));
    hf->text = json_object_get(hf->config, "text_config");
    if (!hf->text)
        hf->text = hf->config;
    if (!type || (strcmp(type, "qwen4_exp") != 0 && strcmp(type, "qwen4_exp_text") != 0 && strcmp(type, "qwen3_8_flash_next") != 0))
        return error_set(error, STRATA_E_UNSUPPORTED, "%s/config.json: model_type is '%.60s', wanted qwen4_exp or qwen4_exp_text",
                         hf->directory, type ? type : "(none)");
    int code;
    if ((code = check_fixed(hf, error)) || (code = read_numbers(hf, error)) || (code = read_layer_kinds(hf, error)) ||
        (code = read_rope(hf, error)))
        return code;
    return read_ngram(hf, error);
}

/* ---- The checkpoint -----------------------------------------------------------------------------------------------------------
 */

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
    hf->shape.mtp = hf_find(hf, "mtp.", "fc_embedding.weight") != NULL;
    return read_config(hf, error);
}

void hf_close(struct hf *hf)
{
    json_decref(hf->config);
    json_decref(hf->generation);
    safetensors_close(hf->st);
}
