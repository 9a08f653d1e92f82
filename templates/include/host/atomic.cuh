// Atomic operations on global or shared memory; they order no other access.
namespace device {

// Returns the value before.
__device__ __forceinline__ uint32_t atomic_add(uint32_t* address, uint32_t value, int line = __builtin_LINE()) {
    return emulator::atomic_add(address, value, line);
}
// For values and contents that are not negative, whose bits order like integers; a NaN is larger than all.
__device__ __forceinline__ void atomic_max_nonnegative(float* address, float value, int line = __builtin_LINE()) {
    emulator::atomic_max(reinterpret_cast<uint32_t*>(address), float_to_bits(value), line);
}

}  // namespace device
