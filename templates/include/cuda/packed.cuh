// Arithmetic on two 16-bit values at a time, the first in the low half, and what builds such pairs. The integer forms
// are single instructions from sm_90 on.
namespace device {

// Byte i of the result is byte (selector >> 4 * i) % 8 of the eight bytes low, high.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    return __byte_perm(low, high, selector);
}
__device__ __forceinline__ int max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }
// Maximum of three, of signed 16-bit integers.
__device__ __forceinline__ uint32_t max3_s16x2(uint32_t a, uint32_t b, uint32_t c) { return __vimax3_s16x2(a, b, c); }
// max(a + b, c) of signed 16-bit integers; the sum wraps.
__device__ __forceinline__ uint32_t add_max_s16x2(uint32_t a, uint32_t b, uint32_t c) {
    return __viaddmax_s16x2(a, b, c);
}
// a * b + c of fp16, rounded once.
__device__ __forceinline__ uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ uint32_t add_half2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// 1 / x within 1 ulp by the special function unit.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// a * b, rounded by itself even if a sum follows.
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ int float_to_int(float x) { return __float2int_rn(x); }
// Maximum of fp16 that drops a NaN.
__device__ __forceinline__ uint32_t max_half2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

}  // namespace device
