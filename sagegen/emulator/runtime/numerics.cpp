// Number formats and roundings of the hardware.
#include "numerics.hpp"

#include <cfenv>
#include <climits>
#include <cmath>
#include <cstring>

#include "emulator.cuh"

namespace emulator {

float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

namespace {

// Magnitude of x in a format of `mantissa` bits whose smallest normal exponent is `lowest`, as a whole number of that
// format's units: the bits of the number, since formats are ordered like integers. Ties to even.
uint32_t round_magnitude(double x, int mantissa, int lowest) {
    const double magnitude = std::fabs(x);
    if (magnitude == 0.0) return 0;
    int exponent = std::ilogb(magnitude);
    if (exponent < lowest) exponent = lowest;
    const double units = std::nearbyint(std::ldexp(magnitude, mantissa - exponent));
    return static_cast<uint32_t>((exponent - lowest) << mantissa) + static_cast<uint32_t>(units);
}

}  // namespace

float half_to_float(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const int exponent = bits >> 10 & 31;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | mantissa << 13);
    const float magnitude = exponent ? std::ldexp(1.0f + static_cast<float>(mantissa) / 1024.0f, exponent - 15)
                                     : std::ldexp(static_cast<float>(mantissa), -24);
    return sign ? -magnitude : magnitude;
}

uint16_t float_to_half(float x) { return double_to_half(x); }

uint16_t double_to_half(double x) {
    const uint16_t sign = std::signbit(x) ? 0x8000u : 0;
    if (std::isnan(x)) return 0x7fff;
    if (std::isinf(x)) return sign | 0x7c00;
    const uint32_t bits = round_magnitude(x, 10, -14);
    return static_cast<uint16_t>(sign | (bits > 0x7c00u ? 0x7c00u : bits));
}

uint16_t float_to_bfloat16(float x) {
    if (std::isnan(x)) return 0x7fff;
    const uint32_t bits = float_bits(x);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

uint8_t float_to_e4m3(float x) {
    const uint8_t sign = static_cast<uint8_t>(float_bits(x) >> 24 & 0x80u);
    if (std::isnan(x)) return sign | 0x7f;
    if (std::fabs(x) >= 448.0f) return sign | 0x7e;
    const uint32_t bits = round_magnitude(x, 3, -6);
    return static_cast<uint8_t>(sign | (bits > 0x7eu ? 0x7eu : bits));
}

float e4m3_to_float(uint8_t bits) {
    const int exponent = bits >> 3 & 15;
    const int mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float magnitude =
        exponent ? std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f, exponent - 7) : std::ldexp(static_cast<float>(mantissa), -9);
    return bits & 0x80 ? -magnitude : magnitude;
}

float cut_to_fp22(double x) {
    if (!std::isfinite(x) || x == 0.0) return static_cast<float>(x);
    const int exponent = std::ilogb(x);
    return static_cast<float>(std::ldexp(std::trunc(std::ldexp(x, 13 - exponent)), exponent - 13));
}

bool has_fp22_mma(int architecture) { return architecture == 89 || architecture >= 120; }

float exp2_approx(float x) {
    const float y = std::exp2(x);
    return std::fabs(y) < 1.17549435e-38f ? 0.0f : y;
}

float log2_approx(float x) { return std::log2(x); }

float fma_up(float a, float b, float c) {
    const int before = std::fegetround();
    std::fesetround(FE_UPWARD);
    const volatile float va = a, vb = b, vc = c;
    const volatile float result = std::fma(va, vb, vc);
    std::fesetround(before);
    return result;
}

int float_to_int(float x) {
    if (std::isnan(x)) return 0;
    const float rounded = std::nearbyint(x);
    if (rounded >= 2147483648.0f) return INT_MAX;
    if (rounded < -2147483648.0f) return INT_MIN;
    return static_cast<int>(rounded);
}

}  // namespace emulator
