#include "convert/synth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Shapes
 * -------------------------------------------------------------------------------------------------------------------------- */

struct preset {
    const char *name;
    int first_special;
    int64_t ngram_rows;
    struct shape shape;
};

static const struct preset presets[] = {
    { "qwen3.8-flash-next",
      248044,
      1 << 20,
      { .hidden = 2560,
        .vocab = 248320,
        .layers = 48,
        .context = 262144,
        .heads = 24,
        .kv_heads = 2,
        .head_dim = 256,
        .rope_dims = 64,
        .rope_theta = 1e7,
        .eps = 1e-6,
        .n_sections = 3,
        .sections = { 11, 11, 10 },
        .index_heads = 4,
        .index_dim = 128,
        .index_budget = 2048,
        .index_block = 4,
        .interval = 4,
        .k_heads = 16,
        .v_heads = 48,
        .k_dim = 128,
        .v_dim = 128,
        .conv_taps = 4,
        .experts = 512,
        .experts_used = 10,
        .expert_width = 640,
        .shared_width = 640,
        .streams = 4,
        .low_rank = 320,
        .ngram_layer = 1,
        .ngram_size = 3,
        .ngram_heads = 16,
        .ngram_width = 160,
        .ngram_taps = 4,
        .hash_eos = 248044,
        .image_token = 248056 } },
    { "tiny",
      400,
      4096,
      { .hidden = 256,
        .vocab = 512,
        .layers = 4,
        .context = 4096,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 128,
        .rope_dims = 64,
        .rope_theta = 1e7,
        .eps = 1e-6,
        .n_sections = 3,
        .sections = { 11, 11, 10 },
        .index_heads = 4,
        .index_dim = 128,
        .index_budget = 64,
        .index_block = 4,
        .interval = 4,
        .k_heads = 2,
        .v_heads = 6,
        .k_dim = 64,
        .v_dim = 64,
        .conv_taps = 4,
        .experts = 32,
        .experts_used = 4,
        .expert_width = 64,
        .shared_width = 64,
        .streams = 4,
        .low_rank = 64,
        .ngram_layer = 1,
        .ngram_size = 3,
        .ngram_heads = 16,
        .ngram_width = 16,
        .ngram_taps = 4,
        .hash_eos = 400,
        .image_token = 412 } },
};

int synth_shape(const struct convert_synth *request, struct shape *shape, int *first_special, struct strata_error *error)
{
    const struct preset *p = NULL;
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (strcmp(presets[i].name, request->like) == 0)
            p = &presets[i];
    if (!p)
        return error_set(error, STRATA_E_ARGUMENT, "no shapes of a model '%.60s' are known, wanted %s or %s", request->like,
                         presets[0].name, presets[1].name);
    *shape = p->shape;
    *first_special = p->first_special;
    if (request->n_layers)
        shape->layers = request->n_layers;
    if (shape->layers <= shape->ngram_layer || shape->layers > SHAPE_MAX_LAYERS - 1)
        return error_set(error, STRATA_E_ARGUMENT, "%d layers, wanted %d to %d (layer %d has the n-gram table)", shape->layers,
                         shape->ngram_layer + 1, SHAPE_MAX_LAYERS - 1, shape->ngram_layer);
    int64_t rows = request->ngram_rows ? request->ngram_rows : p->ngram_rows;
    if (rows < 1024 || rows > INT32_MAX)
        return error_set(error, STRATA_E_ARGUMENT, "an n-gram table of %lld rows, wanted 1024 to %d", (long long)rows, INT32_MAX);
    shape_hash_multipliers(1234, 0, shape->vocab, shape->multipliers);
    /* Primes grow by about ln(n) a head: start low enough that all sixteen together stay within the rows. */
    uint64_t base = (uint64_t)rows / (uint64_t)shape->ngram_heads;
    do {
        base -= base / 256 + 1;
        shape_hash_sizes(base, shape->ngram_heads, shape->head_sizes, shape->head_offsets);
    } while (shape_ngram_rows(shape) > rows);
    return 0;
}

/* ---- Tokenizer
 * -------------------------------------------------------------------------------------------------------------------------- */

/* In the order of their ids; '*' marks those that always count as such, even where special tokens in the text do not. */
static const char *const special[] = {
    "<|endoftext|>",      "<|im_start|>",     "<|im_end|>",       "<|object_ref_start|>",
    "<|object_ref_end|>", "<|box_start|>",    "<|box_end|>",      "<|quad_start|>",
    "<|quad_end|>",       "<|vision_start|>", "<|vision_end|>",   "<|vision_pad|>",
    "<|image_pad|>",      "<|video_pad|>",    "*<tool_call>",     "*</tool_call>",
    "*<|fim_prefix|>",    "*<|fim_middle|>",  "*<|fim_suffix|>",  "*<|fim_pad|>",
    "*<|repo_name|>",     "*<|file_sep|>",    "*<tool_response>", "*</tool_response>",
    "*<think>",           "*</think>",        "<|audio_start|>",  "<|audio_end|>",
    "<tts_pad>",          "<tts_text_bos>",   "<tts_text_eod>",   "<tts_text_bos_single>",
    "<|audio_pad|>",
};

