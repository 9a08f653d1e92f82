// The FP8 tensor core's sum of products.
#include "fp8_products.hpp"

#include <algorithm>
#include <cmath>

#include "numerics.hpp"

namespace emulator {

namespace {

constexpr int KEPT_BITS = 13;           // below the largest exponent, and of the sum's mantissa
constexpr int16_t NO_EXPONENT = -4096;  // of a zero
constexpr int PRODUCT_BITS = 6;         // fraction bits of a product of two mantissas in eighths

struct Parts {
    int16_t mantissa;  // signed, in eighths
    int16_t exponent;
    bool is_nan;
};

Parts take_apart(uint8_t bits) {
    const int field = bits >> 3 & 15;
    const int fraction = bits & 7;
    const int magnitude = field ? 8 + fraction : fraction;
    return {static_cast<int16_t>(bits & 0x80 ? -magnitude : magnitude),
            magnitude ? static_cast<int16_t>(field ? field - 7 : -6) : NO_EXPONENT, (bits & 0x7f) == 0x7f};
}

}  // namespace

E4m3Columns::E4m3Columns(const uint8_t* b, int depth, int columns)
    : depth_(depth),
      columns_(columns),
      mantissas_(static_cast<size_t>(depth) * columns),
      exponents_(static_cast<size_t>(depth) * columns),
      is_nan_(static_cast<size_t>(columns)) {
    for (int column = 0; column < columns; ++column) {
        for (int k = 0; k < depth; ++k) {
            const Parts parts = take_apart(b[column * depth + k]);
            mantissas_[static_cast<size_t>(k * columns + column)] = parts.mantissa;
            exponents_[static_cast<size_t>(k * columns + column)] = parts.exponent;
            is_nan_[static_cast<size_t>(column)] |= parts.is_nan;
        }
    }
}

void E4m3Columns::add_products(const uint8_t* a, float* sums) const {
    std::vector<int32_t> largest(static_cast<size_t>(columns_));  // exponents
    std::vector<int32_t> total(static_cast<size_t>(columns_));    // in units of 2^(largest - KEPT_BITS)
    bool row_is_nan = false;
    for (int c = 0; c < columns_; ++c) largest[c] = sums[c] == 0.0f ? 2 * NO_EXPONENT : std::ilogb(sums[c]);
    for (int k = 0; k < depth_; ++k) {
        const Parts left = take_apart(a[k]);
        row_is_nan |= left.is_nan;
        const int16_t* const exponents = &exponents_[static_cast<size_t>(k * columns_)];
        for (int c = 0; c < columns_; ++c) largest[c] = std::max(largest[c], left.exponent + exponents[c]);
    }
    for (int k = 0; k < depth_; ++k) {
        const Parts left = take_apart(a[k]);
        if (left.mantissa == 0) continue;
        const int16_t* const mantissas = &mantissas_[static_cast<size_t>(k * columns_)];
        const int16_t* const exponents = &exponents_[static_cast<size_t>(k * columns_)];
        for (int c = 0; c < columns_; ++c) {
            const int32_t product = left.mantissa * mantissas[c];
            const int32_t away = std::min(31, largest[c] - left.exponent - exponents[c]);
            const int32_t cut = (std::abs(product) << (KEPT_BITS - PRODUCT_BITS)) >> away;
            total[c] += product < 0 ? -cut : cut;
        }
    }
    for (int c = 0; c < columns_; ++c) {
        if (row_is_nan || is_nan_[c] || !std::isfinite(sums[c])) {
            sums[c] = row_is_nan || is_nan_[c] ? NAN : sums[c];
        } else if (largest[c] > NO_EXPONENT) {
            const int unit = largest[c] - KEPT_BITS;
            const double sum = total[c] + std::trunc(std::ldexp(static_cast<double>(sums[c]), -unit));
            sums[c] = cut_to_fp22(std::ldexp(sum, unit));
        }
    }
}

}  // namespace emulator
