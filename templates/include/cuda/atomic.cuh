// Atomic operations on global or shared memory; they order no other access.
namespace device {

// Returns the value before.
__device__ __forceinline__ uint32_t atomic_add(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }
// For values and contents that are not negative, whose bits order like integers; a NaN is larger than all.
__device__ __forceinline__ void atomic_max_nonnegative(float* address, float value) {
    atomicMax(reinterpret_cast<unsigned int*>(address), __float_as_uint(value));
}

}  // namespace device
