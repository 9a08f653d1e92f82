// The square root, rounded to nearest; of a negative number a NaN.
namespace device {

__device__ __forceinline__ float square_root(float x) { return __fsqrt_rn(x); }

}  // namespace device
