/* trace.h - the routed experts of a run in a file: what every policy and cache size can be tried on (docs/FORMAT.md, "Trace").
 *
 * The writer buffers one window and appends it when the window is complete, so a run that is killed leaves a file whose whole windows can
 * be read. The header holds the shape and the settings of the run, so that a simulation without options repeats the run itself.
 */
#ifndef EXPERT_TRACE_H
#define EXPERT_TRACE_H

#include "expert/residency.h"

struct trace_header {
    int n_layers, n_experts, n_used;
    uint64_t *blob_bytes;             /* [n_layers] */
    struct residency_options options; /* of the run; options.bytes 0: it had no device */
};

struct trace_writer;
/* Creates the file (an existing one is replaced). */
int trace_writer_create(struct trace_writer **out, const char *path, const struct trace_header *header, struct strata_error *error);
/* ids [n_rows], `stride` apart, of the next layer of the current window; layers in order 0 .. n_layers-1. */
void trace_writer_layer(struct trace_writer *w, const int32_t *ids, int stride, int n_rows);
/* Ends the window; `complete` false (the window failed) drops it. The first write error is remembered for trace_writer_close. */
void trace_writer_window(struct trace_writer *w, bool complete);
int trace_writer_close(struct trace_writer *w, struct strata_error *error);

struct trace_reader;
/* Checks the header (all sizes and every number in it); path is hostile input. */
int trace_reader_open(struct trace_reader **out, const char *path, struct strata_error *error);
const struct trace_header *trace_reader_header(const struct trace_reader *r);
/* The next window: ids [n_layers][n_rows][n_used], valid until the next call. Returns its rows, 0 at the end, a negative code for a damaged
 * file. A last window that is cut short counts as the end; trace_reader_cut says so. */
int trace_reader_next(struct trace_reader *r, const int32_t **ids, struct strata_error *error);
bool trace_reader_cut(const struct trace_reader *r);
/* Back to the first window. */
int trace_reader_rewind(struct trace_reader *r, struct strata_error *error);
void trace_reader_close(struct trace_reader *r);

#endif
