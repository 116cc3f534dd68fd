// A library of the vendor that is already in the process, by whatever name it was put there: wheels rename copies.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include <string>

namespace multigemm {
namespace gpu {

// A handle of the loaded library whose file is called `stem`, then '.' or '-', then anything; null if there is none.
inline void* library_called(const char* stem) {
  struct Search {
    const char* stem;
    std::string path;
  } search{stem, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* argument) {
        Search& s = *static_cast<Search*>(argument);
        const char* slash = strrchr(info->dlpi_name, '/');
        const char* file = slash ? slash + 1 : info->dlpi_name;
        const size_t length = strlen(s.stem);
        if (strncmp(file, s.stem, length) != 0 || (file[length] != '.' && file[length] != '-')) return 0;
        s.path = info->dlpi_name;
        return 1;
      },
      &search);
  return search.path.empty() ? nullptr : dlopen(search.path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
}

// A handle that has the functions of a library, `name` one of them: first what PyTorch's own library was linked with,
// since a process may hold another copy, of the system, whose streams and memory are not PyTorch's.
inline void* loaded_library(const char* stem, const char* name) {
  for (const char* torch : {"libtorch_hip", "libc10_hip"}) {
    void* library = library_called(torch);
    if (library && dlsym(library, name)) return library;
  }
  return library_called(stem);
}

}  // namespace gpu
}  // namespace multigemm
