// A GPU runtime on plain memory for the tests of the launch layer: pretend devices, streams that are queues of work,
// a record of every call, and errors on demand.
#pragma once

#include <stdint.h>

#include <functional>
#include <string>

namespace multigemm {
namespace stand_in {

constexpr int kInvalidValue = 1, kInvalidConfiguration = 9, kInvalidDevice = 101, kNoKernelImage = 209, kCaptured = 900;
constexpr int kDevices = 4;

// Records a call with the thread's current device; what it answers is 0, or the error that the test asked for.
int answer(const std::string& call, void* stream, int64_t detail = 0);

const char* error_name(int error);
int current_device();

// The devices that the process has a context on: CUDA makes one when a device is made current.
bool has_context(int device);

// Work in the order of a stream, and waiting for all of it.
void enqueue(void* stream, std::function<void()> work);
void synchronize(void* stream);

// What the test asked for of a kernel such as "rows_sm90": it takes nothing, packed operands, or anything.
enum Taking { kNothing, kPacked, kAnything };
int taking(const std::string& kernel);

bool grouped_products();

// Something wrong was found while a stream's work was done.
void complain();

}  // namespace stand_in
}  // namespace multigemm
