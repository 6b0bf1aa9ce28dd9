/* pack.h - a model's experts in a file, byte for byte as the store holds them (docs/FORMAT.md, "Pack").
 *
 * Owns the file's format: its header, its checks, and writing it so that the final name only ever belongs to a whole pack. The
 * header is a function of the model's shapes and fingerprint and of the layers' hashes, so nothing in a pack is believed: what
 * differs from the model's own is refused. Who makes the layers, and reads them, is the loader.
 */
#ifndef EXPERT_PACK_H
#define EXPERT_PACK_H

#include "expert/store.h"

enum {
    PACK_VERSION = 1,
    /* The layout of tiles and blobs: raise it when quant/tile.h or the order inside a blob (ops.h) changes. Then old packs are
       refused. */
    PACK_TILES = 1,
};

struct pack {
    const char *path; /* the caller's */
    int fd, n_layers;
    struct pack_layer {
        uint64_t offset, bytes, hash;
    } * layers; /* [n_layers]; all inside the file */
};

/* Opens and checks a pack for a model with these sets and this fingerprint. `model_path` names the model in sentences. */
int pack_open(struct pack *out, const char *path, const struct expert_store *store, uint64_t fingerprint, const char *model_path,
              struct strata_error *error);
void pack_close(struct pack *pack);

/* The file grows as PATH.part and takes its name in pack_writer_finish; what a killed run left there is written over. */
struct pack_writer;
int pack_writer_create(struct pack_writer **out, const char *path, const struct expert_store *store, uint64_t fingerprint,
                       struct strata_error *error);
/* The next bytes of the layers' runs (store_layer_bytes each, one after the other); a call stays inside one layer. */
int pack_writer_write(struct pack_writer *writer, const uint8_t *bytes, size_t length, struct strata_error *error);
/* All layers are there: flushes to disk and gives the file its name. */
int pack_writer_finish(struct pack_writer *writer, struct strata_error *error);
/* Without finish: removes PATH.part. NULL is allowed. */
void pack_writer_destroy(struct pack_writer *writer);
/* Of the finished file. */
uint64_t pack_file_bytes(const struct expert_store *store);

#endif
