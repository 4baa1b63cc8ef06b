// nanobind itself, as one source of each extension that binds with it (nanobind/src/nb_combined.cpp says how it is compiled).
// Here, since a source distribution cannot hold a source that lies in another package.
#ifndef __clang__
#pragma GCC optimize("no-strict-aliasing")  // as nanobind asks; kernels are compiled without
#endif
#include "nb_combined.cpp"
