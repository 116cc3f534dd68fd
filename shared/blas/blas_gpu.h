// Matrix products on a GPU by the BLAS that this library links, or finds in the process.
#pragma once

#include <string>
#include <vector>

#include "blas/handles.h"
#include "multigemm/abi.h"

namespace multigemm {

void check_blas(int status, const char* what);

// "" if there is a BLAS, else why not.
std::string blas_refusal();

// c[i] = a[i] b[i] (+ c[i] if accumulate); a and b have a unit row or column stride, c a unit column stride, and no
// size passes 2^31 - 1. The dtype is any of the four; halves are summed in float32.
void blas_product(const mg_matmul& product, int32_t precision, bool accumulate, const BorrowedHandle& handle);

// Whether the loaded library has the grouped product, which takes products of different sizes in one call.
bool has_grouped_products();

// The same for many products of one dtype at once; `room` is device memory of 3 x count pointers.
void blas_products(const std::vector<mg_matmul>& products, int32_t precision, int64_t* room,
                   const BorrowedHandle& handle, void* stream);

// Of the library that is loaded: 130002 is 13.0.2; 0 if it does not tell. Needs no device.
int64_t blas_version();

}  // namespace multigemm
