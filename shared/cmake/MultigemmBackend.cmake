# multigemm_add_backend(NAME cpu KIND cpu SOURCES ...): the libraries of one backend with its backend.json.
#
#   NAME           suffix of the library, of its exported mg_* functions and of the import package multigemm_<NAME>
#   KIND           cpu, cuda or rocm; a cuda backend has MG_CUDA=1 defined and its own static copy of the CUDA runtime,
#                  a rocm one MG_HIP=1, and neither links nor needs anything of ROCm
#   MAJOR          of a cuda backend, the toolkit's major, which is in its libraries' names
#   SOURCES        files under shared/ of the core, each compiled once; it needs no PyTorch
#   BINDING        files under shared/ of the second library, which registers the core with PyTorch
#   LEVELS         x86-64 levels for kernels/grouped_mm/cpu_level.cpp, compiled once for each
#   ARCHITECTURES  of a cuda backend, by CUDA's names: machine code for sm_90a, PTX for compute_120; of a rocm one gfx942
#   INCLUDES       more folders of headers
#   RPATH          folders, relative to the library, of the vendor libraries in other wheels
#   NEEDED         vendor libraries to link, by path
#   INFO           the fields of backend.json that are this backend's own, as JSON members
include_guard()
get_filename_component(MULTIGEMM_SHARED "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
include(${CMAKE_CURRENT_LIST_DIR}/Cuda.cmake)

# What every CUDA backend is built of, beside what every GPU backend is.
set(MULTIGEMM_CUDA_SOURCES
  blas/blas_cuda.cpp
  blas/handles_cuda.cpp
  kernels/grouped_mm/rows_sm80.cu
  kernels/grouped_mm/rows_sm90.cu
  kernels/grouped_mm/wgrad_sm80.cu
  kernels/grouped_mm/wgrad_sm90.cu
  kernels/moe/up_sm90.cu
)

# What every GPU backend is built of, beside one vendor's BLAS and the kernels of one architecture.
set(MULTIGEMM_GPU_SOURCES
  blas/handles_gpu.cpp
  kernels/grouped_mm/simt.cu
  kernels/indexed_polynomial/polynomial_simt.cu
  kernels/indexed_polynomial/unrolled_float32.cu
  kernels/indexed_polynomial/unrolled_float64.cu
  kernels/moe/moe_activate.cu
  kernels/moe/moe_route.cu
  kernels/moe/moe_rows.cu
  launch/call_gpu.cpp
  launch/checks.cpp
  launch/choose_gpu.cpp
  launch/device_groups.cpp
  launch/groups.cpp
  launch/grouped_mm.cpp
  launch/grouped_mm_gpu.cpp
  launch/grouped_mm_wgrad.cpp
  launch/grouped_mm_wgrad_gpu.cpp
  launch/indexed_polynomial.cpp
  launch/indexed_polynomial_gpu.cpp
  launch/moe.cpp
  launch/moe_gpu.cpp
  launch/products_gpu.cpp
  runtime/device.cpp
  runtime/query.cpp
  runtime/query_gpu.cpp
  runtime/status.cpp
)
set(MULTIGEMM_GPU_BINDING
  bindings/torch_moe.cpp
  bindings/torch_polynomial.cpp
  bindings/torch_services_gpu.cpp
  bindings/torch_stable.cpp
  launch/checks.cpp
)

# The folder PATH of the Python package PACKAGE that holds FILE, asked without importing it, or empty. A variable of
# the name OVERRIDE, CMake's or the environment's, goes first.
function(multigemm_find_in_package out package path file override)
  set(found "${${override}}")
  if(NOT found)
    set(found "$ENV{${override}}")
  endif()
  if(NOT found)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u, os, sys; s = u.find_spec('${package}')
for root in (s and s.submodule_search_locations) or ():
    folder = os.path.join(root, '${path}')
    if os.path.exists(os.path.join(folder, '${file}')):
        sys.exit(print(folder))"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT EXISTS "${found}/${file}")
    message(FATAL_ERROR
      "${file} was not found (looked in '${found}'). Build with --no-build-isolation in an environment that has the "
      "Python package that brings it, as the README of this package says, or set ${override} to its folder.")
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# Options by which a compiler writes no folder of this machine into a library: error texts name the source by a path
# from the root of the project, and a build elsewhere gives the same bytes. INCLUDES are folders outside the project.
function(multigemm_path_options out)
  set(options "-ffile-prefix-map=${CMAKE_BINARY_DIR}=build")
  foreach(folder IN LISTS ARGN)
    if(NOT folder MATCHES "^${MULTIGEMM_SHARED}(/|$)")
      list(APPEND options "-ffile-prefix-map=${folder}=include")
    endif()
  endforeach()
  list(APPEND options "-ffile-prefix-map=${MULTIGEMM_SHARED}=shared")
  set(${out} "${options}" PARENT_SCOPE)
endfunction()

# Leaves a defence out of a GPU backend, for the tests of the tests: MULTIGEMM_WITHOUT is guard (the operands' device is
# not made current), stream (work goes to the default stream) or pool-key (a BLAS handle serves any device). Only the
# files that runtime/without.h speaks to are compiled for it. backend.json and the library tell, and the audit refuses
# such a wheel; no build for publication may ask for one.
function(multigemm_leave_out out kind)
  set(left_out "${MULTIGEMM_WITHOUT}")
  set(json "[]")
  if(left_out)
    if(NOT left_out MATCHES "^(guard|stream|pool-key)$")
      message(FATAL_ERROR "MULTIGEMM_WITHOUT is '${left_out}'; it takes guard, stream or pool-key")
    endif()
    if(kind STREQUAL "cpu")
      message(FATAL_ERROR "MULTIGEMM_WITHOUT=${left_out} is for GPU backends")
    endif()
    if(DEFINED ENV{CIBUILDWHEEL})
      message(FATAL_ERROR "MULTIGEMM_WITHOUT=${left_out} is for tests; wheels for publication have every defence")
    endif()
    message(WARNING "Built without its ${left_out}, for tests of the tests: results may be wrong")
    string(TOUPPER "MG_WITHOUT_${left_out}" definition)
    string(REPLACE "-" "_" definition "${definition}")
    foreach(source IN ITEMS blas/handles_gpu.cpp runtime/device.cpp runtime/query_gpu.cpp)
      set_property(SOURCE "${MULTIGEMM_SHARED}/${source}" APPEND PROPERTY COMPILE_DEFINITIONS ${definition})
    endforeach()
    set(json "[\"${left_out}\"]")
  endif()
  set(${out} "${json}" PARENT_SCOPE)
endfunction()

function(multigemm_commit out)
  set(commit "$ENV{MULTIGEMM_COMMIT}")
  if(NOT commit)
    execute_process(COMMAND git rev-parse HEAD WORKING_DIRECTORY "${MULTIGEMM_SHARED}"
                    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT commit)
    set(commit unknown)
  endif()
  set(${out} "${commit}" PARENT_SCOPE)
endfunction()

# What a CUDA source is compiled for, in CMake's names. The stem says what it needs: *_sm90 is for that architecture alone,
# with its own instructions (sm_90a); *_sm80 for that and later ones; any other for all.
function(multigemm_source_architectures out source)
  get_filename_component(stem "${source}" NAME_WE)
  set(chosen "")
  foreach(name IN LISTS ARGN)
    if(NOT name MATCHES "^(sm|compute)_([0-9]+)([af]?)$")
      message(FATAL_ERROR "'${name}' is not an architecture: sm_80, sm_90a (machine code) and compute_120 (PTX) are.")
    endif()
    set(number ${CMAKE_MATCH_2})
    set(letter "${CMAKE_MATCH_3}")
    string(REGEX REPLACE "^sm_(.*)" "\\1-real" target "${name}")
    string(REGEX REPLACE "^compute_(.*)" "\\1-virtual" target "${target}")
    if(NOT stem MATCHES "_sm([0-9]+)$")
      list(APPEND chosen ${target})
    elseif(CMAKE_MATCH_1 LESS 90 AND number GREATER_EQUAL CMAKE_MATCH_1)
      list(APPEND chosen ${target})
    elseif(CMAKE_MATCH_1 EQUAL number AND letter)
      list(APPEND chosen ${target})
    endif()
  endforeach()
  if(NOT chosen)
    message(FATAL_ERROR "${source} cannot be compiled for any of ${ARGN}")
  endif()
  set(${out} "${chosen}" PARENT_SCOPE)
endfunction()

# Object libraries of a backend's CUDA sources, one for each set of architectures, linked into it.
function(multigemm_add_cuda_sources target)
  cmake_parse_arguments(arg "" "" "SOURCES;ARCHITECTURES;INCLUDES;DEFINITIONS;OPTIONS" ${ARGN})
  foreach(source IN LISTS arg_SOURCES)
    multigemm_source_architectures(architectures "${source}" ${arg_ARCHITECTURES})
    string(REGEX REPLACE "[^0-9a-z]+" "_" suffix "${architectures}")
    set(objects "cuda_${suffix}")
    if(NOT TARGET ${objects})
      add_library(${objects} OBJECT)
      set_target_properties(${objects} PROPERTIES
        CUDA_ARCHITECTURES "${architectures}" CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
        POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
      target_include_directories(${objects} PRIVATE ${arg_INCLUDES})
      target_compile_definitions(${objects} PRIVATE ${arg_DEFINITIONS})
      target_compile_options(${objects} PRIVATE --expt-relaxed-constexpr ${arg_OPTIONS})
      target_link_libraries(${target} PRIVATE ${objects})
    endif()
    target_sources(${objects} PRIVATE "${source}")
  endforeach()
endfunction()

# The clang that compiles kernels for AMD. No ROCm is needed: kernels read shared/vendor/hip_api.h and call no library.
function(multigemm_find_hip_compiler out)
  set(compiler "${MULTIGEMM_HIP_COMPILER}")
  if(NOT compiler)
    set(compiler "$ENV{MULTIGEMM_HIP_COMPILER}")
  endif()
  if(NOT compiler)
    find_program(found_hip_compiler NAMES clang++-19 amdclang++ HINTS /opt/rocm/bin NO_CACHE)
    set(compiler "${found_hip_compiler}")
  endif()
  if(NOT compiler)
    message(FATAL_ERROR
      "No clang for AMD GPUs was found. Install Debian's clang-19, clang-tools-19 and lld-19, or set "
      "MULTIGEMM_HIP_COMPILER to a clang++ of version 19 or newer.")
  endif()
  foreach(program IN ITEMS lld clang-offload-bundler)
    execute_process(COMMAND "${compiler}" -print-prog-name=${program}
                    OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT IS_ABSOLUTE "${path}")
      message(FATAL_ERROR "${compiler} has no ${program}: of Debian's packages, lld-19 and clang-tools-19 bring them.")
    endif()
  endforeach()
  set(${out} "${compiler}" PARENT_SCOPE)
endfunction()

# Objects of a backend's kernels for AMD, each with the machine code for all architectures, linked into it.
function(multigemm_add_hip_sources target)
  cmake_parse_arguments(arg "" "" "SOURCES;ARCHITECTURES;INCLUDES;DEFINITIONS;OPTIONS" ${ARGN})
  multigemm_find_hip_compiler(compiler)
  list(TRANSFORM arg_ARCHITECTURES PREPEND --offload-arch=)
  list(TRANSFORM arg_INCLUDES PREPEND -I)
  list(TRANSFORM arg_DEFINITIONS PREPEND -D)
  foreach(source IN LISTS arg_SOURCES)
    get_filename_component(stem "${source}" NAME_WE)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/hip/${stem}.o")
    file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/hip")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND "${compiler}" -x hip ${arg_ARCHITECTURES} -nogpuinc -nogpulib -mcode-object-version=5 -std=c++17 -O3
              -DNDEBUG -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra ${arg_OPTIONS} ${arg_INCLUDES}
              ${arg_DEFINITIONS} -MD -MT "${object}" -MF "${object}.d" -c "${source}" -o "${object}"
      DEPENDS "${source}" DEPFILE "${object}.d" VERBATIM)
    target_sources(${target} PRIVATE "${object}")
  endforeach()
endfunction()

function(multigemm_add_backend)
  cmake_parse_arguments(arg "" "NAME;KIND;MAJOR;INFO" "SOURCES;BINDING;LEVELS;ARCHITECTURES;RPATH;NEEDED;INCLUDES" ${ARGN})
  file(STRINGS "${MULTIGEMM_SHARED}/version.txt" version LIMIT_COUNT 1)
  multigemm_find_in_package(torch_include torch include torch/csrc/stable/library.h MULTIGEMM_TORCH_INCLUDE)
  set(target multigemm_${arg_NAME})

  # torch's own library is found by its SONAME among those already loaded, so an empty one to link against is enough.
  set(stub_folder "${CMAKE_CURRENT_BINARY_DIR}/stub")
  file(WRITE "${stub_folder}/torch_cpu.c" "")
  add_library(stub_torch_cpu SHARED "${stub_folder}/torch_cpu.c")
  set_target_properties(stub_torch_cpu PROPERTIES OUTPUT_NAME torch_cpu LIBRARY_OUTPUT_DIRECTORY "${stub_folder}")

  set(level_targets "")
  list(TRANSFORM arg_SOURCES PREPEND "${MULTIGEMM_SHARED}/")
  list(TRANSFORM arg_BINDING PREPEND "${MULTIGEMM_SHARED}/")
  set(kernel_sources ${arg_SOURCES})
  list(FILTER kernel_sources INCLUDE REGEX "\\.cu$")
  list(FILTER arg_SOURCES EXCLUDE REGEX "\\.cu$")
  # The core needs no PyTorch, so that arrays of other libraries reach it without one; the binding links the core.
  set(binding ${target}_torch)
  add_library(${target} SHARED ${arg_SOURCES})
  add_library(${binding} MODULE ${arg_BINDING})
  set(includes "${MULTIGEMM_SHARED}" "${MULTIGEMM_SHARED}/include" ${arg_INCLUDES})
  multigemm_path_options(paths ${arg_INCLUDES} "${torch_include}")
  foreach(level IN LISTS arg_LEVELS)
    string(REPLACE "-" "_" namespace "${level}")
    add_library(level_${namespace} OBJECT "${MULTIGEMM_SHARED}/kernels/grouped_mm/cpu_level.cpp")
    target_include_directories(level_${namespace} PRIVATE ${includes})
    target_compile_definitions(level_${namespace} PRIVATE MG_LEVEL=${namespace} "MG_LEVEL_NAME=\"${level}\"")
    target_compile_options(level_${namespace} PRIVATE -O3 ${paths})
    if(NOT level STREQUAL "baseline")
      target_compile_options(level_${namespace} PRIVATE -march=${level})
    endif()
    target_link_libraries(${target} PRIVATE level_${namespace})
    list(APPEND level_targets level_${namespace})
  endforeach()
  set_target_properties(${target} ${binding} ${level_targets} PROPERTIES
    CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    SKIP_BUILD_RPATH ON INSTALL_RPATH "")

  target_include_directories(${target} PRIVATE ${includes})
  target_include_directories(${binding} PRIVATE ${includes})
  target_include_directories(${binding} SYSTEM PRIVATE "${torch_include}")
  set(definitions MG_SUFFIX=${arg_NAME} "MG_VERSION=\"${version}\"" "MG_BACKEND_NAME=\"${arg_NAME}\""
    "MG_BACKEND_KIND=\"${arg_KIND}\"")
  if(arg_KIND STREQUAL "cuda")
    list(APPEND definitions MG_CUDA=1 "MG_BLAS_MAJOR=\"${arg_MAJOR}\"")
    if(MULTIGEMM_CUDA_COMPILER STREQUAL "nvrtc")
      target_include_directories(${target} SYSTEM PRIVATE "${MULTIGEMM_NVRTC_INCLUDE}")
      multigemm_add_nvrtc_sources(${target} SOURCES ${kernel_sources} ARCHITECTURES ${arg_ARCHITECTURES}
        INCLUDES ${includes} DEFINITIONS ${definitions} OPTIONS ${paths})
    else()
      find_package(CUDAToolkit REQUIRED)
      target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
      target_link_libraries(${target} PRIVATE CUDA::cudart_static)
      list(TRANSFORM paths PREPEND "-Xcompiler=" OUTPUT_VARIABLE host_paths)
      multigemm_add_cuda_sources(${target} SOURCES ${kernel_sources} ARCHITECTURES ${arg_ARCHITECTURES}
        INCLUDES ${includes} DEFINITIONS ${definitions} OPTIONS ${host_paths})
    endif()
    set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  elseif(arg_KIND STREQUAL "rocm")
    list(APPEND definitions MG_HIP=1)
    multigemm_add_hip_sources(${target} SOURCES ${kernel_sources} ARCHITECTURES ${arg_ARCHITECTURES}
      INCLUDES ${includes} DEFINITIONS ${definitions} OPTIONS ${paths})
    # The runtime keeps pointers into the library, which therefore stays.
    target_link_options(${target} PRIVATE LINKER:-z,nodelete)
  endif()
  # 2.10 is 0x020A: computed, because a hexadecimal 10 (0x0210) would mean 2.16.
  target_compile_definitions(${target} PRIVATE ${definitions})
  target_compile_definitions(${binding} PRIVATE ${definitions} "TORCH_TARGET_VERSION=((2ULL << 56) | (10ULL << 48))")

  # Exported: the C ABI and nothing else; the binding exports nothing, it registers itself.
  set(exports "${CMAKE_CURRENT_BINARY_DIR}/exports.map")
  file(WRITE "${exports}" "{ global: mg_*_${arg_NAME}; local: *; };\n")
  target_link_libraries(${target} PRIVATE ${arg_NEEDED})
  target_link_libraries(${binding} PRIVATE ${target} stub_torch_cpu)
  foreach(library IN ITEMS ${target} ${binding})
    # RPATH, not RUNPATH: a toolkit on LD_LIBRARY_PATH must not come before the wheels the metadata asks for.
    set_target_properties(${library} PROPERTIES SKIP_BUILD_RPATH OFF BUILD_WITH_INSTALL_RPATH ON)
    target_compile_options(${library} PRIVATE -Wall -Wextra ${paths})
    target_link_options(${library} PRIVATE "LINKER:--no-as-needed" "LINKER:--disable-new-dtags"
      "LINKER:--version-script=${exports}")
    install(TARGETS ${library} LIBRARY DESTINATION lib)
  endforeach()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN;${arg_RPATH}")
  set_target_properties(${binding} PROPERTIES INSTALL_RPATH "$ORIGIN")

  multigemm_commit(commit)
  multigemm_leave_out(without ${arg_KIND})
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/backend.json"
"{
  \"protocol\": 1,
  \"abi\": 1,
  \"version\": \"${version}\",
  \"name\": \"${arg_NAME}\",
  \"kind\": \"${arg_KIND}\",
  \"min_torch\": [2, 10],
  \"library\": \"lib/libmultigemm_${arg_NAME}_torch.so\",
  \"core\": \"lib/libmultigemm_${arg_NAME}.so\",
${arg_INFO},
  \"without\": ${without},
  \"commit\": \"${commit}\"
}
")
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/backend.json" DESTINATION .)
endfunction()
