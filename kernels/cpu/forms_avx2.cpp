// Published forms in AVX2.
#include "forms.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include "lanes_avx2.hpp"

namespace tiermoe {
namespace {

constexpr int kTile = 2, kRows = 2;

}  // namespace
}  // namespace tiermoe

#include "forms_body.hpp"

namespace tiermoe {

const FormKernels* avx2_forms() {
    static constexpr FormKernels kernels = form_table("avx2");
    return processor_has_it() ? &kernels : nullptr;
}

}  // namespace tiermoe

#else

namespace tiermoe {
const FormKernels* avx2_forms() { return nullptr; }
}  // namespace tiermoe

#endif
