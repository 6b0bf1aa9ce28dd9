#include "convert/shape.h"

#include <stdio.h>

/* ---- Hash constants (spec/model.md section 3.2) --------------------------------------------------------------------------------
 */

void shape_hash_multipliers(uint64_t seed, int ngram_layer_index, int vocab, uint64_t out[3])
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

void shape_hash_sizes(uint64_t base, int n_heads, uint64_t *sizes, uint64_t *offsets)
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

/* ---- Keys -------------------------------------------------------------------------------------------------------------------- */

static void put_u32(struct gguf_writer *writer, const char *key, int value)
{
    char full[80];
    snprintf(full, sizeof full, "qwen4exp.%s", key);
    gguf_put_u32(writer, full, (uint32_t)value);
}

void shape_put_keys(const struct shape *s, struct gguf_writer *writer)
{
    gguf_put_string(writer, "general.architecture", "qwen4exp");
    gguf_put_string(writer, "general.type", "model");
    const struct {
        const char *key;
        int value;
    } numbers[] = {
        { "block_count", s->layers + s->mtp },
        { "context_length", s->context },
        { "embedding_length", s->hidden },
        { "attention.head_count", s->heads },
        { "attention.head_count_kv", s->kv_heads },
        { "attention.key_length", s->head_dim },
        { "attention.value_length", s->head_dim },
        { "attention.indexer.head_count", s->index_heads },
        { "attention.indexer.key_length", s->index_dim },
        { "attention.indexer.top_k", s->index_budget },
        { "rope.dimension_count", s->rope_dims },
        { "full_attention_interval", s->interval },
        { "ssm.group_count", s->k_heads },
        { "ssm.time_step_rank", s->v_heads },
        { "ssm.state_size", s->k_dim },
        { "ssm.inner_size", s->v_heads * s->v_dim },
        { "ssm.conv_kernel", s->conv_taps },
        { "expert_count", s->experts },
        { "expert_used_count", s->experts_used },
        { "expert_feed_forward_length", s->expert_width },
        { "expert_shared_feed_forward_length", s->shared_width },
        { "hyper_connection.count", s->streams },
        { "hyper_connection.low_rank", s->low_rank },
        { "ple.ngram_size", s->ngram_size },
        { "ple.heads_per_ngram", s->ngram_heads / (s->ngram_size - 1) },
        { "ple.conv_kernel", s->ngram_taps },
        { "ple.eos_token_id", s->hash_eos },
        { "embedding_length_per_layer_input", s->ngram_width },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        put_u32(writer, numbers[i].key, numbers[i].value);
    if (s->image_token >= 0)
        put_u32(writer, "ple.image_token_id", s->image_token);
    if (s->mtp)
        put_u32(writer, "nextn_predict_layers", 1);
    gguf_put_f32(writer, "qwen4exp.attention.layer_norm_rms_epsilon", (float)s->eps);
    gguf_put_f32(writer, "qwen4exp.rope.freq_base", (float)s->rope_theta);
    if (s->n_sections)
        gguf_put_array(writer, "qwen4exp.rope.dimension_sections", GGUF_I32, s->sections, 4);
    int32_t ratios[SHAPE_MAX_LAYERS] = { 0 }; /* 0: no index; so it stays for the draft block */
    for (int i = 0; i < s->layers; i++)
        ratios[i] = shape_attends(s, i) ? s->index_block : 0;
    gguf_put_array(writer, "qwen4exp.attention.compress_ratios", GGUF_I32, ratios, (uint64_t)(s->layers + s->mtp));
    gguf_put_array(writer, "qwen4exp.ple.layers", GGUF_I32, &(int32_t){ s->ngram_layer }, 1);
    gguf_put_array(writer, "qwen4exp.ple.layer_multipliers", GGUF_U64, s->multipliers, 3);
    gguf_put_array(writer, "qwen4exp.ple.head_vocab_sizes", GGUF_U64, s->head_sizes, (uint64_t)s->ngram_heads);
    gguf_put_array(writer, "qwen4exp.ple.head_offsets", GGUF_U64, s->head_offsets, (uint64_t)s->ngram_heads);
}

int64_t shape_ngram_rows(const struct shape *s)
{
    uint64_t rows = 0;
    for (int h = 0; h < s->ngram_heads; h++)
        if (s->head_offsets[h] + s->head_sizes[h] > rows)
            rows = s->head_offsets[h] + s->head_sizes[h];
    return (int64_t)rows;
}
