# The compiler of a CUDA backend: nvcc of its major, or, where there is none, NVRTC and clang (nvrtc_compile.py).
include_guard()

# Sets MULTIGEMM_CUDA_COMPILER to "nvcc", with the language CUDA enabled, or to "nvrtc", and MULTIGEMM_CUDA_VERSION to
# the toolkit's "major.minor". A macro, as languages are enabled for the folder that asks. An nvcc of another major is
# passed over: it is there for another backend.
macro(multigemm_enable_cuda major)
  set(MULTIGEMM_CUDA_COMPILER "")
  find_program(multigemm_nvcc NAMES "$ENV{CUDACXX}" nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin NO_CACHE)
  if(CMAKE_CUDA_COMPILER)
    set(multigemm_nvcc "${CMAKE_CUDA_COMPILER}")
  endif()
  if(multigemm_nvcc)
    execute_process(COMMAND "${multigemm_nvcc}" --version OUTPUT_VARIABLE multigemm_nvcc_says ERROR_QUIET)
    if("${multigemm_nvcc_says}" MATCHES "release (${major}\\.[0-9]+)")
      set(MULTIGEMM_CUDA_VERSION "${CMAKE_MATCH_1}")
      set(MULTIGEMM_CUDA_COMPILER nvcc)
      set(CMAKE_CUDA_COMPILER "${multigemm_nvcc}")
      set(CMAKE_CUDA_ARCHITECTURES OFF)  # each source has its own
      enable_language(CUDA)
    endif()
  endif()
  if(NOT MULTIGEMM_CUDA_COMPILER)
    multigemm_prepare_nvrtc(${major})
  endif()
  message(STATUS "CUDA ${MULTIGEMM_CUDA_VERSION} by ${MULTIGEMM_CUDA_COMPILER}")
endmacro()

# Sets the folders and programs of the second way in the caller's scope.
function(multigemm_prepare_nvrtc major)
  set(compiler "${MULTIGEMM_CUDA_CLANG}")
  if(NOT compiler)
    set(compiler "$ENV{MULTIGEMM_CUDA_CLANG}")
  endif()
  if(NOT compiler)
    find_program(found_cuda_clang NAMES clang++-19 clang++ NO_CACHE)
    set(compiler "${found_cuda_clang}")
  endif()
  if(NOT compiler)
    message(FATAL_ERROR
      "Neither nvcc ${major} nor a clang was found. Name an nvcc of CUDA ${major} by CUDACXX, or install Debian's "
      "clang-19 (another clang++: MULTIGEMM_CUDA_CLANG), which compiles the host's half of CUDA sources here.")
  endif()
  multigemm_find_in_package(found nvidia cuda_nvrtc/lib libnvrtc.so.${major} MULTIGEMM_NVRTC_LIB)
  string(REGEX REPLACE "/nvidia/cuda_nvrtc/lib/?$" "" site "${found}")
  set(tree "${CMAKE_CURRENT_BINARY_DIR}/cuda")
  set(command "${Python_EXECUTABLE}" "${MULTIGEMM_SHARED}/cmake/nvrtc_compile.py" --site "${site}" --major ${major}
      --clang "${compiler}" --work "${tree}")
  execute_process(COMMAND ${command} --prepare OUTPUT_VARIABLE version COMMAND_ERROR_IS_FATAL ANY)
  set(MULTIGEMM_CUDA_COMPILER nvrtc PARENT_SCOPE)
  set(MULTIGEMM_CUDA_VERSION "${version}" PARENT_SCOPE)
  set(MULTIGEMM_NVRTC_COMMAND "${command}" PARENT_SCOPE)
  set(MULTIGEMM_NVRTC_INCLUDE "${tree}/include" PARENT_SCOPE)
  set(MULTIGEMM_NVRTC_CUDART "${site}/nvidia/cuda_runtime/lib/libcudart_static.a" PARENT_SCOPE)
endfunction()

# Objects of a backend's CUDA sources by NVRTC, each with the code for all its architectures, linked into it.
function(multigemm_add_nvrtc_sources target)
  cmake_parse_arguments(arg "" "" "SOURCES;ARCHITECTURES;INCLUDES;DEFINITIONS;OPTIONS" ${ARGN})
  list(TRANSFORM arg_INCLUDES PREPEND -I)
  list(TRANSFORM arg_DEFINITIONS PREPEND -D)
  file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/nvrtc")
  foreach(source IN LISTS arg_SOURCES)
    multigemm_source_architectures(architectures "${source}" ${arg_ARCHITECTURES})
    list(TRANSFORM architectures REPLACE "^(.+)-real$" "sm_\\1")
    list(TRANSFORM architectures REPLACE "^(.+)-virtual$" "compute_\\1")
    get_filename_component(stem "${source}" NAME_WE)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/nvrtc/${stem}.o")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND ${MULTIGEMM_NVRTC_COMMAND} --source "${source}" --object "${object}" --architectures ${architectures}
              -- ${arg_DEFINITIONS} ${arg_INCLUDES} ${arg_OPTIONS}
      DEPENDS "${source}" "${MULTIGEMM_SHARED}/cmake/nvrtc_compile.py" DEPFILE "${object}.d" VERBATIM)
    target_sources(${target} PRIVATE "${object}")
  endforeach()
  find_package(Threads REQUIRED)
  target_link_libraries(${target} PRIVATE "${MULTIGEMM_NVRTC_CUDART}" Threads::Threads ${CMAKE_DL_LIBS} rt)
endfunction()
