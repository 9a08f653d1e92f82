// Arithmetic that is rounded by itself: the compiler joins a product with no sum that follows.
namespace device {

__device__ __forceinline__ float multiply(float a, float b) { return a * b; }
// Rounded to nearest; of a negative number a NaN.
__device__ __forceinline__ float square_root(float x) { return __builtin_sqrtf(x); }

}  // namespace device
