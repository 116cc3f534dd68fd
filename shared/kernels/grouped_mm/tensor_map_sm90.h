// Tensor maps of 16-bit operands, for the copy engine. The driver's function is looked up, so that nothing links it.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "multigemm/abi.h"

namespace multigemm {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// Null where the driver has no such function.
inline TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<TensorMapEncoder>(function)
                                                                         : nullptr;
  }();
  return found;
}

// Rows of 128 bytes in the 128-byte swizzle; zeros outside. Strides in bytes, of the dimensions after the first.
inline bool encode_tensor_map(CUtensorMap* map, int32_t dtype, const void* data, int rank, const cuuint64_t* extents,
                              const cuuint64_t* strides, const cuuint32_t* box) {
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUtensorMapDataType type =
      dtype == MG_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_map_encoder()(map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), extents, strides, box,
                              steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace multigemm
