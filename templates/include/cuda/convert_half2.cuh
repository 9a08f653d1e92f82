// Pairs of fp16, the first in the low half: to and from floats and e4m3 bytes, and out of FP16 accumulators.
namespace device {

__device__ __forceinline__ void unpack_half2(uint32_t word, float& first, float& second) {
    asm("{\n"
        ".reg .f16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(first), "=f"(second)
        : "r"(word));
}
// Round to nearest even; values beyond the range of fp16 give an infinity.
__device__ __forceinline__ uint32_t pack_half2(float first, float second) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
// Adds an MMA's FP16 accumulator to FP32 sums, which hold the elements as an MMA's FP32 accumulator does.
__device__ __forceinline__ void promote(float (&sum)[4], const uint32_t (&accumulator)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float first, second;
        unpack_half2(accumulator[row], first, second);
        sum[2 * row] += first;
        sum[2 * row + 1] += second;
    }
}
// Four fp16 to four e4m3 bytes, the first in the lowest byte; values beyond +-448 saturate, NaN stays NaN.
__device__ __forceinline__ uint32_t half2_to_e4m3(uint32_t first_pair, uint32_t second_pair) {
    uint32_t word;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(word)
        : "r"(first_pair), "r"(second_pair));
    return word;
}
// Four e4m3 bytes to four fp16, which hold them exactly.
__device__ __forceinline__ void e4m3_to_half2(uint32_t word, uint32_t& first_pair, uint32_t& second_pair) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(first_pair), "=r"(second_pair)
        : "r"(word));
}

}  // namespace device
