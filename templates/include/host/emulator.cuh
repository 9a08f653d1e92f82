// The emulator's runtime as the host bodies see it (sagegen/emulator/runtime). Every call that can wait, fail or touch
// memory takes the source line of whoever called the wrapper.
namespace emulator {

// Place of the running thread.
int block_index();
int thread_index();

// Barriers and warp collectives: the thread waits until all that take part have come.
void block_barrier(int line);
void warp_barrier(int line);
uint32_t shuffle_xor(uint32_t value, int lane_mask, int line);
uint32_t ballot(bool predicate, int line);

// Shared memory by its 32-bit address.
uint32_t shared_address(const void* pointer);
void load_matrix(uint32_t (&matrix)[4], uint32_t row_address, bool transposed, int line);

// cp.async: the copy happens at the wait that covers its group.
void async_copy(void* shared, const void* global, bool valid, int line);
void async_commit();
void async_wait(int pending, int line);

// A load or store of a vector type, before it happens; `caller` is where in the kernel.
void vector_load(const void* pointer, int bytes, void* caller);
void vector_store(void* pointer, int bytes, void* caller);

// Arithmetic as the hardware does it.
float exp2_approx(float x);
float log2_approx(float x);
float fma_up(float a, float b, float c);
int float_to_int(float x);
float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);
uint16_t float_to_bfloat16(float x);
uint8_t float_to_e4m3(float x);

// Matrix products of one warp: a 16 x 8 tile D = A B + C, fragments as PTX lays them out.
void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int* c, int line);
void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float* c, int line);
void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float* c, int line);
void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float* c, int line);

}  // namespace emulator
