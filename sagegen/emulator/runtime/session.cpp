// What a call's launches share, and running one launch with several workers.
#include "session.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

#include "engine.hpp"
#include "module.hpp"

namespace emulator {

namespace {

// Whether walking the dims from the largest stride finds every element once, so that gaps can be told apart.
bool is_nested(const Buffer& buffer) {
    int64_t inner = 0;  // last element of the dims walked so far, smallest stride first
    for (int i = buffer.dims - 1; i >= 0; --i) {
        if (buffer.sizes[i] == 1 || buffer.strides[i] == 0) continue;
        if (buffer.strides[i] <= inner) return false;
        inner += (buffer.sizes[i] - 1) * buffer.strides[i];
    }
    return true;
}

// Dims by falling stride: the order in which an element's index is taken apart.
Buffer sorted(Buffer buffer) {
    int order[4] = {0, 1, 2, 3};
    std::stable_sort(order, order + buffer.dims,
                     [&](int a, int b) { return buffer.strides[a] > buffer.strides[b]; });
    const Buffer from = buffer;
    for (int i = 0; i < buffer.dims; ++i) {
        buffer.sizes[i] = from.sizes[order[i]];
        buffer.strides[i] = from.strides[order[i]];
    }
    if (is_nested(buffer)) return buffer;
    int64_t elements = 1;  // rows that overlap: any byte of the range may belong to one
    for (int i = 0; i < buffer.dims; ++i) elements += (from.sizes[i] - 1) * from.strides[i];
    buffer.dims = 1;
    buffer.sizes[0] = elements;
    buffer.strides[0] = 1;
    return buffer;
}

}  // namespace

bool Memory::is_element(uint64_t element) const {
    for (int i = 0; i < buffer.dims; ++i) {
        const uint64_t stride = static_cast<uint64_t>(buffer.strides[i]);
        if (buffer.sizes[i] == 1 || stride == 0) continue;
        element -= std::min<uint64_t>(element / stride, buffer.sizes[i] - 1) * stride;
    }
    return element == 0;
}

bool Memory::holds(uintptr_t address, int size) const {
    const uint64_t offset = address - buffer.base;
    if (address < buffer.base || offset + size > bytes) return false;
    return is_element(offset / buffer.item_bytes) && is_element((offset + size - 1) / buffer.item_bytes);
}

Memory* Session::find(uintptr_t address, int bytes) const {
    for (const auto& memory : memories) {
        if (memory->holds(address, bytes)) return memory.get();
    }
    return nullptr;
}

std::string Session::describe(uintptr_t address) const {
    const Memory* nearest = nullptr;
    uint64_t distance = UINT64_MAX;
    for (const auto& memory : memories) {
        const uint64_t begin = memory->buffer.base;
        const uint64_t end = begin + memory->bytes;
        if (address - begin < memory->bytes) return "between the rows of " + memory->name;
        const uint64_t away = address < begin ? begin - address : address - end;
        if (away < distance) nearest = memory.get(), distance = away;
    }
    if (address < 4096) return "by a null pointer";
    if (!nearest || distance > uint64_t{1} << 32) return "of no tensor of the call";
    const std::string side = address < nearest->buffer.base ? " before the start of " : " past the end of ";
    return (distance ? std::to_string(distance) + " bytes" : std::string("right")) + side + nearest->name;
}

namespace {

struct Outcome {
    std::mutex mutex;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> limit;  // blocks from here on need not run: a lower one failed
    Report report = {};
};

void run_blocks(Session& session, const Launch& launch, Outcome& outcome) {
    Engine engine(session, launch);
    while (!session.is_stopped) {
        const int64_t block = outcome.next.fetch_add(1);
        if (block >= outcome.limit.load()) return;
        if (engine.run_block(static_cast<int>(block))) continue;
        const std::lock_guard<std::mutex> lock(outcome.mutex);
        if (block < outcome.limit.load()) {
            outcome.limit = block;
            outcome.report = engine.report;
        }
        return;
    }
}

}  // namespace

}  // namespace emulator

extern "C" {

void* emulator_open(const emulator::Buffer* buffers, int32_t count) {
    try {
        auto session = std::make_unique<emulator::Session>();
        for (int32_t i = 0; i < count; ++i) {
            auto memory = std::make_unique<emulator::Memory>();
            memory->name = buffers[i].name;
            int64_t last = 0;
            for (int d = 0; d < buffers[i].dims; ++d) last += (buffers[i].sizes[d] - 1) * buffers[i].strides[d];
            memory->bytes = (last + 1) * static_cast<uint64_t>(buffers[i].item_bytes);
            memory->buffer = emulator::sorted(buffers[i]);
            if (buffers[i].is_writable) memory->words = std::vector<emulator::Word>(memory->bytes / 4 + 2);
            session->memories.push_back(std::move(memory));
        }
        return session.release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void emulator_close(void* session) { delete static_cast<emulator::Session*>(session); }

int32_t emulator_run(void* handle, const emulator::Launch* launch, emulator::Report* report) {
    auto& session = *static_cast<emulator::Session*>(handle);
    ++session.launches;
    emulator::Outcome outcome;
    outcome.limit = launch->grid;
    const int workers = std::max(1, std::min<int>(launch->workers, launch->grid));
    std::vector<std::thread> others;
    try {
        for (int i = 0; i < workers; ++i) {  // never on the caller's own thread: its shared memory would stay for good
            others.emplace_back([&] { emulator::run_blocks(session, *launch, outcome); });
        }
    } catch (const std::system_error& error) {  // fewer workers do, if there are some
        if (others.empty()) {
            snprintf(outcome.report.kind, sizeof outcome.report.kind, "no_thread");
            snprintf(outcome.report.message, sizeof outcome.report.message, "the machine gives no thread: %s", error.what());
            outcome.report.block = outcome.report.thread = -1;
        }
    }
    for (std::thread& other : others) other.join();
    *report = outcome.report;
    return outcome.report.kind[0] != 0;
}

void emulator_stop(void* handle) { static_cast<emulator::Session*>(handle)->is_stopped = true; }

int32_t emulator_writer_of(void* handle, uint64_t address, emulator::Report* report) {
    const emulator::Memory* const memory = static_cast<emulator::Session*>(handle)->find(address, 4);
    if (!memory || !memory->buffer.is_writable) return 0;
    const emulator::Word& word = memory->words[(address - memory->buffer.base) / 4];
    const uint32_t writer = word.writer;
    if (!writer) return 0;
    report->block = static_cast<int32_t>((writer & 0xffffff) - 1);
    report->thread = word.thread;
    report->site = word.address - emulator::module_of_kernel().base;
    return 1;
}

int32_t emulator_bank_counts(void* handle, emulator::BankCount* counts, int32_t capacity) {
    auto& session = *static_cast<emulator::Session*>(handle);
    int32_t index = 0;
    for (const auto& entry : session.banks) {
        if (index < capacity) counts[index] = entry.second;
        ++index;
    }
    return index;
}
}
