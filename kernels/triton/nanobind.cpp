// nanobind itself, as one source of this extension: see actors/core/nanobind.cpp.
#include "nb_combined.cpp"
