// Published forms in plain C++: for processors without AVX2, and the arithmetic that the others are checked against.
#include "forms.hpp"

#include "lanes_portable.hpp"

namespace tiermoe {
namespace {

constexpr int kTile = 2, kRows = 2;

}  // namespace
}  // namespace tiermoe

#include "forms_body.hpp"

namespace tiermoe {

const FormKernels& portable_forms() {
    static constexpr FormKernels kernels = form_table("portable");
    return kernels;
}

}  // namespace tiermoe
