// Defences that this library was built without, for the tests of the tests: CMake's MULTIGEMM_WITHOUT names one, and
// no wheel that is published has any. The few files that read this are told apart by CMake, so that such a build
// compiles those alone.
#pragma once

namespace multigemm {

#if defined(MG_WITHOUT_GUARD)  // nothing makes the operands' device current
constexpr bool kHasGuard = false;
#else
constexpr bool kHasGuard = true;
#endif

#if defined(MG_WITHOUT_STREAM)  // work goes to the default stream, whatever the caller's is
constexpr bool kHasStream = false;
#else
constexpr bool kHasStream = true;
#endif

#if defined(MG_WITHOUT_POOL_KEY)  // a BLAS handle serves a device that it was not made on
constexpr bool kHasPoolKey = false;
#else
constexpr bool kHasPoolKey = true;
#endif

// The field "without" of what the library says of itself.
constexpr const char* kWithout = !kHasGuard     ? "[\"guard\"]"
                                 : !kHasStream  ? "[\"stream\"]"
                                 : !kHasPoolKey ? "[\"pool-key\"]"
                                                : "[]";

}  // namespace multigemm
