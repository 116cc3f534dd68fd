/* The C ABI of GPU backends: what the pool of BLAS handles holds, for tests and for looking into a running process. */
#ifndef MULTIGEMM_ABI_BLAS_H
#define MULTIGEMM_ABI_BLAS_H

#include "multigemm/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes a JSON text, cut at `capacity` bytes with its final zero, and stores the full length without that zero:
 * {"made": how many handles were made so far, "most_idle": how many wait at most,
 *  "handles": [{"device": the one it serves, "made_on": the one that was current when it was made,
 *               "stream": of its last call, "idle": whether it waits now} ...]}
 * Asks no device. */
MG_EXPORT int32_t MG_NAME(mg_blas_handles)(char* text, int64_t capacity, int64_t* length);

#ifdef __cplusplus
}
#endif
#endif
