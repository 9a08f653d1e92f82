// Asynchronous 16-byte copies from global to shared memory, and matrix loads out of it.
namespace device {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }

__device__ __forceinline__ void async_copy_16(void* shared, const void* global, int line = __builtin_LINE()) {
    emulator::async_copy(shared, global, true, line);
}
// Writes zeros without reading `global` unless `valid`.
__device__ __forceinline__ void async_copy_16_or_zero(void* shared, const void* global, bool valid,
                                                      int line = __builtin_LINE()) {
    emulator::async_copy(shared, global, valid, line);
}
__device__ __forceinline__ void async_commit() { emulator::async_commit(); }
// Waits until at most PENDING of this thread's committed groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void async_wait(int line = __builtin_LINE()) {
    emulator::async_wait(PENDING, line);
}

// Four 8x8 matrices of 16-bit elements; lane l gives the shared address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&matrix)[4], uint32_t row_address,
                                               int line = __builtin_LINE()) {
    emulator::load_matrix(matrix, row_address, false, line);
}
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&matrix)[4], uint32_t row_address,
                                                          int line = __builtin_LINE()) {
    emulator::load_matrix(matrix, row_address, true, line);
}

}  // namespace device
