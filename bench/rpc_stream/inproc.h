/* SPDX-License-Identifier: Apache-2.0 */
/* inproc.h - what rpc_stream's calls take without a client: the backend in this process. */
#ifndef EXL3_BENCH_RPC_STREAM_INPROC_H
#define EXL3_BENCH_RPC_STREAM_INPROC_H

#define RPC_SIZE 128u /* the matrix is so high and so wide */

/* Microseconds of an empty kernel and of one row of the matrix, each with its word, queued ahead. Starts CUDA in
 * this process. 0; 1: a line on stderr says why not. */
int rpc_inproc(double us[2]);

#endif
