/* info.c - `strata info`: what a file holds, and whether it runs here. */
#include "cli/cli.h"

#include "gguf/gguf.h"
#include "model/model.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char help[] = "Usage: strata info FILE [--tensors] [--all]\n"
                           "Shows what a GGUF file holds: metadata, types and sizes, and whether Strata runs it (if not, why).\n\n"
                           "      --tensors   every tensor: name, type, shape, size\n"
                           "      --all       metadata arrays in full\n";

/* The rest of long strings is left out. */
static void print_text(const char *text, uint64_t length, uint64_t limit)
{
    cli_print_text(stdout, text, (size_t)(length < limit ? length : limit));
    if (length > limit)
        printf("... (%" PRIu64 " bytes)", length);
}

static void print_element(const struct gguf_value *value, uint64_t i, uint64_t limit)
{
    enum gguf_type type = value->type == GGUF_ARRAY ? value->element : value->type;
    const uint8_t *data = value->data;
    union { uint8_t u8; int8_t i8; uint16_t u16; int16_t i16; uint32_t u32; int32_t i32; float f32; uint64_t u64; int64_t i64; double f64; } x;
#define LOAD(field) (memcpy(&x, data + i * sizeof x.field, sizeof x.field), x.field)
    switch (type) {
    case GGUF_U8: printf("%u", LOAD(u8)); break;
    case GGUF_I8: printf("%d", LOAD(i8)); break;
    case GGUF_U16: printf("%u", LOAD(u16)); break;
    case GGUF_I16: printf("%d", LOAD(i16)); break;
    case GGUF_U32: printf("%u", LOAD(u32)); break;
    case GGUF_I32: printf("%d", LOAD(i32)); break;
    case GGUF_F32: printf("%g", (double)LOAD(f32)); break;
    case GGUF_BOOL: printf("%s", LOAD(u8) ? "true" : "false"); break;
    case GGUF_U64: printf("%" PRIu64, LOAD(u64)); break;
    case GGUF_I64: printf("%" PRId64, LOAD(i64)); break;
    case GGUF_F64: printf("%g", LOAD(f64)); break;
    case GGUF_STRING: {
        const struct gguf_string *s = (const struct gguf_string *)value->data + i;
        print_text(s->data, s->length, limit);
        break;
    }
    default: printf("?");
    }
#undef LOAD
}

static void print_metadata(const struct gguf *gguf, bool all)
{
    enum { SHOWN = 12, TEXT = 80 };
    for (uint64_t i = 0; i < gguf->n_entries; i++) {
        const struct gguf_value *value = &gguf->entries[i].value;
        printf("  ");
        print_text(gguf->entries[i].key.data, gguf->entries[i].key.length, TEXT);
        printf(" = ");
        if (value->type != GGUF_ARRAY) {
            print_element(value, 0, all ? UINT64_MAX : TEXT);
        } else {
            printf("[");
            for (uint64_t j = 0; j < value->count && (all || j < SHOWN); j++) {
                printf("%s", j ? ", " : "");
                print_element(value, j, all ? UINT64_MAX : 20);
            }
            printf(!all && value->count > SHOWN ? ", ... %" PRIu64 " elements]" : "]", value->count);
        }
        printf("\n");
    }
}

static void print_types(const struct gguf *gguf)
{
    enum { TYPES = 64 };
    uint64_t count[TYPES] = { 0 }, bytes[TYPES] = { 0 }, weights[TYPES] = { 0 }, total = 0, all = 0;
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        const struct gguf_tensor *t = &gguf->tensors[i];
        uint32_t type = t->type < TYPES ? t->type : TYPES - 1;
        uint64_t n = (uint64_t)(t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]);
        count[type]++;
        bytes[type] += t->bytes;
        weights[type] += n;
        total += t->bytes;
        all += n;
    }
    char text[32];
    printf("%" PRIu64 " tensors, %.3f billion weights, %s\n", gguf->n_tensors, (double)all / 1e9, cli_bytes(text, (double)total));
    for (uint32_t type = 0; type < TYPES; type++)
        if (count[type]) {
            const struct quant_format *f = quant_format_find(type);
            printf("  %-8s %6" PRIu64 " tensors  %10s  %5.2f bits a weight%s\n", quant_type_name(type), count[type], cli_bytes(text, (double)bytes[type]),
                   weights[type] ? 8.0 * (double)bytes[type] / (double)weights[type] : 0, f ? "" : "  (Strata cannot compute with it)");
        }
}

static void print_tensors(const struct gguf *gguf)
{
    for (uint64_t i = 0; i < gguf->n_tensors; i++) {
        const struct gguf_tensor *t = &gguf->tensors[i];
        char shape[100] = "", text[32];
        for (int d = t->n_dims - 1; d >= 0; d--)
            snprintf(shape + strlen(shape), sizeof shape - strlen(shape), "%s%" PRId64, *shape ? " x " : "", t->dims[d]);
        printf("  ");
        cli_print_text(stdout, t->name, strlen(t->name));
        printf("%*s %-8s %-24s %10s\n", strlen(t->name) < 44 ? 44 - (int)strlen(t->name) : 0, "", quant_type_name(t->type), shape,
               cli_bytes(text, (double)t->bytes));
    }
}

int cli_info(int argc, char **argv)
{
    static const struct option options[] = { { "tensors", no_argument, NULL, 't' }, { "all", no_argument, NULL, 'a' }, { "help", no_argument, NULL, 'h' }, { 0 } };
    bool tensors = false, all = false;
    optind = 1;
    for (int c; (c = getopt_long(argc, argv, "h", options, NULL)) != -1;)
        switch (c) {
        case 't': tensors = true; break;
        case 'a': all = true; break;
        case 'h': fputs(help, stdout); return CLI_OK;
        default: return cli_usage("info", "wrong option");
        }
    if (optind + 1 != argc)
        return cli_usage("info", optind < argc ? "one file at a time" : "no file");
    struct strata_error error = { 0 };
    struct gguf *gguf;
    if (gguf_open(&gguf, argv[optind], &error))
        return cli_fail(&error);
    char text[32];
    for (int i = 0; i < gguf->n_files; i++)
        printf("%s: GGUF version %u, %s\n", gguf->files[i].path, gguf->version, cli_bytes(text, (double)gguf->files[i].size));
    print_metadata(gguf, all);
    print_types(gguf);
    if (tensors)
        print_tensors(gguf);
    bool runs = model_check(gguf, &error) == 0;
    printf(runs ? "Strata runs this file" : "Strata cannot run this file: ");
    if (!runs)
        cli_print_text(stdout, error.text, strlen(error.text));
    printf(".\n");
    gguf_close(gguf);
    return CLI_OK;
}
