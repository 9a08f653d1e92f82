// Programmatic dependent launch: a kernel launched with that attribute may start before its predecessor has ended.
// sm_90 and later.
namespace device {

// Waits until all that earlier kernels wrote can be read, and may be overwritten.
__device__ __forceinline__ void wait_for_predecessor() { emulator::wait_for_predecessor(); }
// The next kernel may start once every block has called this or ended.
__device__ __forceinline__ void launch_dependents() {}  // emulated launches run one after the other

}  // namespace device
