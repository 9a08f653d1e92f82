// Four floats to four e4m3 bytes, the first in the lowest byte; values beyond +-448 saturate, NaN stays NaN.
namespace device {

__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    return emulator::float_to_e4m3(x0) | emulator::float_to_e4m3(x1) << 8 | emulator::float_to_e4m3(x2) << 16 |
           static_cast<uint32_t>(emulator::float_to_e4m3(x3)) << 24;
}

}  // namespace device
