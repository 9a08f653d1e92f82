// Four floats to four e4m3 bytes, the first in the lowest byte; values beyond +-448 saturate, NaN stays NaN.
namespace device {

__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    uint32_t word;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(word)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return word;
}

}  // namespace device
