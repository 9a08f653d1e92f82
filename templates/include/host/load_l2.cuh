// Loads that the L1 cache does not answer; the emulator has none.
namespace device {

__device__ __forceinline__ uint4 load_l2(const uint4* global) { return *global; }

}  // namespace device
