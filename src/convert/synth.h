/* synth.h - inside convert/ only: what a synthetic model is like, apart from its weights. */
#ifndef CONVERT_SYNTH_H
#define CONVERT_SYNTH_H

#include "convert/emit.h"
#include "convert/shape.h"

/* The shape that was asked for. Ids from *first_special on are special tokens or padding. */
int synth_shape(const struct convert_synth *request, struct shape *shape, int *first_special, struct strata_error *error);

/* A vocabulary that tokenizes any text: the 256 bytes, a few English pieces with their merges, "<sN>" up to the special tokens. */
int synth_put_tokenizer(const struct shape *shape, int first_special, struct gguf_writer *writer, struct strata_error *error);

#endif