/* A merge makes the token that its two sides spell. \304\240 is how a space is written. */
static const char *const merges[] = {
    "\304\240 t", "\304\240t h", "\304\240th e", "i n", "e r",  "o n",        "\304\240 a",  "\304\240a n", "\304\240an d", "r e",
    "\304\240 s", "\304\240 w",  "e n",          "o u", "in g", "\304\240 o", "\304\240o f", "\304\240 in", "e d",          "a n",
};

static const char template[] =
    "{%- for message in messages -%}\n{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor -%}\n{%- if add_generation_prompt -%}\n{{ '<|im_start|>assistant\\n' }}\n{%- endif -%}\n";

/* The printable character that stands for byte i of the base vocabulary: printable bytes first, the other 68 as U+0100 and up. */
static void byte_token(int i, char out[4])
{
    int code, n_printable = 94 + 12 + 82; /* 21-7E, A1-AC, AE-FF */
    if (i >= n_printable)
        code = 0x100 + i - n_printable;
    else
        code = i < 94 ? 0x21 + i : i < 106 ? 0xa1 + i - 94 : 0xae + i - 106;
    int at = 0;
    if (code >= 0x80)
        out[at++] = (char)(0xc0 | code >> 6);
    out[at++] = (char)(code < 0x80 ? code : 0x80 | (code & 0x3f));
    out[at] = 0;
}

static void token_text(int id, int first_special, char out[32], int32_t *type)
{
    enum { NORMAL = 1, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5 };
    int n_merges = (int)(sizeof merges / sizeof *merges), n_special = (int)(sizeof special / sizeof *special);
    *type = NORMAL;
    if (id < 256)
        byte_token(id, out);
    else if (id < 256 + n_merges) {
        const char *space = strchr(merges[id - 256], ' ');
        snprintf(out, 32, "%.*s%s", (int)(space - merges[id - 256]), merges[id - 256], space + 1);
    } else if (id < first_special)
        snprintf(out, 32, "<s%d>", id);
    else if (id < first_special + n_special) {
        bool always = special[id - first_special][0] == '*';
        snprintf(out, 32, "%s", special[id - first_special] + always);
        *type = always ? USER_DEFINED : CONTROL;
    } else {
        snprintf(out, 32, "[PAD%d]", id);
        *type = UNUSED;
    }
}

int synth_put_tokenizer(const struct shape *shape, int first_special, struct gguf_writer *writer, struct strata_error *error)
{
    size_t n = (size_t)shape->vocab, n_merges = sizeof merges / sizeof *merges;
    char(*texts)[32] = malloc(n * sizeof *texts);
    struct gguf_string *tokens = malloc(n * sizeof *tokens), merge_strings[sizeof merges / sizeof *merges];
    int32_t *types = malloc(n * sizeof *types);
    int code = texts && tokens && types ? 0 : error_set(error, STRATA_E_MEMORY, "out of memory for %zu tokens", n);
    for (size_t i = 0; !code && i < n; i++) {
        token_text((int)i, first_special, texts[i], &types[i]);
        tokens[i] = (struct gguf_string){ texts[i], strlen(texts[i]) };
    }
    for (size_t i = 0; i < n_merges; i++)
        merge_strings[i] = (struct gguf_string){ merges[i], strlen(merges[i]) };
    if (!code) {
        gguf_put_string(writer, "tokenizer.ggml.model", "gpt2");
        gguf_put_string(writer, "tokenizer.ggml.pre", "qwen35");
        gguf_put_string_array(writer, "tokenizer.ggml.tokens", tokens, n);
        gguf_put_array(writer, "tokenizer.ggml.token_type", GGUF_I32, types, n);
        gguf_put_string_array(writer, "tokenizer.ggml.merges", merge_strings, n_merges);
        gguf_put_u32(writer, "tokenizer.ggml.eos_token_id", (uint32_t)first_special + 2);
        gguf_put_u32(writer, "tokenizer.ggml.bos_token_id", (uint32_t)first_special);
        gguf_put_u32(writer, "tokenizer.ggml.padding_token_id", (uint32_t)first_special);
        gguf_put_bool(writer, "tokenizer.ggml.add_bos_token", false);
        gguf_put_string(writer, "tokenizer.chat_template", template);
    }
    free(types);
    free(tokens);
    free(texts);
    return code;
}
