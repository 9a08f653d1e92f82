// Arithmetic on two 16-bit values of a word, and conversions out of e4m3.
#include <algorithm>
#include <cmath>

#include "numerics.hpp"

#include "emulator.cuh"
#include "emulator_hopper.cuh"

namespace emulator {

namespace {

// operation(a, b, c) on both halves.
template <typename Operation>
uint32_t both(uint32_t a, uint32_t b, uint32_t c, Operation operation) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto half = [shift](uint32_t word) { return static_cast<uint16_t>(word >> shift); };
        result |= static_cast<uint32_t>(static_cast<uint16_t>(operation(half(a), half(b), half(c)))) << shift;
    }
    return result;
}

int16_t as_signed(uint16_t bits) { return static_cast<int16_t>(bits); }

}  // namespace

uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7)) & 0xff;
        result |= byte << 8 * i;
    }
    return result;
}

uint32_t max3_s16x2(uint32_t a, uint32_t b, uint32_t c) {
    return both(a, b, c, [](uint16_t x, uint16_t y, uint16_t z) {
        return std::max({as_signed(x), as_signed(y), as_signed(z)});
    });
}

uint32_t add_max_s16x2(uint32_t a, uint32_t b, uint32_t c) {
    return both(a, b, c, [](uint16_t x, uint16_t y, uint16_t z) {
        return std::max(as_signed(static_cast<uint16_t>(x + y)), as_signed(z));
    });
}

uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
    return both(a, b, c, [](uint16_t x, uint16_t y, uint16_t z) {
        // exact in a double, or one term is too small to matter
        return double_to_half(static_cast<double>(half_to_float(x)) * half_to_float(y) + half_to_float(z));
    });
}

uint32_t max_half2(uint32_t a, uint32_t b) {
    return both(a, b, 0, [](uint16_t x, uint16_t y, uint16_t) {
        const float left = half_to_float(x);
        const float right = half_to_float(y);
        if (std::isnan(left) && std::isnan(right)) return uint16_t{0x7fff};
        if (left == right) return static_cast<uint16_t>(x & y);  // +0 is larger than -0
        return left > right || std::isnan(right) ? x : y;
    });
}

}  // namespace emulator
