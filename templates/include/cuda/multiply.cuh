// A product that is rounded by itself: the compiler joins it with no sum that follows.
namespace device {

__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }

}  // namespace device
