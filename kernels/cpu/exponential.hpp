#pragma once

#include <cstdint>
#include <cstring>

namespace tiermoe {
namespace {

// e^x by 2^n times a polynomial, to 2 ulp; the argument is kept within what a float can say. Keeps NaN.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}

}  // namespace
}  // namespace tiermoe
