// The FP8 tensor core's sum of products.
#pragma once

#include <cstdint>
#include <vector>

namespace emulator {

// A B operand of e4m3, taken apart once for all rows of A.
class E4m3Columns {
   public:
    // b: [columns, depth] bytes.
    E4m3Columns(const uint8_t* b, int depth, int columns);

    // sums[column] += a . b[column], as the hardware does it: all products and the accumulator are cut toward zero to 13
    // bits below the largest one's exponent, added, and the sum is cut to 13 mantissa bits. A product's exponent is the
    // sum of its factors', whatever their mantissas. Bit for bit what wgmma gives on an H200 (docs/gpu-runs).
    void add_products(const uint8_t* a, float* sums) const;

   private:
    int depth_;
    int columns_;
    std::vector<int16_t> mantissas_;  // [depth, columns], signed, in eighths
    std::vector<int16_t> exponents_;  // [depth, columns]
    std::vector<uint8_t> is_nan_;     // [columns]
};

}  // namespace emulator
