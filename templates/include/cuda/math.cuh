// Scalar arithmetic whose rounding or NaN rule matters.
namespace device {

// 2^x by the special function unit; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// a * b + c rounded towards plus infinity.
__device__ __forceinline__ float fma_up(float a, float b, float c) { return __fmaf_ru(a, b, c); }
// Maximum that drops a NaN.
__device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
// Maximum that keeps a NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
// Round to nearest even, then saturate to [-127, 127]; NaN gives 0.
__device__ __forceinline__ int round_to_int8(float x) {
    const int rounded = __float2int_rn(x);
    return rounded > 127 ? 127 : rounded < -127 ? -127 : rounded;
}
__device__ __forceinline__ float int_to_float(int x) { return __int2float_rn(x); }
__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t float_to_bits(float x) { return __float_as_uint(x); }

}  // namespace device
