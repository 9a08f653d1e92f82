// Scalar arithmetic whose rounding or NaN rule matters.
namespace device {

// 2^x by the special function unit; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) { return emulator::exp2_approx(x); }
__device__ __forceinline__ float log2_approx(float x) { return emulator::log2_approx(x); }
__device__ __forceinline__ float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// a * b + c rounded towards plus infinity.
__device__ __forceinline__ float fma_up(float a, float b, float c) { return emulator::fma_up(a, b, c); }
// Maximum that drops a NaN.
__device__ __forceinline__ float max(float a, float b) { return __builtin_fmaxf(a, b); }
// Maximum that keeps a NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
    return a != a || b != b ? __builtin_nanf("") : __builtin_fmaxf(a, b);
}
__device__ __forceinline__ float absolute(float x) { return __builtin_fabsf(x); }
// Round to nearest even, then saturate to [-127, 127]; NaN gives 0.
__device__ __forceinline__ int round_to_int8(float x) {
    const int rounded = emulator::float_to_int(x);
    return rounded > 127 ? 127 : rounded < -127 ? -127 : rounded;
}
__device__ __forceinline__ float int_to_float(int x) { return static_cast<float>(x); }
__device__ __forceinline__ float bits_to_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
__device__ __forceinline__ uint32_t float_to_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

}  // namespace device
