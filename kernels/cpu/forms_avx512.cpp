// Published forms in AVX-512.
#include "forms.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include "lanes_avx512.hpp"

namespace tiermoe {
namespace {

constexpr int kTile = 4, kRows = 4;

}  // namespace
}  // namespace tiermoe

#include "forms_body.hpp"

namespace tiermoe {

const FormKernels* avx512_forms() {
    static constexpr FormKernels kernels = form_table("avx512");
    return processor_has_it() ? &kernels : nullptr;
}

}  // namespace tiermoe

#else

namespace tiermoe {
const FormKernels* avx512_forms() { return nullptr; }
}  // namespace tiermoe

#endif
