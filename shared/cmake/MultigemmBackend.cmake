# multigemm_add_backend(NAME cpu KIND cpu [MAJOR n] SOURCES ...): one backend library with its backend.json.
#
#   NAME     suffix of the library, of its exported mg_* functions and of the import package multigemm_<NAME>
#   SOURCES  files under shared/, each compiled once
#   LEVELS   x86-64 levels for kernels/grouped_mm/cpu_level.cpp, compiled once for each
#   RPATH    folders, relative to the library, of the vendor libraries in other wheels
#   NEEDED   vendor libraries to link, by path
#   INFO     the fields of backend.json that are this backend's own, as JSON members
include_guard()
set(MULTIGEMM_SHARED "${CMAKE_CURRENT_LIST_DIR}/..")

# PyTorch's headers come from the torch package of the build environment; nothing of torch is linked.
function(multigemm_find_torch_headers out)
  set(found "${MULTIGEMM_TORCH_INCLUDE}")
  if(NOT found)
    set(found "$ENV{MULTIGEMM_TORCH_INCLUDE}")
  endif()
  if(NOT found)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u, os; print(os.path.join(os.path.dirname(u.find_spec('torch').origin), 'include'))"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT EXISTS "${found}/torch/csrc/stable/library.h")
    message(FATAL_ERROR
      "PyTorch's stable-ABI headers were not found (looked for torch/csrc/stable/library.h in '${found}'). "
      "Build with --no-build-isolation in an environment that has torch 2.10 or newer, or set "
      "MULTIGEMM_TORCH_INCLUDE to the include folder of such a torch package.")
  endif()
  set(${out} "${found}" PARENT_SCOPE)
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

function(multigemm_add_backend)
  cmake_parse_arguments(arg "" "NAME;KIND;INFO" "SOURCES;LEVELS;RPATH;NEEDED;INCLUDES" ${ARGN})
  file(STRINGS "${MULTIGEMM_SHARED}/version.txt" version LIMIT_COUNT 1)
  multigemm_find_torch_headers(torch_include)
  set(target multigemm_${arg_NAME})

  # torch's own library is found by its SONAME among those already loaded, so an empty one to link against is enough.
  set(stub_folder "${CMAKE_CURRENT_BINARY_DIR}/stub")
  file(WRITE "${stub_folder}/torch_cpu.c" "")
  add_library(stub_torch_cpu SHARED "${stub_folder}/torch_cpu.c")
  set_target_properties(stub_torch_cpu PROPERTIES OUTPUT_NAME torch_cpu LIBRARY_OUTPUT_DIRECTORY "${stub_folder}")

  set(level_targets "")
  list(TRANSFORM arg_SOURCES PREPEND "${MULTIGEMM_SHARED}/")
  add_library(${target} MODULE ${arg_SOURCES})
  set(includes "${MULTIGEMM_SHARED}" "${MULTIGEMM_SHARED}/include" ${arg_INCLUDES})
  foreach(level IN LISTS arg_LEVELS)
    string(REPLACE "-" "_" namespace "${level}")
    add_library(level_${namespace} OBJECT "${MULTIGEMM_SHARED}/kernels/grouped_mm/cpu_level.cpp")
    target_include_directories(level_${namespace} PRIVATE ${includes})
    target_compile_definitions(level_${namespace} PRIVATE MG_LEVEL=${namespace} "MG_LEVEL_NAME=\"${level}\"")
    target_compile_options(level_${namespace} PRIVATE -O3)
    if(NOT level STREQUAL "baseline")
      target_compile_options(level_${namespace} PRIVATE -march=${level})
    endif()
    target_link_libraries(${target} PRIVATE level_${namespace})
    list(APPEND level_targets level_${namespace})
  endforeach()
  set_target_properties(${target} ${level_targets} PROPERTIES
    CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    SKIP_BUILD_RPATH ON INSTALL_RPATH "")

  target_include_directories(${target} PRIVATE ${includes})
  target_include_directories(${target} SYSTEM PRIVATE "${torch_include}")
  # 2.10 is 0x020A: computed, because a hexadecimal 10 (0x0210) would mean 2.16.
  target_compile_definitions(${target} PRIVATE MG_SUFFIX=${arg_NAME} "MG_VERSION=\"${version}\""
    "TORCH_TARGET_VERSION=((2ULL << 56) | (10ULL << 48))")
  target_compile_options(${target} PRIVATE -Wall -Wextra)

  # Exported: the C ABI and nothing else.
  set(exports "${CMAKE_CURRENT_BINARY_DIR}/exports.map")
  file(WRITE "${exports}" "{ global: mg_*_${arg_NAME}; local: *; };\n")
  # RPATH, not RUNPATH: a toolkit on LD_LIBRARY_PATH must not come before the wheels the metadata asks for.
  set_target_properties(${target} PROPERTIES SKIP_BUILD_RPATH OFF BUILD_WITH_INSTALL_RPATH ON
    INSTALL_RPATH "$ORIGIN;${arg_RPATH}")
  target_link_options(${target} PRIVATE "LINKER:--no-as-needed" "LINKER:--disable-new-dtags" "LINKER:--version-script=${exports}")
  target_link_libraries(${target} PRIVATE ${arg_NEEDED} stub_torch_cpu)
  install(TARGETS ${target} LIBRARY DESTINATION lib)

  multigemm_commit(commit)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/backend.json"
"{
  \"protocol\": 1,
  \"abi\": 1,
  \"version\": \"${version}\",
  \"name\": \"${arg_NAME}\",
  \"kind\": \"${arg_KIND}\",
  \"min_torch\": [2, 10],
  \"library\": \"lib/libmultigemm_${arg_NAME}.so\",
${arg_INFO},
  \"commit\": \"${commit}\"
}
")
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/backend.json" DESTINATION .)
endfunction()
