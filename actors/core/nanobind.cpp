// nanobind itself, as one source of this extension (nanobind/src/nb_combined.cpp says how it is compiled). Here, since a
// source distribution cannot hold a source that lies in another package.
#include "nb_combined.cpp"
