// Kernels of the device layer's FP8 parts: sm_89 and later.

struct Params {
    const uint32_t* input;
    uint32_t* output;
    int64_t padding;  // the emulator takes only structs of more than 16 bytes
};

extern "C" __global__ void __launch_bounds__(32) mma_e4m3_f16_kernel(const __grid_constant__ Params p) {
    const uint32_t* from = p.input + device::thread_index() * 8;
    const uint32_t a[4] = {from[0], from[1], from[2], from[3]};
    const uint32_t c[2] = {from[6], from[7]};
    uint32_t d[2];
    device::mma_pv(d, a, from[4], from[5], c);
    for (int i = 0; i < 2; ++i) p.output[device::thread_index() * 2 + i] = d[i];
}

// Pairs of pairs of fp16 to e4m3 and back.
extern "C" __global__ void __launch_bounds__(256) e4m3_half2_kernel(const __grid_constant__ Params p) {
    const int index = device::block_index() * 256 + device::thread_index();
    const uint32_t word = device::half2_to_e4m3(p.input[2 * index], p.input[2 * index + 1]);
    p.output[3 * index] = word;
    uint32_t first, second;
    device::e4m3_to_half2(word, first, second);
    p.output[3 * index + 1] = first;
    p.output[3 * index + 2] = second;
}
